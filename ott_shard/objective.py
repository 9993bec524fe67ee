"""What potentials are worth: value, marginal error, and what rounding adds to it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from ott_shard import terms
from ott_shard.forward import active, partial_jvp
from ott_shard.implicit import ImplicitDiff, potentials
from ott_shard.pairwise import capped, dot
from ott_shard.problem import Found, Problem


def dual_objective(
    problem: Problem, found: Found, held: Problem | None = None
) -> jax.Array:
    """The dual objective at given potentials.

    -<a, phi*(-phi)> - <b, phi*(-psi)> - eps (sum P - sum a b^T), where for tau = 1 the
    conjugate term is just <a, phi> (Sejourne et al., Sinkhorn divergences for
    unbalanced optimal transport, 2019).

    Args:
        problem: points, weights, epsilon and tau.
        found: potentials, and their c-transforms, which the iteration has computed.
        held: the same problem, in which there is no derivative: then that in b is
            written out, and takes no pass.

    Returns:
        Scalar. No pass; its gradient is one, by the rule in :mod:`tile`.
    """
    phi, psi, rows, cols = found
    a, b, epsilon = problem.a, problem.b, problem.epsilon
    fixed = problem if held is None else dataclasses.replace(problem, b=held.b)
    # The softmin carries derivatives in points and epsilon.
    known = found._replace(rows=fixed.to_rows(psi, rows))
    mass = jnp.sum(row_sums(problem, known))
    if held is not None:
        exponent = (psi - held.to_cols(phi, cols)) / held.epsilon
        mass += dot(b - held.b, jnp.exp(capped(exponent)))
    return (
        jnp.sum(a * _conjugate(phi, _inverse_rho(epsilon, problem.tau_a)))
        + jnp.sum(b * _conjugate(psi, _inverse_rho(epsilon, problem.tau_b)))
        - epsilon * (mass - a.sum() * b.sum())
    )


def row_sums(problem: Problem, found: Found) -> jax.Array:
    """P 1, [n padded]; no pass."""
    return problem.a * jnp.exp(capped((found.phi - found.rows) / problem.epsilon))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def optimum(settings: ImplicitDiff, problem: Problem, found: Found) -> jax.Array:
    """The dual objective at its optimum, as a function of the problem alone.

    Its derivative is that at fixed potentials (Danskin's theorem), without any linear
    system; its derivatives of higher order follow the potentials.
    """
    return dual_objective(problem, found)


@functools.partial(optimum.defjvp, symbolic_zeros=True)
def _optimum_jvp(settings, primals, tangents):
    problem, found = primals
    phi, psi = potentials(settings, problem, found)
    at = found._replace(phi=phi, psi=psi)
    _, slope = partial_jvp(
        lambda p: dual_objective(p, at, held=problem),
        (problem,),
        (active(tangents[0]),),
    )
    out = optimum(settings, problem, found)
    return out, jnp.zeros_like(out) if slope is None else slope


def _conjugate(phi: jax.Array, inverse_rho: jax.Array) -> jax.Array:
    """rho (1 - exp(-phi / rho)), which is phi for rho = inf."""
    t = phi * inverse_rho
    # The quotient is 0 / 0 at rho = inf, and its derivative loses digits near it.
    small = jnp.abs(t) < 1e-2
    series = phi * (1 - t / 2 * (1 - t / 3 * (1 - t / 4 * (1 - t / 5))))
    s = jnp.where(inverse_rho == 0, 1.0, inverse_rho)
    return jnp.where(small, series, -jnp.expm1(capped(-jnp.where(small, 1.0, t))) / s)


def ascent(problem: Problem, psi: jax.Array, transform: jax.Array) -> jax.Array:
    """The dual's gradient in psi per weight, for phi its best, [m padded].

    By how much the column sums are too small, for the c-transform of that phi.
    """
    sums = jnp.exp(capped((psi - transform) / problem.epsilon))
    return wanted_density(problem, psi) - sums


def marginal_error(problem: Problem, psi, transform) -> jax.Array:
    """L1 distance of the column sums from what they are to be."""
    return jnp.sum(problem.b * jnp.abs(ascent(problem, psi, transform)))


@jax.jit
def duality_gap(problem: Problem, found: Found) -> jax.Array:
    """Objective of a feasible plan F, made of P, less the dual objective; 3 passes.

    It is eps KL(F | P) + rho_a KL(F 1 | a exp(-phi / rho_a)) + the same for b, without
    terms of rho for tau = 1, where F meets the constraint: no large numbers cancel.
    Rows and columns are scaled by shifts of the potentials, which no sum underflows.
    """
    problem, found = lax.stop_gradient((problem, found))
    a, b, epsilon = problem.a, problem.b, problem.epsilon
    exact_a, exact_b = problem.tau_a == 1, problem.tau_b == 1
    both = exact_a & exact_b

    def shift(w, potential, transform, exact):
        """eps log (wanted / sums); if the rest can be laid on, only down."""
        change = jnp.where(w > 0, transform - potential, 0.0)
        return jnp.where(exact, jnp.where(both, jnp.minimum(change, 0.0), change), 0.0)

    def missing(w, sums):
        """Per weight."""
        rest = jnp.where(both, jnp.maximum(w - sums, 0.0), 0.0)
        return jnp.where(w > 0, rest / jnp.where(w > 0, w, 1.0), 0.0)

    u = shift(a, found.phi, found.rows, exact_a)
    phi = found.phi + u
    cols = problem.to_cols(phi)
    v = shift(b, found.psi, cols, exact_b)
    psi = found.psi + v
    made = Found(phi, psi, problem.to_rows(psi), cols)
    sums = row_sums(problem, made), row_sums(problem.T, made.T)
    # What is still missing is laid on as a product of rows and columns.
    s, t = missing(a, sums[0]), missing(b, sums[1])
    total = dot(a, s)
    t /= jnp.where(total > 0, total, 1.0)
    of = (), (u / epsilon, s), (v / epsilon, t)
    gap = epsilon * problem.plan_sum(terms.divergence, *found[:2], of).sum()
    gap += _marginal_gap(problem, found.phi, sums[0])
    gap += _marginal_gap(problem.T, found.psi, sums[1])
    # Nothing can be made of a point all of whose pairs are forbidden.
    stuck = jnp.any((a > 0) & jnp.isposinf(found.rows))
    stuck |= jnp.any((b > 0) & jnp.isposinf(cols))
    return jnp.where(stuck, jnp.inf, gap)


def _marginal_gap(problem: Problem, phi: jax.Array, sums: jax.Array) -> jax.Array:
    """rho_a KL(sums | a exp(-phi / rho_a)), 0 for tau_a = 1."""
    inverse_rho = _inverse_rho(problem.epsilon, problem.tau_a)
    wanted, some = _wanted_sums(problem.T, phi), sums > 0
    ratio = jnp.where(some, sums, 1.0) / jnp.where(some, wanted, 1.0)
    kl = jnp.sum(sums * jnp.log(ratio) - sums + wanted)
    relaxed = inverse_rho > 0
    return jnp.where(relaxed, kl / jnp.where(relaxed, inverse_rho, 1.0), 0.0)


def _wanted_sums(problem: Problem, psi: jax.Array) -> jax.Array:
    """b (balanced) or b exp(-psi / rho_b), [m padded]."""
    return problem.b * wanted_density(problem, psi)


def wanted_density(problem: Problem, psi: jax.Array) -> jax.Array:
    """What column sums are to be, per weight."""
    return jnp.exp(capped(-psi * _inverse_rho(problem.epsilon, problem.tau_b)))


def wanted_mass(problem: Problem, psi: jax.Array) -> jax.Array:
    """Of the plan: not that of b if unbalanced."""
    return _wanted_sums(problem, psi).sum()


def error_floor(problem: Problem, phi, psi, size) -> jax.Array:
    """The L1 error that rounding of the exponents makes, seldom more (BUILD_NOTES M7).

    The plan is exp((phi + psi - C) / eps): all three are rounded, C to a part of what
    it is computed from. Where there is no mass there is no error. Over many points the
    errors spread; a heavy one has its own in full.
    """
    share = jnp.zeros_like(size)
    for w, potential in ((problem.a, phi), (problem.b, psi)):
        size += jnp.sum(jnp.where(w > 0, w * jnp.abs(potential), 0.0)) / w.sum()
        share = jnp.maximum(share, dot(w, w) / jnp.square(w.sum()))
    rounding = jnp.finfo(phi.dtype).eps / 2
    factor = 0.75 * (1 + share)
    mass = wanted_mass(problem, psi)
    return rounding * (4 + factor * size / problem.epsilon) * mass


def _inverse_rho(epsilon, tau):
    return (1 - tau) / (epsilon * tau)
