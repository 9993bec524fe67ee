"""A dense NumPy oracle in float64: what the package computes, written the plain way.

Potentials without weights are called phi and psi here: f = phi + epsilon log a and
P_ij = a_i b_j exp((phi_i + psi_j - C_ij) / epsilon). They stay finite where a weight
is zero, which makes every formula below one line.
"""

import dataclasses
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = np.ndarray


# ------------------------------------------------------------------------ problems


@dataclasses.dataclass(frozen=True)
class Problem:
    """Two weighted clouds, as float64 numbers that the working dtype represents."""

    x: Array
    y: Array
    a: Array
    b: Array

    def cast(self, dtype: Any) -> tuple[jax.Array, ...]:
        """(x, y, a, b) as jax arrays."""
        return tuple(jnp.asarray(v, dtype) for v in (self.x, self.y, self.a, self.b))


def problem(
    n: int, m: int, d: int = 3, *, zeros: bool = True, dtype: Any = np.float32
) -> Problem:
    """Two seeded clouds with random weights of mass 1, some of them zero."""
    rng = np.random.default_rng([n, m, d])

    def weights(size: int) -> Array:
        w = rng.uniform(0.5, 1.5, size)
        if zeros and size > 4:
            w[[1, size - 2]] = 0
        w = (w / w.sum()).astype(dtype).astype(np.float64)
        w[0] += 1 - w.sum()
        return w.astype(dtype).astype(np.float64)

    x = rng.uniform(-1, 1, (n, d)).astype(dtype).astype(np.float64)
    y = rng.uniform(-0.5, 1.5, (m, d)).astype(dtype).astype(np.float64)
    return Problem(x, y, weights(n), weights(m))


def discs(n: int) -> tuple[jax.Array, jax.Array]:
    """The two discs of radius 5 and 10 of the example that started the project.

    Both are drawn with the same key, as there, so each point of y is twice one of x.
    """

    def disc(radius: float, key: jax.Array) -> jax.Array:
        key_radius, key_angle = jax.random.split(key, 2)
        r = radius * jnp.sqrt(jax.random.uniform(key_radius, (n,), jnp.float32))
        angle = 2 * jnp.pi * jax.random.uniform(key_angle, (n,), jnp.float32)
        return jnp.stack((r * jnp.cos(angle), r * jnp.sin(angle)), axis=1)

    with jax.threefry_partitionable(False):
        _, key, _ = jax.random.split(jax.random.PRNGKey(42), 3)
        return disc(5.0, key), disc(10.0, key)


# --------------------------------------------------------------------------- costs


def sqeuclidean(x: Array, y: Array) -> Array:
    """|x - y|^2, without cancellation."""
    return ((x[:, None] - y[None]) ** 2).sum(-1)


def euclidean(x: Array, y: Array) -> Array:
    """|x - y|."""
    return np.sqrt(sqeuclidean(x, y))


COSTS: dict[str, Callable[[Array, Array], Array]] = {
    "SqEuclidean": sqeuclidean,
    "Euclidean": euclidean,
}


def cost_slope(name: str, x: Array, y: Array) -> Array:
    """dC(x_i, y_j) / dx_i, [n, m, d]; 0 between equal points."""
    apart = x[:, None] - y[None]
    if name == "SqEuclidean":
        return 2 * apart
    length = np.sqrt((apart**2).sum(-1, keepdims=True))
    return np.where(length > 0, apart / np.where(length > 0, length, 1), 0)


def statistics(cost: Array, a: Array, b: Array) -> tuple[float, float, float]:
    """Mean and standard deviation weighted by a_i b_j, and the largest entry."""
    weight = np.outer(a, b) / (a.sum() * b.sum())
    mean = (weight * cost).sum()
    std = np.sqrt((weight * (cost - mean) ** 2).sum())
    return float(mean), float(std), float(cost[weight > 0].max())


# ------------------------------------------------------------------------ solutions


def logsumexp(z: Array) -> Array:
    """Over the last axis; every row has a finite entry."""
    top = z.max(-1)
    return top + np.log(np.exp(z - top[..., None]).sum(-1))


def safe_log(w: Array) -> Array:
    """Log, -inf at 0 without a warning."""
    return np.where(w > 0, np.log(np.where(w > 0, w, 1)), -np.inf)


def kl(p: Array, q: Array) -> float:
    """Generalised Kullback-Leibler divergence, sum p log(p / q) - p + q."""
    ratio = np.where(p > 0, p / np.where(p > 0, q, 1), 1)
    return float((p * np.log(ratio) - p + q).sum())


def rho(epsilon: float, tau: float) -> float:
    """Weight of the marginal term that tau stands for."""
    return np.inf if tau == 1 else epsilon * tau / (1 - tau)


@dataclasses.dataclass(frozen=True)
class Solution:
    """Potentials of a dense problem, and all that follows from them."""

    cost: Array
    a: Array
    b: Array
    epsilon: float
    tau_a: float
    tau_b: float
    phi: Array
    psi: Array
    errors: Array

    @property
    def f(self) -> Array:
        return self.phi + self.epsilon * safe_log(self.a)

    @property
    def g(self) -> Array:
        return self.psi + self.epsilon * safe_log(self.b)

    @cached_property
    def kernel(self) -> Array:
        """exp((phi + psi - C) / epsilon), the density of the plan."""
        exponent = self.phi[:, None] + self.psi[None] - self.cost
        return np.exp(exponent / self.epsilon)

    @cached_property
    def plan(self) -> Array:
        return np.outer(self.a, self.b) * self.kernel

    @property
    def reg_ot_cost(self) -> float:
        """The dual objective at these potentials."""
        mass = self.plan.sum() - self.a.sum() * self.b.sum()
        return float(
            self.a @ conjugate(self.phi, rho(self.epsilon, self.tau_a))
            + self.b @ conjugate(self.psi, rho(self.epsilon, self.tau_b))
            - self.epsilon * mass
        )

    @property
    def primal_objective(self) -> float:
        """<C, P> + epsilon KL(P | a b^T), and the marginal terms where unbalanced."""
        total = self.primal_cost + self.epsilon * kl(
            self.plan, np.outer(self.a, self.b)
        )
        for tau, axis, target in ((self.tau_a, 1, self.a), (self.tau_b, 0, self.b)):
            if tau < 1:
                total += rho(self.epsilon, tau) * kl(self.plan.sum(axis), target)
        return total

    @property
    def primal_cost(self) -> float:
        return float((self.plan * self.cost).sum())

    @property
    def dual_cost(self) -> float:
        """<a, f> + <b, g>, as OTT."""
        return sum(
            float(w[w > 0] @ potential[w > 0])
            for w, potential in ((self.a, self.f), (self.b, self.g))
        )

    @property
    def ent_reg_cost(self) -> float:
        """reg_ot_cost - epsilon (H(a) + H(b)), as OTT."""
        entropy = sum(
            -float(w @ safe_log(np.where(w > 0, w, 1))) for w in (self.a, self.b)
        )
        return self.reg_ot_cost - self.epsilon * entropy

    @property
    def marginal_error(self) -> float:
        """L1 distance between the column sums and what they should be."""
        target = self.b * slope(self.psi, rho(self.epsilon, self.tau_b))
        return float(np.abs(self.plan.sum(0) - target).sum())

    # ------------------------------------------------ gradients, potentials fixed

    def grad_x(self, name: str, x: Array, y: Array) -> Array:
        return np.einsum("ij,ijd->id", self.plan, cost_slope(name, x, y))

    def grad_y(self, name: str, x: Array, y: Array) -> Array:
        return np.einsum("ij,jid->jd", self.plan, cost_slope(name, y, x))

    def grad_a(self) -> Array:
        inner = self.kernel @ self.b - self.b.sum()
        return conjugate(self.phi, rho(self.epsilon, self.tau_a)) - self.epsilon * inner

    def grad_b(self) -> Array:
        inner = self.a @ self.kernel - self.a.sum()
        return conjugate(self.psi, rho(self.epsilon, self.tau_b)) - self.epsilon * inner

    def grad_epsilon(self) -> float:
        """tau is what is held fixed, so rho moves with epsilon."""
        exponent = self.phi[:, None] + self.psi[None] - self.cost
        mass = self.plan.sum() - self.a.sum() * self.b.sum()
        total = float((self.plan * exponent).sum()) / self.epsilon - mass
        for tau, weight, potential in (
            (self.tau_a, self.a, self.phi),
            (self.tau_b, self.b, self.psi),
        ):
            if tau < 1:
                r = rho(self.epsilon, tau)
                marginal = weight * np.exp(-potential / r)
                total += tau / (1 - tau) * kl(marginal, weight)
        return total

    def gradients(self, name: str, x: Array, y: Array) -> dict[str, Any]:
        """By argument name."""
        return {
            "x": self.grad_x(name, x, y),
            "y": self.grad_y(name, x, y),
            "a": self.grad_a(),
            "b": self.grad_b(),
            "epsilon": self.grad_epsilon(),
        }


def conjugate(potential: Array, r: float) -> Array:
    """What a potential is worth: itself, or rho (1 - exp(-potential / rho))."""
    return potential if r == np.inf else -r * np.expm1(-potential / r)


def slope(potential: Array, r: float) -> Array:
    """Derivative of :func:`conjugate`."""
    return np.ones_like(potential) if r == np.inf else np.exp(-potential / r)


def sinkhorn(
    cost: Array,
    a: Array,
    b: Array,
    epsilon: float,
    *,
    iterations: int,
    tau_a: float = 1.0,
    tau_b: float = 1.0,
) -> Solution:
    """`iterations` pairs of updates, psi first and then phi, from phi = 0."""
    phi, psi = np.zeros(len(a)), np.zeros(len(b))
    log_a, log_b, errors = safe_log(a), safe_log(b), []
    make = partial(Solution, cost, a, b, float(epsilon), tau_a, tau_b)
    for _ in range(iterations):
        psi = -tau_b * epsilon * logsumexp(log_a + (phi - cost.T) / epsilon)
        phi = -tau_a * epsilon * logsumexp(log_b + (psi - cost) / epsilon)
        errors.append(make(phi, psi, np.zeros(0)).marginal_error)
    return make(phi, psi, np.asarray(errors))


def symmetric(
    cost: Array, a: Array, epsilon: float, *, iterations: int, tau: float = 1.0
) -> Solution:
    """A cloud against itself: one potential, averaged with its update."""
    phi = np.zeros(len(a))
    for _ in range(iterations):
        update = -tau * epsilon * logsumexp(safe_log(a) + (phi - cost) / epsilon)
        phi = (phi + update) / 2
    return Solution(cost, a, a, float(epsilon), tau, tau, phi, phi, np.zeros(0))


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The three terms of a debiased divergence."""

    xy: Solution
    xx: Solution
    yy: Solution

    @property
    def value(self) -> float:
        mass = self.xy.a.sum() - self.xy.b.sum()
        return (
            self.xy.reg_ot_cost
            - (self.xx.reg_ot_cost + self.yy.reg_ot_cost) / 2
            + self.xy.epsilon * mass**2 / 2
        )

    def grad_x(self, name: str, x: Array, y: Array) -> Array:
        # The self term moves with both of its clouds, which are the same one.
        own = self.xx.grad_x(name, x, x) + self.xx.grad_y(name, x, x)
        return self.xy.grad_x(name, x, y) - own / 2

    def grad_y(self, name: str, x: Array, y: Array) -> Array:
        own = self.yy.grad_x(name, y, y) + self.yy.grad_y(name, y, y)
        return self.xy.grad_y(name, x, y) - own / 2


def divergence(
    name: str,
    problem: Problem,
    epsilon: float,
    *,
    iterations: tuple[int, int, int],
    tau_a: float = 1.0,
    tau_b: float = 1.0,
) -> Divergence:
    """Debiased divergence after so many iterations of its terms xy, xx, yy."""
    x, y, a, b = problem.x, problem.y, problem.a, problem.b
    cost, taus = COSTS[name], {"tau_a": tau_a, "tau_b": tau_b}
    xy, *own = (int(k) for k in iterations)

    def alone(z: Array, w: Array, iterations: int) -> Solution:
        if tau_a == tau_b:
            return symmetric(cost(z, z), w, epsilon, iterations=iterations, tau=tau_a)
        return sinkhorn(cost(z, z), w, w, epsilon, iterations=iterations, **taus)

    return Divergence(
        sinkhorn(cost(x, y), a, b, epsilon, iterations=xy, **taus),
        alone(x, a, own[0]),
        alone(y, b, own[1]),
    )


# ------------------------------------------------------ differentiated by jax itself


def dense_value(
    name: str,
    iterations: int,
    x: jax.Array,
    y: jax.Array,
    a: jax.Array,
    b: jax.Array,
    epsilon: jax.Array,
) -> jax.Array:
    """reg_ot_cost of a balanced dense problem with positive weights, for autodiff."""
    cost = jnp.sum((x[:, None] - y[None]) ** 2, -1)
    if name == "Euclidean":
        cost = jnp.sqrt(cost)

    def step(pair: tuple[jax.Array, jax.Array], _: None) -> Any:
        phi, _ = pair
        lse = jax.scipy.special.logsumexp
        psi = -epsilon * lse(jnp.log(a)[:, None] + (phi[:, None] - cost) / epsilon, 0)
        phi = -epsilon * lse(jnp.log(b)[None] + (psi[None] - cost) / epsilon, 1)
        return (phi, psi), None

    start = (jnp.zeros_like(a), jnp.zeros_like(b))
    (phi, psi), _ = lax.scan(step, start, None, length=iterations)
    plan = a[:, None] * b[None] * jnp.exp((phi[:, None] + psi[None] - cost) / epsilon)
    return a @ phi + b @ psi - epsilon * (plan.sum() - a.sum() * b.sum())


# ---------------------------------------------------------------------- comparisons


def assert_close(actual: Any, desired: Any, tol: float, what: str = "") -> None:
    """Equal to `tol` times the largest entry of `desired`; infinities must agree."""
    desired = np.asarray(desired, np.float64)
    actual = np.asarray(actual, np.float64)
    finite = desired[np.isfinite(desired)]
    scale = float(np.abs(finite).max()) if finite.size else 0.0
    np.testing.assert_allclose(
        actual, desired, rtol=0, atol=tol * scale + 1e-300, err_msg=what
    )


def centred(potential: Any) -> Array:
    """A potential without its free constant."""
    potential = np.asarray(potential, np.float64)
    return potential - potential[np.isfinite(potential)].mean()
