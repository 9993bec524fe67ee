"""Sinkhorn's iteration: it knows neither mesh nor tiles, only two c-transforms.

One iteration updates g, then f, as OTT does. The c-transform of the new f, which the
next iteration starts from, also tells the column sums of the present plan,
b_j exp((psi_j - transform_j) / eps): the error costs no pass of its own.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ott_shard import _checks, implicit, initial, loops, objective, operators
from ott_shard.epsilon import Epsilon
from ott_shard.geometry import PointCloud
from ott_shard.implicit import ImplicitDiff
from ott_shard.problem import Found, Problem
from ott_shard.solution import SinkhornOutput
from ott_shard.state import Limits, Settings, Snapshot, State
from ott_shard.status import Status

Progress = Callable[[str, int, float, float], None]
Watch = Callable[[str, Snapshot], None]


# So many checks without a smaller error, at the level of rounding, are a stall.
_PATIENCE = 10


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
        max_iterations: never more than so many iterations.
        min_iterations: never fewer, unless the error is NaN.
        inner_iterations: the error is checked every so many iterations.
        init: where to start. None: f = 0. (f, g), [n] and [m]: from f. An earlier
            `SinkhornOutput` or `DualPotentials`, also of other points (the next
            mini-batch), numbers, epsilon or scale: from its f at these x, by one pass.
            One of :mod:`ott_shard.initializers`. A `Snapshot`: goes on from there.
            Constant to differentiation.
        implicit_diff: how derivatives of potentials and of the plan, and all second
            derivatives, are computed: by a linear system at the solution. None: through
            all iterations, up to where they stopped, in reverse mode with memory for
            2 sqrt(max_iterations) times the potentials; they are then those of what was
            computed, converged or not, if min_iterations is max_iterations.
        progress: called on the host at every check with ("xy", iteration, error,
            seconds per iteration, which for the first check includes compilation). The
            numbers are the same with and without; not available inside jit.
        watch: called on the host at every check with ("xy", a :class:`Snapshot`), to
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
    value, and one, with its transposes, for its gradient. O(n d / rows + m d / cols +
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
    check(implicit_diff, progress=progress, watch=watch)
    settings = Settings(
        Limits(max_iterations, min_iterations, inner_iterations), implicit_diff
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


def check(implicit_diff: Any, **callbacks: Any) -> None:
    """Refuse what is not a way to differentiate, or to report."""
    if not isinstance(implicit_diff, ImplicitDiff | None):
        raise TypeError(
            "implicit_diff must be an ott_shard.ImplicitDiff, or None to differentiate "
            f"through the iterations, got {implicit_diff!r}"
        )
    for name, callback in callbacks.items():
        _checks.optional_callable(name, callback)
        if callback and implicit_diff is None:
            raise ValueError(
                f"{name} must be None with implicit_diff=None, got {callback}: what is "
                "reported on its way cannot be differentiated through"
            )


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
    while bool(_unfinished(problem, state, threshold, settings.limits)):
        begun, before = time.perf_counter(), int(state.now.iteration)
        state = _advance(problem, state, settings)
        error, iteration = float(state.now.error), int(state.now.iteration)
        pace = (time.perf_counter() - begun) / (iteration - before)
        if progress:
            progress(term, iteration, error, pace)
        if watch:
            watch(term, state.now.unpadded(data[0]))
    return _finish(data, state, threshold, settings)


@functools.partial(jax.jit, static_argnums=3)
def _run(data, threshold, start, settings: Settings) -> SinkhornOutput:
    unrolled = settings.implicit_diff is None
    known = data if unrolled else lax.stop_gradient(data)
    problem, state = _start(known, start, settings)

    def unfinished(s: State):
        return _unfinished(problem, s, threshold, settings.limits)

    def advance(s: State):
        return _advance(problem, s, settings)

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
    problem, limits = _pose(data), settings.limits
    if isinstance(start, Snapshot):
        now = start._replace(errors=start.history(limits.checks))
        return problem, _state_at(problem, now, limits)
    phi = jnp.zeros_like(problem.a) if start is None else start
    psi = jnp.zeros_like(problem.b)
    if settings.symmetric and start is not None:
        psi = problem.pairs.T.mirror(phi)
    unknown = jnp.full((), jnp.inf, psi.dtype)
    now = Snapshot(
        phi,
        psi,
        iteration=jnp.int32(0),
        epsilon=unknown,
        error=unknown,
        errors=jnp.full(limits.checks, -1, psi.dtype),
        floor=unknown,
        lowest=unknown,
        stale=jnp.int32(0),
    )
    return problem, _state_at(problem, now, limits)


def _state_at(problem: Problem, now: Snapshot, limits: Limits) -> State:
    """With what follows from it."""
    before = jnp.maximum(now.iteration - 1, 0)
    return State(
        now,
        transform=_at(problem, before, limits).to_cols(now.phi),
        size=operators.cost_size(problem.pairs, problem.a, problem.b),
    )


def _at(problem: Problem, iteration: jax.Array, limits: Limits) -> Problem:
    """The problem at the epsilon of an iteration; the last is always at the target."""
    scheduled = problem.schedule.at(iteration)
    last = iteration >= limits.max_iterations - 1
    epsilon = jnp.where(last, problem.epsilon, scheduled)
    return dataclasses.replace(problem, schedule=Epsilon.constant(epsilon))


def _unfinished(
    problem: Problem, state: State, threshold: jax.Array, limits: Limits
) -> jax.Array:
    iteration, error = state.now.iteration, state.now.error
    on_the_way = problem.schedule.at(iteration - 1) > problem.epsilon
    wanted = ~(_reached(state, threshold) | _stalled(state))
    wanted |= (iteration < limits.min_iterations) | on_the_way
    return (iteration < limits.max_iterations) & wanted & ~jnp.isnan(error)


def _reached(state: State, threshold: jax.Array) -> jax.Array:
    """The error is within the threshold whatever rounding adds to it."""
    return state.now.error + state.now.floor <= threshold


def _stalled(state: State) -> jax.Array:
    """Rounding is what keeps the error from falling.

    Without rounding it never rises (it is an L1 distance between marginals of
    alternating projections), but at a small epsilon it may rest for long.
    """
    rests = (state.now.stale >= _PATIENCE) & (state.now.lowest <= 20 * state.now.floor)
    return rests | (state.now.lowest <= state.now.floor)


@functools.partial(jax.jit, static_argnums=2)
def _advance(problem: Problem, state: State, settings: Settings) -> State:
    """Iterate up to the next check and record the error there."""
    limits = settings.limits
    step = _symmetric_step if settings.symmetric else _step
    inner = jnp.minimum(
        limits.inner_iterations, limits.max_iterations - state.now.iteration
    )

    def body(k, potentials):
        return step(_at(problem, state.now.iteration + k, limits), *potentials)

    begun = state.now.phi, state.now.psi, state.transform
    if settings.implicit_diff is None:
        most = limits.inner_iterations
        phi, psi, transform = loops.repeat(body, begun, inner, most)
    else:
        phi, psi, transform = lax.fori_loop(0, inner, body, begun)
    iteration = state.now.iteration + inner
    at = _at(problem, iteration - 1, limits)
    error = objective.marginal_error(at, psi, transform)
    check = (iteration - 1) // limits.inner_iterations
    at_target = at.epsilon <= problem.epsilon
    better = ~at_target | (error < state.now.lowest)
    lowest = jnp.fmin(error, state.now.lowest)
    now = Snapshot(
        phi,
        psi,
        iteration,
        at.epsilon,
        error,
        errors=state.now.errors.at[check].set(error),
        floor=objective.error_floor(at, phi, psi, state.size),
        lowest=jnp.where(at_target, lowest, state.now.lowest),
        stale=jnp.where(better, 0, state.now.stale + 1),
    )
    return State(now, transform, state.size)


def _step(problem: Problem, _, psi, transform):
    psi = problem.T.settled(problem.tau_b * transform)
    phi = problem.settled(problem.tau_a * problem.to_rows(psi))
    return phi, psi, problem.to_cols(phi)


def _symmetric_step(problem: Problem, _, psi, transform):
    psi = problem.T.settled((psi + problem.tau_b * transform) / 2)
    phi = problem.pairs.mirror(psi)
    return phi, psi, problem.to_cols(phi)


@functools.partial(jax.jit, static_argnums=3)
def _finish(data, state: State, threshold, settings: Settings) -> SinkhornOutput:
    problem, how = _pose(data), settings.implicit_diff
    if settings.symmetric:
        rows = problem.pairs.mirror(state.transform)
    else:
        rows = state.now.phi / problem.tau_a  # see _step
    cols = problem.T.settled(state.transform)
    found = Found(state.now.phi, state.now.psi, rows, cols)
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
    code = jnp.where(_stalled(state), Status.STALLED, Status.MAX_ITERATIONS)
    code = jnp.where(_reached(state, threshold), Status.CONVERGED, code)
    code = jnp.where(finite, code, Status.NOT_FINITE)
    return jnp.where(possible, code, Status.INVALID_INPUT)
