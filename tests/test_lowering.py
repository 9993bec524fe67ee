"""The path on a GPU, without one: programs lowered for CUDA, read but not compiled.

What XLA is handed must ask for full float32 products (the default of recent GPUs is
TF32, which no test on CPU can see), hold no array of the size of the plan, and have the
same collectives as on CPU.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import ott_shard as otts
from launch.programs import count
from ott_shard import operators

N, MESH, TILE = 2048, (4, 2), 64
LOCAL = N // MESH[0], N // MESH[1]
COSTS = {"SqEuclidean": otts.costs.SqEuclidean(), "Euclidean": otts.costs.Euclidean()}


def lowered(fn, *args):
    """The StableHLO of `fn` for CUDA."""
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def shapes(d):
    """Of a cloud of x, one of y and a potential of each, where they belong."""
    mesh = otts.make_mesh(*MESH)

    def array(shape, axis):
        split = NamedSharding(mesh, P(axis))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=split)

    clouds = (array((N, d), axis) for axis in ("rows", "cols"))
    return (*clouds, *(array((N,), axis) for axis in ("rows", "cols")))


def geometry(x, y, name):
    options = dict(mesh=otts.make_mesh(*MESH), batch_size=TILE)
    return otts.PointCloud(x, y, cost_fn=COSTS[name], epsilon=0.5, **options)


def softmin(name, x, y, phi, psi):
    pairs = geometry(x, y, name).pairs
    weights = jnp.full_like(psi, 1 / N)
    return operators.softmin(pairs, psi, weights, jnp.float32(0.5))


def gradient(name, *args):
    """Of known values: what a gradient takes besides."""

    def total(x, y, phi, psi):
        pairs = geometry(x, y, name).pairs
        weights = jnp.full_like(psi, 1 / N)
        return operators.softmin(pairs, psi, weights, jnp.float32(0.5), phi).sum()

    return jax.grad(total, (0, 1, 3))(*args)


def solve(name, x, y, phi, psi):
    """Value and gradient of a solution that was found on the way."""

    def value(x, y):
        return otts.solve(geometry(x, y, name), max_iterations=20).reg_ot_cost

    return jax.value_and_grad(value, (0, 1))(x, y)


@functools.cache
def program(fn, name, d):
    return lowered(functools.partial(fn, name), *shapes(d))


def dots(text):
    """(shapes of the operands, precision) of all products."""
    found = re.findall(
        r"dot_general .*?(?:precision = \[(.*?)\])? : \((.*?)\) ->", text
    )
    return [(re.findall(r"tensor<([\dx]+)xf32>", sides), how) for how, sides in found]


def wide(*values):
    return pytest.param(*values, marks=pytest.mark.wide)


PROGRAMS = pytest.mark.parametrize(
    ("fn", "name", "d"),
    [
        (softmin, "SqEuclidean", 3),
        (gradient, "SqEuclidean", 3),
        (gradient, "Euclidean", 64),
        (solve, "SqEuclidean", 64),
        wide(softmin, "Euclidean", 64),
        wide(solve, "Euclidean", 3),
    ],
)


@PROGRAMS
def test_products_are_full_float32(fn, name, d):
    found = dots(program(fn, name, d))
    assert any(f"{TILE}x{TILE}" in sides or len(sides) == 2 for sides, _ in found)
    assert {how for _, how in found} == {"HIGHEST, HIGHEST"}, found


@PROGRAMS
def test_no_array_of_the_size_of_the_plan(fn, name, d):
    text = program(fn, name, d)
    arrays = re.findall(r"tensor<((?:\d+x)+)[a-z]", text)
    sizes = {a: math.prod(int(size) for size in a.split("x")[:-1]) for a in arrays}
    assert max(sizes.values()) < math.prod(LOCAL) // 2, max(sizes, key=sizes.get)
    assert sizes[f"{TILE}x{TILE}x"] == TILE**2  # the tiles are among them
    assert "xf64>" not in text


@PROGRAMS
def test_only_sums_travel(fn, name, d):
    """Of the shard_map; and nothing calls the host, or a library."""
    text = program(fn, name, d)
    found = re.findall(
        r"stablehlo\.(all_reduce|all_gather|all_to_all|collective_permute|"
        r"reduce_scatter|collective_broadcast)\b",
        text,
    )
    assert set(found) == {"all_reduce"}
    if fn is softmin:
        assert len(found) == 2
    assert "custom_call" not in text


@pytest.mark.parametrize(
    ("fn", "wanted"),
    [
        # Maximum and sum, of rows over columns.
        (softmin, {(MESH[1], 4 * LOCAL[0]): 2}),
        # Of x over columns; of y, with its potential, over rows.
        (gradient, {(MESH[1], 12 * LOCAL[0]): 1, (MESH[0], 16 * LOCAL[1]): 1}),
    ],
    ids=["softmin", "gradient"],
)
def test_sums_travel_once(fn, wanted):
    """As compiled, and as often as loops run; more could only be seen in a loop."""
    of_shapes = jax.jit(functools.partial(fn, "SqEuclidean")).lower(*shapes(3))
    work = count(of_shapes.compile().as_text())
    assert (work.all_reduces, work.others) == (wanted, 0)


def test_all_reduces_of_a_gpu():
    """As its compiler writes them: started, in pairs, or in groups of one."""
    text = """
ENTRY %main (p: f32[64]) -> f64[5] {
  %a = (f32[64]{0}, bf16[8,2]{1,0}) all-reduce-start(%p, %q), replica_groups=[4,2]<=[8]
  %b = (f32[64]{0}, bf16[8,2]{1,0}) all-reduce-done(%a)
  ROOT %c = f64[5]{0} all-reduce(%r), channel_id=1, replica_groups={{0,1},{2,3}}, x
  %d = f32[] all-reduce(%s), replica_groups={{0},{1}}, to_apply=%sum
  %e = f32[] all-reduce(%s), replica_groups=[8,1]<=[8], to_apply=%sum
"""
    assert count(text).all_reduces == {(2, 256 + 32): 1, (2, 40): 1}


def test_lower_precision_is_seen():
    """A control: these programs are not blind to what is forbidden."""
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    ((sides, how),) = dots(lowered(lambda x: x @ x.T, x))
    assert sides == ["8x4", "8x4"] or sides == ["8x4", "4x8"]
    assert "HIGHEST" not in how
    assert "8x8" in lowered(lambda x: x @ x.T, x)
