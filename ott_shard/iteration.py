"""One iteration after the other: it knows neither mesh nor tiles, only c-transforms.

One iteration makes a new g, then f of it. The c-transform of that f, which the next
iteration starts from, also tells the column sums of the present plan,
b_j exp((psi_j - transform_j) / eps): the error, and the gradient of the dual in g,
cost no pass of their own.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from ott_shard import lbfgs, loops, objective, operators
from ott_shard.epsilon import Epsilon
from ott_shard.lbfgs import Memory
from ott_shard.pairwise import dot
from ott_shard.problem import Problem
from ott_shard.state import Settings, Snapshot, State

# So many iterations without a smaller error, at the level of rounding, are a stall.
_PATIENCE = 100
# So many, and the steps are Sinkhorn's own.
_DOUBT = 50
# In units of epsilon: a step by which rounding does not hide what it has done.
_LONGEST = 1e4
# Of the size of the costs: where annealing starts.
_WARM = 0.3
# So many iterations there should be for each epsilon on the way.
_STAGE = 10
# Of the mass: the error that is enough for an epsilon on the way.
_ROUGH = 0.05


def start(problem: Problem, phi: jax.Array | None, settings: Settings) -> State:
    """Before the first iteration, which starts from phi, [n padded]; None: from 0."""
    psi = jnp.zeros_like(problem.b)
    if settings.symmetric and phi is not None:
        psi = problem.pairs.T.mirror(phi)
    size = operators.cost_size(problem.pairs, problem.a, problem.b)
    epsilon, how = problem.epsilon, settings.acceleration
    if phi is None and how and how.decay < 1:
        # For tau < 1 potentials are of the size of rho: 0 is a better start.
        warm = jnp.where(problem.balanced, _WARM * size, 0.0)
        stages = settings.limits.max_iterations // _STAGE
        most = epsilon * jnp.power(jnp.ones_like(warm) / how.decay, stages)
        epsilon = jnp.fmax(epsilon, jnp.fmin(warm, most))
    unknown = jnp.full((), jnp.inf, psi.dtype)
    now = Snapshot(
        jnp.zeros_like(problem.a) if phi is None else phi,
        psi,
        iteration=jnp.int32(0),
        epsilon=epsilon,
        error=unknown,
        errors=jnp.full(settings.limits.checks, -1, psi.dtype),
        floor=jnp.zeros_like(unknown),
        lowest=unknown,
        stale=jnp.int32(0),
        **Memory.empty(psi, how.memory if how else 0)._asdict(),
    )
    now = now._replace(epsilon=_next_epsilon(problem, now, settings))
    return at(problem, now, size)


def proceed(problem: Problem, now: Snapshot, settings: Settings) -> State:
    """Go on from a snapshot, also of a run with other settings."""
    now = now._replace(errors=now.history(settings.limits.checks))
    memory = settings.acceleration.memory if settings.acceleration else 0
    if now.steps.shape[1] != memory:
        now = now._replace(**Memory.empty(now.psi, memory)._asdict())
    return at(problem, now, operators.cost_size(problem.pairs, problem.a, problem.b))


def at(problem: Problem, now: Snapshot, size: jax.Array) -> State:
    """With what follows from it, laid out as iterations leave it."""
    now = now.split(problem.pairs)
    return State(now, _with(problem, now.epsilon).to_cols(now.phi), size)


def _with(problem: Problem, epsilon: jax.Array) -> Problem:
    return dataclasses.replace(problem, schedule=Epsilon.constant(epsilon))


def unfinished(
    problem: Problem, state: State, threshold: jax.Array, settings: Settings
) -> jax.Array:
    """Whether there is to be another iteration."""
    now, limits = state.now, settings.limits
    wanted = ~(reached(state, threshold) | stalled(state))
    wanted |= (now.iteration < limits.min_iterations) | (now.epsilon > problem.epsilon)
    return (now.iteration < limits.max_iterations) & wanted & ~jnp.isnan(now.error)


def reached(state: State, threshold: jax.Array) -> jax.Array:
    """The error is within the threshold whatever rounding adds to it."""
    return state.now.error + state.now.floor <= threshold


def stalled(state: State) -> jax.Array:
    """Rounding is what keeps the error from falling.

    Without rounding it never rises in Sinkhorn's steps (it is an L1 distance between
    marginals of alternating projections), but at a small epsilon it may rest for long.
    """
    rests = (state.now.stale >= _PATIENCE) & (state.now.lowest <= 20 * state.now.floor)
    return rests | (state.now.error <= state.now.floor)


def advance(
    problem: Problem, state: State, threshold: jax.Array, settings: Settings
) -> State:
    """Iterate up to the next check, or to the end, and record the error there."""
    before, limits = state.now, settings.limits
    most = limits.inner_iterations
    end = jnp.minimum(before.iteration + most, limits.max_iterations)

    def going_on(s: State):
        wanted = unfinished(problem, s, threshold, settings)
        return wanted & (s.now.iteration < end)

    def iterate(s: State):
        return _iterate(problem, s, settings)

    if settings.implicit_diff is None:
        count = end - before.iteration
        state = loops.repeat(lambda _, s: iterate(s), state, count, most)
    else:
        state = lax.while_loop(going_on, iterate, state)
    now = state.now
    check = (now.iteration - 1) // limits.inner_iterations
    return state._replace(now=now._replace(errors=now.errors.at[check].set(now.error)))


def _iterate(problem: Problem, state: State, settings: Settings) -> State:
    before = state.now
    epsilon = _next_epsilon(problem, before, settings)
    local = _with(problem, epsilon)
    if settings.symmetric:
        now, transform = _symmetric_step(local, state)
    elif settings.acceleration:
        now, transform = _learning_step(local, state)
    else:
        now, transform = _step(local, state)
    phi, psi, seen = lax.stop_gradient((now.phi, now.psi, transform))
    error = objective.marginal_error(local, psi, seen)
    lowest = jnp.where(epsilon == before.epsilon, before.lowest, jnp.inf)
    now = now._replace(
        iteration=before.iteration + 1,
        epsilon=epsilon,
        error=error,
        floor=objective.error_floor(local, phi, psi, state.size),
        lowest=jnp.fmin(error, lowest),
        stale=jnp.where(error < lowest, 0, before.stale + 1),
    )
    return State(now, transform, state.size)


def _next_epsilon(problem: Problem, now: Snapshot, settings: Settings) -> jax.Array:
    """By the schedule, or by the error; at the last iteration always the target.

    An error that rounding keeps large, or that only falls slowly, is not waited for.
    """
    target, schedule = problem.epsilon, problem.schedule
    epsilon, how = schedule.at(now.iteration), settings.acceleration
    if how and how.decay < 1:
        enough = _ROUGH * objective.wanted_mass(problem, now.psi)
        ready = (now.error <= enough) | (now.stale >= _PATIENCE)
        lower = jnp.maximum(how.decay * now.epsilon, target)
        lower = jnp.where(ready, lower, now.epsilon)
        epsilon = jnp.where(schedule.init > target, epsilon, lower)
    last = now.iteration >= settings.limits.max_iterations - 1
    return jnp.where(last, target, epsilon)


def _step(problem: Problem, state: State) -> tuple[Snapshot, jax.Array]:
    """Sinkhorn's own."""
    psi = problem.T.settled(problem.tau_b * state.transform)
    phi = _best(problem, psi, state.now.phi)
    transform = problem.to_cols_near(phi, state.transform)
    return state.now._replace(phi=phi, psi=psi), transform


def _symmetric_step(problem: Problem, state: State) -> tuple[Snapshot, jax.Array]:
    psi = (state.now.psi + problem.tau_b * state.transform) / 2
    psi = problem.T.settled(psi)
    phi = problem.pairs.mirror(psi)
    transform = problem.to_cols_near(phi, state.transform)
    return state.now._replace(phi=phi, psi=psi), transform


def _best(problem: Problem, psi: jax.Array, before: jax.Array) -> jax.Array:
    """The phi for this psi, from that for the last one."""
    rows = problem.to_rows_near(psi, before / problem.tau_a)
    return problem.settled(problem.tau_a * rows)


def _learning_step(problem: Problem, state: State) -> tuple[Snapshot, jax.Array]:
    """See :class:`ott_shard.lbfgs.Acceleration`."""
    now = state.now
    # Of another epsilon nothing is known, but for where to start.
    new = (now.epsilon != problem.epsilon) | (now.iteration == 0)
    memory = now.memory.cleared(new)
    gradient = _gradient(problem, now.psi, state.transform)
    along = lbfgs.direction(memory, gradient, _inverse_mass(problem, now.psi))
    slope = dot(gradient, along)
    visible = jnp.max(jnp.abs(along)) <= _LONGEST * problem.epsilon
    plain = ~((slope > 0) & visible) | (now.stale >= _DOUBT)
    follow = problem.T.settled(problem.tau_b * state.transform)
    # Of another epsilon its constant depends on the mass, and may cost digits.
    follow += jnp.where(new, off_centre(problem, now.phi, follow), 0.0)
    # A point without weight is in no product: it follows the others.
    psi = jnp.where(plain | (problem.b == 0), follow, now.psi + memory.share * along)
    phi = _best(problem, psi, now.phi)
    transform = problem.to_cols_near(phi, state.transform)
    change = gradient - _gradient(problem, psi, transform)
    end = slope - dot(change, along)
    good = plain | lbfgs.is_good(slope, end)
    step = _without_constant(problem, psi - now.psi)
    curved = dot(step, change) > 0
    longer = memory.learnt(step, change, good & ~new & curved)
    # Tried once more, and then given up with all that led to it; or if rounding rules.
    share = jnp.where(good, 1.0, lbfgs.shorter(memory.share, slope, end))
    lost = jnp.where(good, ~plain & ~curved, memory.share < 1)
    memory = longer._replace(share=share).cleared(lost)
    made = (phi, psi, transform), (now.phi, now.psi, state.transform)
    phi, psi, transform = (jnp.where(good, u, v) for u, v in zip(*made, strict=True))
    return now._replace(phi=phi, psi=psi, **memory._asdict()), transform


def _gradient(problem: Problem, psi: jax.Array, transform: jax.Array) -> jax.Array:
    """Of the dual, [m padded]; 0 where there is no weight, where it may be huge."""
    ascent, b = objective.ascent(problem, psi, transform), problem.b
    return jnp.where(b > 0, b * ascent, 0.0)


def _inverse_mass(problem: Problem, psi: jax.Array) -> jax.Array:
    """1 / what the column sums are to be, within reason; 0 where there is no weight."""
    density = jnp.clip(objective.wanted_density(problem, psi), 1e-3, 1e3)
    mass = problem.b * density
    return jnp.where(mass > 0, 1 / jnp.where(mass > 0, mass, 1.0), 0.0)


def _without_constant(problem: Problem, step: jax.Array) -> jax.Array:
    """A step in psi to learn from; if balanced, a constant in it changes nothing.

    It would be climbed for ever if the masses differ, if only by a rounding.
    """
    b = problem.b
    step = jnp.where(b > 0, step, 0.0)
    mean = jnp.where(problem.balanced, dot(b, step) / b.sum(), 0.0)
    return jnp.where(b > 0, step - mean, 0.0)


def off_centre(problem: Problem, phi: jax.Array, psi: jax.Array) -> jax.Array:
    """What to add to psi, and take off phi, for equal means; 0 if not balanced."""
    a, b = problem.a, problem.b
    return jnp.where(
        problem.balanced, (dot(a, phi) / a.sum() - dot(b, psi) / b.sum()) / 2, 0.0
    )
