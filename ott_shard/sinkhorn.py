"""Solve for potentials: the arguments, the loop over iterations, what is returned."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ott_shard import _checks, implicit, initial, iteration, lbfgs, loops, objective
from ott_shard.geometry import PointCloud
from ott_shard.implicit import ImplicitDiff
from ott_shard.lbfgs import Acceleration
from ott_shard.problem import Found, Problem
from ott_shard.solution import SinkhornOutput
from ott_shard.state import Limits, Settings, Snapshot, State
from ott_shard.status import Status

Progress = Callable[[str, int, float, float], None]
Watch = Callable[[str, Snapshot], None]


def solve(
    geom: PointCloud,
    a: ArrayLike | None = None,
    b: ArrayLike | None = None,
    *,
    tau_a: ArrayLike = 1.0,
    tau_b: ArrayLike = 1.0,
    threshold: ArrayLike = 1e-3,
    max_iterations: int = 2000,
    min_iterations: int = 0,
    inner_iterations: int = 10,
    init: Any = None,
    acceleration: Acceleration | None = lbfgs.DEFAULT,
    implicit_diff: ImplicitDiff | None = implicit.DEFAULT,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> SinkhornOutput:
    """Entropic optimal transport between the two clouds of a geometry.

    Minimises <C, P> + eps KL(P | a b^T) + rho_a KL(P 1 | a) + rho_b KL(P^T 1 | b) with
    rho = eps tau / (1 - tau); for tau = 1 the marginal is a constraint.

    Args:
        geom: the clouds, their cost, epsilon and mesh.
        a: [n] weights of x, non-negative. None: uniform, 1 / n.
        b: [m] weights of y, non-negative. None: uniform, 1 / m.
        tau_a: scalar in (0, 1], may be traced.
        tau_b: scalar in (0, 1], may be traced.
        threshold: converged when the L1 error of the marginal, and what rounding adds
            to it, is at most this. Scalar, in units of mass, may be traced.
        max_iterations: never more than so many iterations; the last is at the target
            epsilon, whatever came before.
        min_iterations: never fewer, unless the error is NaN.
        inner_iterations: the error is recorded every so many iterations, and reported.
        init: where to start. None: f = 0. (f, g), [n] and [m]: from f. An earlier
            `SinkhornOutput` or `DualPotentials`, also of other points (the next
            mini-batch), numbers, epsilon or scale: from its f at these x, by one pass.
            One of :mod:`ott_shard.initializers`. A `Snapshot`: goes on from there.
            Constant to differentiation.
        acceleration: how iterations are saved, see :class:`Acceleration`; the constant
            in the potentials, free at tau_a = tau_b = 1, is then such that the means of
            f - epsilon log a and g - epsilon log b are equal. None: all are Sinkhorn's
            own, at the epsilon that is given, as with implicit_diff=None.
        implicit_diff: how derivatives of potentials and of the plan, and all second
            derivatives, are computed: by a linear system at the solution. None: through
            all iterations, up to where they stopped, in reverse mode with memory for
            2 sqrt(max_iterations) times the potentials; they are then those of what was
            computed, converged or not, if min_iterations is max_iterations.
        progress: called on the host at every record with ("xy", iteration, error,
            seconds per iteration, which for the first check includes compilation). The
            numbers are the same with and without; not available inside jit.
        watch: called on the host at every record with ("xy", a :class:`Snapshot`), to
            keep one; what it raises ends the run. Not available inside jit.

    Returns:
        A :class:`SinkhornOutput`, differentiable with respect to points, weights,
        epsilon, tau and parameters of the cost. The gradient of ``reg_ot_cost`` is that
        at fixed potentials (Danskin's theorem); in a it is phi = f - epsilon log a and
        in b likewise, for tau = 1 and masses of 1.

    Raises:
        ValueError, TypeError: for bad arguments, before anything is compiled.

    Cost: 2 passes over the n m pairs per iteration, each with two all-reduces, one to
    begin; one more for an epsilon that is a multiple of a statistic; none for the
    value, and one, with its transposes, for its gradient. With 16 tiles or more on a
    device, passes of iterations are shifted by where the last one ended and take about
    half the time (BUILD_NOTES M25), unless that is more than 40 epsilon away.
    Acceleration adds sums of at most [8, 8] numbers. O(n d / rows + m (d + 16) / cols +
    tile) memory on a device, forward and backward.

    References:
        Cuturi, Sinkhorn distances, 2013; Chizat et al., Scaling algorithms for
        unbalanced optimal transport problems, 2018, for tau < 1.

    Example:
        >>> import jax.numpy as jnp, ott_shard as otts
        >>> x = jnp.linspace(0, 1, 5)[:, None]
        >>> out = otts.solve(otts.PointCloud(x, x + 1, epsilon=0.1))
        >>> bool(out.converged), round(float(out.reg_ot_cost), 3)
        (True, 1.095)
    """
    if not isinstance(geom, PointCloud):
        raise TypeError(
            f"geom must be a PointCloud, got {type(geom).__name__}: "
            "solve(ott_shard.PointCloud(x, y), ...)"
        )
    limits = Limits(max_iterations, min_iterations, inner_iterations)
    settings = settings_of(
        limits, implicit_diff, acceleration, progress=progress, watch=watch
    )
    a, b = geom.weights(a, 0), geom.weights(b, 1)
    tau_a = _checks.scalar("tau_a", tau_a, up_to=1.0, dtype=geom.dtype)
    tau_b = _checks.scalar("tau_b", tau_b, up_to=1.0, dtype=geom.dtype)
    _checks.equal_mass(a, b, tau_a, tau_b)
    data = geom.resolve(a, b), a, b, tau_a, tau_b
    return run(
        data,
        settings,
        start=initial.potential(init, data),
        threshold=_checks.scalar("threshold", threshold, dtype=geom.dtype),
        term="xy",
        on_check=(progress, watch),
    )


def settings_of(
    limits: Limits, implicit_diff: Any, acceleration: Any, **callbacks: Any
) -> Settings:
    """Refuse what is not a way to differentiate, to save iterations, or to report."""
    if not isinstance(implicit_diff, ImplicitDiff | None):
        raise TypeError(
            "implicit_diff must be an ott_shard.ImplicitDiff, or None to differentiate "
            f"through the iterations, got {implicit_diff!r}"
        )
    if not isinstance(acceleration, Acceleration | None):
        raise TypeError(
            "acceleration must be an ott_shard.Acceleration, or None for Sinkhorn's "
            f"iterations as they are, got {acceleration!r}"
        )
    for name, callback in callbacks.items():
        _checks.optional_callable(name, callback)
        if callback and implicit_diff is None:
            raise ValueError(
                f"{name} must be None with implicit_diff=None, got {callback}: what is "
                "reported on its way cannot be differentiated through"
            )
    return Settings(limits, implicit_diff, implicit_diff and acceleration)


def run(
    data: tuple[PointCloud, *tuple[jax.Array, ...]],
    settings: Settings,
    *,
    threshold: jax.Array,
    start: jax.Array | Snapshot | None = None,
    term: str = "",
    on_check: tuple[Progress | None, Watch | None] = (None, None),
) -> SinkhornOutput:
    """Solve for checked, placed (resolved geom, a, b, tau_a, tau_b), from phi."""
    progress, watch = on_check
    if not (progress or watch):
        return _run(data, threshold, start, settings)
    problem, state = _start(lax.stop_gradient(data), start, settings)
    if _checks.concrete(state.now.error) is None:
        raise TypeError(
            f"{'progress' if progress else 'watch'} must be None inside jit and vmap, "
            f"got {progress or watch}: leave it out"
        )
    while bool(_unfinished(problem, state, threshold, settings)):
        begun, before = time.perf_counter(), int(state.now.iteration)
        state = _advance(problem, state, threshold, settings)
        error, count = float(state.now.error), int(state.now.iteration)
        pace = (time.perf_counter() - begun) / (count - before)
        if progress:
            progress(term, count, error, pace)
        if watch:
            watch(term, state.now.unpadded(data[0]))
    return _finish(data, state, threshold, settings)


@functools.partial(jax.jit, static_argnums=3)
def _run(data, threshold, start, settings: Settings) -> SinkhornOutput:
    unrolled = settings.implicit_diff is None
    known = data if unrolled else lax.stop_gradient(data)
    problem, state = _start(known, start, settings)

    def unfinished(s: State):
        return iteration.unfinished(problem, s, threshold, settings)

    def advance(s: State):
        return iteration.advance(problem, s, threshold, settings)

    if unrolled:
        state = loops.repeat(
            lambda _, s: lax.cond(unfinished(s), advance, lambda s: s, s),
            state,
            settings.limits.checks,
            settings.limits.checks,
        )
    else:
        state = lax.while_loop(unfinished, advance, state)
    return _finish(data, state, threshold, settings)


def _pose(data) -> Problem:
    geom, a, b, tau_a, tau_b = data
    return Problem(geom.pairs, a, b, geom.schedule, tau_a, tau_b)


@functools.partial(jax.jit, static_argnums=2)
def _start(data, start, settings: Settings) -> tuple[Problem, State]:
    problem = _pose(data)
    if isinstance(start, Snapshot):
        return problem, iteration.proceed(problem, start, settings)
    return problem, iteration.start(problem, start, settings)


_unfinished = jax.jit(iteration.unfinished, static_argnums=3)
_advance = jax.jit(iteration.advance, static_argnums=3)


@functools.partial(jax.jit, static_argnums=3)
def _finish(data, state: State, threshold, settings: Settings) -> SinkhornOutput:
    problem, how = _pose(data), settings.implicit_diff
    if settings.symmetric:
        rows = problem.pairs.mirror(state.transform)
    else:
        rows = state.now.phi / problem.tau_a  # see iteration.py
    cols = problem.T.settled(state.transform)
    found = Found(state.now.phi, state.now.psi, rows, cols)
    if settings.acceleration:  # whose constant depends on each rounding
        found = found.shifted(iteration.off_centre(problem, found.phi, found.psi))
    if how is None:
        value = objective.dual_objective(problem, found)
    else:
        found = lax.stop_gradient(found)
        value = objective.optimum(how, problem, found)
    return SinkhornOutput(
        geom=data[0],
        problem=problem,
        found=found,
        implicit_diff=how,
        reg_ot_cost=value,
        marginal_error=state.now.error,
        error_floor=state.now.floor,
        errors=state.now.errors,
        n_iters=state.now.iteration,
        code=_status(problem, state, value, threshold),
    )


def _status(problem: Problem, state: State, value, threshold) -> jax.Array:
    a, b = problem.a, problem.b
    taus = jnp.stack([problem.tau_a, problem.tau_b])
    # Traced weights were summed on devices, and by whatever made them.
    slack = 16 * max(_checks.mass_slack(a), _checks.mass_slack(b)) * a.sum()
    possible = (
        (problem.epsilon > 0)
        & (problem.pairs.scale > 0)
        & jnp.all((taus > 0) & (taus <= 1))
        & ~(jnp.any(a < 0) | jnp.any(b < 0))
        & (jnp.any(taus < 1) | (jnp.abs(a.sum() - b.sum()) <= slack))
    )
    potentials = state.now.phi.sum() + state.now.psi.sum()
    finite = jnp.isfinite(value + state.now.error + potentials)
    code = jnp.where(iteration.stalled(state), Status.STALLED, Status.MAX_ITERATIONS)
    code = jnp.where(iteration.reached(state, threshold), Status.CONVERGED, code)
    code = jnp.where(finite, code, Status.NOT_FINITE)
    return jnp.where(possible, code, Status.INVALID_INPUT)
