"""Sums over the plan and blocks of it, against dense NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref

import ott_shard as otts
from ott_shard import tile

TAUS = [(1.0, 1.0), (0.8, 1.0), (1.0, 0.9), (0.8, 0.9)]


def geometry(p, dtype, mesh, **options):
    x, y, *weights = p.cast(dtype)
    options = dict(epsilon=0.3, batch_size=(4, 7), mesh=mesh) | options
    return otts.PointCloud(x, y, **options), weights


def few_iterations(p, dtype, mesh, taus=(1.0, 1.0), **options):
    """Far from converged: marginals and the gap are off; nor differentiated so."""
    geom, weights = geometry(p, dtype, mesh, **options)
    limits = dict(max_iterations=2, implicit_diff=None)
    return otts.solve(geom, *weights, tau_a=taus[0], tau_b=taus[1], **limits)


def dense(p, out, scale=1.0):
    phi, psi = (np.float64(z) for z in (out.phi[: len(p.a)], out.psi[: len(p.b)]))
    taus = float(out.problem.tau_a), float(out.problem.tau_b)
    cost = ref.sqeuclidean(p.x, p.y) / scale
    epsilon = float(out.epsilon)
    return ref.Solution(cost, p.a, p.b, epsilon, *taus, phi, psi, np.zeros(0))


def tolerance(dtype):
    return 1e-5 if dtype == np.float32 else 1e-12


def entropy(p):
    p = p[p > 0]
    return -float(p @ np.log(p))


def rounded(s):
    """A plan that meets the constraints, from that of `s` (Altschuler et al. 2017)."""
    plan, (exact_a, exact_b) = s.plan, (s.tau_a == 1, s.tau_b == 1)

    def factor(wanted, sums):
        ratio = wanted / np.where(sums > 0, sums, 1)
        return np.minimum(ratio, 1) if exact_a and exact_b else ratio

    if exact_a:
        plan = plan * factor(s.a, plan.sum(1))[:, None]
    if exact_b:
        plan = plan * factor(s.b, plan.sum(0))
    if exact_a and exact_b:
        rest = s.a - plan.sum(1), s.b - plan.sum(0)
        plan = plan + np.outer(*rest) / rest[0].sum()
    return plan


def objective(s, plan):
    total = (s.cost * plan).sum() + s.epsilon * ref.kl(plan, np.outer(s.a, s.b))
    for tau, axis, wanted in ((s.tau_a, 1, s.a), (s.tau_b, 0, s.b)):
        if tau < 1:
            total += ref.rho(s.epsilon, tau) * ref.kl(plan.sum(axis), wanted)
    return total


@pytest.mark.parametrize("taus", TAUS)
def test_scalars(mesh, dtype, taus):
    p = ref.problem(13, 21, dtype=dtype)
    x, y, *_ = p.cast(dtype)
    euclidean = otts.costs.Euclidean()

    @jax.jit
    def run():
        out = few_iterations(p, dtype, mesh, taus)
        other = otts.PointCloud(
            x + 1, y, cost_fn=euclidean, scale_cost="mean", mesh=mesh
        )
        at_other = out.transport_cost_at_geom(other)
        numbers = out.primal_cost, out.entropy, out.normalized_entropy, at_other
        return out, *numbers, out.duality_gap

    out, primal, spread, normalized, at_other, gap = run()
    s = dense(p, out)
    other = ref.euclidean(p.x + 1, p.y)
    other /= p.a @ other @ p.b
    low, high = sorted([entropy(p.a), entropy(p.b)])
    for got, want in (
        (primal, s.primal_cost),
        (spread, entropy(s.plan.ravel())),
        (normalized, (entropy(s.plan.ravel() / s.plan.sum()) - high) / low),
        (at_other, (other * s.plan).sum()),
        (gap, objective(s, rounded(s)) - s.reg_ot_cost),
    ):
        # The gap here is a difference of two values, of which it is a thousandth.
        np.testing.assert_allclose(got, want, rtol=100 * tolerance(dtype))
    assert gap > 1e-4


def test_the_gap_closes():
    """And holds the optimum between the two values, on the way there."""
    with jax.enable_x64(True):
        p, mesh = ref.problem(13, 21, dtype=np.float64), otts.make_mesh(2, 4)
        geom, weights = geometry(p, np.float64, mesh, epsilon=0.05)
        ends = []
        for iterations in (1, 10, 100, 2000):
            options = dict(threshold=1e-13, max_iterations=iterations)
            out = otts.solve(geom, *weights, **options)
            ends.append((float(out.reg_ot_cost), float(out.duality_gap)))
    best = ends[-1][0]
    for value, gap in ends:
        assert value <= best + 1e-12 and best <= value + gap + 1e-12
    gaps = [gap for _, gap in ends]
    assert gaps == sorted(gaps, reverse=True) and 0 <= gaps[-1] < 1e-10 < gaps[0]


@pytest.mark.parametrize("taus", [(1.0, 0.9), (0.8, 1.0)])
def test_the_gap_of_potentials_far_off(taus):
    """A row whose sum underflows must still be filled: the gap grows, without end."""
    with jax.enable_x64(True):
        p = ref.problem(6, 5, zeros=False, dtype=np.float64)
    x, y, a, b = p.cast(np.float32)
    geom = otts.PointCloud(x, y, epsilon=0.5, mesh=otts.make_mesh(2, 4))
    tau_a, tau_b = taus
    out = otts.solve(geom, a, b, tau_a=tau_a, tau_b=tau_b, threshold=1e-5)
    f, g, gaps = np.array(out.f), np.array(out.g), []
    for lower in (0, 20, 200):
        moved = f - lower * (np.arange(6) == 0), g - lower * (np.arange(5) == 0)
        ends = (moved[0], g) if tau_a == 1 else (f, moved[1])
        plan = otts.Plan.from_potentials(geom, *ends, a, b, tau_a=tau_a, tau_b=tau_b)
        gaps.append(float(plan.duality_gap))
    # What has to be raised again has the weight of a point.
    weight = float(a[0] if tau_a == 1 else b[0])
    assert gaps[0] < 1e-4 < gaps[1]
    np.testing.assert_allclose(gaps[2] - gaps[1], weight * 180, rtol=0.1)


@pytest.mark.parametrize("mass", [0.1, 2.0, 30.0])
def test_normalized_entropy_of_any_mass(mass):
    p = ref.problem(13, 21)
    x, y, a, b = p.cast(np.float32)
    geom = otts.PointCloud(x, y, epsilon=0.3, mesh=otts.make_mesh(1, 1))
    own, scaled = (
        otts.Plan.from_potentials(geom, f, f[:13].sum() + np.zeros(21), w * a, w * b)
        for w, f in ((1.0, np.zeros(13)), (mass, np.full(13, 0.3 * np.log(mass))))
    )
    got, want = float(scaled.normalized_entropy), float(own.normalized_entropy)
    plan = np.asarray(own.matrix, np.float64)
    plan /= plan.sum()
    low, high = sorted([entropy(p.a), entropy(p.b)])
    expected = (entropy(plan.ravel()) - high) / low
    np.testing.assert_allclose(want, expected, rtol=1e-4)
    assert np.isfinite(got)
    plan = np.asarray(scaled.matrix, np.float64)
    expected = (entropy((plan / plan.sum()).ravel()) - high) / low
    np.testing.assert_allclose(got, expected, rtol=1e-3)


def kinds(x, y):
    """Infinite between kinds, which the first coordinate names."""
    same = jnp.round(x[0]) == jnp.round(y[0])
    return jnp.where(same, jnp.sum((x - y) ** 2), jnp.inf)


@pytest.mark.parametrize("axis", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_points_without_weight_or_partner(axis):
    """All pairs forbidden, but no weight: the others do not see it."""
    rng = np.random.default_rng(0)
    points = np.stack([np.repeat([0, 1, 2], 4), *rng.normal(0, 0.3, (2, 12))], axis=1)
    points = points.astype(np.float32)
    lonely = np.float32([[7.0, 0.0, 0.0]])
    clouds = [np.concatenate([points, lonely]), points[::-1] + np.float32([0, 0.1, 0])]
    weights = [np.float32([1 / 12] * 12 + [0]), np.float32([1 / 12] * 12)]
    if axis == 1:
        clouds, weights = clouds[::-1], weights[::-1]
    options = dict(cost_fn=kinds, epsilon=0.2, mesh=otts.make_mesh(2, 2))
    with_it = otts.solve(otts.PointCloud(*clouds, **options), *weights)
    without = [z[:12] for z in clouds], [w[:12] for w in weights]
    alone = otts.solve(otts.PointCloud(*without[0], **options), *without[1])
    assert with_it.status is otts.Status.CONVERGED
    for name in ("reg_ot_cost", "dual_cost", "entropy", "primal_cost"):
        got, want = getattr(with_it, name), getattr(alone, name)
        np.testing.assert_allclose(got, want, rtol=1e-5, err_msg=name)
    ref.assert_close(np.asarray(with_it.matrix)[:12, :12], alone.matrix, 1e-5)
    plan = otts.Plan.from_potentials(with_it.geom, with_it.f, with_it.g, *weights)
    np.testing.assert_allclose(plan.entropy, alone.entropy, rtol=1e-5)

    def slope(name, clouds, weights):  # of the first 12 points, through the potentials
        def value(x):
            geom = otts.PointCloud(x, clouds[1], **options)
            return getattr(otts.solve(geom, *weights), name)

        return jax.grad(value)(clouds[0])[:12]

    for name in ("reg_ot_cost", "primal_cost"):
        got, want = slope(name, clouds, weights), slope(name, *without)
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5, err_msg=name)


def test_sharp_and_blurred():
    """From one-to-one to independent, by epsilon; in float32."""
    x = np.random.default_rng(0).permutation(40).astype(np.float32)[:, None]
    mesh, entropies = otts.make_mesh(4, 2), []
    for epsilon in (0.05, 1e6):
        geom = otts.PointCloud(x, x[::-1], epsilon=epsilon, mesh=mesh)
        entropies.append(float(otts.solve(geom).normalized_entropy))
    np.testing.assert_allclose(entropies, [0, 1], atol=1e-2)


def test_derivative_of_the_entropy():
    """In the points and epsilon, through the solution, by finite differences."""
    with jax.enable_x64(True):
        p, mesh = ref.problem(9, 7, dtype=np.float64), otts.make_mesh(1, 1)

        @jax.jit
        def spread(x, epsilon):
            geom = otts.PointCloud(x, p.y, epsilon=epsilon, mesh=mesh)
            return otts.solve(geom, p.a, p.b, threshold=1e-13).entropy

        slopes = jax.grad(spread, argnums=(0, 1))(p.x, 0.5)
        step, h = np.cos(np.arange(27.0)).reshape(9, 3), 1e-5
        ends = [spread(p.x + t * step, 0.5) for t in (h, -h)]
        want = (ends[0] - ends[1]) / (2 * h)
        np.testing.assert_allclose(np.vdot(slopes[0], step), want, rtol=1e-6)
        ends = [spread(p.x, 0.5 + t) for t in (h, -h)]
        np.testing.assert_allclose(slopes[1], (ends[0] - ends[1]) / (2 * h), rtol=1e-6)


def test_blocks_and_maps(mesh, dtype):
    p, tol = ref.problem(13, 21, dtype=dtype), tolerance(dtype)
    out = few_iterations(p, dtype, mesh)
    s = dense(p, out)
    for start, stop in ((0, 13), (5, 6), (3, 12)):
        rows = out.rows(start, stop)
        assert rows.shape == (stop - start, 21)
        ref.assert_close(rows, s.plan[start:stop], tol)
    ref.assert_close(out.matrix, s.plan, tol)
    for axis, ends, weights in ((1, p.y, s.a), (0, p.x, s.b)):
        plan, some = (s.plan if axis == 1 else s.plan.T), weights > 0
        means = (plan @ ends)[some] / plan.sum(1)[some, None]
        got = np.asarray(out.barycentric_map(axis))
        ref.assert_close(got[some], means, tol)
        transport = out.to_dual_potentials().transport
        own = transport((p.x if axis == 1 else p.y).astype(dtype), forward=axis == 1)
        ref.assert_close(got, own, tol)


def test_many_vectors_at_once(mesh, dtype, monkeypatch):
    """So many that they are taken in parts, of any sign; and their derivatives."""
    monkeypatch.setattr(tile, "_MAX_PART", 1)
    p, tol = ref.problem(13, 21, dtype=dtype), tolerance(dtype)
    v = np.random.default_rng(0).normal(size=(21, 151)).astype(dtype)
    w = np.random.default_rng(1).normal(size=(13, 151)).astype(dtype)

    @jax.jit
    def run(v):
        out = few_iterations(p, dtype, mesh)
        image, back = jax.vjp(lambda v: out.apply(v, 1), v)
        return out, image, back(w)[0]

    out, image, slope = run(v)
    plan = dense(p, out).plan
    ref.assert_close(image, plan @ v, tol)
    ref.assert_close(slope, plan.T @ w, tol)


def test_potentials_from_a_file(mesh, dtype):
    """With weights of zero, and units of 7: everything is as it was."""
    p, tol = ref.problem(13, 21, dtype=dtype), tolerance(dtype)
    taus = dict(tau_a=0.8, tau_b=1.0)
    out = few_iterations(p, dtype, mesh, (0.8, 1.0), scale_cost=7.0)
    geom, weights = geometry(p, dtype, mesh, scale_cost=7.0)
    f, g = np.asarray(out.f), np.asarray(out.g)
    assert np.isneginf(f).any() and np.isneginf(g).any()
    plan = otts.Plan.from_potentials(geom, f, g, *weights, **taus)
    for name in ("matrix", "primal_cost", "entropy", "duality_gap"):
        want = getattr(out, name)
        ref.assert_close(getattr(plan, name), want, 1e3 * tol, name)
    pots = plan.to_dual_potentials(), out.to_dual_potentials()
    got, want = (pot.transport(p.x.astype(dtype)) for pot in pots)
    ref.assert_close(got, want, tol)


@functools.cache
def small():
    x = np.eye(3, dtype=np.float32)
    return otts.solve(otts.PointCloud(x, np.ones((4, 3), np.float32), epsilon=1.0))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda out: out.apply(np.ones((4, 0)), 1), ValueError, "v must have shape"),
        (lambda out: out.rows(2, 2), ValueError, "stop must be at least 3"),
        (lambda out: out.rows(0, 4), ValueError, "stop must be at most n = 3, got 4"),
        (lambda out: out.rows(-1, 2), ValueError, "start must be at least 0"),
        (lambda out: out.rows(0, 1.5), TypeError, "stop must be an int"),
        (lambda out: out.barycentric_map(2), ValueError, "axis must be one of"),
        (lambda out: out.transport_cost_at_geom(3), TypeError, "other_geom must be a"),
        (
            lambda out: out.transport_cost_at_geom(otts.PointCloud(*[np.eye(3)] * 2)),
            ValueError,
            r"other_geom must have the shape \(3, 4\)",
        ),
        (
            lambda out: out.transport_cost_at_geom(
                otts.PointCloud(
                    np.eye(3), np.ones((4, 1)) * [1, 2, 3], mesh=otts.make_mesh(1, 1)
                )
            ),
            ValueError,
            "other_geom must be on the mesh of the plan",
        ),
        (
            lambda out: otts.Plan.from_potentials(
                out.geom, out.f, out.g, b=np.full(4, 0.5)
            ),
            ValueError,
            "a and b must have the same total mass",
        ),
        (
            lambda out: otts.Plan.from_potentials(out.geom, out.g, out.g),
            ValueError,
            r"f must have shape \(3,\), got \(4,\)",
        ),
        (
            lambda out: otts.Plan.from_potentials(out.geom, out.f, out.g * np.nan),
            ValueError,
            "g must be finite where the weight is positive",
        ),
    ],
)
def test_bad_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call(small())


def test_the_matrix_is_refused_above_a_limit():
    x = np.zeros((5000, 1), np.float32)
    out = otts.solve(otts.PointCloud(x, x, epsilon=1.0), max_iterations=1)
    with pytest.raises(ValueError, match="rows") as refusal:
        _ = out.matrix
    for name in ("apply", "marginal", "top_k", "to_bcoo", "sample", "rows"):
        assert name in str(refusal.value) and hasattr(out, name)
