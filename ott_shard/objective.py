"""What potentials are worth: value, marginal error, and what rounding adds to it."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ott_shard.solution import Problem


def dual_objective(
    problem: Problem,
    potentials: tuple[jax.Array, jax.Array],
    transforms: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """The dual objective at fixed potentials, whose derivative is the envelope's.

    -<a, phi*(-phi)> - <b, phi*(-psi)> - eps (sum P - sum a b^T), where for tau = 1 the
    conjugate term is just <a, phi> (Sejourne et al., Sinkhorn divergences for
    unbalanced optimal transport, 2019).

    Args:
        problem: differentiable: points, weights, epsilon and tau.
        potentials: phi [n padded] and psi [m padded], without their weights.
        transforms: the c-transforms of psi [n padded] and of phi [m padded], which
            the iteration has computed.

    Returns:
        Scalar. No pass; its gradient is one, by the rule in :mod:`tile`.
    """
    (phi, psi), (rows, cols) = potentials, transforms
    a, b, epsilon = problem.a, problem.b, problem.epsilon
    fixed = dataclasses.replace(problem, b=lax.stop_gradient(b))
    # P_ij / a_i summed over j. The softmin carries the derivative in points and
    # epsilon; that in the weights is written out, so that it exists at weight 0.
    row_sums = jnp.exp(_capped((phi - fixed.to_rows(psi, known=rows)) / epsilon))
    col_sums = jnp.exp(_capped((psi - cols) / epsilon))
    mass = jnp.sum(a * row_sums) + _derivative_only(b, col_sums)
    return (
        jnp.sum(a * _conjugate(phi, _inverse_rho(epsilon, problem.tau_a)))
        + jnp.sum(b * _conjugate(psi, _inverse_rho(epsilon, problem.tau_b)))
        - epsilon * (mass - a.sum() * b.sum())
    )


def _derivative_only(w: jax.Array, slope: Any) -> jax.Array:
    """0, with derivative `slope` in w."""
    return jnp.vdot(w - lax.stop_gradient(w), lax.stop_gradient(slope))


def _conjugate(phi: jax.Array, inverse_rho: jax.Array) -> jax.Array:
    """rho (1 - exp(-phi / rho)), which is phi for rho = inf."""
    t = phi * inverse_rho
    # The quotient is 0 / 0 at rho = inf, and its derivative loses digits near it.
    small = jnp.abs(t) < 1e-2
    series = phi * (1 - t / 2 * (1 - t / 3 * (1 - t / 4 * (1 - t / 5))))
    s = jnp.where(inverse_rho == 0, 1.0, inverse_rho)
    return jnp.where(small, series, -jnp.expm1(_capped(-jnp.where(small, 1.0, t))) / s)


def marginal_error(problem: Problem, psi, transform) -> jax.Array:
    """L1 distance of the column sums from what they are to be."""
    sums = problem.b * jnp.exp(_capped((psi - transform) / problem.epsilon))
    return jnp.sum(jnp.abs(sums - _wanted_sums(problem, psi)))


def _wanted_sums(problem: Problem, psi: jax.Array) -> jax.Array:
    """b (balanced) or b exp(-psi / rho_b), [m padded]."""
    inverse_rho = _inverse_rho(problem.epsilon, problem.tau_b)
    return problem.b * jnp.exp(_capped(-psi * inverse_rho))


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


def _capped(t: jax.Array) -> jax.Array:
    """`t` where its exponential is finite: 0 mass may stand far from all others."""
    return jnp.minimum(t, 0.9 * math.log(jnp.finfo(t.dtype).max))


def _inverse_rho(epsilon, tau):
    return (1 - tau) / (epsilon * tau)
