"""The smallest inputs that broke other solvers: NaN, infinities, degenerate clouds.

The ids, A2.1 and so on, are those of a table of public reports. Most of its rows are
answered by the other tests; here are those that need an input of their own.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref
from solving import FLOAT, assert_finite, mesh, plainly, solved, two_by_two, uniform

import ott_shard as otts
from ott_shard import Status, costs

pytestmark = pytest.mark.wide


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
        _, out, *_, gradients = solved(
            costs.SqEuclidean(), x, y, half, half, 1.0, acceleration=None
        )
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
