"""Fewer iterations: steps that learn from those before, and an epsilon that comes down.

One iteration, psi to T(psi), the c-transform of the c-transform, climbs the concave
dual D(psi) = max over phi of the objective. The transform that it ends with tells the
gradient of D at psi, so quasi-Newton steps cost what Sinkhorn's own steps do.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from ott_shard import _checks
from ott_shard.pairwise import dot, inner

# A step is good unless D falls at its end by more than this times its first slope.
_OVERSHOOT = 0.8


@dataclasses.dataclass(frozen=True)
class Acceleration:
    """Annealing of epsilon, and L-BFGS steps on the dual, safeguarded.

    Epsilon starts at 0.3 times the size of the costs, lower if there are few iterations
    to come down in, at the target if that is larger; and is multiplied by `decay`
    whenever the marginal error is within 5 % of the mass: each epsilon starts from the
    potentials of the last. (Not so if there is an ``init=`` or a schedule, which are
    followed, nor if a tau is below 1, where it does not pay.) At each epsilon steps are
    those of L-BFGS, preconditioned by the weights. A step at whose end the dual falls
    steeply is taken back and tried shorter, then given up for one of Sinkhorn's; and
    whenever the error has not fallen for 50 iterations only Sinkhorn's steps are made
    until it does. So a run needs seldom more, and at the worst a few times, the
    iterations of a plain one; it needs about a tenth of them at epsilon = 0.01 x std of
    the costs, and a fortieth at 0.001 (BUILD_NOTES M19).

    An iteration is two passes over the pairs, as ever. Memory: 2 `memory` m numbers,
    split like y.

    Attributes:
        memory: how many steps are remembered.
        decay: of epsilon, in (0, 0.9]; or 1: epsilon is the target from the start.

    Raises:
        ValueError, TypeError: if one is out of range.

    References:
        Liu and Nocedal, On the limited memory BFGS method for large scale optimization,
        1989; Hager and Zhang, A new conjugate gradient method with guaranteed descent
        and an efficient line search, 2005, for the test of a step, which needs no
        differences of values; Kosowsky and Yuille, The invisible hand algorithm, 1994,
        and Schmitzer, Stabilized sparse scaling algorithms for entropy regularized
        transport problems, 2019, for annealing.

    Example:
        >>> import jax, ott_shard as otts
        >>> x = jax.random.normal(jax.random.key(0), (300, 2))
        >>> y = jax.random.normal(jax.random.key(1), (200, 2)) + 1
        >>> geom = otts.PointCloud(x, y, epsilon=0.01)
        >>> plain = otts.solve(geom, acceleration=None)
        >>> bool(otts.solve(geom).n_iters < plain.n_iters / 5)
        True
    """

    memory: int = 8
    decay: float = 0.25

    def __post_init__(self):
        _checks.integer("memory", self.memory)
        _checks.number(
            "decay", self.decay, lambda q: 0 < q <= 0.9 or q == 1, "in (0, 0.9], or 1"
        )


DEFAULT = Acceleration()


class Memory(NamedTuple):
    """What steps are made from.

    Attributes:
        steps: [m, memory], the newest last.
        changes: [m, memory], of the gradient over each, downwards.
        count: how many there have been; what is older counts for nothing.
        share: scalar, of the step that is tried next; below 1 it is tried again.
    """

    steps: jax.Array
    changes: jax.Array
    count: jax.Array
    share: jax.Array

    @classmethod
    def empty(cls, psi: jax.Array, size: int) -> "Memory":
        """Of no steps, for potentials like psi."""
        none = jnp.zeros_like(psi, shape=(len(psi), size))
        return cls(none, none, jnp.int32(0), jnp.ones((), psi.dtype))

    def cleared(self, when: jax.Array) -> "Memory":
        """Without any steps, if `when`."""
        return self._replace(
            count=jnp.where(when, 0, self.count), share=jnp.where(when, 1.0, self.share)
        )

    def learnt(self, step: jax.Array, change: jax.Array, when: jax.Array) -> "Memory":
        """With one step more, if `when`; in place of the oldest."""

        def put(columns, new):
            longer = jnp.concatenate([columns[:, 1:], new[:, None]], axis=1)
            return jnp.where(when, longer, columns)

        steps, changes = put(self.steps, step), put(self.changes, change)
        return Memory(steps, changes, self.count + when, self.share)


def direction(memory: Memory, gradient: jax.Array, inverse: jax.Array) -> jax.Array:
    """H gradient, [m], for the inverse Hessian H that L-BFGS has of D; 0 for no memory.

    It starts from a multiple of the diagonal matrix `inverse`, [m]. For 1 / b, that is
    epsilon times what Sinkhorn's own step is to first order, the eigenvalues of what it
    is the inverse of are then in [0, 1]. H is in compact form, which asks for a few
    products of [m, memory] matrices at once (Byrd et al., Representations of
    quasi-Newton matrices and their use in limited memory methods, 1994, equation 3.1).
    """
    steps, changes, count, _ = memory
    size, scaled = steps.shape[1], inverse[:, None] * changes
    known = jnp.arange(size, dtype=jnp.int32) >= size - count
    both = known[:, None] & known
    s_y, y_y = (
        jnp.where(both, inner(z.T, changes.T, "highest"), 0.0) for z in (steps, scaled)
    )
    s_g, y_g = (jnp.where(known, dot(gradient, z), 0.0) for z in (steps, scaled))
    curvature = jnp.diagonal(s_y)
    upper = jnp.triu(s_y) + jnp.diag(jnp.where(known, 0.0, 1.0))
    scale = curvature[-1] / jnp.where(known[-1], y_y[-1, -1], 1.0)
    u = solve_triangular(upper, s_g)
    v = curvature * u + scale * (dot(y_y, u) - y_g)
    v = solve_triangular(upper, v, trans=1)
    return dot(steps, v) - dot(scaled, scale * u) + scale * inverse * gradient


def is_good(slope: jax.Array, end: jax.Array) -> jax.Array:
    """Whether a step may be kept, for the slopes at its two ends; not if one is NaN."""
    return end >= -_OVERSHOOT * slope


def shorter(share: jax.Array, slope: jax.Array, end: jax.Array) -> jax.Array:
    """The share of a step that was too long: where its slope would be 0, if linear."""
    ratio = slope / (slope - end)
    return share * jnp.where(ratio > 0.05, jnp.minimum(ratio, 0.5), 0.05)  # also if NaN
