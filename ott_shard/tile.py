"""The kernel: a remat-wrapped scan over tiles, and the only exp((f + g - C) / eps).

One direction only: every row is reduced over all columns. The other direction is the
same code with the two clouds swapped. The entry points are ``local_*``: they and their
helpers run inside ``shard_map``, their shapes are those of one device, and they never
form more than one tile of [block.rows, block.cols].

Two levels of ``jax.checkpoint`` keep reverse mode at the same memory. The one around
the body makes a tile's residuals disappear when the tile is done; the one around the
whole scan makes the scan itself keep nothing but its inputs.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ott_shard.collectives import Axes, axis_sum, combine_lse, match_varying
from ott_shard.costs import BilinearCost, CostFn
from ott_shard.forward import active, partial_jvp
from ott_shard.pairwise import capped, inner

Tree = Any


# The most numbers that a matrix times the plan has in one part: 32 MiB in float32.
_MAX_PART = 2**23
# Of what an exponential may overflow at: 40 in float32, 319 in float64.
_NEAR = 0.45


class Block(NamedTuple):
    """What is static about a tile.

    Attributes:
        rows: the most rows that it may have.
        cols: the most columns.
        precision: of its matrix products.
        classes: those in the cost, see :func:`ott_shard.costs.register`: no program for
            one cost may be taken for another's.
    """

    rows: int
    cols: int
    precision: str
    classes: tuple[type, ...]

    def within(self, other: "Block") -> "Block":
        """For work that both are for."""
        rows, cols = min(self.rows, other.rows), min(self.cols, other.cols)
        return Block(rows, cols, self.precision, self.classes + other.classes)


class Operands(NamedTuple):
    """What the exponent z_ij = h_j - C(x_i, y_j) / epsilon is made of.

    Attributes:
        shared: (cost, centre [d], 1 / (epsilon scale_cost)), the same for all points.
            Costs in this file are before the division by `scale_cost`.
        rows: x, [n, d].
        cols: (y, h), [m, d] and [m]. Weights b are kept apart: a density exp(z) is per
            unit of b_j, and so has a derivative in a weight of zero.
    """

    shared: tuple[CostFn, jax.Array, jax.Array]
    rows: jax.Array
    cols: tuple[jax.Array, jax.Array]


def exponent(precision: str, shared: Tree, rows: Tree, cols: Tree) -> jax.Array:
    """z of one tile, [bn, bm].

    For a bilinear cost epsilon and h go into the features: z is then one matrix
    product, and its derivatives are two more, without sums over the tile.
    """
    (cost, centre, inverse_epsilon), x, (y, h) = shared, rows, cols
    if not isinstance(cost, BilinearCost):
        costs = cost.pairwise(x - centre, y - centre, precision)
        # A forbidden pair has infinite cost; no derivative may meet the infinity.
        allowed = costs != jnp.inf
        z = h[None, :] - jnp.where(allowed, costs, 0.0) * inverse_epsilon
        return jnp.where(allowed, z, -jnp.inf)
    left, right = cost.left(x - centre) * -inverse_epsilon, cost.right(y - centre)
    left = jnp.concatenate([left, jnp.ones_like(left[:, :1])], axis=1)
    return inner(left, jnp.concatenate([right, h[:, None]], axis=1), precision)


def fold_tiles(
    body: Callable[[Tree, Tree, Tree, jax.Array], Tree],
    init: Tree,
    rows: Tree,
    cols: Tree,
    keep: jax.Array,
    block: Block,
) -> Tree:
    """Fold `body(carry, rows, cols, keep)` over all tiles of this device.

    Args:
        body: takes the carry [bn, ...] of a block of rows and one tile to a new carry.
        init: pytree of [...], the carry that every row starts with.
        rows: pytree of [n, ...].
        cols: pytree of [m, ...].
        keep: [m] bool, which columns count.
        block: the largest tile.

    Returns:
        pytree of [n, ...], like `init`. Blocks are balanced, so that the padding, which
        repeats the last row or column and is not kept, stays small.
    """
    n = jax.tree.leaves(rows)[0].shape[0]
    # What is the same on several devices is marked as varying here, and not by each
    # tile: the transpose of that is a sum over these devices, wherever it stands.
    init, rows, cols = match_varying((init, rows, cols), init, rows, cols, keep)
    row_blocks = blocks(rows, block.rows, mode="edge")
    col_blocks = blocks(cols, block.cols, mode="edge")
    keep_blocks = blocks(keep, block.cols, mode="constant")
    body = jax.checkpoint(body)

    def over_rows(_, rows_b):
        size = jax.tree.leaves(rows_b)[0].shape[0]
        carry = jax.tree.map(lambda z: jnp.broadcast_to(z, (size, *z.shape)), init)
        carry, _ = lax.scan(
            lambda c, tile: (body(c, rows_b, *tile), None),
            carry,
            (col_blocks, keep_blocks),
        )
        return None, carry

    _, out = lax.scan(over_rows, None, row_blocks)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:n], out)


def blocks(tree: Tree, size: int, mode: str) -> Tree:
    """[n, ...] to [count, size', ...] with size' <= size, padded in `mode`."""

    def split(leaf: jax.Array) -> jax.Array:
        n = leaf.shape[0]
        count, even = _even_split(n, size)
        padding = [(0, count * even - n)] + [(0, 0)] * (leaf.ndim - 1)
        if padding[0][1]:
            leaf = jnp.pad(leaf, padding, mode=mode)
        return leaf.reshape(count, even, *leaf.shape[1:])

    return jax.tree.map(split, tree)


def _even_split(n: int, size: int) -> tuple[int, int]:
    """Number and size of blocks of at most `size` that hold n, with little padding."""
    fewest = -(-n // size)
    # A few more blocks may hold n exactly, and then nothing is padded, or copied.
    for count in range(fewest, fewest + fewest // 4 + 1):
        if n % count == 0 and (count == 1 or n // count % 8 == 0):
            return count, n // count
    even = -(-n // fewest)
    return fewest, min(size, -(-even // 16) * 16)  # whole vector registers


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def local_lse(
    block: Block, axes: Axes, operands: Operands, weights: jax.Array
) -> jax.Array:
    """log sum_j b_j exp(z_ij) over the columns of all devices along `axes`, [n].

    One scan with a running maximum, then one collective log-sum-exp. Its derivative
    needs only its own output, so nothing of this scan is ever differentiated.
    """
    (y, h), positive = operands.cols, weights > 0
    h = h + log_of_positive(weights)

    def body(carry, rows, cols, keep):
        top, total = carry
        z = exponent(block.precision, operands.shared, rows, cols)
        z = jnp.where(keep, z, -jnp.inf)
        new_top = jnp.maximum(top, z.max(axis=1))
        shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        total *= jnp.exp(top - shift)
        return new_top, total + jnp.exp(z - shift[:, None]).sum(axis=1)

    dtype = jnp.result_type(*jax.tree.leaves(operands))
    init = jnp.full((), -jnp.inf, dtype), jnp.zeros((), dtype)
    top, total = fold_tiles(body, init, operands.rows, (y, h), positive, block)
    return combine_lse(top, total, axes)


def local_lse_near(
    block: Block,
    axes: Axes,
    operands: Operands,
    weights: jax.Array,
    near: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The same where it is known to be about `near`, and whether that was so, [n] both.

    There is no maximum: exponents are shifted by `near`, and the exponentials that
    underflow are nothing beside a sum of a size that is accepted. One all-reduce. It is
    not to be differentiated.
    """
    (y, h), positive = operands.cols, weights > 0
    h = h + log_of_positive(weights)
    # Not -inf, of which a product that splits its numbers makes NaN. Not a `where` of
    # the tile: XLA on CPU takes a pass for it (BUILD_NOTES M25).
    never = 0.1 * jnp.finfo(h.dtype).min

    def body(total, rows, cols, keep):
        (x, near), (y, h) = rows, cols
        cols = y, jnp.where(keep, h, never)
        z = exponent(block.precision, operands.shared, x, cols)
        return total + jnp.exp(z - near[:, None]).sum(axis=1)

    rows, zero = (operands.rows, near), jnp.zeros((), near.dtype)
    total = fold_tiles(body, zero, rows, (y, h), positive, block)
    log = jnp.log(axis_sum(total, axes))
    return near + log, jnp.abs(log) <= _NEAR * math.log(jnp.finfo(h.dtype).max)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def local_known_lse(
    block: Block,
    axes: Axes,
    operands: Operands,
    weights: jax.Array,
    known: jax.Array,
) -> jax.Array:
    """local_lse where its value is `known`: only the derivative takes a scan."""
    return known


def _weighted_average(lse: Callable) -> Callable:
    """The tangent rule: d lse_i = sum_j exp(z_ij - lse_i) (b_j dz_ij + db_j).

    It is linear in the tangents and written in plain jax, so that the same rule gives
    forward mode, reverse mode (its transpose) and all higher orders.
    """

    def rule(block, axes, primals, tangents):
        operands, weights, *_ = primals
        out = lse(block, axes, *primals)
        average = jax.checkpoint(functools.partial(_local_average, block))
        # In reverse mode the tangents' dtype is the one that gradients are summed in.
        dots = jax.tree.map(lambda t: t.astype(out.dtype), active(tangents[:2]))
        return out, axis_sum(average((operands, weights), dots, out), axes)

    return rule


local_lse.defjvp(_weighted_average(local_lse), symbolic_zeros=True)
local_known_lse.defjvp(_weighted_average(local_known_lse), symbolic_zeros=True)


def _local_average(block, primals, tangents, lse):
    (operands, weights), (operands_dot, weights_dot) = primals, tangents
    weights = as_rounded(operands, weights)
    shift = jnp.where(jnp.isneginf(lse), 0.0, lse)

    def body(total, rows, cols, keep):
        (rows, rows_dot, shift), (cols, cols_dot, b, b_dot) = rows, cols
        z, z_dot = partial_jvp(
            functools.partial(exponent, block.precision),
            (operands.shared, rows, cols),
            (operands_dot.shared, rows_dot, cols_dot),
        )
        slope = 0.0 if z_dot is None else b * z_dot
        if b_dot is not None:
            slope += b_dot
        return total + jnp.sum(density(z - shift[:, None], keep) * slope, axis=1)

    return fold_tiles(
        body,
        jnp.zeros((), lse.dtype),
        (operands.rows, operands_dot.rows, shift),
        (operands.cols, operands_dot.cols, weights, weights_dot),
        jnp.ones_like(weights, bool),
        block,
    )


def as_rounded(operands: Operands, weights: jax.Array) -> jax.Array:
    """The weights b that the sum h + log b of :func:`local_lse` in fact stands for.

    For equal weights that rounding is the same in all of a row, and so would be felt:
    the shares of a row, exp(z_ij - lse_i) b_j, would not sum to 1.
    """
    h, log = operands.cols[1], log_of_positive(weights)
    return weights * jnp.exp(lax.stop_gradient((h + log) - h - log))


def log_of_positive(weights: jax.Array) -> jax.Array:
    """log, 0 where there is no weight."""
    return jnp.log(jnp.where(weights > 0, weights, 1.0))


def density(exponents: jax.Array, keep: jax.Array) -> jax.Array:
    """exp, capped: far from all mass a pair of two weights of zero would overflow."""
    return jnp.where(keep, jnp.exp(capped(exponents)), 0.0)


def local_apply(
    block: Block,
    axes: Axes,
    operands: Operands,
    shift: jax.Array,
    row_weights: jax.Array,
    weights: jax.Array,
    values: jax.Array,
) -> jax.Array:
    """sum_j a_i b_j exp(z_ij + shift_i) v_j over all devices along `axes`, [n, k].

    With shift = phi / epsilon the sum is that of the plan, and for a balanced problem
    the exponential is at most 1 / b_j. If v has many columns they are taken in parts,
    each by a scan and a sum of its own: what these copy is then of the size of a few
    tiles.
    """
    (m, k), n, weights = values.shape, len(shift), as_rounded(operands, weights)
    most = max(64, _MAX_PART // max(n, m))

    def some(part):
        rows = shift, row_weights
        return axis_sum(_apply_to_few(block, operands, *rows, weights, part), axes)

    if k <= most:
        return some(values)
    parts = -(-k // most)
    size = -(-k // parts)

    def one(out, part):
        start = jnp.minimum(part * size, k - size)  # the last two may overlap
        sums = some(lax.dynamic_slice_in_dim(values, start, size, axis=1))
        return lax.dynamic_update_slice_in_dim(out, sums, start, axis=1), None

    out = jnp.zeros((n, k), jnp.result_type(shift, values))
    out = match_varying(out, operands.rows, shift)  # the sum is over the others
    return lax.scan(one, out, jnp.arange(parts, dtype=jnp.int32))[0]


@functools.partial(jax.checkpoint, static_argnums=(0,))
def _apply_to_few(block, operands, shift, row_weights, weights, values):
    def body(total, rows, cols, keep):
        (x, shift, a), (cols, b, values) = rows, cols
        z = exponent(block.precision, operands.shared, x, cols)
        mass = a[:, None] * density(z + shift[:, None], keep)
        return total + inner(mass, (b[:, None] * values).T, block.precision)

    init = jnp.zeros(values.shape[1], jnp.result_type(shift, values))
    rows, cols = (operands.rows, shift, row_weights), (operands.cols, weights, values)
    return fold_tiles(body, init, rows, cols, jnp.ones_like(weights, bool), block)


# See :mod:`ott_shard.terms`.
Term = Callable[[str, Tree, Tree, Tree, jax.Array, jax.Array], jax.Array]


@functools.partial(jax.checkpoint, static_argnums=(0, 1))
def local_sum(
    block: Block,
    term: Term,
    operands: Operands,
    shift: jax.Array,
    weights: jax.Array,
    of: tuple[Tree, Tree, Tree],
) -> jax.Array:
    """sum_j b_j t_ij over the columns of this device, [n].

    t_ij = term(precision, shared, rows_i, cols_j, e_ij, exp(e_ij)) with e_ij = z_ij +
    shift_i and of = (shared, rows, cols).
    """
    shared, rows, cols = of

    def body(total, rows, cols, keep):
        (x, shift, rows), (y, b, cols) = rows, cols
        e = exponent(block.precision, operands.shared, x, y) + shift[:, None]
        tile = term(block.precision, shared, rows, cols, e, density(e, keep))
        return total + jnp.sum(jnp.where(keep, b * tile, 0.0), axis=1)

    init, keep = jnp.zeros((), shift.dtype), jnp.ones_like(weights, bool)
    rows = operands.rows, shift, rows
    cols = operands.cols, as_rounded(operands, weights), cols
    return fold_tiles(body, init, rows, cols, keep, block)
