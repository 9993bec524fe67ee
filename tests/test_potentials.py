"""Potentials and the map at new points, against dense NumPy."""

import functools

import jax
import numpy as np
import pytest
import reference as ref

import ott_shard as otts


def logsumexp(z, axis):
    top = z.max(axis, keepdims=True)
    return np.squeeze(top, axis) + np.log(np.exp(z - top).sum(axis))


@functools.cache
def solved(mesh, dtype, taus=(1.0, 1.0)):
    """Weights of zero among them, and costs in units of 7."""
    p = ref.problem(13, 21, dtype=dtype)
    x, y, a, b = p.cast(dtype)
    geom = otts.PointCloud(
        x, y, epsilon=0.1, scale_cost=7.0, mesh=mesh, batch_size=(4, 7)
    )
    tau_a, tau_b = taus
    out = otts.solve(geom, a, b, tau_a=tau_a, tau_b=tau_b, threshold=1e-5)
    return p, out


@pytest.mark.parametrize("taus", [(1.0, 1.0), (0.8, 1.0)])
def test_at_new_points(mesh, dtype, taus):
    p, out = solved(mesh, dtype, taus)
    pot, tol = out.to_dual_potentials(), 1e-5 if dtype == np.float32 else 1e-12
    new = np.random.default_rng(5).normal(size=(10, 3)).astype(dtype)
    phi, psi = np.float64(out.phi[:13]), np.float64(out.psi[:21])
    with np.errstate(divide="ignore"):
        forth = (psi - ref.sqeuclidean(new, p.y) / 7) / 0.1 + np.log(p.b)
        back = (phi - ref.sqeuclidean(new, p.x) / 7) / 0.1 + np.log(p.a)
    for got, z, tau in ((pot.f, forth, taus[0]), (pot.g, back, taus[1])):
        ref.assert_close(got(new), -tau * 0.1 * logsumexp(z, 1), tol)
    for forward, z, ends in ((True, forth, p.y), (False, back, p.x)):
        shares = np.exp(z - logsumexp(z, 1)[:, None])
        got = pot.transport(new, forward=forward)
        ref.assert_close(got, shares @ np.float64(ends), tol)


def test_at_the_points_of_the_solution(mesh, dtype):
    p, out = solved(mesh, dtype)
    pot, tol = out.to_dual_potentials(), 1e-5 if dtype == np.float32 else 1e-12
    support = p.a > 0
    x, y = p.x.astype(dtype), p.y.astype(dtype)
    want = np.where(support, out.f - 0.1 * np.log(np.where(support, p.a, 1)), 0)
    ref.assert_close(np.where(support, pot.f(x), 0), want, tol)
    mean = (
        np.asarray(out.apply(y, 1))[support]
        / np.asarray(out.marginal(1))[support, None]
    )
    ref.assert_close(np.asarray(pot.transport(x))[support], mean, tol)


@pytest.mark.wide
@pytest.mark.parametrize("scale", ["mean", "std", "max_cost", "max_norm", "max_bound"])
def test_at_the_points_of_the_solution_in_any_unit(scale):
    """P y / (P 1), also where the costs are divided by a statistic."""
    p = ref.problem(13, 21)
    x, y, a, b = p.cast(np.float32)
    options = dict(epsilon=0.05, scale_cost=scale, mesh=otts.make_mesh(4, 2))
    out = otts.solve(otts.PointCloud(x, y, **options), a, b)
    plan = np.asarray(out.matrix, np.float64)
    some = p.a > 0
    means = plan[some] @ p.y / plan[some].sum(1, keepdims=True)
    for got in (out.to_dual_potentials().transport(x), out.barycentric_map()):
        ref.assert_close(np.asarray(got)[some], means, 1e-5)


def test_the_map_is_a_gradient():
    """x - 7 grad f / 2; its derivative, by finite differences; in jit and vmap."""
    with jax.enable_x64(True):
        _, out = solved(otts.make_mesh(4, 2), np.dtype("float64"))
        pot = out.to_dual_potentials()
        new, v = np.random.default_rng(5).normal(size=(2, 10, 3))
        slope = jax.jit(jax.grad(lambda x: pot.f(x).sum()))(new)
        ref.assert_close(pot.transport(new), new - 7 * slope / 2, 1e-12)
        moved = jax.jvp(pot.transport, (new,), (v,))[1]
        ends = [pot.transport(new + h * v) for h in (1e-6, -1e-6)]
        np.testing.assert_allclose(moved, (ends[0] - ends[1]) / 2e-6, rtol=1e-6)
        several = jax.vmap(pot.transport)(np.stack([new, new + v]))
        ref.assert_close(several[0], pot.transport(new), 1e-12)
        one = jax.jit(lambda out, x: out.to_dual_potentials().transport(x[None])[0])
        np.testing.assert_allclose(one(out, new[3]), pot.transport(new)[3], rtol=1e-12)


@pytest.mark.wide
def test_derivative_in_the_clouds():
    """Of the map at new points, through the solution, by finite differences."""
    with jax.enable_x64(True):
        p = ref.problem(13, 21, dtype=np.float64)
        new, v = np.random.default_rng(5).normal(size=(10, 3)), p.y[::-1]

        def mean(y):
            geom = otts.PointCloud(p.x, y, epsilon=0.5, mesh=otts.make_mesh(1, 1))
            out = otts.solve(geom, p.a, p.b, threshold=1e-12)
            return out.to_dual_potentials().transport(new)

        moved = jax.jit(lambda y: jax.jvp(mean, (y,), (v,))[1])(p.y)
        ends = [jax.jit(mean)(p.y + h * v) for h in (1e-5, -1e-5)]
        np.testing.assert_allclose(moved, (ends[0] - ends[1]) / 2e-5, rtol=1e-5)


@pytest.mark.parametrize("forward", [True, False])
def test_hard_transforms(mesh, dtype, forward):
    """min C - psi over points that have weight; its derivative is that of one cost."""
    p, out = solved(mesh, dtype)
    pot, tol = out.to_dual_potentials(), 1e-5 if dtype == np.float32 else 1e-12
    new = np.random.default_rng(5).normal(size=(10, 3)).astype(dtype)
    ends, b, psi = (p.y, p.b, out.psi[:21]) if forward else (p.x, p.a, out.phi[:13])
    values = ref.sqeuclidean(new, ends) / 7 - np.float64(psi)
    values[:, b == 0] = np.inf
    hard = functools.partial(pot.f if forward else pot.g, hard=True)
    got, slope = jax.jit(jax.value_and_grad(lambda x: hard(x).sum()))(new)
    ref.assert_close(hard(new), values.min(1), tol)
    np.testing.assert_allclose(got, values.min(1).sum(), rtol=1e-5)
    ref.assert_close(slope, 2 * (new - ends[values.argmin(1)]) / 7, tol)


def test_hard_is_the_limit():
    """Of a small epsilon, where it lies below within eps log m."""
    _, out = solved(otts.make_mesh(4, 2), np.dtype("float32"))
    pot = out.to_dual_potentials()
    new = np.random.default_rng(5).normal(size=(10, 3)).astype(np.float32)
    apart = np.asarray(pot.f(new) - pot.f(new, hard=True))
    assert np.all(apart > -1e-6) and np.all(apart < 0.1 * np.log(1 / out.problem.b[0]))


def test_no_dense_array():
    """50,000 points in 50 dimensions to 50,000 others; doubling at most doubles."""

    def run(x, y, new):
        geom = otts.PointCloud(x, y, epsilon=1.0, mesh=otts.make_mesh(1, 1))
        out = otts.solve(geom, max_iterations=1)
        return out.to_dual_potentials().transport(new)

    def temp(n):
        cloud = jax.ShapeDtypeStruct((n, 50), np.float32)
        memory = jax.jit(run).lower(cloud, cloud, cloud).compile().memory_analysis()
        return memory.temp_size_in_bytes

    small, large = map(temp, (25_000, 50_000))
    assert small < large <= 2 * small and large < 128 * 2**20


@pytest.mark.parametrize(
    ("points", "words"),
    [
        (np.ones((3, 2)), r"points must have shape \[n, 3\], got \(3, 2\)"),
        (np.ones(3), r"points must have shape \[n, d\]"),
        (np.full((2, 3), np.nan), "points"),
    ],
)
def test_bad_points(points, words):
    x = np.eye(3, dtype=np.float32)
    pot = otts.solve(otts.PointCloud(x, x, epsilon=1.0)).to_dual_potentials()
    with pytest.raises(ValueError, match=words):
        pot.transport(points)


@functools.cache
def divergence(mesh, dtype):
    p = ref.problem(13, 21, dtype=dtype)

    @jax.jit
    def run(x, y, a, b):
        options = dict(epsilon=0.5, scale_cost=2.0, mesh=mesh, batch_size=(4, 7))
        return otts.sinkhorn_divergence(x, y, a, b, threshold=1e-6, **options)

    grad = jax.grad(run, argnums=(0, 1, 2, 3), has_aux=True)
    return p, *jax.jit(grad)(*p.cast(dtype))


def test_debiased_potentials_are_derivatives_in_weights(mesh, dtype):
    p, slopes, out = divergence(mesh, dtype)
    pot, tol = out.to_dual_potentials(), 1e-4 if dtype == np.float32 else 1e-5
    for values, slope in (
        (pot.f(p.x.astype(dtype)), slopes[2]),
        (pot.g(p.y.astype(dtype)), slopes[3]),
    ):
        ref.assert_close(ref.centred(values), ref.centred(slope), tol)


def test_debiased_maps(mesh, dtype):
    """x less half the gradient of the divergence per weight, in units of 2."""
    p, slopes, out = divergence(mesh, dtype)
    pot, tol = out.to_dual_potentials(), 1e-4 if dtype == np.float32 else 1e-5
    for forward, points, a, slope in (
        (True, p.x, p.a, slopes[0]),
        (False, p.y, p.b, slopes[1]),
    ):
        got = np.asarray(pot.transport(points.astype(dtype), forward=forward))
        some = a > 0
        want = points[some] - np.asarray(slope)[some] / a[some, None]
        ref.assert_close(got[some], want, tol)


def test_debiased_potentials_do_not_shrink():
    """A moved cloud is moved, also beyond where it stands, whatever epsilon."""
    x = np.random.default_rng(0).normal(size=(200, 2)).astype(np.float32)
    _, out = otts.sinkhorn_divergence(x, x + 3, epsilon=1.0, threshold=1e-4)
    new = np.float32([[0.5, -2.0], [0.0, 0.3]])
    debiased = out.to_dual_potentials().transport(new)
    biased = out.outputs[0].to_dual_potentials().transport(new)
    np.testing.assert_allclose(debiased, new + 3, atol=1e-2)
    assert np.all(np.abs(np.asarray(biased) - new - 3).max(1) > 0.05)


@pytest.mark.wide
def test_derivative_of_debiased_potentials():
    """With the constants of (x, x): in the points, by finite differences."""
    with jax.enable_x64(True):
        p, mesh = ref.problem(9, 7, dtype=np.float64), otts.make_mesh(1, 1)
        new = np.random.default_rng(5).normal(size=(4, 3))

        @jax.jit
        def shape(x):
            options = dict(epsilon=0.5, mesh=mesh, threshold=1e-13)
            _, out = otts.sinkhorn_divergence(x, p.y, p.a, p.b, **options)
            pot = out.to_dual_potentials()
            f = pot.f(new)  # up to the constant of (x, y), but not that of (x, x)
            return f - f[0] + (pot.own_x.f(new) + pot.own_x.g(new)) / 2

        step, h = np.cos(np.arange(27.0)).reshape(9, 3), 1e-5
        moved = jax.jvp(shape, (p.x,), (step,))[1]
        ends = [shape(p.x + t * step) for t in (h, -h)]
        np.testing.assert_allclose(moved, (ends[0] - ends[1]) / (2 * h), atol=1e-7)


def test_debiased_refusals():
    x = np.eye(3, dtype=np.float32)
    options = dict(epsilon=1.0, static_b=True, cost_fn=otts.costs.Euclidean())
    _, out = otts.sinkhorn_divergence(x, x, **options)
    pot = out.to_dual_potentials()
    with pytest.raises(ValueError, match="static_b must be False for debiased"):
        pot.g(x)
    with pytest.raises(ValueError, match="transport must be for SqEuclidean costs"):
        pot.transport(x)
