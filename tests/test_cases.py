"""The smallest inputs that broke other solvers, and the right answers.

The ids, A2.1 and so on, are those of a table of public reports. Most of its rows are
answered by the other tests; here are those that need an input of their own.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref

import ott_shard as otts
from ott_shard import Status, costs

FLOAT = np.float32


def mesh():
    return otts.make_mesh(1, 1)


def uniform(n):
    return np.full(n, 1 / n, FLOAT)


def solved(cost, x, y, a, b, epsilon, taus=(1.0, 1.0), threshold=1e-3):
    """Value, what else a solution holds, and gradients."""
    numbers = (np.asarray(z, x.dtype) for z in (epsilon, taus, threshold))
    return compiled(cost, x, y, a, b, *numbers)


@jax.jit
def compiled(cost, x, y, a, b, epsilon, taus, threshold):
    """Once for a cost, dtype and shape."""

    @functools.partial(jax.value_and_grad, argnums=range(5), has_aux=True)
    def run(x, y, a, b, epsilon):
        geom = otts.PointCloud(x, y, cost_fn=cost, epsilon=epsilon, mesh=mesh())
        out = otts.solve(
            *(geom, a, b), tau_a=taus[0], tau_b=taus[1], threshold=threshold
        )
        rows, columns = out.marginal(1), out.marginal(0)
        return out.reg_ot_cost, (out, out.matrix, out.primal_cost, rows, columns)

    (value, others), gradients = run(x, y, a, b, epsilon)
    return value, *others, dict(zip(("x", "y", "a", "b"), gradients, strict=False))


@functools.partial(jax.jit, static_argnames=("max_iterations", "inner_iterations"))
def plainly(cost, x, y, epsilon, b=None, threshold=1e-3, **options):
    """A solution, its marginals and <C, P>, without gradients."""
    geom = otts.PointCloud(x, y, cost_fn=cost, epsilon=epsilon, mesh=mesh())
    out = otts.solve(geom, None, b, threshold=threshold, **options)
    return out, out.marginal(1), out.marginal(0), out.primal_cost


def two_by_two(x, y, a, b, epsilon, **options):
    """Two points each on a line: one program for them all."""
    x, y = (np.asarray(z, FLOAT)[:, None] for z in (x, y))
    a, b = np.asarray(a, FLOAT), np.asarray(b, FLOAT)
    return solved(costs.SqEuclidean(), x, y, a, b, epsilon, **options)


def assert_finite(*trees):
    for leaf in jax.tree.leaves(trees):
        assert np.all(np.isfinite(leaf))


# ----------------------------------------------------- NaN, infinities, degenerate


def test_a2_1_a_value_that_is_nan_while_the_potentials_are_finite():
    """exp(-psi / rho) of a point of weight 0 overflows."""
    value, out, plan, *_, gradients = two_by_two(
        [0, 1], [0, 1], [0.5, 0.5], [1, 0], 0.003, taus=(0.75, 0.625)
    )
    assert out.status is Status.CONVERGED
    assert_finite(value, plan, out.errors, gradients["x"], gradients["y"])
    alone = two_by_two([0, 1], [0, 0], [0.5, 0.5], [1, 0], 0.003, taus=(0.75, 0.625))
    np.testing.assert_allclose(value, alone[0], rtol=1e-5)


def test_a2_3_the_slope_of_a_distance_between_equal_points():
    x = jnp.asarray([[1.2, 3.2, 4.1]])
    slopes = jax.grad(lambda x, y: costs.Euclidean().pairwise(x, y).sum(), (0, 1))(x, x)
    np.testing.assert_array_equal(slopes, np.zeros((2, 1, 3)))


def test_a2_5_a_gradient_flow_on_a_line_arrives():
    """Finite all the way, and at the end, where points coincide."""
    y = jnp.linspace(0.6, 1.0, 8, dtype=FLOAT)[:, None]

    @jax.jit
    @jax.value_and_grad
    def loss(x):
        return otts.sinkhorn_divergence(
            x, y, epsilon=0.01, threshold=1e-4, mesh=mesh()
        )[0]

    x, values = jnp.linspace(0.0, 0.2, 8, dtype=FLOAT)[:, None], []
    for _ in range(20):
        value, slope = loss(x)
        x -= 0.5 * len(x) * slope
        values.append(float(value))
    assert_finite(values, x)
    assert values[0] > 0.4 and abs(values[-1]) < 1e-5
    np.testing.assert_allclose(np.sort(x, 0), y, atol=2e-3)


@pytest.mark.parametrize("batch_size", [pytest.param(None, marks=pytest.mark.slow), 1])
def test_a2_6_equal_points_on_every_tile_path(batch_size):
    """Beyond 8 dimensions distances come from dot products: no root below 0."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(6, 12)) + 10).astype(FLOAT)

    @jax.jit
    @jax.value_and_grad
    def run(x):
        geom = otts.PointCloud(
            *(x, x),
            cost_fn=costs.Euclidean(),
            epsilon=0.01,
            batch_size=batch_size,
            mesh=mesh(),
        )
        return otts.solve(geom).reg_ot_cost

    value, slope = run(x)
    # Each point stays where it is: the plan is diagonal.
    np.testing.assert_allclose(value, 0.01 * np.log(6), rtol=1e-4)
    np.testing.assert_allclose(slope, np.zeros_like(x), atol=1e-6)


def test_a2_7_potentials_too_large_for_a_plain_exponential():
    """f / epsilon is beyond 88, the plan is not; its mass has a closed form."""
    tau, epsilon, cost = 0.99, 0.05, 9.0
    _, out, plan, _, rows, columns, _ = two_by_two(
        [0, 0], [3, 3], [1, 0], [1, 0], epsilon, taus=(tau, tau)
    )
    assert float(out.f[0] + out.g[0]) / epsilon > 88
    assert out.status is Status.CONVERGED
    mass = np.exp(-cost / (epsilon + 2 * ref.rho(epsilon, tau)))
    for sums in (plan.sum(0), rows, columns, out.apply(np.ones(2, FLOAT), 0)):
        np.testing.assert_allclose(sums, [mass, 0], rtol=3e-3)


def test_a2_8_a_zero_weight_and_a_small_epsilon():
    """Not NaN, and not 0: half of the mass moves by 1."""
    value, out, plan, primal, *_, gradients = two_by_two(
        [0, 1], [0, 1], [0, 1], [0.5, 0.5], 0.01
    )
    assert out.status is Status.CONVERGED
    np.testing.assert_allclose([value, primal], 0.5, rtol=1e-5)
    np.testing.assert_allclose(plan, [[0, 0], [0.5, 0.5]], atol=1e-6)
    assert_finite(gradients)
    np.testing.assert_allclose(gradients["x"], [[0], [1]], atol=1e-5)


def test_a2_9_features_that_were_not_scaled():
    """Costs of 10,000 at an epsilon of 0.1: only the logarithm holds them."""
    value, out, plan, primal, *_, gradients = two_by_two(
        [0, 100], [1, 102], [0.5, 0.5], [0.5, 0.5], 0.1
    )
    assert_finite(value, plan, gradients)
    assert out.status in (Status.CONVERGED, Status.STALLED)
    np.testing.assert_allclose(plan, np.eye(2) / 2, atol=0.01)
    np.testing.assert_allclose(value, (1 + 4) / 2 + 0.1 * np.log(2), atol=0.01)


def test_a2_10_many_points_against_few():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(70_000, 2)).astype(FLOAT)
    y = rng.normal(size=(100, 2)).astype(FLOAT)
    out, _, columns, _ = plainly(costs.SqEuclidean(), x, y, 1.0)
    assert out.status is Status.CONVERGED
    assert_finite(out.phi, out.psi)
    assert np.abs(columns - uniform(100)).sum() <= 1e-3


def unlike(x, y):
    return jnp.where(x[0] == y[0], jnp.inf, 0.0)


def test_a2_11_b13_forbidden_pairs():
    """Infinite costs on the diagonal: 0 times infinity is 0."""
    points = np.asarray([[0.0], [1.0]], FLOAT)
    value, out, plan, primal, *_, gradients = solved(
        *(costs.Custom(unlike), points, points, uniform(2), uniform(2)), 0.1
    )
    assert out.status is Status.CONVERGED
    np.testing.assert_allclose(plan, [[0, 0.5], [0.5, 0]], rtol=1e-6)
    assert primal == 0
    np.testing.assert_allclose(value, 0.1 * np.log(2), rtol=1e-5)
    assert_finite(gradients)


def test_a2_12_prototypes_and_features_of_any_length():
    rng = np.random.default_rng(0)
    x = (30 * rng.normal(size=(8, 16))).astype(FLOAT)
    y = rng.normal(size=(3000, 16)).astype(FLOAT)
    out, rows, *_ = plainly(costs.NegDotProduct(), x, y, 0.05, max_iterations=20)
    assert_finite(out.phi, out.psi, out.reg_ot_cost)
    np.testing.assert_allclose(rows, uniform(8), rtol=1e-2)


def test_a2_13_a_gradient_is_a_weighted_mean_however_large_the_costs():
    """2 x 2 points of 147 dimensions in float64, at exponents of about -2,600."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x, y = 3 * rng.normal(size=(2, 2, 147))
        half = np.full(2, 0.5)
        cost = ref.sqeuclidean(x, y)
        assert 2_000 < cost.min() < cost.max() < 3_500
        _, out, *_, gradients = solved(costs.SqEuclidean(), x, y, half, half, 1.0)
        assert_finite(gradients)
        want = ref.sinkhorn(cost, half, half, 1.0, iterations=int(out.n_iters))
        ref.assert_close(gradients["x"], want.grad_x("SqEuclidean", x, y), 1e-9)
        ref.assert_close(gradients["y"], want.grad_y("SqEuclidean", x, y), 1e-9)


def test_a2_14_the_slope_at_what_is_masked():
    """Of exponents 0 and -100 the second is masked: slopes there are 0, not NaN."""
    value, *_, gradients = two_by_two([0, 0], [0, 10], [1, 0], [1, 0], 1.0)
    assert value == 0
    assert_finite(gradients)
    np.testing.assert_array_equal(gradients["x"], np.zeros((2, 1)))
    np.testing.assert_array_equal(gradients["y"], np.zeros((2, 1)))


def test_a2_15_a_vector_of_both_signs():
    """Equal entries of the plan take large numbers away from each other exactly."""
    x, y = np.zeros((1, 1), FLOAT), np.zeros((3, 1), FLOAT)
    out = otts.solve(otts.PointCloud(x, y, epsilon=1.0, mesh=mesh()))
    v = np.asarray([2.0**66, -(2.0**66), 1.1], FLOAT)
    np.testing.assert_allclose(out.apply(v, 1), [1.1 / 3], rtol=1e-6)


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
        otts.sinkhorn_divergence(x, x, rank=10)  # pyright: ignore


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
    assert out.status is Status.CONVERGED and int(out.n_iters) == 200


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
        *(costs.Custom(quartic), grid, grid, 0.02, heavy.astype(FLOAT)), threshold=1e-4
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
        return otts.solve(geom).reg_ot_cost

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
    out = otts.solve(geom, a.astype(FLOAT), b.astype(FLOAT), max_iterations=20)
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
