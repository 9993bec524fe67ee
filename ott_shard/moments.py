"""Statistics of the costs on one device, tile by tile."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ott_shard.costs import BilinearCost
from ott_shard.pairwise import inner
from ott_shard.tile import Block, Operands, fold_tiles

# So many points of a device tell the size of its costs.
_SAMPLE = 128


class Moments(NamedTuple):
    """Mean, sum of squared deviations and maximum of costs, and their total weight."""

    weight: jax.Array
    mean: jax.Array
    deviation: jax.Array
    max: jax.Array

    def merge(self, other: "Moments") -> "Moments":
        """Moments of both samples together, without cancellation (Chan et al. 1983)."""
        weight = self.weight + other.weight
        share = other.weight / jnp.where(weight > 0, weight, 1.0)
        step = other.mean - self.mean
        return Moments(
            weight,
            self.mean + share * step,
            self.deviation + other.deviation + self.weight * share * step**2,
            jnp.maximum(self.max, other.max),
        )


def local_moments(block: Block, operands: Operands, b: jax.Array) -> Moments:
    """Moments of C_ij over the columns of this device with weights b_j, each [n].

    Forbidden pairs, of infinite cost, do not count.
    """
    (cost, centre, _), x, (y, _) = operands

    # A product is faster than sums, and XLA keeps some memory for every sum over a tile
    # until a program ends, on CPU.
    summed = functools.partial(jnp.dot, precision=block.precision)

    def body(carry, x, cols, keep):
        y, b = cols
        b = jnp.where(keep, b, 0.0)
        costs = cost.pairwise(x - centre, y - centre, block.precision)
        counts = keep & (costs != jnp.inf)
        weight = summed(counts.astype(b.dtype), b)
        top = _largest(jnp.where(counts, costs, -jnp.inf))
        costs = jnp.where(counts, costs, 0.0)
        mean = summed(costs, b) / jnp.where(weight > 0, weight, 1.0)
        squares = jnp.where(counts, jnp.square(costs - mean[:, None]), 0.0)
        return carry.merge(Moments(weight, mean, summed(squares, b), top))

    zero = jnp.zeros((), b.dtype)
    init = Moments(zero, zero, zero, jnp.full_like(zero, -jnp.inf))
    return fold_tiles(body, init, x, (y, b), b > 0, block)


def _largest(z: jax.Array) -> jax.Array:
    """Of each row; written out, for XLA's own maximum keeps memory as its sums do."""
    least = jnp.full((), -jnp.inf, z.dtype)
    return lax.reduce(z, least, lambda a, b: lax.select(a > b, a, b), (1,))


def local_cost_size(
    block: Block, operands: Operands, a: jax.Array, b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Sum of a_i b_j x the terms of C_ij, and of a_i b_j, over some pairs, each [1]."""
    (cost, centre, _), x, (y, _) = operands
    x, a, y, b = (z[:: -(-len(z) // _SAMPLE)] for z in (x, a, y, b))
    x, y = x - centre, y - centre
    if isinstance(cost, BilinearCost):
        size = inner(jnp.abs(cost.left(x)), jnp.abs(cost.right(y)), block.precision)
    else:
        size = jnp.abs(cost.pairwise(x, y, block.precision))
    weight = jnp.where(size < jnp.inf, a[:, None] * b, 0.0)
    total = jnp.sum(weight * jnp.where(weight > 0, size, 0.0))
    return total[None], weight.sum()[None]
