"""Conjugate gradients without a matrix, with a status."""

import enum
import logging
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ott_shard.pairwise import dot

_log = logging.getLogger("ott_shard")


class LinearStatus(enum.IntEnum):
    """How a linear system was left."""

    CONVERGED = 0
    ROUNDED = 1
    MAX_ITERATIONS = 2
    SINGULAR = 3
    NOT_FINITE = 4

    @property
    def sentence(self) -> str:
        """What happened and what to try."""
        return _SENTENCES[self]


_SENTENCES = {
    LinearStatus.CONVERGED: "the residual is within the tolerance",
    LinearStatus.ROUNDED: (
        "rounding allows no smaller residual: (a) use float64, (b) use a larger "
        "epsilon, (c) give a ridge, or (d) raise the tolerance to accept it"
    ),
    LinearStatus.MAX_ITERATIONS: (
        "max_iterations was reached before the tolerance, and the derivative is NaN: "
        "(a) raise max_iterations, (b) use a larger epsilon, or (c) give a ridge"
    ),
    LinearStatus.SINGULAR: (
        "the system is singular up to rounding, and the derivative is NaN: the plan "
        "falls apart into clusters, whose relative potentials are undetermined: (a) "
        "give a ridge, (b) use a larger epsilon, or (c) use float64"
    ),
    LinearStatus.NOT_FINITE: (
        "a NaN or an infinity appeared: see the status of the solution, whose "
        "derivative this is"
    ),
}


class LinearSolve(NamedTuple):
    """A solution and how good it is.

    Attributes:
        x: [m].
        residual: scalar, |rhs - A x| / |rhs|, computed from x, in the norm of the
            preconditioner.
        n_iters: int scalar, applications of A, without the one for the residual.
        code: int scalar, the :class:`LinearStatus`.
    """

    x: jax.Array
    residual: jax.Array
    n_iters: jax.Array
    code: jax.Array


class _State(NamedTuple):
    x: jax.Array
    r: jax.Array
    p: jax.Array
    square: jax.Array  # r . r / diagonal
    n_iters: jax.Array
    broken: jax.Array  # p . A p is not positive: A is only up to rounding


def conjugate_gradients(
    matvec: Callable[[jax.Array], jax.Array],
    rhs: jax.Array,
    *,
    diagonal: jax.Array,
    tolerance: float,
    max_iterations: int,
) -> LinearSolve:
    """Solve A x = rhs for a symmetric positive definite A.

    Args:
        matvec: [m] to [m], v to A v.
        rhs: [m].
        diagonal: [m], positive, a diagonal like that of A: the preconditioner is its
            inverse, and |r|^2 = sum r_j^2 / diagonal_j the norm.
        tolerance: ends when |rhs - A x| <= tolerance |rhs|.
        max_iterations: at most so many applications of A, and one more.

    Returns:
        A :class:`LinearSolve`. Inside ``vmap`` all systems run until the last is done.

    References:
        Hestenes and Stiefel, Methods of conjugate gradients for solving linear systems,
        1952.
    """
    # Squares of a very large or small right-hand side would not be numbers.
    size = jnp.max(jnp.abs(rhs) / jnp.sqrt(diagonal))
    size = jnp.where(size > 0, size, 1.0)
    rhs = rhs / size

    def square(r):
        return dot(r, r / diagonal)

    goal = tolerance**2 * square(rhs)

    def unfinished(s: _State):
        return (s.square > goal) & (s.n_iters < max_iterations) & ~s.broken

    def step(s: _State):
        image = matvec(s.p)
        curvature = dot(s.p, image)
        broken = ~(curvature > 0)
        length = jnp.where(broken, 0.0, s.square / jnp.where(broken, 1.0, curvature))
        r = s.r - length * image
        new = square(r)
        p = r / diagonal + new / s.square * s.p
        return _State(s.x + length * s.p, r, p, new, s.n_iters + 1, broken)

    start = _State(
        x=jnp.zeros_like(rhs),
        r=rhs,
        p=rhs / diagonal,
        square=square(rhs),
        n_iters=jnp.int32(0),
        broken=jnp.bool_(False),
    )
    end = lax.while_loop(unfinished, step, start)
    # What was updated along the way drifts from it by rounding.
    true = square(rhs - matvec(end.x))
    total = square(rhs)
    stuck = (end.square <= goal) | end.broken
    usable = true <= jnp.finfo(rhs.dtype).eps * total
    code = jnp.where(stuck, LinearStatus.SINGULAR, LinearStatus.MAX_ITERATIONS)
    code = jnp.where(stuck & usable, LinearStatus.ROUNDED, code)
    code = jnp.where(true <= 4 * goal, LinearStatus.CONVERGED, code)
    code = jnp.where(jnp.isfinite(true), code, LinearStatus.NOT_FINITE)
    residual = jnp.sqrt(true / jnp.where(total > 0, total, 1.0))
    return LinearSolve(size * end.x, residual, end.n_iters, code)


def checked(solve: LinearSolve) -> jax.Array:
    """x, or NaN where there is no solution; one line is logged unless converged."""
    jax.debug.callback(_report, solve.code, solve.n_iters, solve.residual)
    return jnp.where(solve.code < LinearStatus.MAX_ITERATIONS, solve.x, jnp.nan)


def _report(code, n_iters, residual) -> None:
    for c, n, r in zip(*map(np.ravel, (code, n_iters, residual)), strict=True):
        if c != LinearStatus.CONVERGED:
            status = LinearStatus(int(c))
            _log.warning(
                "derivative of the potentials: %s (%s). %d iterations, residual %.3g",
                *(status.sentence, status.name, n, r),
            )
