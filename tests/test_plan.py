"""What a solution tells about its plan, against the dense plan."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref
import scipy.optimize

import ott_shard as otts
from ott_shard import matching


def dense_top(plan, k):
    """Of equal entries the first; -1 where there is no mass."""
    order = np.argsort(-plan, axis=1, kind="stable")[:, :k]
    values = np.take_along_axis(plan, order, axis=1)
    return np.where(values > 0, order, -1), values


@pytest.mark.parametrize("axis", [0, 1])
def test_top_k(mesh, dtype, axis):
    """13 x 21 in tiles of 4 x 7, weights of zero among them; k beyond a tile."""
    p = ref.problem(13, 21, dtype=dtype)
    x, y, a, b = p.cast(dtype)
    geom = otts.PointCloud(x, y, epsilon=0.3, mesh=mesh, batch_size=(4, 7))
    out = otts.solve(geom, a, b, threshold=1e-5)
    plan = np.asarray(out.matrix)
    plan = plan if axis == 1 else plan.T
    for k in (1, 3, plan.shape[1]):
        indices, values = out.top_k(k, axis)
        assert indices.shape == values.shape == (len(plan), k)
        want, shares = dense_top(plan, k)
        ref.assert_close(values, shares, 1e-5 if dtype == np.float32 else 1e-12)
        np.testing.assert_array_equal(indices >= 0, shares > 0)
        np.testing.assert_array_equal(indices[:, 0], want[:, 0])
        # Further on neighbours as close as rounding may change places.
        entries = np.take_along_axis(plan, np.maximum(indices, 0), axis=1)
        np.testing.assert_allclose(entries * (indices >= 0), shares, rtol=1e-4)
    np.testing.assert_array_equal(out.argmax(axis), out.top_k(1, axis)[0][:, 0])


def test_of_equals_the_first():
    x, y = np.zeros((3, 2), np.float32), np.zeros((40, 2), np.float32)
    geom = otts.PointCloud(x, y, epsilon=1.0, mesh=otts.make_mesh(2, 4), batch_size=3)
    indices, values = jax.jit(lambda: otts.solve(geom).top_k(25, axis=1))()
    np.testing.assert_array_equal(indices, np.tile(np.arange(25), (3, 1)))
    np.testing.assert_allclose(values, 1 / 120, rtol=1e-5)


def test_top_k_takes_no_dense_array():
    """n = m = 50,000 and d = 50, of which the plan is 9.3 GiB; doubling n doubles."""

    def run(x, y):
        geom = otts.PointCloud(x, y, epsilon=1.0, mesh=otts.make_mesh(1, 1))
        out = otts.solve(geom, max_iterations=1)
        return out.top_k(10, axis=1)

    def temp(n):
        cloud = jax.ShapeDtypeStruct((n, 50), np.float32)
        memory = jax.jit(run).lower(cloud, cloud).compile().memory_analysis()
        return memory.temp_size_in_bytes

    small, large = map(temp, (25_000, 50_000))
    assert small < large <= 2 * small and large < 128 * 2**20


@pytest.mark.parametrize(
    ("k", "axis", "error"),
    [(0, 1, ValueError), (5, 1, ValueError), (1.5, 1, TypeError), (1, 2, ValueError)],
)
def test_bad_arguments(k, axis, error):
    x = np.eye(3, dtype=np.float32)
    out = functools.partial(otts.PointCloud, x, np.ones((4, 3), np.float32))
    with pytest.raises(error, match="k must|axis must"):
        otts.solve(out(epsilon=1.0)).top_k(k, axis)


@pytest.mark.parametrize("axis", [0, 1])
def test_sparse_plans(mesh, dtype, axis):
    p, tol = ref.problem(13, 21, dtype=dtype), 1e-5 if dtype == np.float32 else 1e-12
    x, y, a, b = p.cast(dtype)
    geom = otts.PointCloud(x, y, epsilon=0.3, mesh=mesh, batch_size=(4, 7))
    out = otts.solve(geom, a, b)
    plan = np.asarray(out.matrix)
    ends = plan if axis == 1 else plan.T
    lowest = np.sort(ends, axis=1)[:, -4:]
    largest = np.where((ends >= lowest[:, :1]) & (ends > 0), ends, 0)
    largest = largest if axis == 1 else largest.T
    limit = float(np.quantile(plan, 0.7)) * (1 + 1e-6)
    high = np.where(plan >= limit, plan, 0)
    for options, want in (
        (dict(k=4, axis=axis), largest),
        (dict(k=4, axis=axis, threshold=limit), np.where(largest >= limit, largest, 0)),
        (dict(threshold=limit), high),
    ):
        got = out.to_bcoo(**options)
        assert got.shape == plan.shape and got.nse == np.count_nonzero(want)
        ref.assert_close(got.todense(), want, tol)
        order = np.lexsort(got.indices.T[::-1])
        np.testing.assert_array_equal(order, np.arange(got.nse))
    traced = jax.jit(lambda out: out.to_bcoo(k=4, axis=axis))(out)
    assert traced.nse == 4 * len(ends)
    ref.assert_close(traced.todense(), largest, tol)


def test_sparse_plans_by_blocks(monkeypatch):
    """Blocks of rows that do not divide n, and a limit on what is kept."""
    monkeypatch.setattr(matching, "_BLOCK_ENTRIES", 5 * 21)
    p = ref.problem(13, 21)
    geom = otts.PointCloud(*p.cast(np.float32)[:2], epsilon=0.3)
    out = otts.solve(geom)
    plan = np.asarray(out.matrix)
    ref.assert_close(out.to_bcoo(threshold=1e-30).todense(), plan, 1e-6)
    monkeypatch.setattr(matching, "_MAX_ENTRIES", 100)
    with pytest.raises(ValueError, match="threshold must keep at most 100 entries"):
        out.to_bcoo(threshold=1e-30)


def exact(x, y):
    cost = ref.sqeuclidean(x, y)
    rows, cols = scipy.optimize.linear_sum_assignment(cost)
    return cols, cost[rows, cols].mean()


def test_assignment(mesh, dtype):
    x, y = np.random.default_rng(0).normal(size=(2, 53, 3)).astype(dtype)
    out = otts.solve(otts.PointCloud(x, y + 3, epsilon=0.1, mesh=mesh, batch_size=7))
    got = out.assignment()
    indices, cost = exact(np.float64(x), np.float64(y + 3))
    np.testing.assert_array_equal(got.indices, indices)
    np.testing.assert_allclose(got.cost, cost, rtol=1e-5)


@pytest.mark.parametrize("epsilon", [0.02, 1.0])
def test_assignment_of_many(monkeypatch, epsilon):
    """Chosen among candidates, and completed: near the best, even if blurred."""
    monkeypatch.setattr(matching, "_MAX_EXACT", 10)
    x, y = np.random.default_rng(0).normal(size=(2, 601, 2)).astype(np.float32)
    geom = otts.PointCloud(x, y * 0.5 + 1, epsilon=epsilon, mesh=otts.make_mesh(4, 2))
    got = otts.solve(geom).assignment()
    np.testing.assert_array_equal(np.sort(got.indices), np.arange(601))
    y = np.float64(np.float32(y * 0.5 + 1))
    _, best = exact(np.float64(x), y)
    own = ((x - y[got.indices]) ** 2).sum(1).mean()
    np.testing.assert_allclose(got.cost, own, rtol=1e-5)
    assert best * (1 - 1e-6) <= own <= best * 1.01


def test_assignment_around_forbidden_pairs():
    def cost(x, y):
        return jnp.where(
            jnp.floor(x[0]) == jnp.floor(y[0]), (x[0] - y[0]) ** 2, jnp.inf
        )

    x = np.random.default_rng(0).permutation(40).astype(np.float32)[:, None] / 10
    geom = otts.PointCloud(x, x[::-1] + 0.01, cost_fn=cost, epsilon=0.1)
    out = otts.solve(geom, threshold=1e-2)
    np.testing.assert_array_equal(out.assignment().indices, np.arange(40)[::-1])
    # Three points stand where two of the others do.
    geom = otts.PointCloud(x, x[::-1].clip(0.1) // 1 + 0.1, cost_fn=cost, epsilon=0.1)
    plan = otts.Plan.from_potentials(geom, np.zeros(40), np.zeros(40))
    costs = ref.sqeuclidean(np.float64(x), np.float64(geom.y))
    apart = np.floor(np.float64(x)) != np.floor(np.float64(geom.y)).T
    best = scipy.optimize.linear_sum_assignment(np.where(apart, np.inf, costs))
    np.testing.assert_allclose(plan.assignment().cost, costs[best].mean(), rtol=1e-3)
    geom = otts.PointCloud(x, x[::-1] * 0.5, cost_fn=cost, epsilon=0.1)
    plan = otts.Plan.from_potentials(geom, np.zeros(40), np.zeros(40))
    with pytest.raises(ValueError, match="assignment must be possible"):
        plan.assignment()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda out: out.assignment(), ValueError, "as many x as y, got 3 and 4"),
        (lambda out: out.to_bcoo(), ValueError, "k or threshold must be given"),
        (lambda out: out.to_bcoo(k=5), ValueError, "k must be at most 4"),
        (lambda out: out.to_bcoo(threshold=0.0), ValueError, "threshold must be gr"),
        (lambda out: out.to_bcoo(threshold=1.0, axis=3), ValueError, "axis must be"),
        (
            lambda out: jax.jit(lambda t: out.to_bcoo(threshold=t).data)(0.1),
            TypeError,
            "threshold must be a number known now",
        ),
        (
            lambda out: jax.jit(lambda out: out.to_bcoo(threshold=0.1).data)(out),
            TypeError,
            "threshold must come with k inside jit",
        ),
    ],
)
def test_bad_use(call, error, words):
    x = np.eye(3, dtype=np.float32)
    out = otts.solve(otts.PointCloud(x, np.ones((4, 3), np.float32), epsilon=1.0))
    with pytest.raises(error, match=words):
        call(out)


def test_an_assignment_needs_equal_weights_and_numbers():
    x = np.eye(3, dtype=np.float32)
    geom = otts.PointCloud(x, x, epsilon=1.0)
    weights = np.asarray([0.5, 0.3, 0.2], np.float32)
    with pytest.raises(ValueError, match="equal weights, got b from 0.2 to 0.5"):
        otts.solve(geom, b=weights).assignment()
    with pytest.raises(TypeError, match="assignment must not be inside jit"):
        jax.jit(lambda: otts.solve(geom).assignment())()


def test_assignment_of_equal_points(monkeypatch):
    """Four places for 600 points, in few passes, at the least cost."""
    monkeypatch.setattr(matching, "_MAX_EXACT", 16)
    calls, largest = [], matching._largest
    monkeypatch.setattr(matching, "_largest", lambda *a: calls.append(1) or largest(*a))
    rng = np.random.default_rng(0)
    x = rng.permutation(np.repeat(np.eye(4), 150, 0)).astype(np.float32)
    y = rng.permutation(x) + np.float32(0.25)
    out = otts.solve(otts.PointCloud(x, y, epsilon=0.2, mesh=otts.make_mesh(2, 1)))
    got = out.assignment()
    np.testing.assert_array_equal(np.sort(got.indices), np.arange(600))
    np.testing.assert_allclose(
        got.cost, exact(np.float64(x), np.float64(y))[1], rtol=1e-4
    )
    assert len(calls) <= 2 * 12


def test_no_assignment_of_nan(monkeypatch):
    """Refused before anything of n x n is made."""
    monkeypatch.setattr(matching, "_MAX_EXACT", 16)
    monkeypatch.setattr(matching, "_reduced_costs", None)
    x = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    out = otts.solve(otts.PointCloud(x, x, epsilon=1.0, mesh=otts.make_mesh(1, 1)))
    nan = jax.tree.map(lambda z: z * np.nan, out.found)
    plan = otts.Plan(out.geom, out.problem, nan)
    with pytest.raises(ValueError, match="assignment must be possible"):
        plan.assignment()
    i, j = plan.sample(jax.random.key(0), 5)
    assert np.all(i == -1) and np.all(j == -1)
