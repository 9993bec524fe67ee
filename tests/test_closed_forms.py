"""Problems whose solution is known: points, Gaussians, permutations, points on a line.

The plan of two Gaussians is a Gaussian, whatever tau (Janati, Muzellec, Peyre and
Cuturi, Entropic optimal transport between unbalanced Gaussian measures has a closed
form, 2020). Here they are clouds of quadrature nodes, not samples: what is integrated
is smooth, and the error of the quadrature is about that of rounding.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ott_shard as otts

TAUS = [(1.0, 1.0), (0.8, 0.6), (0.7, 0.7), (1.0, 0.7), (0.6, 1.0)]


@pytest.fixture(autouse=True)
def mesh():
    """Everything here is in float64 on 4 x 2 devices."""
    with jax.enable_x64(True):
        yield otts.make_mesh(4, 2)


# ----------------------------------------------------------------- the closed forms


def held(tau):
    """The marginal is a constraint. A tau that is differentiated is below 1."""
    return isinstance(tau, float) and tau == 1


def rho(epsilon, tau):
    return epsilon * tau / (1 - tau)


def kl(mass, other):
    return mass * jnp.log(mass / other) - mass + other


def of_masses(cost, alpha, beta, epsilon, tau_a, tau_b):
    """(value, mass of the plan) for masses alpha and beta.

    With `cost` the value per unit of mass of the normalised problem, a plan of mass M
    costs M cost + eps KL(M | alpha beta) + rho_a KL(M | alpha) + rho_b KL(M | beta),
    which is least where log M is the mean of log alpha (with weight eps + rho_a) and
    log beta (eps + rho_b), less cost / (eps + rho_a + rho_b).
    """
    penalties = [
        (rho(epsilon, tau), mass)
        for tau, mass in ((tau_a, alpha), (tau_b, beta))
        if not held(tau)
    ]
    if len(penalties) == 2:
        logs = sum((epsilon + r) * jnp.log(mass) for r, mass in penalties)
        mass = jnp.exp((logs - cost) / (epsilon + sum(r for r, _ in penalties)))
    else:
        mass = alpha if held(tau_a) else beta
    value = mass * cost + epsilon * kl(mass, alpha * beta)
    return value + sum(r * kl(mass, other) for r, other in penalties), mass


def of_diracs(x, y, alpha, beta, epsilon, tau_a, tau_b):
    """(value, mass) for a point x of mass alpha and a point y of mass beta."""
    return of_masses(jnp.sum((x - y) ** 2), alpha, beta, epsilon, tau_a, tau_b)


def coupling(gap, var_x, var_y, epsilon, tau_a, tau_b):
    """The best probability p between N(gap, var_x) and N(0, var_y), on the line.

    It is Gaussian. That the derivative of <C, p> + eps KL(p | a b) + rho_a KL(p_x | a)
    + rho_b KL(p_y | b) in its precision matrix vanishes says that this is [[u, -2 /
    eps], [-2 / eps, v]] with

        u = 1 / var_x + 2 (1 - tau_a) / eps + tau_a (2 / eps)^2 / v,

    and v likewise: a quadratic equation. The means are held by springs in a row.

    Returns:
        {cost: <C, p>, value: of the objective, mean: (x, y), var: (x, y), cov: xy}.
    """
    k = (2 / epsilon) ** 2
    p = 1 / var_x + 2 * (1 - tau_a) / epsilon
    q = 1 / var_y + 2 * (1 - tau_b) / epsilon
    r = (tau_b - tau_a) * k - p * q
    u = (jnp.sqrt(r**2 + 4 * p * q * tau_b * k) - r) / (2 * q)
    v = q + tau_b * k / u
    det = u * v - k
    var, cov = (v / det, u / det), 2 / epsilon / det
    soft = [w * (1 - t) / epsilon for w, t in ((var_x, tau_a), (var_y, tau_b))]
    rest = gap / (1 + 2 * sum(soft))
    shift = -2 * soft[0] * rest, 2 * soft[1] * rest
    cost = var[0] + var[1] - 2 * cov + rest**2
    spread = [
        (h + s**2) / w for h, s, w in zip(var, shift, (var_x, var_y), strict=True)
    ]
    value = cost + epsilon / 2 * (sum(spread) - 2 + jnp.log(var_x * var_y * det))
    for tau, part, h, w in zip(
        (tau_a, tau_b), spread, var, (var_x, var_y), strict=True
    ):
        if not held(tau):
            value += rho(epsilon, tau) / 2 * (part - 1 - jnp.log(h / w))
    mean = gap + shift[0], shift[1]
    return {"cost": cost, "value": value, "mean": mean, "var": var, "cov": cov}


def of_gaussians(gap, s, t, alpha, beta, epsilon, tau_a, tau_b):
    """(value, mass) for alpha N(gap, s^2) and beta N(0, t^2)."""
    best = coupling(gap, s**2, t**2, epsilon, tau_a, tau_b)["value"]
    return of_masses(best, alpha, beta, epsilon, tau_a, tau_b)


def divergence_of(fn, x, y, mass_x, mass_y, *rest):
    """The debiased divergence; fn(x, y, mass of x, mass of y, ...) is the value."""
    own = fn(x, x, mass_x, mass_x, *rest) + fn(y, y, mass_y, mass_y, *rest)
    epsilon = rest[0]
    mass = epsilon * (mass_x - mass_y) ** 2 / 2
    return fn(x, y, mass_x, mass_y, *rest) - own / 2 + mass


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
    return otts.solve(
        geom, a, b, **{"threshold": 1e-11, "max_iterations": 20_000}, **taus, **options
    )


def differentiated(fn):
    """fn(**inputs) -> (value, more) compiled: (value, more) and gradients by name.

    One program whatever the inputs are.
    """
    run = jax.jit(jax.value_and_grad(lambda inputs: fn(**inputs), has_aux=True))
    return lambda **inputs: run(jax.tree.map(jnp.asarray, inputs))


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
