"""What costs and epsilon are measured in: statistics of the costs, streamed.

Statistics are weighted by a_i b_j, so points of weight zero do not count, and neither
do forbidden pairs. They are constants to differentiation.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ott_shard import _checks, operators
from ott_shard.costs import CostFn, NormedCost
from ott_shard.epsilon import Epsilon
from ott_shard.operators import Pairs
from ott_shard.pairwise import dot

OF_COSTS = ("mean", "std", "max_cost")
OF_POINTS = ("max_norm", "max_bound")


class CostStatistics(NamedTuple):
    """Mean, standard deviation and maximum of the costs, scalars in units of cost."""

    mean: jax.Array
    std: jax.Array
    max: jax.Array


def check(relative_epsilon: Any, scale_cost: Any, cost: CostFn) -> None:
    """Refuse what is not a statistic, or not one of this cost."""
    _checks.choice("relative_epsilon", relative_epsilon, (None, "mean", "std"))
    if not isinstance(scale_cost, str):
        return
    if scale_cost == "median":
        raise ValueError(
            "scale_cost must not be 'median', got it, for a median needs all costs at "
            "once: use 'mean' or 'std', or give the median of a subsample as a number"
        )
    _checks.choice("scale_cost", scale_cost, (*OF_COSTS, *OF_POINTS))
    if scale_cost in OF_POINTS and not isinstance(cost, NormedCost):
        raise ValueError(
            f"scale_cost must be a number or one of {OF_COSTS} for {cost}, got "
            f"{scale_cost!r}, which needs a norm of points"
        )


@jax.jit
def centred(pairs: Pairs, a: jax.Array, b: jax.Array) -> Pairs:
    """The same pairs with their centre of mass as centre, if costs are free of it."""
    if not pairs.cost.translation_invariant:
        return pairs
    x, y, a, b = jax.lax.stop_gradient((pairs.x, pairs.y, a, b))
    mean_x, mean_y = (dot(w, z) / w.sum() for z, w in ((x, a), (y, b)))
    # XLA may compute a sum again for each of its users, and copies differ by roundings:
    # for a cloud far from 0, too much. The result of a loop has no copies; this one
    # adds up two halves (older XLA drops a barrier before it fuses).
    half = jax.lax.optimization_barrier((mean_x + mean_y) / 4)
    centre = jax.lax.fori_loop(0, 2, lambda _, sum: sum + half, jnp.zeros_like(half))
    return dataclasses.replace(pairs, centre=centre)


@jax.jit
def statistics(pairs: Pairs, a: jax.Array, b: jax.Array) -> CostStatistics:
    """Of the scaled costs with weights a_i b_j; one pass."""
    moments = operators.cost_moments(*jax.lax.stop_gradient((pairs, a, b)))
    return CostStatistics(moments.mean, jnp.sqrt(moments.deviation), moments.max)


@functools.partial(jax.jit, static_argnums=(4, 5))
def resolve(
    pairs: Pairs,
    schedule: Epsilon,
    a: jax.Array,
    b: jax.Array,
    relative_epsilon: str | None,
    relative_scale: str | None,
) -> tuple[jax.Array, Epsilon]:
    """Scale of the costs, and epsilon in units of scaled costs; one pass.

    Args:
        pairs: the clouds; their scale stands if it is not relative, and is 1 if it is.
        schedule: in units of cost, or of the statistic `relative_epsilon`.
        a: [n padded] weights.
        b: [m padded] weights.
        relative_epsilon: a statistic of the scaled costs, or None.
        relative_scale: a statistic of the costs, or None.
    """
    stats = statistics(pairs, a, b)
    size = jnp.maximum(jnp.abs(stats.max), jnp.abs(stats.mean))
    noise = 8 * jnp.finfo(size.dtype).eps * size

    def unit(value: jax.Array) -> jax.Array:
        # Without spread any unit will do. A negative one makes the problem invalid.
        return jnp.where(jnp.abs(value) > noise, value, 1.0)

    scale, factor = pairs.scale, jnp.ones_like(size)
    if relative_epsilon:
        factor = unit(getattr(stats, relative_epsilon))
    if relative_scale in OF_POINTS:
        scale = unit(_of_points(pairs, a, b, relative_scale))
    elif relative_scale:
        scale = unit(getattr(stats, relative_scale.removesuffix("_cost")))
    if relative_epsilon and relative_scale:
        factor /= scale  # the statistics are of costs that were not scaled yet
    target, init = schedule.target * factor, schedule.init * factor
    schedule = Epsilon(target, init=init, decay=schedule.decay)
    return jax.lax.optimization_barrier((scale, schedule))


def _of_points(pairs: Pairs, a: jax.Array, b: jax.Array, kind: str) -> jax.Array:
    cost: Any = pairs.cost
    x, y = jax.lax.stop_gradient((pairs.x, pairs.y))
    norms = (
        jnp.where(w > 0, cost.norm(z.astype(w.dtype)), 0.0).max()
        for z, w in ((x, a), (y, b))
    )
    return jnp.maximum(*norms) if kind == "max_norm" else cost.bound(*norms)
