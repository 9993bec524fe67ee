"""Operators of the plan on a mesh: the only ``shard_map``.

All work on :class:`Pairs`, which says where the two clouds live; all reduce rows over
columns. The other direction is ``pairs.T``. Potentials here are phi = f - eps log a,
finite also where a weight is zero: P_ij = a_i b_j exp((phi_i + psi_j - C_ij) / eps).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import register_dataclass

from ott_shard import entries, loops, moments, tile
from ott_shard.collectives import (
    Axes,
    axis_max,
    axis_sum,
    match_varying,
    position,
    stack,
)
from ott_shard.costs import CostFn
from ott_shard.mesh import exchange
from ott_shard.moments import Moments
from ott_shard.tile import Block, Operands, Term
from ott_shard.transposed import transposed


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Pairs:
    """All pairs (x_i, y_j): x split over the row axes of a mesh, y over the others.

    Attributes:
        x: [n, d], a multiple of the number of devices, split over `row_axes`.
        y: [m, d], likewise, split over `col_axes`.
        centre: [d], taken off x and y in every tile. Digits of a common offset would
            be lost in |x|^2 + |y|^2 - 2 x.y, and costs do not depend on it. 0 for a
            cost that does.
        scale: scalar by which costs are divided.
        cost: the cost function.
        mesh: the mesh.
        row_axes: the mesh axes that split x.
        col_axes: the mesh axes that split y.
        block: the largest tile.
    """

    x: jax.Array
    y: jax.Array
    centre: jax.Array
    scale: jax.Array
    cost: CostFn
    mesh: Mesh = dataclasses.field(metadata=dict(static=True))
    row_axes: Axes = dataclasses.field(metadata=dict(static=True))
    col_axes: Axes = dataclasses.field(metadata=dict(static=True))
    block: Block = dataclasses.field(metadata=dict(static=True))

    @property
    def T(self) -> "Pairs":  # noqa: N802 (the transpose is called T everywhere)
        """The same pairs with rows and columns swapped."""
        return dataclasses.replace(
            self,
            x=self.y,
            y=self.x,
            cost=transposed(self.cost),
            row_axes=self.col_axes,
            col_axes=self.row_axes,
            block=self.block._replace(rows=self.block.cols, cols=self.block.rows),
        )

    @property
    def tiles(self) -> int:
        """How many tiles a device has."""
        sides = (
            (self.x, self.row_axes, self.block.rows),
            (
                self.y,
                self.col_axes,
                self.block.cols,
            ),
        )
        return math.prod(
            -(-len(points) // (size * math.prod(self.mesh.shape[k] for k in axes)))
            for points, axes, size in sides
        )

    def costs_of(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """C(x_i, y_j) of some pairs, [k], for their indices [k]."""

        def one(x, y):
            x, y = (z[None] - self.centre for z in (x, y))
            return self.cost.pairwise(x, y, self.block.precision)[0, 0] / self.scale

        return jax.vmap(one)(self.x[i], self.y[j])

    def mirror(self, psi: jax.Array) -> jax.Array:
        """Move a vector that is split like y to where x is; n floats travel."""
        return exchange(psi, self.mesh, self.col_axes, self.row_axes)


def _reduce_rows(
    pairs: Pairs,
    local: Callable,
    row_args: Any,
    col_args: tuple[jax.Array, ...],
    epsilon: jax.Array,
    everywhere: tuple = (),
    dense: bool = False,
) -> Any:
    """Run `local(operands, row_args, col_args, sharpness, scale, *everywhere)`.

    On all devices. `col_args` starts with the potential psi, of which the bias h = psi
    / eps is made; the other arguments may be pytrees, and `everywhere` is whole on each
    device. The result has one entry per row of x, split like x; if `dense` it also has
    one column per row of y.

    `sharpness` is 1 / eps, and all that is to be divided by eps is multiplied by it:
    its rounding then is that of epsilon, the same everywhere, and not one of the large
    numbers whose difference is the exponent.
    """

    def on_device(x, y, row_args, col_args, everywhere):
        psi, *others = col_args
        cost, centre, scale, epsilon, *rest = everywhere
        sharpness = 1 / epsilon
        # As in `tile.fold_tiles`: here, and not by each tile.
        shared = match_varying((cost, centre, sharpness / scale), x, y)
        operands = Operands(shared, x, (y, psi * sharpness))
        return local(operands, row_args, others, sharpness, scale, *rest)

    rows, cols = PartitionSpec(pairs.row_axes), PartitionSpec(pairs.col_axes)
    whole = PartitionSpec(pairs.row_axes, pairs.col_axes)
    return jax.shard_map(
        on_device,
        mesh=pairs.mesh,
        in_specs=(rows, cols, rows, cols, PartitionSpec()),
        out_specs=whole if dense else rows,
    )(
        *(pairs.x, pairs.y, row_args, col_args),
        (pairs.cost, pairs.centre, pairs.scale, epsilon, *everywhere),
    )


@jax.jit
def softmin(
    pairs: Pairs,
    potential: jax.Array,
    weights: jax.Array,
    epsilon: jax.Array,
    known: jax.Array | None = None,
) -> jax.Array:
    """-eps log sum_j b_j exp((psi_j - C_ij) / eps), the c-transform of psi.

    Args:
        pairs: the clouds.
        potential: [m], psi, split like y, finite.
        weights: [m], b, split like y; a zero takes the point out.
        epsilon: scalar.
        known: [n], the result, if it is known: then only a derivative takes a pass.

    Returns:
        [n], split like x, in units of cost. O(n m d / devices) time, O(n d / rows +
        m d / cols + tile) memory forward and backward, two all-reduces of n / rows.
    """

    def local(operands, known, col_args, sharpness, scale):
        args = pairs.block, pairs.col_axes, operands, *col_args
        if known is None:
            return -tile.local_lse(*args) / sharpness
        return -tile.local_known_lse(*args, -known * sharpness) / sharpness

    return _reduce_rows(pairs, local, known, (potential, weights), epsilon)


@jax.jit
def softmin_if_near(
    pairs: Pairs,
    potential: jax.Array,
    weights: jax.Array,
    epsilon: jax.Array,
    near: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """softmin where it is within 40 epsilon of `near`, and where it is, [n] both.

    (In float64: within 319 epsilon.) About half the time of :func:`softmin`, and one
    all-reduce of n / rows. Constants.
    """

    def local(operands, near, col_args, sharpness, scale):
        (weights,), where = col_args, (pairs.block, pairs.col_axes)
        lse, sure = tile.local_lse_near(*where, operands, weights, -near * sharpness)
        return -lse / sharpness, sure

    constants = lax.stop_gradient((pairs, potential, weights, epsilon, near))
    pairs, potential, weights, epsilon, near = constants
    return _reduce_rows(pairs, local, near, (potential, weights), epsilon)


@jax.jit
def softmin_near(
    pairs: Pairs,
    potential: jax.Array,
    weights: jax.Array,
    epsilon: jax.Array,
    near: jax.Array,
) -> jax.Array:
    """softmin, [n], in less time if all of it is near `near`; in more if not.

    A constant.
    """
    args = lax.stop_gradient((pairs, potential, weights, epsilon))
    found, sure = softmin_if_near(*args, near)
    return lax.cond(loops.for_all(sure), lambda: found, lambda: softmin(*args))


@jax.jit
def apply_plan(
    pairs: Pairs,
    potentials: tuple[jax.Array, jax.Array],
    weights: tuple[jax.Array, jax.Array],
    values: jax.Array,
    epsilon: jax.Array,
) -> jax.Array:
    """sum_j P_ij v_j, [m, k] to [n, k]; one all-reduce."""

    def local(operands, row_args, col_args, sharpness, scale):
        phi, a = row_args
        axes, shift = pairs.col_axes, phi * sharpness
        return tile.local_apply(pairs.block, axes, operands, shift, a, *col_args)

    (phi, psi), (a, b) = potentials, weights
    return _reduce_rows(pairs, local, (phi, a), (psi, b, values), epsilon)


@functools.partial(jax.jit, static_argnums=0)
def plan_sum(
    term: Term,
    pairs: Pairs,
    potentials: tuple[jax.Array, jax.Array],
    weights: tuple[jax.Array, jax.Array],
    epsilon: jax.Array,
    of: tuple[Any, Any, Any],
) -> jax.Array:
    """sum_j a_i b_j t_ij, [n]; one all-reduce.

    Args:
        term: one of :mod:`ott_shard.terms`.
        pairs: the clouds.
        potentials: (phi [n], psi [m]).
        weights: (a [n], b [m]).
        epsilon: scalar.
        of: (shared, rows, cols), pytrees that the term is computed from: the same on
            all devices, split like x, and split like y.
    """
    shared, rows, cols = of

    def local(operands, row_args, col_args, sharpness, scale, *everywhere):
        (phi, a, rows), (b, cols), shared = row_args, col_args, everywhere
        of = shared, rows, cols
        shift = phi * sharpness
        sums = tile.local_sum(pairs.block, term, operands, shift, b, of)
        return a * axis_sum(sums, pairs.col_axes)

    (phi, psi), (a, b) = potentials, weights
    return _reduce_rows(pairs, local, (phi, a, rows), (psi, b, cols), epsilon, shared)


@jax.jit
def plan_rows(
    pairs: Pairs,
    potentials: tuple[jax.Array, jax.Array],
    weights: tuple[jax.Array, jax.Array],
    epsilon: jax.Array,
) -> jax.Array:
    """P_ij, [n, m], split over all devices: the one array of this size."""

    def local(operands, row_args, col_args, sharpness, scale):
        phi, a = row_args
        shift = phi * sharpness
        return a[:, None] * entries.local_plan(pairs.block, operands, shift, *col_args)

    (phi, psi), (a, b) = potentials, weights
    return _reduce_rows(pairs, local, (phi, a), (psi, b), epsilon, dense=True)


@functools.partial(jax.jit, static_argnums=0)
def largest(
    k: int,
    pairs: Pairs,
    potentials: tuple[jax.Array, jax.Array],
    weights: tuple[jax.Array, jax.Array],
    epsilon: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Columns j of the k largest P_ij of each row, and log (P_ij / a_i), [n, k].

    One pass; two all-reduces of n k x devices along the columns. Where fewer columns
    have mass, or the row has none, j is -1 and the logarithm -inf. Constants.
    """

    def local(operands, row_args, col_args, sharpness, scale):
        (phi, a), (b,) = row_args, col_args
        own = entries.local_top(pairs.block, k, operands, b)
        # [devices, n, k] to [n, devices k], in the order of the columns.
        exponents, places = (stack(part, pairs.col_axes) for part in own)
        places += len(b) * jnp.arange(len(places), dtype=jnp.int32)[:, None, None]
        exponents, places = (
            jnp.moveaxis(part, 0, 1).reshape(len(phi), -1)
            for part in (exponents, places)
        )
        exponents, winners = lax.top_k(exponents, k)
        places = jnp.take_along_axis(places, winners, axis=1)
        exponents += (phi * sharpness)[:, None]
        none = jnp.isneginf(exponents) | (a == 0)[:, None]
        return jnp.where(none, -1, places), jnp.where(none, -jnp.inf, exponents)

    pairs, potentials, weights, epsilon = lax.stop_gradient(
        (pairs, potentials, weights, epsilon)
    )
    (phi, psi), (a, b) = potentials, weights
    return _reduce_rows(pairs, local, (phi, a), (psi, b), epsilon)


@jax.jit
def quantiles(
    pairs: Pairs,
    psi: jax.Array,
    rows: jax.Array,
    b: jax.Array,
    level: jax.Array,
    epsilon: jax.Array,
) -> jax.Array:
    """The first column j of each row at which sum_j P_ij / (P 1)_i is above level_i.

    Args:
        pairs: the clouds.
        psi: [m], the potential of y.
        rows: [n], the c-transform of psi.
        b: [m], weights of y.
        level: [n], in [0, 1).
        epsilon: scalar.

    Returns:
        [n] int32. Two passes; two all-reduces, one of n x devices along the columns.
    """

    def local(operands, row_args, col_args, sharpness, scale):
        (rows, level), (b,) = row_args, col_args
        shift, me = rows * sharpness, position(pairs.col_axes)
        ones = jnp.ones_like(rows), b, jnp.ones_like(b)[:, None]
        own = tile.local_apply(pairs.block, (), operands, shift, *ones)[:, 0]
        parts = stack(own, pairs.col_axes)
        ends = jnp.cumsum(parts, axis=0)
        level = level * ends[-1]
        devices = jnp.arange(len(parts), dtype=jnp.int32)[:, None]
        last = jnp.max(jnp.where(parts > 0, devices, 0), axis=0)
        owner = jnp.minimum(jnp.sum(ends <= level, axis=0, dtype=jnp.int32), last)
        rest = level - (ends[me] - parts[me])
        column = entries.local_quantile(pairs.block, operands, shift, b, rest)
        column = jnp.where(owner == me, column + me * len(b), 0)
        return axis_sum(column, pairs.col_axes)

    return _reduce_rows(pairs, local, (rows, level), (psi, b), epsilon)


@jax.jit
def cost_moments(pairs: Pairs, a: jax.Array, b: jax.Array) -> Moments:
    """Moments of the costs with weights a_i b_j, as scalars; one pass.

    `deviation` of the result is the variance.
    """

    def local(operands, _, col_args, __, scale):
        own = moments.local_moments(pairs.block, operands, *col_args)
        total = axis_sum(own.weight, pairs.col_axes)
        some = jnp.where(total > 0, total, 1.0)
        mean = axis_sum(own.weight * own.mean, pairs.col_axes) / some
        spread = own.deviation + own.weight * jnp.square(own.mean - mean)
        return Moments(
            total,
            mean / scale,
            axis_sum(spread, pairs.col_axes) / scale**2,
            axis_max(own.max, pairs.col_axes) / scale,
        )

    # There is no potential here; any epsilon will do.
    unused = jnp.ones_like(pairs.scale)
    rows = _reduce_rows(pairs, local, (), (jnp.zeros_like(b), b), unused)
    weight = a * rows.weight
    total = weight.sum()
    mean = jnp.sum(weight * rows.mean) / total
    spread = a * (rows.deviation + rows.weight * jnp.square(rows.mean - mean))
    largest = jnp.max(jnp.where(weight > 0, rows.max, -jnp.inf))
    return Moments(total, mean, spread.sum() / total, largest)


@jax.jit
def cost_size(pairs: Pairs, a: jax.Array, b: jax.Array) -> jax.Array:
    """The mean size of the numbers that costs are computed from, scalar; of a sample.

    With weights a_i b_j. The rounding error of a cost is a few units in their last
    place.
    """

    def local(operands, a, col_args, _, scale):
        sums = moments.local_cost_size(pairs.block, operands, a, *col_args)
        total, weight = (axis_sum(part, pairs.col_axes) for part in sums)
        return total / scale, weight

    columns = (jnp.zeros_like(b), b)
    # One number from every device, as if it were its row.
    total, weight = _reduce_rows(pairs, local, a, columns, jnp.ones_like(pairs.scale))
    return total.sum() / jnp.where(weight.sum() > 0, weight.sum(), 1.0)
