"""What costs and epsilon are measured in: statistics, schedules, storage."""

import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref

import ott_shard as otts

EPSILON = 0.3
MESH = (4, 2)
# Each is a program to compile: two of them by default.
UNITS = (
    "std",
    "max_bound",
    *(
        pytest.param(u, marks=pytest.mark.slow)
        for u in ("mean", "max_cost", "max_norm")
    ),
)


def unit(name, x, y, a, b):
    """The statistic that scale_cost names, for squared distances."""
    mean, std, largest = ref.statistics(ref.sqeuclidean(x, y), a, b)
    norms = [(z[w > 0] ** 2).sum(1).max() for z, w in ((x, a), (y, b))]
    return {
        "mean": mean,
        "std": std,
        "max_cost": largest,
        "max_norm": max(norms),
        "max_bound": sum(np.sqrt(norms)) ** 2,
    }[name]


# ------------------------------------------------------------------------ statistics


@pytest.mark.parametrize("name", UNITS)
def test_scale_cost_by_a_statistic(name):
    """Of the pairs that have mass: a heavy point of weight 0 far away is not one."""
    p = ref.problem(13, 21)
    x, y, a, b = p.cast(jnp.float32)
    x, far = x.at[1].set(1e3), p.x.copy()
    far[1] = 1e3
    assert p.a[1] == 0
    geom = otts.PointCloud(
        x, y, epsilon=EPSILON, scale_cost=name, mesh=otts.make_mesh(*MESH)
    )
    scale = unit(name, far, p.y, p.a, p.b)
    out = otts.solve(geom, a, b, min_iterations=100, acceleration=None)
    np.testing.assert_allclose(out.geom.scale_cost, scale, rtol=1e-5)
    np.testing.assert_allclose(out.epsilon, EPSILON)
    cost = ref.sqeuclidean(far, p.y) / scale
    want = ref.sinkhorn(cost, p.a, p.b, EPSILON, iterations=100)
    for field in ("f", "g", "reg_ot_cost", "primal_cost"):
        ref.assert_close(getattr(out, field), getattr(want, field), 2e-5, field)
    uniform = np.full(13, 1 / 13), np.full(21, 1 / 21)
    alone = unit(name, far, p.y, *uniform)
    np.testing.assert_allclose(geom.scale_cost, alone, rtol=1e-5)


@pytest.mark.parametrize("relative", ["mean", "std"])
def test_relative_epsilon_is_of_scaled_costs(relative):
    p = ref.problem(13, 21)
    x, y, a, b = p.cast(jnp.float32)
    mesh = otts.make_mesh(*MESH)
    mean, std, _ = ref.statistics(ref.sqeuclidean(p.x, p.y), p.a, p.b)
    value = {"mean": mean, "std": std}[relative]
    for scale, number in (("max_norm", None), (4.0, 4.0)):
        number = number or unit(scale, p.x, p.y, p.a, p.b)
        geom = otts.PointCloud(
            *(x, y),
            epsilon=0.1,
            relative_epsilon=relative,
            scale_cost=scale,
            mesh=mesh,
        )
        out = otts.solve(geom, a, b, max_iterations=1)
        np.testing.assert_allclose(out.epsilon, 0.1 * value / number, rtol=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("n", "name"),
    [
        (1, "std"),
        (5, "max_norm"),
        *(pytest.param(n, "mean", marks=pytest.mark.slow) for n in (1, 5)),
    ],
)
def test_no_spread(n, name):
    """Copies of one point: value 0, gradient 0, everything finite."""
    x = jnp.full((n, 2), 0.3) * (name != "max_norm")

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def both(x):
        geom = otts.PointCloud(x, x, scale_cost=name, mesh=otts.make_mesh(2, 2))
        out = otts.solve(geom)
        return out.reg_ot_cost, out

    (value, out), gradient = both(x)
    assert bool(out.converged)
    np.testing.assert_allclose(value, 0, atol=1e-6)
    np.testing.assert_allclose(gradient, np.zeros((n, 2)), atol=1e-6)
    np.testing.assert_allclose(out.matrix, np.full((n, n), n**-2.0), rtol=1e-5)


def test_a_negative_unit_is_said():
    """Inner products may have a negative mean: no unit."""
    x = jnp.asarray([[1.0, 2.0], [2.0, 1.0]])
    geom = otts.PointCloud(
        *(x, x),
        cost_fn=otts.costs.NegDotProduct(),
        epsilon=EPSILON,
        scale_cost="mean",
        mesh=otts.make_mesh(2, 2),
    )
    out = otts.solve(geom, max_iterations=1)
    assert out.status is otts.Status.INVALID_INPUT
    assert "scale_cost" in out.status.sentence


# -------------------------------------------------------------------------- schedule


def scheduled(cost, a, b, target, init, decay, iterations):
    """The oracle with another epsilon at every iteration, the target at the last."""
    phi = np.zeros(len(a))
    epsilons = [max(init * decay**t, target) for t in range(iterations - 1)] + [target]
    # psi comes from the transform that ended the iteration before.
    for epsilon, before in zip(epsilons, epsilons[:1] + epsilons, strict=False):
        log_a, log_b = ref.safe_log(a), ref.safe_log(b)
        psi = -before * ref.logsumexp(log_a + (phi - cost.T) / before)
        phi = -epsilon * ref.logsumexp(log_b + (psi - cost) / epsilon)
    return ref.Solution(cost, a, b, target, 1.0, 1.0, phi, psi, np.zeros(0))


@pytest.mark.wide
@pytest.mark.parametrize("iterations", [1, 30, pytest.param(7, marks=pytest.mark.slow)])
def test_init_is_the_epsilon_of_iteration_0(iterations):
    """And the last iteration is at the target, so that what is returned is about it."""
    p = ref.problem(13, 21)
    x, y, a, b = p.cast(jnp.float32)
    numbers = dict(target=0.1, init=2.0, decay=0.8)
    geom = otts.PointCloud(
        x, y, epsilon=otts.Epsilon(**numbers), mesh=otts.make_mesh(*MESH)
    )
    out = otts.solve(
        *(geom, a, b),
        min_iterations=iterations,
        max_iterations=iterations,
        acceleration=None,
    )
    cost = ref.sqeuclidean(p.x, p.y)
    want = scheduled(cost, p.a, p.b, **numbers, iterations=iterations)
    assert int(out.n_iters) == iterations
    np.testing.assert_allclose(out.epsilon, 0.1)
    np.testing.assert_allclose(out.marginal_error, want.marginal_error, atol=2e-6)
    for field in ("f", "g", "reg_ot_cost"):
        ref.assert_close(getattr(out, field), getattr(want, field), 2e-5, field)


def test_a_schedule_ends_at_its_target():
    """It is not left early, however small the error is on the way; it saves work."""
    p = ref.problem(13, 21)
    x, y, a, b = p.cast(jnp.float32)
    mesh = otts.make_mesh(*MESH)

    @jax.jit
    def solve(epsilon, threshold):
        geom = otts.PointCloud(x, y, epsilon=epsilon, mesh=mesh)
        options = dict(threshold=threshold, acceleration=None)
        return otts.solve(geom, a, b, **options)

    schedule = otts.Epsilon(jnp.float32(0.02), init=jnp.float32(2.0), decay=0.9)
    loose = solve(schedule, 10.0)
    first_at_target = np.ceil(np.log(0.01) / np.log(0.9))
    assert int(loose.n_iters) >= first_at_target
    assert bool(loose.converged)
    exact, slow = solve(schedule, 1e-3), solve(otts.Epsilon(0.02, 0.02, 0.9), 1e-3)
    assert bool(exact.converged) and bool(slow.converged)
    assert int(exact.n_iters) < int(slow.n_iters)
    np.testing.assert_allclose(exact.reg_ot_cost, slow.reg_ot_cost, rtol=1e-3)
    errors = np.asarray(exact.errors)
    checks = -(-int(exact.n_iters) // 10)
    assert errors[checks - 1] == exact.marginal_error and np.all(errors[checks:] == -1)


@pytest.mark.wide
def test_schedule_of_a_divergence():
    p = ref.problem(13, 21)
    x, y, a, b = p.cast(jnp.float32)
    options = dict(mesh=otts.make_mesh(*MESH), threshold=1e-5)
    schedule = otts.Epsilon(0.05, init=0.5, decay=0.8)
    with_schedule, out = otts.sinkhorn_divergence(
        x, y, a, b, epsilon=schedule, relative_epsilon="mean", **options
    )
    plain, _ = otts.sinkhorn_divergence(
        x, y, a, b, epsilon=0.05, relative_epsilon="mean", **options
    )
    assert bool(out.converged)
    np.testing.assert_allclose(with_schedule, plain, rtol=1e-4)


# --------------------------------------------------------------------------- storage


@pytest.mark.wide
@pytest.mark.parametrize(
    "low", [jnp.bfloat16, pytest.param(np.float16, marks=pytest.mark.slow)]
)
def test_half_precision_is_stored_and_not_computed_with(low):
    """The result is that of the same numbers in float32; only gradients are rounded."""
    p = ref.problem(40, 24, d=12)
    x, y, a, b = p.cast(low)
    x, y = (np.asarray(x), y)  # one on the host, one on a device
    a, b = (w.astype(jnp.float32) / w.astype(jnp.float32).sum() for w in (a, b))
    mesh = otts.make_mesh(*MESH)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def both(x, y):
        geom = otts.PointCloud(x, y, epsilon=EPSILON, batch_size=3, mesh=mesh)
        out = otts.solve(geom, a, b)
        return out.reg_ot_cost, out

    (value, out), gradients = both(x, y)
    assert out.problem.pairs.x.dtype == out.problem.pairs.y.dtype == low
    assert out.geom.dtype == out.f.dtype == value.dtype == np.float32
    (want, exact), slopes = both(*(z.astype(jnp.float32) for z in (x, y)))
    np.testing.assert_allclose(value, want, rtol=1e-6)
    ref.assert_close(out.f, exact.f, 1e-6)
    for gradient, slope in zip(gradients, slopes, strict=True):
        assert gradient.dtype == low
        # One rounding of each entry, whatever the number of tiles and devices.
        rounded = np.asarray(slope.astype(low), np.float32)
        scale = np.abs(rounded).max()
        np.testing.assert_allclose(
            np.asarray(gradient, np.float32), rounded, rtol=1e-2, atol=1e-5 * scale
        )


@pytest.mark.wide
def test_clouds_of_two_dtypes():
    p = ref.problem(13, 21)
    mesh = otts.make_mesh(2, 2)
    with jax.enable_x64(True):
        for x, y, dtype in (
            (jnp.bfloat16, np.float64, np.float64),
            (np.int32, jnp.bfloat16, np.float32),
        ):
            cloud = otts.PointCloud(
                jnp.asarray(4 * p.x, x), jnp.asarray(p.y, y), epsilon=1.0, mesh=mesh
            )
            assert cloud.dtype == cloud.mean_cost.dtype == dtype
            assert bool(otts.solve(cloud).converged)


def test_float64_without_x64_is_said():
    x = np.zeros((3, 2))
    with pytest.warns(UserWarning, match="x came as float64.*jax_enable_x64.*astype"):
        otts.PointCloud(x, x[:2].astype(np.float32), mesh=otts.make_mesh(1, 1))
    with jax.enable_x64(True):
        assert otts.PointCloud(x, x, mesh=otts.make_mesh(1, 1)).dtype == np.float64
    # A list asks for nothing.
    otts.PointCloud([[0.0]], [[1.0]], mesh=otts.make_mesh(1, 1))


MEASURED = """
import jax
import numpy as np
import ott_shard as otts
from ott_shard import operators

jax.config.update("jax_num_cpu_devices", 2)
x = np.random.default_rng(0).normal(size=(20_000, 20)).astype("float32")
geom = otts.PointCloud(x, x + 1, mesh=otts.make_mesh(), batch_size=256)
a, b = geom.weights(None, 0), geom.weights(None, 1)
program = operators.cost_moments.lower(geom.pairs, a, b).compile()

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

before = resident()
jax.block_until_ready(program(geom.pairs, a, b))
assert resident() - before < 45, resident() - before
"""


@pytest.mark.wide
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux says")
def test_nothing_is_kept_of_a_tile():
    """XLA keeps some memory for every sum over a tile, of 6,241 here 97 MiB."""
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", MEASURED], check=True, cwd=root, timeout=120)
