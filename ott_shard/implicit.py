"""Derivatives of the potentials: the fixed point of the iteration, differentiated.

At a solution phi = tau_a R(psi) and psi = tau_b C(phi), with the c-transforms R and C.
Their derivatives are averages over the plan, R' = -W with W = P / P 1 and C' = -V with
V = P^T / P^T 1, so that tangents of the data, which move the right-hand sides by s and
t at fixed potentials, move the potentials by

    dphi + tau_a W dpsi = s,    dpsi + tau_b V dphi = t.

dphi is eliminated (Schur complement). With the column sums c of the plan on the left,
c (1 - tau_a tau_b V W) is symmetric, positive semi-definite, and its diagonal is like
c. For tau = 1 it has one null vector, the constant, since potentials are defined up to
one; adding c c^T / sum c removes it, and fixes that constant by <c, dpsi> = 0.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ott_shard import _checks
from ott_shard.forward import active, partial_jvp
from ott_shard.linear_solve import LinearSolve, checked, conjugate_gradients
from ott_shard.pairwise import capped, dot
from ott_shard.problem import Found, Problem


@dataclasses.dataclass(frozen=True)
class ImplicitDiff:
    """Differentiate the equations that potentials solve, not the way to them.

    Each derivative, forward or reverse, is one symmetric linear system, solved by
    conjugate gradients, preconditioned by the column sums of the plan. Each of their
    iterations takes two passes over the pairs; they need about the square root of the
    iterations that the solver took. If they fail the derivative is NaN, and in any case
    but convergence one line of the logger "ott_shard" says why.

    Attributes:
        tolerance: on |residual| / |right-hand side|, weighted by the column sums. None:
            1e-5 in float32, 1e-10 in float64.
        max_iterations: of conjugate gradients.
        ridge: added to the eigenvalues of the system, which lie between 0 and 1: what
            belongs to an eigenvalue t is multiplied by t / (t + ridge). For problems
            that fall apart, at a small epsilon, into clusters whose relative potentials
            are undetermined, with eigenvalues of about 0.

    Raises:
        ValueError, TypeError: if one is out of range.

    Example:
        >>> import jax, jax.numpy as jnp, ott_shard as otts
        >>> x = jnp.linspace(0, 1, 5)[:, None]
        >>> def spread(x):  # of the potential, any function of a solution
        ...     geom = otts.PointCloud(x, x + 1, epsilon=0.1)
        ...     cg = otts.ImplicitDiff(tolerance=1e-4)
        ...     return jnp.var(otts.solve(geom, implicit_diff=cg).f)
        >>> jax.grad(spread)(x).shape
        (5, 1)
    """

    tolerance: float | None = None
    max_iterations: int = 1000
    ridge: float = 0.0

    def __post_init__(self):
        tolerance = 0.5 if self.tolerance is None else self.tolerance
        _checks.number("tolerance", tolerance, lambda t: 0 < t < 1, "between 0 and 1")
        _checks.number("ridge", self.ridge, lambda r: 0 <= r < math.inf, "at least 0")
        _checks.integer("max_iterations", self.max_iterations)


# The default of every solver.
DEFAULT = ImplicitDiff()


@functools.partial(jax.jit, static_argnums=0)
def potentials(
    settings: ImplicitDiff, problem: Problem, found: Found
) -> tuple[jax.Array, jax.Array]:
    """(phi, psi) as differentiable functions of the problem, to any order.

    Args:
        settings: of the linear solver.
        problem: what `found` solves, in which is differentiated.
        found: constants; nothing is computed from them but derivatives.

    Returns:
        phi [n padded] and psi [m padded].
    """
    return _potentials(settings, problem, found)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _potentials(settings, problem, found):
    return found.phi, found.psi


@functools.partial(_potentials.defjvp, symbolic_zeros=True)
def _potentials_jvp(settings, primals, tangents):
    problem, found = primals
    phi, psi = _potentials(settings, problem, found)

    def updates(p: Problem):
        rows, cols = p.to_rows(psi, found.rows), p.to_cols(phi, found.cols)
        return p.tau_a * rows, p.tau_b * cols

    _, moved = partial_jvp(updates, (problem,), (active(tangents[0]),))
    if moved is None:
        return (phi, psi), (jnp.zeros_like(phi), jnp.zeros_like(psi))
    system = System(settings, problem, found, phi, psi)
    return (phi, psi), system.solve(*moved)


@functools.partial(jax.jit, static_argnums=0)
def linear_solve(
    settings: ImplicitDiff, problem: Problem, found: Found, v: jax.Array
) -> LinearSolve:
    """The solution for the right-hand side c v, [m padded], and its status."""
    system = System(settings, problem, found, found.phi, found.psi)
    rhs = jnp.where(system.support, system.sums * v, 0.0)
    return system.invert(system.matvec, rhs)


class System:
    """The linear system of the module's docstring, at one solution."""

    def __init__(
        self,
        settings: ImplicitDiff,
        problem: Problem,
        found: Found,
        phi: jax.Array,
        psi: jax.Array,
    ):
        self.settings, self.problem = settings, problem
        self.phi, self.psi = phi, psi
        # Functions of the problem too, for derivatives of higher order.
        self.rows = problem.to_rows(psi, found.rows)
        self.cols = problem.to_cols(phi, found.cols)
        exponent = (psi - self.cols) / problem.epsilon
        self.sums = problem.b * jnp.exp(capped(exponent))
        self.support = ~(self.sums == 0)  # a NaN is to be seen

    def to_rows(self, v: jax.Array) -> jax.Array:
        """W v, [m padded] to [n padded]; one pass."""
        return self.problem.average(self.psi, self.rows, v)

    def to_cols(self, u: jax.Array) -> jax.Array:
        """V u, [n padded] to [m padded]; one pass."""
        return self.problem.T.average(self.phi, self.cols, u)

    def matvec(self, v: jax.Array) -> jax.Array:
        """The symmetric matrix times v, [m padded]; two passes."""
        p, sums = self.problem, self.sums
        decay = p.tau_a * p.tau_b
        own = (1 + self.settings.ridge) * v
        constant = jnp.where(decay < 1, 0.0, dot(sums, v) / sums.sum())
        image = sums * (own - decay * self.to_cols(self.to_rows(v)) + constant)
        # A column of weight 0 is in no equation but its own, see `solve`.
        return jnp.where(self.support, image, v)

    def invert(self, matvec: Any, rhs: jax.Array) -> LinearSolve:
        """Conjugate gradients on `matvec`, which is `self.matvec`."""
        dtype = rhs.dtype
        tolerance = self.settings.tolerance or (1e-10 if dtype.itemsize > 4 else 1e-5)
        return conjugate_gradients(
            matvec,
            rhs,
            diagonal=jnp.where(self.support, self.sums, 1.0),
            tolerance=tolerance,
            max_iterations=self.settings.max_iterations,
        )

    def solve(self, s: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(dphi, dpsi) for the tangents (s, t), linear in them."""
        p = self.problem
        rhs = jnp.where(self.support, self.sums * (t - p.tau_b * self.to_cols(s)), 0.0)
        dpsi = lax.custom_linear_solve(
            self.matvec,
            rhs,
            lambda matvec, rhs: checked(self.invert(matvec, rhs)),
            symmetric=True,
        )
        dphi = s - p.tau_a * self.to_rows(dpsi)
        return dphi, jnp.where(self.support, dpsi, t - p.tau_b * self.to_cols(dphi))
