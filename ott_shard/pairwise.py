"""Arithmetic of one tile, [bn, d] and [bm, d] to [bn, bm], and its derivatives.

What costs are made of: the one matrix product, sums over coordinates, safe powers.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from ott_shard.collectives import match_varying

# Sums over coordinates are formed directly, so many at a time: no digits are lost to
# cancellation, and d is too small for a matrix unit to help.
_DIRECT_DIMS = 8


def inner(x: jax.Array, y: jax.Array, precision: str) -> jax.Array:
    """x y^T at the given precision, [bn, k] and [bm, k] to [bn, bm].

    The derivative in y is (x^T g)^T for a cotangent g of the size of a tile. Written
    plainly it becomes g^T x, for which XLA on CPU walks g down its columns, 14 times
    slower at k = 6 (BUILD_NOTES M2); the barrier keeps it from undoing the transpose.
    """
    y_t = lax.optimization_barrier(y.T)
    return lax.dot_general(x, y_t, (((1,), (0,)), ((), ())), precision=precision)


def dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """x y, of which one is a vector, with all digits: GPUs take fewer if not asked."""
    return jnp.matmul(x, y, precision="highest")


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def sqdist(precision: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Squared distances, never negative and exactly 0 between equal points.

    Beyond 8 dimensions they come from |x|^2 + |y|^2 - 2 x.y, whose rounding error is
    a few units in the last place of |x|^2 + |y|^2; what lies below that is 0. The
    derivative runs through matrix products in every dimension.
    """
    if x.shape[1] <= _DIRECT_DIMS:
        return sum_of_powers(2, x, y)
    square = _expanded_sqdist(precision, x, y)
    noise = 8 * jnp.finfo(square.dtype).eps * (sqnorm(x) + sqnorm(y).T)
    return jnp.where(square > noise, square, 0.0)


@sqdist.defjvp
def _sqdist_jvp(precision, primals, tangents):
    _, tangent = jax.jvp(
        functools.partial(_expanded_sqdist, precision), primals, tangents
    )
    return sqdist(precision, *primals), tangent


def _expanded_sqdist(precision: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return inner(sqdist_left(x), sqdist_right(y), precision)


def sqdist_left(x: jax.Array) -> jax.Array:
    """(-2 x, |x|^2, 1), whose inner product with (y, 1, |y|^2) is |x - y|^2."""
    return jnp.concatenate([-2 * x, sqnorm(x), jnp.ones_like(x[:, :1])], axis=1)


def sqdist_right(y: jax.Array) -> jax.Array:
    """(y, 1, |y|^2)."""
    return jnp.concatenate([y, jnp.ones_like(y[:, :1]), sqnorm(y)], axis=1)


def sqnorm(x: jax.Array) -> jax.Array:
    """|x|^2, [n, d] to [n, 1]."""
    return jnp.sum(x * x, axis=1, keepdims=True)


def sum_of_powers(p: float, x: jax.Array, y: jax.Array) -> jax.Array:
    """sum_k |x_k - y_k|^p, a few coordinates at a time, so that none fills memory."""
    missing = -x.shape[1] % min(_DIRECT_DIMS, x.shape[1])
    x, y = (jnp.pad(z, ((0, 0), (0, missing))) for z in (x, y))
    # [pieces, a few, bn]: equal coordinates, such as the padding, add nothing.
    pieces = tuple(z.T.reshape(-1, min(_DIRECT_DIMS, len(z.T)), len(z)) for z in (x, y))

    def add(xs, ys):
        terms = (
            power(jnp.abs(a[:, None] - b[None]), p) for a, b in zip(xs, ys, strict=True)
        )
        return functools.reduce(jnp.add, terms)

    first, rest = (
        jax.tree.map(lambda z, k=k: z[k], pieces) for k in (0, slice(1, None))
    )
    total = add(*first)
    if not len(rest[0]):
        return total
    step = jax.checkpoint(lambda total, piece: (total + add(*piece), None))
    return lax.scan(step, total, rest)[0]


def power(t: jax.Array, p: float) -> jax.Array:
    """t^p for t >= 0 and p > 0, with derivative 0 at 0."""
    if p == 1:
        return jnp.where(t > 0, t, 0.0)
    if p == 2:
        return t * t
    some = jnp.where(t > 0, t, 1.0)
    return jnp.where(t > 0, jnp.sqrt(some) if p == 0.5 else some**p, 0.0)


def unit(x: jax.Array) -> jax.Array:
    """x / |x|, [n, d] to [n, d + 1]: the last coordinate is 1 for zero vectors only.

    So all have length 1, and a zero vector is orthogonal to all others.
    """
    size = lax.stop_gradient(jnp.max(jnp.abs(x), axis=1, keepdims=True))
    zero = size == 0
    # Its square neither overflows nor underflows; a zero vector has no direction.
    x = jnp.where(zero, 0.0, x / jnp.where(zero, 1.0, size))
    length = jnp.sqrt(jnp.where(zero, 1.0, sqnorm(x)))
    return jnp.concatenate([x / length, zero.astype(x.dtype)], axis=1)


def angle(square: jax.Array) -> jax.Array:
    """The angle between unit vectors at this squared distance, accurate near 0."""
    apart = (square > 0) & (square < 4)
    half = jnp.sqrt(jnp.where(apart, square, 1.0)) / 2
    ends = jnp.where(square > 0, jnp.pi, 0.0).astype(square.dtype)
    return jnp.where(apart, 2 * jnp.arcsin(half), ends)


@jax.custom_jvp
def of_pair(fn: Callable, x: jax.Array, y: jax.Array) -> jax.Array:
    """fn(x, y) for two points [d], with derivative 0 where it has none and x = y."""
    return fn(x, y)


@of_pair.defjvp
def _of_pair_jvp(primals, tangents):
    primals, tangents = match_varying((primals, tangents), primals, tangents)
    fn, x, y = primals
    slope = jax.grad(fn)(x, y)
    kink = jnp.all(x == y) & ~jnp.all(jnp.isfinite(slope))
    # Differentiated elsewhere, so that no NaN meets the 0 that takes its place.
    _, tangent = jax.jvp(
        lambda fn, x, y: fn(x, y), (fn, x, jnp.where(kink, y + 1, y)), tangents
    )
    return of_pair(fn, x, y), jnp.where(kink, 0.0, tangent)


def capped(t: jax.Array) -> jax.Array:
    """`t` where its exponential is finite: 0 mass may stand far from all others."""
    return jnp.minimum(t, 0.9 * math.log(jnp.finfo(t.dtype).max))
