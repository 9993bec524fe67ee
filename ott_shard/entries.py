"""Single entries of the plan on one device: the largest, quantiles of rows, blocks."""

import jax
import jax.numpy as jnp
from jax import lax

from ott_shard.collectives import match_varying
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

    def write(whole, tile):
        i, j = tile // count, tile % count
        (x, shift), (own, b) = (
            jax.tree.map(lambda leaf, k=k: leaf[k], part)
            for part, k in ((rows, i), (cols, j))
        )
        z = exponent(block.precision, operands.shared, x, own)
        part = b * density(z + shift[:, None], jnp.ones_like(b, bool))
        corner = i * part.shape[0], j * part.shape[1]
        # In place: the result is the only array of its size.
        return lax.dynamic_update_slice(whole, part, corner), None

    (several, bn), (count, bm) = rows[1].shape, cols[1].shape
    whole = jnp.zeros((several * bn, count * bm), shift.dtype)
    whole = match_varying(whole, rows, cols)
    tiles = jnp.arange(several * count, dtype=jnp.int32)
    whole, _ = lax.scan(write, whole, tiles)
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
