"""Problems whose solution is known: points, Gaussians, permutations, points on a line.

Gaussians are clouds of quadrature nodes here, not samples: what is integrated is
smooth, and the error of the quadrature is about that of rounding.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closed_forms import (
    coupling,
    divergence_of,
    held,
    of_diracs,
    of_gaussians,
    of_masses,
)

import ott_shard as otts

pytestmark = pytest.mark.wide

TAUS = [(1.0, 1.0), (0.8, 0.6), (0.7, 0.7), (1.0, 0.7), (0.6, 1.0)]


@pytest.fixture(autouse=True)
def mesh():
    """Everything here is in float64 on 4 x 2 devices."""
    with jax.enable_x64(True):
        yield otts.make_mesh(4, 2)


# ---------------------------------------------------------------------- comparisons


def assert_close(got, want, tol, what):
    got, want = np.asarray(got), np.asarray(want)
    size = np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=tol * size + tol, err_msg=what)


def assert_gradients(closed, got, inputs, tol):
    """Against the derivatives of the closed form, where there are any.

    At a tau of 1 it has none, and two masses that must be equal have none either.
    """
    fixed = {name for name in ("tau_a", "tau_b") if held(inputs[name])}
    fixed |= {"alpha", "beta"} if len(fixed) == 2 else set()
    moving = {k: jnp.asarray(v) for k, v in inputs.items() if k not in fixed}
    constant = {k: inputs[k] for k in fixed}
    want = jax.grad(lambda moving: closed(**moving, **constant)[0])(moving)
    for name in moving:
        assert_close(got[name], want[name], tol, f"d/d{name} at {inputs}")


def solve(x, y, a, b, epsilon, tau_a=1.0, tau_b=1.0, cost_fn=None, **options):
    """On the mesh of this file, to the last digits."""
    geom = otts.PointCloud(
        x, y, cost_fn=cost_fn, epsilon=epsilon, mesh=otts.make_mesh(4, 2)
    )
    taus = {"tau_a": tau_a, "tau_b": tau_b}
    options = {"threshold": 1e-11, "max_iterations": 5_000} | options
    return otts.solve(geom, a, b, **taus, **options)


def differentiated(fn):
    """fn(**inputs) -> (value, more) compiled: (value, more) and gradients by name.

    One program whatever the inputs are.
    """
    run = jax.jit(jax.value_and_grad(lambda inputs: fn(**inputs), has_aux=True))
    return lambda **inputs: run(jax.tree.map(np.float64, inputs))


# --------------------------------------------------------------------------- points


@differentiated
def two_points(x, y, alpha, beta, epsilon, tau_a, tau_b):
    out = solve(x[None], y[None], alpha[None], beta[None], epsilon, tau_a, tau_b)
    return out.reg_ot_cost, (out.converged, out.transport_mass, out.primal_cost)


@pytest.mark.parametrize("taus", TAUS)
def test_two_points(taus):
    """Only the mass of the plan is to be found; most devices hold nothing."""
    x, y = np.array([0.3, -0.2]), np.array([1.0, 0.4])
    inputs = {
        **{"x": x, "y": y, "epsilon": 0.4, "tau_a": taus[0], "tau_b": taus[1]},
        **{"alpha": 0.8, "beta": 0.8 if taus == (1, 1) else 1.5},
    }
    (value, (converged, mass, cost)), gradients = two_points(**inputs)
    want, want_mass = of_diracs(**inputs)
    assert bool(converged)
    assert_close(value, want, 1e-11, "value")
    assert_close(mass, want_mass, 1e-11, "mass")
    assert_close(cost, want_mass * np.sum((x - y) ** 2), 1e-11, "cost")
    assert_gradients(of_diracs, gradients, inputs, 1e-10)


@pytest.mark.slow
def test_divergence_of_two_points():
    """Each term of a point with itself has both taus, and the masses' own term."""

    @jax.jit
    def run(x, y, alpha, beta, epsilon, tau_a, tau_b):
        return otts.sinkhorn_divergence(
            *(x[None], y[None], alpha[None], beta[None]),
            epsilon=epsilon,
            tau_a=tau_a,
            tau_b=tau_b,
            threshold=1e-12,
            mesh=otts.make_mesh(4, 2),
        )[0]

    x, y = np.array([0.3, -0.2]), np.array([1.0, 0.4])

    def value(*inputs):
        return of_diracs(*inputs)[0]

    for taus in TAUS:
        masses = (0.8, 0.8) if taus == (1, 1) else (0.8, 1.5)
        got = run(x, y, *masses, 0.4, *taus)
        want = divergence_of(value, x, y, *masses, 0.4, *taus)
        assert_close(got, want, 1e-11, f"taus {taus}")


# ------------------------------------------------------------------------ Gaussians


@functools.cache
def nodes(count):
    """Points [count] and weights of the quadrature for N(0, 1)."""
    z, w = np.polynomial.hermite_e.hermegauss(count)
    return z, w / w.sum()


@differentiated
def on_the_line(gap, s, t, alpha, beta, epsilon, tau_a, tau_b):
    z, w = nodes(60)
    x, y = gap + s * z, t * z
    out = solve(x[:, None], y[:, None], alpha * w, beta * w, epsilon, tau_a, tau_b)
    # Moments of the plan, per unit of mass.
    rows, pulled = out.apply(jnp.stack([jnp.ones_like(y), y], axis=1), 1).T
    cols, mass = out.marginal(0), rows.sum()
    mean = jnp.vdot(rows, x) / mass, jnp.vdot(cols, y) / mass
    dx, dy = x - mean[0], y - mean[1]
    plan = {
        "cost": out.primal_cost / mass,
        "mean": jnp.stack(mean),
        "var": jnp.stack([jnp.vdot(rows, dx**2), jnp.vdot(cols, dy**2)]) / mass,
        "cov": jnp.vdot(dx, pulled) / mass,
    }
    return out.reg_ot_cost, (out.converged, mass, plan)


@pytest.mark.parametrize("epsilon", [0.7, 2.0, 30.0])
@pytest.mark.parametrize("taus", TAUS)
def test_gaussians_on_a_line(taus, epsilon):
    """Value, gradients, and the plan by its moments."""
    masses = (0.8, 0.8) if taus == (1, 1) else (0.8, 1.5)
    inputs = dict(gap=0.9, s=0.6, t=1.1, alpha=masses[0], beta=masses[1])
    inputs |= dict(epsilon=epsilon, tau_a=taus[0], tau_b=taus[1])
    (value, (converged, mass, plan)), gradients = on_the_line(**inputs)
    want, want_mass = of_gaussians(**inputs)
    assert bool(converged)
    assert_close(value, want, 1e-10, "value")
    assert_close(mass, want_mass, 1e-10, "mass")
    best = coupling(0.9, 0.6**2, 1.1**2, epsilon, *taus)
    for name, moments in plan.items():
        assert_close(moments, best[name], 1e-9, name)
    assert_gradients(of_gaussians, gradients, inputs, 1e-9)


def test_the_plain_value_is_least_for_a_shrunk_cloud():
    """Entropy makes N(0, t^2 - eps / 2) the closest to N(0, t^2): why one debiases."""
    masses_and_taus = dict(alpha=1.0, beta=1.0, tau_a=1.0, tau_b=1.0)
    t, epsilon = 1.1, 0.9
    s = np.sqrt(t**2 - epsilon / 2)
    (value, _), slopes = on_the_line(
        gap=0.0, s=s, t=t, epsilon=epsilon, **masses_and_taus
    )
    np.testing.assert_allclose([slopes["gap"], slopes["s"]], 0, atol=1e-10)
    for other in (0.9 * s, 1.1 * s):
        inputs = dict(gap=0.0, s=other, t=t, epsilon=epsilon)
        assert on_the_line(**inputs, **masses_and_taus)[0][0] > value + 1e-3


@differentiated
def divergence_on_the_line(gap, s, t, alpha, beta, epsilon, tau):
    z, w = nodes(40)
    x, y = (gap + s * z)[:, None], (t * z)[:, None]
    value, out = otts.sinkhorn_divergence(
        *(x, y, alpha * w, beta * w),
        epsilon=epsilon,
        tau_a=tau,
        tau_b=tau,
        threshold=1e-11,
        mesh=otts.make_mesh(4, 2),
    )
    return value, out.converged


def divergence_of_gaussians(gap, s, t, alpha, beta, epsilon, tau):
    def value(x, y, *rest):
        return of_gaussians(x[0] - y[0], x[1], y[1], *rest)[0]

    ends = (gap, s), (0.0, t)
    return divergence_of(value, *ends, alpha, beta, epsilon, tau, tau), None


@pytest.mark.parametrize("tau", [1.0, 0.7])
def test_divergence_of_gaussians(tau):
    """Its value and slopes; against N(0, 1) it is least, and 0, for N(0, 1)."""
    for gap, s, t in ((0.9, 0.6, 1.1), (-0.4, 1.2, 0.8)):
        masses = dict(alpha=0.8, beta=0.8 if tau == 1 else 1.5)
        inputs = dict(gap=gap, s=s, t=t, epsilon=1.5, **masses)
        (value, converged), slopes = divergence_on_the_line(tau=tau, **inputs)
        assert bool(converged)
        want = divergence_of_gaussians(tau=tau, **inputs)[0]
        assert_close(value, want, 1e-10, f"value at {inputs}")
        closed = functools.partial(divergence_of_gaussians, tau=tau)
        moving = ("gap", "s", "t", "epsilon", *(masses if tau < 1 else ()))
        slope = jax.grad(lambda v: closed(**{**inputs, **v})[0])  # noqa: B023 (used at once)
        want = slope({name: inputs[name] for name in moving})
        for name in moving:
            assert_close(slopes[name], want[name], 1e-9, f"d/d{name} at {inputs}")
    equal = dict(t=1.0, alpha=1.0, beta=1.0, epsilon=1.5, tau=tau)
    (least, _), slopes = divergence_on_the_line(gap=0.0, s=1.0, **equal)
    names = ("gap", "s", "t", *(("alpha", "beta") if tau < 1 else ()))
    np.testing.assert_allclose([least, *(slopes[k] for k in names)], 0, atol=1e-10)
    for s in (0.5, 0.9, 0.99, 1.01, 1.1, 1.5):
        (value, _), slopes = divergence_on_the_line(gap=0.0, s=s, **equal)
        assert value > 0.1 * (s - 1) ** 2 and slopes["s"] * (s - 1) > 0


def root(matrix):
    """Of a covariance."""
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(values)) @ vectors.T


def covariance(angle, *variances):
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    return (turn * np.array(variances)) @ turn.T


@jax.jit
def in_the_plane(gap, root_x, root_y, alpha, beta, epsilon, tau_a, tau_b):
    z, w = nodes(24)
    grid = np.stack(np.meshgrid(z, z), axis=-1).reshape(-1, 2)
    w = np.outer(w, w).ravel()
    x, y = gap + grid @ root_x, grid @ root_y
    out = solve(x, y, alpha * w, beta * w, epsilon, tau_a, tau_b)
    return out.reg_ot_cost, out.primal_cost, out.transport_mass, out.converged


def test_balanced_gaussians_in_the_plane():
    """Covariances that do not commute.

    With l_k the eigenvalues of B = X^(1/2) Y X^(1/2), those of (B + (eps / 4)^2)^(1/2)
    - eps / 4 are c_k, and the best cross-covariance has the trace sum c_k. The mutual
    information is -log det (1 - c^2 / l) / 2, and l - c^2 = eps c / 2.
    """
    epsilon, gap = 2.0, np.array([0.5, -0.3])
    var_x, var_y = covariance(0.4, 0.9, 0.3), covariance(1.5, 0.4, 1.0)
    assert np.abs(var_x @ var_y - var_y @ var_x).max() > 0.1
    got = in_the_plane(gap, root(var_x), root(var_y), 1.0, 1.0, epsilon, 1.0, 1.0)
    eigenvalues = np.linalg.eigvalsh(root(var_x) @ var_y @ root(var_x))
    c = np.sqrt(eigenvalues + epsilon**2 / 16) - epsilon / 4
    cost = gap @ gap + np.trace(var_x + var_y) - 2 * c.sum()
    value = cost - epsilon / 2 * np.log(epsilon * c / (2 * eigenvalues)).sum()
    for mine, want in zip(got, (value, cost, 1.0, True), strict=True):
        np.testing.assert_allclose(mine, want, rtol=1e-9)


@pytest.mark.parametrize("taus", [(0.8, 0.6), (1.0, 0.7)])
def test_unbalanced_gaussians_in_the_plane(taus):
    """Along common axes the problem falls apart into two on the line, of one mass."""
    epsilon, alpha, beta, angle = 2.0, 0.8, 1.5, 0.4
    gap = np.array([0.5, -0.3])
    along = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    variances = (0.9, 0.3), (0.4, 1.0)
    roots = (root(covariance(angle, *v)) for v in variances)
    got = in_the_plane(gap, *roots, alpha, beta, epsilon, *taus)
    axes = [
        coupling(*numbers, epsilon, *taus)
        for numbers in zip(along @ gap, *variances, strict=True)
    ]
    best, cost = (sum(axis[key] for axis in axes) for key in ("value", "cost"))
    value, mass = of_masses(best, alpha, beta, epsilon, *taus)
    for mine, want in zip(got, (value, mass * cost, mass, True), strict=True):
        np.testing.assert_allclose(mine, want, rtol=1e-9)


# ----------------------------------------------------------------------- many points


def test_a_permutation():
    """Points far apart, in another order and a little moved: each finds its own."""
    epsilon, n = 0.02, 27
    rng = np.random.default_rng(0)
    lattice = np.stack(np.meshgrid(*[np.arange(3.0)] * 3), -1).reshape(n, 3)
    x = lattice + rng.uniform(-0.05, 0.05, (n, 3))
    order, shift = rng.permutation(n), np.array([0.05, -0.1, 0.02])
    y = x[order] + shift
    v = rng.normal(size=(n, 2))

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def run(x):
        out = solve(x, y, None, None, epsilon)
        parts = out.primal_cost, out.matrix, out.apply(v, 1), out.apply(v, 0)
        return out.reg_ot_cost, (out.converged, *parts)

    (value, (converged, cost, plan, forth, back)), gradient = run(x)
    want = np.zeros((n, n))
    want[order, np.arange(n)] = 1 / n
    assert bool(converged)
    np.testing.assert_allclose(plan, want, atol=1e-14)
    np.testing.assert_allclose(forth[order], v / n, atol=1e-13)
    np.testing.assert_allclose(back, v[order] / n, atol=1e-13)
    np.testing.assert_allclose(cost, shift @ shift, rtol=1e-12)
    # KL(P | a b^T) of a permutation is log n.
    np.testing.assert_allclose(value, shift @ shift + epsilon * np.log(n), rtol=1e-12)
    np.testing.assert_allclose(
        gradient, np.tile(-2 * shift / n, (n, 1)), rtol=0, atol=1e-13
    )


@functools.partial(jax.jit, static_argnames="p")
def of_powers(x, y, schedule, threshold, p):
    """(reg_ot_cost, primal_cost, converged) for points on a line."""
    cost = otts.costs.PNormP(p)
    weights = (None, None)
    out = solve(x, y, *weights, schedule, cost_fn=cost, threshold=threshold)
    return out.reg_ot_cost, out.primal_cost, out.converged


def of_sorted(x, y, p):
    """The exact cost: on a line the points are matched in order."""
    return float(np.mean(np.abs(np.sort(x, 0) - np.sort(y, 0)) ** p) / p)


POWERS = [1, 2, pytest.param(3, marks=pytest.mark.slow)]


@pytest.mark.parametrize("p", POWERS)
def test_points_on_a_line_are_sorted(p):
    """As epsilon falls, the cost comes down to that of points matched in order.

    In between is what the optimum of <C, P> + eps KL(P | a b^T) leaves: KL is log n
    for a matching. A threshold allows the plan to be cheaper by twice its worth.
    """
    rng, threshold, excess = np.random.default_rng(3), 2e-5, []
    x, y = rng.uniform(0, 1, (30, 1)), rng.uniform(-0.4, 1.5, (30, 1))
    exact = of_sorted(x, y, p)
    for epsilon in (1e-1, 3e-2, 1e-2):
        schedule = otts.Epsilon(epsilon, 1.0, 0.95)
        value, cost, converged = of_powers(x, y, schedule, threshold, p)
        assert bool(converged)
        excess.append(float(cost) - exact)
        assert -2 * threshold <= excess[-1] <= value - exact <= epsilon * np.log(30)
    assert excess[1] < excess[0] / 2 and excess[2] < excess[1] / 2


@pytest.mark.parametrize("p", POWERS)
def test_a_large_epsilon_leaves_the_mean_cost(p):
    """The plan is a b^T, and first differs by what of C is not a sum f_i + g_j.

    With V the mean square of that, the value is the mean cost less V / (2 eps).
    """
    rng = np.random.default_rng(4)
    x, y = rng.uniform(0, 1, (30, 1)), rng.uniform(-0.4, 1.5, (30, 1))
    matrix = np.abs(x - y.T) ** p / p
    rest = matrix - matrix.mean(0) - matrix.mean(1, keepdims=True) + matrix.mean()
    for epsilon in (1e2, 1e3):
        schedule = otts.Epsilon(epsilon, epsilon, 0.5)
        value, cost, _ = of_powers(x, y, schedule, 1e-11, p)
        first = (rest**2).mean() / epsilon
        np.testing.assert_allclose(matrix.mean() - value, first / 2, rtol=1 / epsilon)
        np.testing.assert_allclose(matrix.mean() - cost, first, rtol=2 / epsilon)
