"""Ground costs: the cost of one tile, from [bn, d] and [bm, d] to [bn, bm].

A cost is a frozen dataclass, registered as a pytree; its fields are parameters. If it
can be written as an inner product of per-point features it is a
:class:`BilinearCost`, and the kernel then folds epsilon and the potential into one
matrix product.
"""

import dataclasses
import functools
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import register_dataclass

# Up to this dimension sums of squared differences are formed directly: no digits are
# lost to cancellation and d is too small for a matrix unit to help.
_DIRECT_DIMS = 8


@runtime_checkable
class CostFn(Protocol):
    """What the kernel needs from a cost."""

    translation_invariant: bool

    def pairwise(self, x: jax.Array, y: jax.Array, precision: str) -> jax.Array:
        """Costs of all pairs, [bn, d] and [bm, d] to [bn, bm]."""
        ...


@runtime_checkable
class BilinearCost(CostFn, Protocol):
    """A cost that is an inner product of features, C(x, y) = left(x) . right(y)."""

    def left(self, x: jax.Array) -> jax.Array:
        """Features of the rows, [n, d] to [n, k]."""
        ...

    def right(self, y: jax.Array) -> jax.Array:
        """Features of the columns, [m, d] to [m, k]."""
        ...


@register_dataclass
@dataclasses.dataclass(frozen=True)
class SqEuclidean:
    """Squared Euclidean distance, C(x, y) = |x - y|^2 (not half of it).

    >>> import jax.numpy as jnp
    >>> x, y = jnp.zeros((1, 2)), jnp.asarray([[3.0, 4.0]])
    >>> float(SqEuclidean().pairwise(x, y)[0, 0])
    25.0
    """

    translation_invariant = True

    def left(self, x: jax.Array) -> jax.Array:
        """(-2 x, |x|^2, 1)."""
        return jnp.concatenate([-2 * x, _sqnorm(x), jnp.ones_like(x[:, :1])], axis=1)

    def right(self, y: jax.Array) -> jax.Array:
        """(y, 1, |y|^2)."""
        return jnp.concatenate([y, jnp.ones_like(y[:, :1]), _sqnorm(y)], axis=1)

    def pairwise(
        self, x: jax.Array, y: jax.Array, precision: str = "highest"
    ) -> jax.Array:
        """Costs of all pairs, [bn, d] and [bm, d] to [bn, bm]."""
        return pairwise_sqdist(precision, x, y)


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Euclidean:
    """Euclidean distance, C(x, y) = |x - y|, with derivative 0 where x = y.

    >>> import jax.numpy as jnp
    >>> x, y = jnp.zeros((1, 2)), jnp.asarray([[3.0, 4.0]])
    >>> float(Euclidean().pairwise(x, y)[0, 0])
    5.0
    """

    translation_invariant = True

    def pairwise(
        self, x: jax.Array, y: jax.Array, precision: str = "highest"
    ) -> jax.Array:
        """Costs of all pairs, [bn, d] and [bm, d] to [bn, bm]."""
        square = pairwise_sqdist(precision, x, y)
        apart = square > 0
        return jnp.where(apart, jnp.sqrt(jnp.where(apart, square, 1.0)), 0.0)


def inner(x: jax.Array, y: jax.Array, precision: str) -> jax.Array:
    """x y^T at the given precision, [bn, k] and [bm, k] to [bn, bm].

    The derivative in y is (x^T g)^T for a cotangent g of the size of a tile. Written
    plainly it becomes g^T x, for which XLA on CPU walks g down its columns, 14 times
    slower at k = 6 (BUILD_NOTES M2); the barrier keeps it from undoing the transpose.
    """
    y_t = lax.optimization_barrier(y.T)
    return lax.dot_general(x, y_t, (((1,), (0,)), ((), ())), precision=precision)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def pairwise_sqdist(precision: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Squared distances, never negative and exactly 0 between equal points.

    Beyond 8 dimensions they come from |x|^2 + |y|^2 - 2 x.y, whose rounding error is
    a few units in the last place of |x|^2 + |y|^2; what lies below that is 0. The
    derivative runs through matrix products in every dimension.
    """
    if x.shape[1] <= _DIRECT_DIMS:
        return functools.reduce(
            jnp.add,
            (jnp.square(x[:, k, None] - y[None, :, k]) for k in range(x.shape[1])),
        )
    square = _expanded_sqdist(precision, x, y)
    noise = 8 * jnp.finfo(square.dtype).eps * (_sqnorm(x) + _sqnorm(y).T)
    return jnp.where(square > noise, square, 0.0)


@pairwise_sqdist.defjvp
def _pairwise_sqdist_jvp(precision, primals, tangents):
    _, tangent = jax.jvp(
        functools.partial(_expanded_sqdist, precision), primals, tangents
    )
    return pairwise_sqdist(precision, *primals), tangent


def _expanded_sqdist(precision: str, x: jax.Array, y: jax.Array) -> jax.Array:
    cost = SqEuclidean()
    return inner(cost.left(x), cost.right(y), precision)


def _sqnorm(x: jax.Array) -> jax.Array:
    return jnp.sum(x * x, axis=1, keepdims=True)
