"""The cost of a point of y and a point of x, where the order of the two counts."""

import dataclasses
from typing import Any

import jax

from ott_shard.costs import BilinearCost, CostFn, register


@register
@dataclasses.dataclass(frozen=True)
class Transposed:
    """C(y, x) as a cost of (x, y)."""

    of: CostFn

    translation_invariant = False

    def pairwise(
        self, x: jax.Array, y: jax.Array, precision: str = "highest"
    ) -> jax.Array:
        """Costs of all pairs, [bn, d] and [bm, d] to [bn, bm]."""
        return self.of.pairwise(y, x, precision).T


@register
@dataclasses.dataclass(frozen=True)
class TransposedBilinear(Transposed):
    """The same of an inner product of features."""

    of: BilinearCost

    def left(self, x: jax.Array) -> jax.Array:
        """Features of the rows."""
        return self.of.right(x)

    def right(self, y: jax.Array) -> jax.Array:
        """Features of the columns."""
        return self.of.left(y)


def is_symmetric(cost: CostFn) -> bool:
    """Whether C(x, y) = C(y, x) is known: a cost says so by `symmetric = True`."""
    return getattr(cost, "symmetric", False)


def transposed(cost: Any) -> CostFn:
    """The cost with its points swapped; itself, if that is the same."""
    if is_symmetric(cost):
        return cost
    if isinstance(cost, Transposed):
        return cost.of
    return (
        TransposedBilinear(cost) if isinstance(cost, BilinearCost) else Transposed(cost)
    )
