"""More small inputs that broke other solvers: values, convergence, interface.

The ids are as in test_cases.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref
from solving import FLOAT, mesh, plainly, solved, two_by_two, uniform

import ott_shard as otts
from ott_shard import Status, costs

pytestmark = pytest.mark.wide

# -------------------------------------------------------------- values and gradients


def test_a3_4_an_unbalanced_value_is_not_negative():
    """It is the documented objective of the plan, whose terms are not negative."""
    rng = np.random.default_rng(0)
    x, y = rng.uniform(size=(2, 1000, 30)).astype(FLOAT)
    y += FLOAT(0.1)
    w = uniform(1000)
    geom = otts.PointCloud(x, y, epsilon=1.0, mesh=mesh())
    out = otts.solve(geom, w, w, tau_a=0.5, tau_b=0.6, threshold=1e-4)
    assert out.status is Status.CONVERGED and out.reg_ot_cost > 0
    plan = np.asarray(out.matrix, np.float64)
    cost = ref.sqeuclidean(x.astype(np.float64), y.astype(np.float64))
    want = (plan * cost).sum() + ref.kl(plan, np.outer(w, w))
    for axis, tau in ((1, 0.5), (0, 0.6)):
        want += ref.rho(1.0, tau) * ref.kl(plan.sum(axis), w.astype(np.float64))
    np.testing.assert_allclose(out.reg_ot_cost, want, rtol=1e-5)


def test_a3_8_a_batch_is_its_members():
    """Five clouds on a line, each against itself and against the next."""
    clouds = np.random.default_rng(0).normal(size=(5, 100, 1)).astype(FLOAT)

    def divergence(x, y):
        return otts.sinkhorn_divergence(
            *(x, y),
            cost_fn=costs.Euclidean(),
            epsilon=0.1,
            threshold=1e-4,
            mesh=mesh(),
        )[0]

    many = jax.jit(jax.vmap(divergence))
    np.testing.assert_allclose(many(clouds, clouds), np.zeros(5), atol=1e-5)
    following = np.roll(clouds, 1, axis=0)
    pairs = zip(clouds, following, strict=True)
    # A batch of one and the same pair stops when that pair is done.
    each = [many(*(np.stack([z] * 5) for z in pair))[0] for pair in pairs]
    np.testing.assert_allclose(many(clouds, following), each, rtol=1e-4)


def test_a3_15_there_is_no_rank():
    x = np.zeros((3, 1), FLOAT)
    with pytest.raises(TypeError, match="rank"):
        otts.sinkhorn_divergence(x, x, rank=10)  # pyright: ignore (the test)


@pytest.mark.slow
def test_a3_18_a_schedule_does_not_converge_to_an_absurd_cost():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(292, 3)).astype(FLOAT)
    y = rng.normal(size=(824, 3)).astype(FLOAT) + 1
    schedule = otts.Epsilon(1e-3, init=100.0, decay=0.99)
    geom = otts.PointCloud(x, y, epsilon=schedule, mesh=mesh())
    out = otts.solve(geom, threshold=1e-2, max_iterations=1200)
    error = np.abs(out.marginal(0) - uniform(824)).sum()
    np.testing.assert_allclose(out.marginal_error, error, atol=0.01)
    assert bool(out.converged) == bool(error + out.error_floor <= 1e-2)
    # Two normal clouds 1 apart in each coordinate: |x - y|^2 is 3 between their means.
    assert 2 < float(out.reg_ot_cost) < 5 and 2 < float(out.primal_cost) < 5


@pytest.mark.parametrize(
    "name", [pytest.param("SqEuclidean", marks=pytest.mark.slow), "Euclidean"]
)
def test_a3_20_a_cloud_and_itself_in_300_dimensions(name):
    """0 to the rounding of its terms."""
    x = np.random.default_rng(0).normal(size=(10, 300)).astype(FLOAT)

    @jax.jit
    def run(x, y):
        return otts.sinkhorn_divergence(
            x, y, cost_fn=getattr(costs, name)(), epsilon=1.0, mesh=mesh()
        )

    value, out = run(x, x)
    assert out.status is Status.CONVERGED
    np.testing.assert_allclose(value, 0, atol=3e-6)


# --------------------------------------------------------------------- convergence


def test_a4_1_an_easy_problem_converges():
    """It did not where the cost was computed in fewer bits; see the next test too."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 50, 2)).astype(FLOAT)
    out, *_ = plainly(
        *(costs.SqEuclidean(), x, y, 1.0),
        threshold=1e-2,
        inner_iterations=200,
        max_iterations=1000,
    )
    assert out.status is Status.CONVERGED and int(out.n_iters) < 200


@pytest.mark.parametrize("precision", ["highest", "default"])
def test_a4_2_a_product_says_its_precision(precision):
    """Each asks for itself: nothing depends on a setting of the whole process."""
    x = jnp.ones((4, 16))

    def run(x):
        geom = otts.PointCloud(x, x, epsilon=1.0, precision=precision, mesh=mesh())
        return otts.solve(geom).reg_ot_cost

    text = jax.jit(jax.value_and_grad(run)).lower(x).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    wanted = f"precision = [{precision.upper()}, {precision.upper()}]"
    tiles = [line for line in products if "4x4" in line or "x18x" in line]
    assert len(tiles) >= 3
    assert all((wanted in line) or precision == "default" for line in tiles)
    assert jax.config.jax_default_matmul_precision is None


def test_a4_4_images_at_an_epsilon_far_below_their_costs_are_said():
    """Unscaled pixels: not converged, and why; in units of the cost it does."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, size=(2, 100, 784)).astype(FLOAT)

    @jax.jit
    def solve(epsilon):
        geom = otts.PointCloud(x, y, epsilon=epsilon, mesh=mesh())
        out = otts.solve(geom, threshold=1e-3, max_iterations=100)
        return out.code, out.error_floor, out.marginal(0), out.reg_ot_cost

    for epsilon in (1e-4, 1e-2, 1.0, 0.1 * 784 * 256**2 / 6):
        code, floor, columns, value = solve(FLOAT(epsilon))
        error = np.abs(np.asarray(columns) - uniform(100)).sum()
        if epsilon > 1:
            assert code == Status.CONVERGED and error < 1e-3
        else:
            assert code in (Status.STALLED, Status.MAX_ITERATIONS)
            assert floor > 1e-3 or error > 1e-3
            assert np.isfinite(value)


@pytest.mark.parametrize("taus", [(1.0, 1.0), (1.0, 0.6), (0.6, 1.0), (0.8, 0.6)])
def test_a4_12_every_kind_of_balance_by_finite_differences(taus):
    """With half the cost too: tau is rho / (rho + epsilon) in units of what is left."""
    with jax.enable_x64(True):
        p = ref.problem(5, 4, dtype=np.float64, zeros=False)
        b = p.b * (1.0 if taus == (1, 1) else 1.5)
        epsilon, half = 0.3, costs.PNormP(2)
        run = functools.partial(solved, half, taus=taus, threshold=1e-13)
        value, out, *_, gradients = run(p.x, p.y, p.a, b, epsilon)
        assert out.status is Status.CONVERGED
        cost = ref.sqeuclidean(p.x, p.y) / 2
        want = ref.sinkhorn(
            *(cost, p.a, b, epsilon), iterations=2000, tau_a=taus[0], tau_b=taus[1]
        )
        np.testing.assert_allclose(value, want.primal_objective, rtol=1e-10)
        rng, h = np.random.default_rng(1), 1e-5
        dx, dy, db = (rng.normal(size=z.shape) for z in (p.x, p.y, b))
        db -= db.mean()  # in a balanced problem the mass must stay
        ends = [
            run(p.x + s * dx, p.y + s * dy, p.a, b + s * db, epsilon)[0]
            for s in (h, -h)
        ]
        slope = sum(
            np.vdot(gradients[k], t) for k, t in (("x", dx), ("y", dy), ("b", db))
        )
        np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * h), rtol=1e-6)


# --------------------------------------------------------------------------- interface


def quartic(x, y):
    return jnp.sum((x - y) ** 4)


def test_a5_12_a_cost_of_ones_own_is_used_everywhere():
    """On a grid of 1,000: in the statistics, the solution and its costs."""
    grid = np.linspace(0, 1, 1000, dtype=FLOAT)[:, None]
    heavy = np.arange(1, 1001) / 500_500
    geom = otts.PointCloud(grid, grid, cost_fn=quartic, epsilon=0.02, mesh=mesh())
    z = grid.astype(np.float64)
    cost = (z - z.T) ** 4
    np.testing.assert_allclose(
        geom.cost_statistics(), (cost.mean(), cost.std(), cost.max()), rtol=1e-5
    )
    out, *_, primal = plainly(
        *(costs.Custom(quartic), grid, grid, 0.02, heavy.astype(FLOAT)),
        threshold=1e-4,
        acceleration=None,
    )
    assert out.status is Status.CONVERGED
    want = ref.sinkhorn(
        cost, np.full(1000, 1e-3), heavy, 0.02, iterations=int(out.n_iters)
    )
    np.testing.assert_allclose(primal, want.primal_cost, rtol=1e-4)
    np.testing.assert_allclose(out.reg_ot_cost, want.reg_ot_cost, rtol=1e-4)


@pytest.mark.parametrize(
    "cost",
    [pytest.param(costs.SqEuclidean(), marks=pytest.mark.slow), costs.PNormP(1)],
    ids=str,
)
def test_a5_18_thousands_of_dimensions_compile(cost):
    x = np.zeros((2, 5184), FLOAT)
    y = np.ones((3, 5184), FLOAT)

    @jax.jit
    @jax.value_and_grad
    def run(x):
        geom = otts.PointCloud(x, y, cost_fn=cost, epsilon=1.0, mesh=mesh())
        return otts.solve(geom, acceleration=None).reg_ot_cost

    value, slope = run(x)
    np.testing.assert_allclose(value, 5184, rtol=1e-5)
    factor = 1 if isinstance(cost, costs.PNormP) else 2
    np.testing.assert_allclose(slope, np.full_like(x, -factor / 2), rtol=1e-5)


def test_a5_19_python_numbers_follow_the_data():
    device = jax.devices()[3]
    x = jax.device_put(jnp.asarray([[0.0], [1.0]]), device)
    there = otts.make_mesh(1, 1, devices=[device])
    geom = otts.PointCloud(x, x + 1, epsilon=2.0, scale_cost=3.0, mesh=there)
    out = otts.solve(geom, tau_a=0.9, tau_b=0.9)
    for leaf in (out.f, out.g, out.reg_ot_cost, geom.mean_cost):
        assert leaf.devices() == {device}


# ------------------------------------------------- what worked, and is to stay so


@pytest.mark.parametrize("cost", ["SqEuclidean", "Euclidean", "Cosine"])
@pytest.mark.parametrize(
    "batch_size",
    [3, *(pytest.param(k, marks=pytest.mark.slow) for k in (7, 8, 100))],
)
def test_b_tiles_that_do_not_divide_the_cloud(cost, batch_size):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 3)).astype(FLOAT)
    y = rng.normal(size=(10, 3)).astype(FLOAT)
    a, b = rng.uniform(0.5, 1.5, 8), rng.uniform(0.5, 1.5, 10)
    a, b = a / a.sum(), b / b.sum()

    geom = otts.PointCloud(
        *(x, y),
        cost_fn=getattr(costs, cost)(),
        epsilon=0.3,
        batch_size=batch_size,
        mesh=mesh(),
    )
    weights = a.astype(FLOAT), b.astype(FLOAT)
    out = otts.solve(geom, *weights, max_iterations=20, acceleration=None)
    x, y = x.astype(np.float64), y.astype(np.float64)
    if cost == "Cosine":
        x, y = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (x, y))
        dense = ref.sqeuclidean(x, y) / 2
    else:
        dense = ref.COSTS[cost](x, y)
    want = ref.sinkhorn(dense, a, b, 0.3, iterations=int(out.n_iters))
    ref.assert_close(out.f, want.f, 3e-6)
    np.testing.assert_allclose(out.reg_ot_cost, want.reg_ot_cost, rtol=1e-5)


def test_b_tau_from_1_to_0_is_continuous():
    """One point against one, C = 4: its value has a closed form for every tau."""
    epsilon = 0.5
    for tau in (1e-3, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999, 1.0):
        tau = FLOAT(tau)
        value, out, *_ = two_by_two(
            [0, 0], [2, 2], [1, 0], [1, 0], epsilon, taus=(tau, tau), threshold=1e-5
        )
        # Near 1 a common shift of both potentials dies out as tau^2 to the iterations.
        assert tau > 0.99 or out.status is Status.CONVERGED
        total = epsilon + 2 * ref.rho(epsilon, float(tau))
        want = 4.0 if tau == 1 else -total * np.expm1(-4.0 / total)
        np.testing.assert_allclose(value, want, rtol=2e-5 if tau < 0.9995 else 2e-4)
