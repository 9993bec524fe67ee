"""What travels between devices: collectives of one update, layouts of results."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref
from jax.sharding import NamedSharding, PartitionSpec as P

import ott_shard as otts
from ott_shard import mesh as meshes, operators

MESH = (4, 2)
COSTS = {"SqEuclidean": otts.costs.SqEuclidean(), "Euclidean": otts.costs.Euclidean()}
EPSILON = 0.3


KINDS = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
)


def collectives(compiled, *, top_level_only=False):
    """How many of each collective a compiled program has.

    At the top level means outside of every loop, where once in the text is once in
    a run.
    """
    text = compiled.as_text()
    if top_level_only:
        text = text[text.index("\nENTRY ") :]
    return {k: len(re.findall(rf" = .* {k}(?:-start)?\(", text)) for k in KINDS}


def update(transposed=False):
    """One f-update, or one g-update: a softmin over pairs."""

    def run(pairs, potential, weights, epsilon):
        pairs = pairs.T if transposed else pairs
        return operators.softmin(pairs, potential, weights, epsilon)

    return run


def arguments(n, m, mesh, name="SqEuclidean", dtype=np.float32, batch_size=None):
    """Placed pairs, a potential and weights of y, and the same of x."""
    p = ref.problem(n, m, dtype=dtype)
    x, y, a, b = p.cast(dtype)
    geom = otts.PointCloud(
        x, y, cost_fn=COSTS[name], epsilon=EPSILON, batch_size=batch_size, mesh=mesh
    )
    a, b = geom.weights(a, 0), geom.weights(b, 1)
    rng = np.random.default_rng(3)
    phi, psi = (
        jax.device_put(rng.normal(size=w.shape).astype(dtype), w.sharding)
        for w in (a, b)
    )
    return p, geom.pairs, (phi, a), (psi, b)


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("batch_size", [None, 16, (5, 40)], ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["f", "g"])
def test_two_all_reduces_an_update(transposed, batch_size, name):
    """Whatever the tile, and nothing else travels."""
    mesh = otts.make_mesh(*MESH)
    _, pairs, of_x, of_y = arguments(200, 120, mesh, name, batch_size=batch_size)
    potential, weights = of_x if transposed else of_y
    compiled = (
        jax.jit(update(transposed))
        .lower(pairs, potential, weights, jnp.float32(EPSILON))
        .compile()
    )
    found = collectives(compiled)
    assert found == collectives(compiled, top_level_only=True)
    assert found.pop("all-reduce") == 2, found
    assert not any(found.values()), found


@pytest.mark.parametrize("shape", [(8, 1), (1, 8), (1, 1)])
def test_no_more_on_one_dimensional_meshes(shape):
    mesh = otts.make_mesh(*shape)
    _, pairs, of_x, of_y = arguments(200, 120, mesh)
    for transposed, (potential, weights) in ((False, of_y), (True, of_x)):
        compiled = (
            jax.jit(update(transposed))
            .lower(pairs, potential, weights, jnp.float32(EPSILON))
            .compile()
        )
        found = collectives(compiled)
        assert found.pop("all-reduce") <= 2
        assert not any(found.values()), found


def test_an_update_gathers_nothing_in_its_gradient():
    """Backward, too, only sums travel: of x over columns, of y over rows."""
    mesh = otts.make_mesh(*MESH)
    _, pairs, _, (psi, b) = arguments(200, 120, mesh)

    def loss(x, y, psi, epsilon):
        moved = dataclasses.replace(pairs, x=x, y=y)
        return operators.softmin(moved, psi, b, epsilon).sum()

    compiled = (
        jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        .lower(pairs.x, pairs.y, psi, jnp.float32(EPSILON))
        .compile()
    )
    found = collectives(compiled)
    found.pop("all-reduce")
    assert not any(found.values()), found


def test_the_account_sees_a_collective_in_a_loop():
    """A control for the count above."""
    mesh = otts.make_mesh(*MESH)

    @jax.jit
    def looped(x):
        def step(_, x):
            return x - x.sum() / 7

        return jax.lax.fori_loop(0, 5, step, x)

    x = jax.device_put(jnp.arange(40.0), NamedSharding(mesh, P("rows")))
    compiled = looped.lower(x).compile()
    assert collectives(compiled)["all-reduce"] >= 1
    assert collectives(compiled, top_level_only=True)["all-reduce"] == 0


def test_an_update_is_the_same_on_every_mesh(mesh, dtype):
    name = {"float32": "SqEuclidean", "float64": "Euclidean"}[np.dtype(dtype).name]
    tol = {"float32": 1e-5, "float64": 1e-11}[np.dtype(dtype).name]
    p, pairs, (phi, a), (psi, b) = arguments(13, 21, mesh, name, dtype, (2, 3))
    epsilon = jnp.asarray(EPSILON, dtype)
    cost, eps = ref.COSTS[name](p.x, p.y), float(epsilon)
    rows = operators.softmin(pairs, psi, b, epsilon)
    cols = operators.softmin(pairs.T, phi, a, epsilon)
    phi, psi = (np.asarray(v, np.float64) for v in (phi[:13], psi[:21]))
    want = -eps * ref.logsumexp(ref.safe_log(p.b) + (psi - cost) / eps)
    ref.assert_close(rows[:13], want, tol, "f-update")
    want = -eps * ref.logsumexp(ref.safe_log(p.a) + (phi - cost.T) / eps)
    ref.assert_close(cols[:21], want, tol, "g-update")
    # Results lie where the next update wants them.
    assert rows.sharding.is_equivalent_to(NamedSharding(mesh, P("rows")), 1)
    assert cols.sharding.is_equivalent_to(NamedSharding(mesh, P("cols")), 1)


@pytest.mark.wide
def test_potentials_stay_split(mesh):
    """Divisible sizes: f like x, g like y, on the devices they were computed on."""
    x, y, a, b = ref.problem(24, 40).cast(np.float32)
    out = otts.solve(otts.PointCloud(x, y, epsilon=EPSILON, mesh=mesh), a, b)
    assert out.f.sharding.is_equivalent_to(NamedSharding(mesh, P("rows")), 1)
    assert out.g.sharding.is_equivalent_to(NamedSharding(mesh, P("cols")), 1)


def test_results_need_no_further_care():
    """f, g and costs mix with ordinary arrays, for uneven sizes too."""
    p = ref.problem(13, 21)
    x, y, a, b = p.cast(np.float32)
    out = otts.solve(
        otts.PointCloud(x, y, epsilon=EPSILON, mesh=otts.make_mesh(*MESH)), a, b
    )
    support = p.a > 0
    total = jnp.vdot(out.f[support], a[support]) + out.reg_ot_cost
    assert bool(jnp.isfinite(total))
    assert np.asarray(out.g).shape == (21,)
    assert (out.f[:, None] + out.g[None]).shape == (13, 21)


@pytest.mark.parametrize("n", [1, 9, 203])
@pytest.mark.parametrize("pad", ["edge", "constant"])
def test_rows_are_asked_for_once(n, pad):
    """What several devices hold is one request; the result is that of `place`."""
    x = np.random.default_rng(0).normal(size=(n, 3)).astype(np.float32)
    mesh = otts.make_mesh(*MESH)
    for axes in meshes.axes_of(mesh):
        asked = []

        def fill(start, out, asked=asked):
            asked.append((start, len(out)))
            out[:] = x[start : start + len(out)]

        options = {"pad": pad, "dtype": np.float32}
        got = meshes.place_rows(fill, x.shape, mesh, axes, **options)
        want = meshes.place(x, mesh, axes, pad=pad)
        np.testing.assert_array_equal(got, want)
        assert got.sharding.is_equivalent_to(want.sharding, 2)
        assert sorted(asked) == asked
        if n == 203:
            assert sum(count for _, count in asked) == n
