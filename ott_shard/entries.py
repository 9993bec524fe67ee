"""Single entries of the plan on one device: the largest, quantiles of rows, blocks."""

import jax
import jax.numpy as jnp
from jax import lax

from ott_shard.tile import (
    Block,
    Operands,
    as_rounded,
    blocks,
    density,
    exponent,
    fold_tiles,
    log_of_positive,
)


def local_plan(
    block: Block, operands: Operands, shift: jax.Array, weights: jax.Array
) -> jax.Array:
    """b_j exp(z_ij + shift_i) itself, [n, m]: the only array of this size."""
    rows = blocks((operands.rows, shift), block.rows, mode="edge")
    cols = operands.cols, as_rounded(operands, weights)
    cols = blocks(cols, block.cols, mode="edge")

    def one(rows, cols):
        (x, shift), (cols, b) = rows, cols
        z = exponent(block.precision, operands.shared, x, cols)
        return b * density(z + shift[:, None], jnp.ones_like(b, bool))

    tiles = lax.map(lambda r: lax.map(lambda c: one(r, c), cols), rows)
    count, _, size, _ = tiles.shape
    whole = jnp.swapaxes(tiles, 1, 2).reshape(count * size, -1)
    return whole[: len(shift), : len(weights)]


def local_top(
    block: Block, k: int, operands: Operands, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The k largest z_ij + log b_j of the columns of this device, and their j, [n, k].

    In descending order, of equals the first. -inf and any j where there are fewer.
    """
    (y, h), positive = operands.cols, weights > 0

    def body(carry, rows, cols, keep):
        best, places = carry
        cols, columns = cols
        z = exponent(block.precision, operands.shared, rows, cols)
        z = jnp.concatenate([best, jnp.where(keep, z, -jnp.inf)], axis=1)
        best, winners = lax.top_k(z, k)
        old = jnp.take_along_axis(places, jnp.minimum(winners, k - 1), axis=1)
        new = columns[jnp.maximum(winners - k, 0)]
        return best, jnp.where(winners < k, old, new)

    init = jnp.full(k, -jnp.inf, h.dtype), jnp.zeros(k, jnp.int32)
    cols = (y, h + log_of_positive(weights)), jnp.arange(len(h), dtype=jnp.int32)
    return fold_tiles(body, init, operands.rows, cols, positive, block)


def local_quantile(
    block: Block,
    operands: Operands,
    shift: jax.Array,
    weights: jax.Array,
    level: jax.Array,
) -> jax.Array:
    """The first column at which sum_j b_j exp(z_ij + shift_i) is above `level`, [n].

    The last one with mass where it is above at none.
    """
    weights = as_rounded(operands, weights)

    none = jnp.int32(len(weights))

    def body(carry, rows, cols, keep):
        (below, first, last), (x, shift, level) = carry, rows
        cols, b, columns = cols
        z = exponent(block.precision, operands.shared, x, cols)
        mass = jnp.where(keep, b * density(z + shift[:, None], keep), 0.0)
        sums = below[:, None] + jnp.cumsum(mass, axis=1)
        # Rounding may make sums fall again, but not mass where there is none.
        above = (sums > level[:, None]) & (mass > 0)
        first = jnp.minimum(first, jnp.where(above, columns, none).min(axis=1))
        last = jnp.maximum(last, jnp.where(mass > 0, columns, 0).max(axis=1))
        return sums[:, -1], first, last

    _, first, last = fold_tiles(
        body,
        (jnp.zeros((), shift.dtype), none, jnp.int32(0)),
        (operands.rows, shift, level),
        (operands.cols, weights, jnp.arange(len(weights), dtype=jnp.int32)),
        jnp.ones_like(weights, bool),
        block,
    )
    return jnp.minimum(first, last)
