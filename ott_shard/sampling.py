"""Pairs of points drawn from a plan that is never formed."""

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from ott_shard import mesh as meshes, operators
from ott_shard.objective import row_sums
from ott_shard.problem import Found, Problem


def sample(
    problem: Problem, found: Found, key: jax.Array, num_pairs: int, method: str
) -> tuple[jax.Array, jax.Array]:
    """(i, j), each [num_pairs] int32, drawn in proportion to P_ij.

    i is drawn by the row sums of the plan, and then j within the row by inversion of
    its cumulative sum: two passes over num_pairs x m, by the same uniform numbers on
    every mesh.
    """
    of_rows, of_columns = jax.random.split(key)
    i = draw_rows(problem, found, of_rows, num_pairs, method)
    return i, draw_columns(problem, found, of_columns, i)


def batches(
    problem: Problem,
    found: Found,
    key: jax.Array,
    sizes: tuple[int, int],
    method: str,
    process: tuple[int, int],
) -> Iterator[tuple[jax.Array, jax.Array]]:
    """See :meth:`ott_shard.Plan.batches`; sizes are of a batch and of the epoch."""
    (size, num), (index, count) = sizes, process
    of_rows, of_order, of_columns = jax.random.split(key, 3)
    rows = draw_rows(problem, found, of_rows, num, method)
    rows = np.asarray(jax.random.permutation(of_order, rows))
    for k in range(index, num // (size * count) * count, count):
        i = jnp.asarray(rows[k * size : (k + 1) * size])
        yield i, draw_columns(problem, found, jax.random.fold_in(of_columns, k), i)


@functools.partial(jax.jit, static_argnums=(3, 4))
def draw_rows(
    problem: Problem, found: Found, key: jax.Array, num: int, method: str
) -> jax.Array:
    """[num] int32, rows by their share of the mass."""
    problem, found = jax.lax.stop_gradient((problem, found))
    masses = row_sums(problem, found)
    total = masses.sum()
    draw = systematic if method == "systematic" else independent
    # Of what is no plan, nothing is drawn.
    some = jnp.isfinite(total) & (total > 0)
    return jnp.where(some, draw(key, jnp.where(some, masses, 1.0), num), -1)


@jax.jit
def draw_columns(
    problem: Problem, found: Found, key: jax.Array, i: jax.Array
) -> jax.Array:
    """A column of each of the rows i, by its share of the row, [num] int32."""
    problem, found = jax.lax.stop_gradient((problem, found))
    pairs, num = problem.pairs, len(i)
    level = jax.random.uniform(key, (num,), problem.a.dtype)
    x, rows, level = (
        meshes.place(z, pairs.mesh, pairs.row_axes)
        for z in (pairs.x[i], found.rows[i], level)
    )
    pairs = dataclasses.replace(pairs, x=x)
    ends = found.psi, rows, problem.b
    j = operators.quantiles(pairs, *ends, level, problem.epsilon)
    return jnp.where(i < 0, -1, meshes.unpad(j, num))


def _last(masses: jax.Array) -> jax.Array:
    """The last index with mass: rounding must not lead beyond it."""
    index = jnp.arange(len(masses), dtype=jnp.int32)
    return jnp.max(jnp.where(masses > 0, index, 0))


def independent(key: jax.Array, masses: jax.Array, num: int) -> jax.Array:
    """Indices i, each drawn by its share of the mass.

    First a block of about sqrt(n) of them, then one in the block: a single uniform
    number would not tell apart so many, nor would a single running sum.
    """
    n = len(masses)
    size = math.isqrt(n - 1) + 1
    blocks = jnp.pad(masses, (0, -n % size)).reshape(-1, size)
    of_block, within = jax.random.uniform(key, (2, num), masses.dtype)
    sums = blocks.sum(axis=1)
    whole = jnp.zeros(num, jnp.int32)
    block = _crossing(jnp.cumsum(sums)[None], whole, of_block)
    index = block * size + _crossing(jnp.cumsum(blocks, axis=1), block, within)
    return jnp.minimum(index, _last(masses))


def _crossing(ends: jax.Array, row: jax.Array, share: jax.Array) -> jax.Array:
    """In each `row` of running sums the first that is above `share` of the last one."""
    size = ends.shape[1]
    level = share * ends[row, -1]

    def halve(_, found):
        low, high = found
        middle = (low + high) // 2
        above = ends[row, middle] > level
        return jnp.where(above, low, middle + 1), jnp.where(above, middle, high)

    none = jnp.zeros(len(row), jnp.int32)
    steps = size.bit_length()
    low, _ = jax.lax.fori_loop(0, steps, halve, (none, none + (size - 1)))
    return jnp.minimum(low, size - 1)


def systematic(key: jax.Array, masses: jax.Array, num: int) -> jax.Array:
    """Index i, in order, floor or ceil of num masses_i / sum masses times.

    One uniform number shifts a grid. The running sum keeps whole parts, as integers,
    apart from fractions: so many terms would round them away.
    """
    expected = masses * (num / masses.sum())
    rounding = 16 * jnp.finfo(masses.dtype).eps * expected
    whole = jnp.floor(expected + jnp.minimum(rounding, 1e-3))
    rest = jnp.maximum(expected - whole, 0.0)
    whole = whole.astype(jnp.int32)

    def add(one, other):
        sum = one[1] + other[1]
        carried = jnp.floor(sum)
        return one[0] + other[0] + carried.astype(jnp.int32), sum - carried

    ends, fractions = jax.lax.associative_scan(add, (jnp.zeros_like(whole), rest))
    shift = jax.random.uniform(key, (), masses.dtype)
    grid = ends + jnp.floor(fractions + shift).astype(jnp.int32)
    left = num - whole.sum()
    grid = jnp.clip(grid, jnp.minimum(left, 0), jnp.maximum(left, 0))
    index = jnp.arange(len(masses), dtype=jnp.int32)
    grid = jnp.where(index >= _last(masses), left, grid)
    counts = whole + jnp.diff(grid, prepend=0)
    return jnp.repeat(index, counts, total_repeat_length=num)
