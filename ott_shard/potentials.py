"""Potentials as functions: their values, and the map they make, at new points."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass
from jax.typing import ArrayLike

from ott_shard import _checks, mesh as meshes, operators
from ott_shard.costs import SqEuclidean
from ott_shard.problem import Problem


@register_dataclass
@dataclasses.dataclass(frozen=True)
class DualPotentials:
    """The potentials of a solution as functions of a point; a pytree.

    They are c-transforms, f(x) = -tau_a eps log sum_j b_j exp((psi_j - C(x, y_j)) /
    eps) with psi = g - eps log b, and g likewise, without the weight of their own
    point. At the points of the solution f is ``out.f - eps log a`` exactly (of a cloud
    with itself, whose updates are averaged, up to the marginal error), and g is
    ``out.g - eps log b`` up to the marginal error. New points are split over the mesh
    like the cloud that they belong to, and may be of any number. All is differentiable,
    in the new points and in what the solution was made of.

    Attributes:
        problem: the padded problem.
        phi: [n padded], the potential of x without its weight.
        psi: [m padded], the potential of y without its weight.

    References:
        Pooladian and Niles-Weed, Entropic estimation of optimal transport maps, 2021.

    Example:
        >>> import jax, jax.numpy as jnp, ott_shard as otts
        >>> x = jnp.linspace(0, 1, 5)[:, None]
        >>> out = otts.solve(otts.PointCloud(x, x + 1, epsilon=0.01))
        >>> pot = out.to_dual_potentials()
        >>> pot.transport(jnp.asarray([[0.5], [0.6]])).shape
        (2, 1)
        >>> jax.grad(lambda x: pot.f(x).sum())(x).shape
        (5, 1)
    """

    problem: Problem
    phi: jax.Array
    psi: jax.Array

    def f(self, x: ArrayLike, hard: bool = False) -> jax.Array:
        """Values at new points of the cloud x.

        Args:
            x: [n', d].
            hard: the c-transform for eps = 0, min_j C(x, y_j) - psi_j over the y_j that
                have weight (which tau_a has no part in).

        Returns:
            [n']; one pass over n' m pairs.
        """
        _checks.choice("hard", hard, (False, True))
        of = _hard_of_rows if hard else _of_rows
        return of(self.problem, self.psi, _points("x", x, self.problem))

    def g(self, y: ArrayLike, hard: bool = False) -> jax.Array:
        """Values at new points of the cloud y, [m', d] to [m'], as `f`."""
        _checks.choice("hard", hard, (False, True))
        of = _hard_of_rows if hard else _of_rows
        return of(self.problem.T, self.phi, _points("y", y, self.problem))

    def transport(self, points: ArrayLike, forward: bool = True) -> jax.Array:
        """The mean of where the plan sends new points (barycentric map).

        sum_j w_j y_j with weights w_j in proportion to b_j exp((psi_j - C(x, y_j)) /
        eps): at the points of the solution it is P y / (P 1). For the squared Euclidean
        cost and tau_a = 1 it is also x - scale_cost grad f(x) / 2.

        Args:
            points: [n', d], new points of x, or of y if not `forward`.
            forward: False maps y to x.

        Returns:
            [n', d]; NaN for a point all of whose pairs are forbidden. Two passes over
            n' m pairs; O(n' d / rows + m d / cols + tile) memory on a device.

        Raises:
            ValueError, TypeError: if `points` is not [n', d] of finite numbers.
        """
        _checks.choice("forward", forward, (False, True))
        problem = self.problem if forward else self.problem.T
        points = _points("points", points, self.problem)
        return _transport(problem, self.psi if forward else self.phi, points)


@register_dataclass
@dataclasses.dataclass(frozen=True)
class DebiasedPotentials:
    """The potentials of a Sinkhorn divergence as functions of a point; a pytree.

    Those of (x, y) less those of a cloud with itself: f is, up to a constant, the
    derivative of the divergence in the weight of a point, and its gradient, for tau =
    1, that in a point per unit of weight. All is differentiable, as in
    :class:`DualPotentials`.

    Attributes:
        between: potentials of (x, y).
        own_x: of (x, x).
        own_y: of (y, y); None if it was not solved.

    References:
        Feydy et al., Interpolating between optimal transport and MMD using Sinkhorn
        divergences, 2019; Pooladian, Cuturi and Niles-Weed, Debiaser beware, 2022, for
        the map.

    Example:
        >>> import jax.numpy as jnp, ott_shard as otts
        >>> x = jnp.linspace(0, 1, 5)[:, None]
        >>> _, out = otts.sinkhorn_divergence(x, x + 1, epsilon=0.1)
        >>> pot = out.to_dual_potentials()
        >>> pot.transport(jnp.asarray([[0.5]])).round(2)
        Array([[1.5]], dtype=float32)
    """

    between: DualPotentials
    own_x: DualPotentials
    own_y: DualPotentials | None

    def f(self, x: ArrayLike) -> jax.Array:
        """Values at new points of the cloud x, [n', d] to [n']; three passes."""
        return self.between.f(x) - (self.own_x.f(x) + self.own_x.g(x)) / 2

    def g(self, y: ArrayLike) -> jax.Array:
        """Values at new points of the cloud y, [m', d] to [m'], likewise."""
        own = self._own(forward=False)
        return self.between.g(y) - (own.f(y) + own.g(y)) / 2

    def transport(self, points: ArrayLike, forward: bool = True) -> jax.Array:
        """Where the divergence would have new points go, for squared Euclidean costs.

        x + T(x, y) - T(x, x) with the barycentric maps: without the shrinking that
        epsilon brings. For tau = 1 it is x - scale_cost grad f(x) / 2.

        Args:
            points: [n', d], new points of x, or of y if not `forward`.
            forward: False for the direction from y to x.

        Returns:
            [n', d]. Six passes.

        Raises:
            ValueError, TypeError: for any other cost, and for bad points.
        """
        cost = self.between.problem.pairs.cost
        if not isinstance(cost, SqEuclidean):
            raise ValueError(
                f"transport must be for SqEuclidean costs, got {cost}: use gradients "
                "of f, or the biased map, outputs[0].to_dual_potentials().transport"
            )
        there, own = self.between.transport(points, forward), self._own(forward)
        back = (own.transport(points) + own.transport(points, forward=False)) / 2
        return there + (_points("points", points, own.problem) - back)

    def _own(self, forward: bool) -> DualPotentials:
        own = self.own_x if forward else self.own_y
        if own is None:
            raise ValueError(
                "static_b must be False for debiased potentials of y, got True: (y, y) "
                "was not solved"
            )
        return own


def _points(name: str, x: ArrayLike, problem: Problem):
    x = _checks.points(name, x, problem.a.dtype)
    d = problem.pairs.x.shape[1]
    if x.shape[1] != d:
        raise ValueError(f"{name} must have shape [n, {d}], got {x.shape}")
    return x


def _at(problem: Problem, x) -> Problem:
    """The problem with other points in place of x; its weights `a` play no part."""
    pairs = problem.pairs
    rows = meshes.place(x, pairs.mesh, pairs.row_axes)
    return dataclasses.replace(problem, pairs=dataclasses.replace(pairs, x=rows))


def _of_rows(problem: Problem, psi: jax.Array, x) -> jax.Array:
    values = problem.tau_a * _at(problem, x).to_rows(psi)
    return meshes.unpad(values, len(x))


def _hard_of_rows(problem: Problem, psi: jax.Array, x) -> jax.Array:
    return meshes.unpad(_hard(_at(problem, x), psi), len(x))


@jax.jit
def _hard(problem: Problem, psi: jax.Array) -> jax.Array:
    pairs, n = problem.pairs, len(problem.pairs.x)
    ones = jnp.ones(n, psi.dtype), (problem.b > 0).astype(psi.dtype)
    ends = jnp.zeros(n, psi.dtype), psi
    nearest, _ = operators.largest(1, pairs, ends, ones, problem.epsilon)
    j = jnp.maximum(nearest[:, 0], 0)
    # Its derivative is that at the minimum (envelope theorem).
    values = pairs.costs_of(jnp.arange(n), j) - psi[j]
    return jnp.where(nearest[:, 0] < 0, jnp.inf, values)


def _transport(problem: Problem, psi: jax.Array, x) -> jax.Array:
    there = _at(problem, x)
    return meshes.unpad(there.barycentres(psi, there.to_rows(psi)), len(x))
