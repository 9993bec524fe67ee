"""What the iteration works on, and what it finds."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from ott_shard import operators
from ott_shard.costs import BilinearCost
from ott_shard.epsilon import Epsilon
from ott_shard.operators import Pairs
from ott_shard.tile import Term

# Tiles of a device that take some milliseconds.
_MANY = 16


class Found(NamedTuple):
    """Potentials without their weights, f = phi + epsilon log a, and c-transforms.

    At a solution phi = tau_a rows and psi = tau_b cols.

    Attributes:
        phi: [n padded], split like x.
        psi: [m padded], split like y.
        rows: [n padded], the c-transform of psi.
        cols: [m padded], the c-transform of phi.
    """

    phi: jax.Array
    psi: jax.Array
    rows: jax.Array
    cols: jax.Array

    @property
    def T(self) -> "Found":  # noqa: N802 (as below)
        """The same of the transposed problem."""
        return Found(self.psi, self.phi, self.cols, self.rows)

    def shifted(self, by: jax.Array) -> "Found":
        """With psi higher by a constant, and phi lower: the same plan."""
        return Found(self.phi - by, self.psi + by, self.rows - by, self.cols + by)


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Problem:
    """Placed clouds and weights, resolved scalars.

    Attributes:
        pairs: the padded, centred clouds.
        a: [n] padded weights of x, split like x.
        b: [m] padded weights of y, split like y.
        schedule: epsilon, in units of cost.
        tau_a: scalar in (0, 1]; 1 keeps the marginal a exactly.
        tau_b: scalar in (0, 1].
    """

    pairs: Pairs
    a: jax.Array
    b: jax.Array
    schedule: Epsilon
    tau_a: jax.Array
    tau_b: jax.Array

    @property
    def epsilon(self) -> jax.Array:
        """The regularisation, scalar: the target of the schedule."""
        return self.schedule.target

    @property
    def balanced(self) -> jax.Array:
        """Bool scalar: both marginals are constraints."""
        return (self.tau_a == 1) & (self.tau_b == 1)

    @property
    def T(self) -> "Problem":  # noqa: N802 (the transpose is called T everywhere)
        """The same problem with rows and columns swapped."""
        return dataclasses.replace(
            self,
            pairs=self.pairs.T,
            a=self.b,
            b=self.a,
            tau_a=self.tau_b,
            tau_b=self.tau_a,
        )

    def to_rows(self, psi: jax.Array, known: jax.Array | None = None) -> jax.Array:
        """The c-transform of psi, [m] to [n]; `known` if only its derivative is not."""
        return operators.softmin(self.pairs, psi, self.b, self.epsilon, known)

    def to_cols(self, phi: jax.Array, known: jax.Array | None = None) -> jax.Array:
        """The c-transform of phi, [n] to [m]."""
        return self.T.to_rows(phi, known)

    @property
    def many(self) -> bool:
        """Whether a pass takes so long that a guess of its result is of use.

        Only a cost made of features is never infinite, which no guess can be near.
        """
        return isinstance(self.pairs.cost, BilinearCost) and self.pairs.tiles >= _MANY

    def to_rows_near(self, psi: jax.Array, near: jax.Array) -> jax.Array:
        """The c-transform of psi where it should be about `near`, [n]."""
        if not self.many:  # another program to compile would take longer than it saves
            return self.to_rows(psi)
        args = self.pairs, psi, self.b, self.epsilon, near
        return self.to_rows(psi, known=operators.softmin_near(*args))

    def to_cols_near(self, phi: jax.Array, near: jax.Array) -> jax.Array:
        """The c-transform of phi, likewise, [m]."""
        return self.T.to_rows_near(phi, near)

    def settled(self, phi: jax.Array) -> jax.Array:
        """0 for points that are in no sum: without weight, all pairs forbidden."""
        return jnp.where((self.a == 0) & jnp.isposinf(phi), 0.0, phi)

    def average(self, psi: jax.Array, rows: jax.Array, v: jax.Array) -> jax.Array:
        """Mean of v over the plan of each row, [m] or [m, k], for rows = to_rows(psi).

        P v / P 1, [n] or [n, k], for any phi, and minus the derivative of to_rows along
        v.
        """
        weights, values = (jnp.ones_like(rows), self.b), v.reshape(len(v), -1)
        means = operators.apply_plan(
            self.pairs, (rows, psi), weights, values, self.epsilon
        )
        return means if v.ndim == 2 else means[:, 0]

    def barycentres(self, psi: jax.Array, rows: jax.Array) -> jax.Array:
        """Mean of y over the plan of each row, [n, d]."""
        pairs = self.pairs
        # Digits of a common offset would be lost in the sum.
        return self.average(psi, rows, pairs.y - pairs.centre) + pairs.centre

    def plan_sum(
        self, term: Term, phi: jax.Array, psi: jax.Array, of: tuple[Any, Any, Any]
    ) -> jax.Array:
        """The sum of a term over each row of the plan, [n]; one pass."""
        weights = self.a, self.b
        return operators.plan_sum(
            term, self.pairs, (phi, psi), weights, self.epsilon, of
        )
