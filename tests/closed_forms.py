"""Values of entropic transport between points and Gaussians, for autodiff too.

The plan of two Gaussians is a Gaussian, whatever tau (Janati, Muzellec, Peyre and
Cuturi, Entropic optimal transport between unbalanced Gaussian measures has a closed
form, 2020).
"""

import jax.numpy as jnp


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
