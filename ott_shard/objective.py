"""What potentials are worth: value, marginal error, and what rounding adds to it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ott_shard.forward import active, partial_jvp
from ott_shard.implicit import ImplicitDiff, capped, potentials
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
    # P_ij / a_i summed over j. The softmin carries derivatives in points and epsilon.
    row_sums = jnp.exp(capped((phi - fixed.to_rows(psi, rows)) / epsilon))
    mass = jnp.sum(a * row_sums)
    if held is not None:
        exponent = (psi - held.to_cols(phi, cols)) / held.epsilon
        mass += jnp.vdot(b - held.b, jnp.exp(capped(exponent)))
    return (
        jnp.sum(a * _conjugate(phi, _inverse_rho(epsilon, problem.tau_a)))
        + jnp.sum(b * _conjugate(psi, _inverse_rho(epsilon, problem.tau_b)))
        - epsilon * (mass - a.sum() * b.sum())
    )


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


def marginal_error(problem: Problem, psi, transform) -> jax.Array:
    """L1 distance of the column sums from what they are to be."""
    sums = problem.b * jnp.exp(capped((psi - transform) / problem.epsilon))
    return jnp.sum(jnp.abs(sums - _wanted_sums(problem, psi)))


def _wanted_sums(problem: Problem, psi: jax.Array) -> jax.Array:
    """b (balanced) or b exp(-psi / rho_b), [m padded]."""
    inverse_rho = _inverse_rho(problem.epsilon, problem.tau_b)
    return problem.b * jnp.exp(capped(-psi * inverse_rho))


def error_floor(problem: Problem, phi, psi, size) -> jax.Array:
    """The L1 error that rounding of the exponents makes, seldom more (BUILD_NOTES M7).

    The plan is exp((phi + psi - C) / eps): all three are rounded, C to a part of what
    it is computed from. Where there is no mass there is no error. Over many points the
    errors spread; a heavy one has its own in full.
    """
    share = jnp.zeros_like(size)
    for w, potential in ((problem.a, phi), (problem.b, psi)):
        size += jnp.sum(jnp.where(w > 0, w * jnp.abs(potential), 0.0)) / w.sum()
        share = jnp.maximum(share, jnp.vdot(w, w) / jnp.square(w.sum()))
    rounding = jnp.finfo(phi.dtype).eps / 2
    factor = 0.75 * (1 + share)
    mass = _wanted_sums(problem, psi).sum()  # of the plan: not b's if unbalanced
    return rounding * (4 + factor * size / problem.epsilon) * mass


def _inverse_rho(epsilon, tau):
    return (1 - tau) / (epsilon * tau)
