"""A transport plan that is never formed: potentials, sums of it, and blocks of it."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass
from jax.typing import ArrayLike

from ott_shard import _checks, mesh as meshes, objective, operators, terms
from ott_shard.geometry import PointCloud
from ott_shard.operators import Pairs
from ott_shard.pairwise import dot
from ott_shard.potentials import DualPotentials
from ott_shard.problem import Found, Problem

_MAX_DENSE_ENTRIES = 2**24  # 64 MiB in float32


@register_dataclass
@dataclasses.dataclass(frozen=True)
class PlanSums:
    """The part of :class:`ott_shard.Plan` that takes the plan as a whole.

    Attributes:
        geom: the geometry, with its scale and epsilon as numbers.
        problem: the padded problem.
        found: potentials and c-transforms as they were found.
    """

    geom: PointCloud
    problem: Problem
    found: Found

    @property
    def f(self) -> jax.Array:
        """[n], potential of x with its weight: -inf where a is 0."""
        p = self._one
        return _potential(self.phi, p.a, p.epsilon, self.geom.n)

    @property
    def g(self) -> jax.Array:
        """[m], potential of y with its weight: -inf where b is 0."""
        p = self._one
        return _potential(self.psi, p.b, p.epsilon, self.geom.m)

    @property
    def phi(self) -> jax.Array:
        """[n padded], potential of x without its weight, f - epsilon log a."""
        return self._potentials[0]

    @property
    def psi(self) -> jax.Array:
        """[m padded], potential of y without its weight."""
        return self._potentials[1]

    @property
    def epsilon(self) -> jax.Array:
        """The regularisation used, scalar, in units of cost."""
        return self.problem.epsilon

    @property
    def _potentials(self) -> tuple[jax.Array, jax.Array]:
        return self.found.phi, self.found.psi

    @property
    def _differentiable(self) -> Found:
        """What was found, as a function of the problem."""
        phi, psi = self._potentials
        return _with_transforms(self._one, self.found._replace(phi=phi, psi=psi))

    @property
    def _one(self) -> Problem:
        """The problem, if it is one."""
        batch = self.found.phi.shape[:-1]
        if batch:
            raise ValueError(
                f"this output is a batch of {batch} solutions: use "
                "jax.vmap(lambda out: out.f)(out)"
            )
        return self.problem

    def _reduced_over(self, axis: Literal[0, 1]) -> tuple[Pairs, tuple]:
        """Pairs, (potentials, weights), with what `axis` is summed over as columns."""
        p = self._one
        ends = self._potentials, (p.a, p.b)
        if axis == 1:
            return p.pairs, ends
        return p.pairs.T, tuple(pair[::-1] for pair in ends)

    def apply(self, v: ArrayLike, axis: Literal[0, 1] = 0) -> jax.Array:
        """The plan times a vector: P^T v (axis 0) or P v (axis 1), as in OTT.

        Args:
            v: [n] or [n, k] for axis 0, [m] or [m, k] for axis 1, of any sign; k may be
                in the thousands.
            axis: 0 or 1.

        Returns:
            [m] or [m, k] for axis 0, [n] or [n, k] for axis 1. One pass and one
            all-reduce for every 2^23 / max(n / rows, m / cols) columns of v (at least
            64); O(n (d + k) / rows + m (d + k) / cols + tile) memory on a device.

        Raises:
            ValueError: if v does not have one row per point or axis is not 0 or 1.

        Example:
            >>> import jax.numpy as jnp, ott_shard as otts
            >>> geom = otts.PointCloud(jnp.eye(3), jnp.ones((2, 3)), epsilon=0.1)
            >>> otts.solve(geom).apply(jnp.ones(2), axis=1).round(4)
            Array([0.3333, 0.3333, 0.3333], dtype=float32)
        """
        _checks.choice("axis", axis, (0, 1))
        values = _checks.real_array("v", v).astype(self.geom.dtype)
        pairs, ends = self._reduced_over(axis)
        size = self.geom.shape[axis]
        if values.ndim not in (1, 2) or len(values) != size or not values.size:
            raise ValueError(
                f"v must have shape [{size}] or [{size}, k >= 1] for axis={axis}, got "
                f"{values.shape}"
            )
        columns = values.reshape(len(values), -1)
        columns = meshes.place(columns, pairs.mesh, pairs.col_axes)
        out = operators.apply_plan(pairs, *ends, columns, self.epsilon)
        out = meshes.unpad(out, self.geom.shape[1 - axis])
        return out if values.ndim == 2 else out[:, 0]

    def marginal(self, axis: Literal[0, 1]) -> jax.Array:
        """Sums of the plan: over rows, [m] (axis 0), or over columns, [n] (axis 1).

        One pass, as `apply` of ones.
        """
        _checks.choice("axis", axis, (0, 1))
        return self.apply(np.ones(self.geom.shape[axis]), axis)

    def barycentric_map(self, axis: Literal[0, 1] = 1) -> jax.Array:
        """The mean of where the plan sends each point.

        Args:
            axis: 1: of y for each x, P y / (P 1); 0: of x for each y.

        Returns:
            [n, d] for axis 1, [m, d] for axis 0, also for points of weight 0. One pass.
            At other points: ``to_dual_potentials().transport``.
        """
        _checks.choice("axis", axis, (0, 1))
        problem, found = self._one, self._differentiable
        if axis == 1:
            means = _barycentres(problem, found.psi, found.rows)
        else:
            means = _barycentres(problem.T, found.phi, found.cols)
        return meshes.unpad(means, self.geom.shape[1 - axis])

    def to_dual_potentials(self) -> DualPotentials:
        """f and g as functions, and the map that they make, for new points."""
        p, (phi, psi) = self._one, self._potentials
        return DualPotentials(p, phi, psi)

    @property
    def transport_mass(self) -> jax.Array:
        """Sum of the plan, scalar; one pass."""
        return self.marginal(1).sum()

    @property
    def primal_cost(self) -> jax.Array:
        """<C, P>, scalar in units of cost; one pass."""
        return _cost(self._one, self._potentials, self._one.pairs)

    def transport_cost_at_geom(self, other_geom: PointCloud) -> jax.Array:
        """<C', P>, for the costs C' of other points that stand for the same ones.

        Args:
            other_geom: a geometry of the same n and m, on the same mesh, with any
                points, cost and scale.

        Returns:
            Scalar, in units of the other cost. One pass.

        Raises:
            ValueError, TypeError: if the shape, the mesh or the dtype differs.

        Example:
            >>> import jax.numpy as jnp, ott_shard as otts
            >>> x = jnp.asarray([[0.0], [1.0], [2.0]])
            >>> out = otts.solve(otts.PointCloud(x, x + 3, epsilon=0.01))
            >>> l1 = otts.PointCloud(x, x + 3, cost_fn=otts.costs.PNormP(1.0))
            >>> round(float(out.transport_cost_at_geom(l1)), 1)
            3.0
        """
        p = self._one
        if not isinstance(other_geom, PointCloud):
            raise TypeError(f"other_geom must be a PointCloud, got {other_geom!r}")
        if other_geom.shape != self.geom.shape:
            raise ValueError(
                f"other_geom must have the shape {self.geom.shape}, one point for each "
                f"point of the plan, got {other_geom.shape}"
            )
        if other_geom.mesh != self.geom.mesh:
            raise ValueError(
                f"other_geom must be on the mesh of the plan, {self.geom.mesh}, got "
                f"{other_geom.mesh}: make it with mesh=out.geom.mesh"
            )
        if other_geom.dtype != self.geom.dtype:
            raise ValueError(
                f"other_geom must be of {self.geom.dtype}, as the plan, got "
                f"{other_geom.dtype}"
            )
        other = other_geom.resolve(p.a, p.b).pairs
        return _cost(p, self._potentials, other)

    @property
    def dual_cost(self) -> jax.Array:
        """<a, f> + <b, g> over the support, scalar, as in OTT."""
        p = self._one
        return _dual_cost(self._potentials, (p.a, p.b), p.epsilon)

    @property
    def duality_gap(self) -> jax.Array:
        """How far the potentials may be from the optimum, scalar in units of cost.

        The objective of a plan that meets the constraints, P rounded (Altschuler et
        al., Near-linear time approximation algorithms for optimal transport, 2017),
        less the dual objective of the potentials: the optimum lies between the two,
        and the gap is 0 only at it. ``reg_ot_cost`` is the lower end, and so at most
        the gap below the optimum. Three passes. Infinite if the rounded plan must use a
        forbidden pair. Not differentiated.
        """
        return objective.duality_gap(self._one, self.found)

    @property
    def entropy(self) -> jax.Array:
        """-sum_ij P_ij log P_ij, scalar; one pass."""
        return _entropy_of_plan(self._one, self._differentiable)

    @property
    def normalized_entropy(self) -> jax.Array:
        """How blurred the plan is: 0 one-to-one, 1 independent; scalar, one pass.

        (H(P) - H_max) / H_min with the larger and the smaller of H(a) and H(b), all of
        them scaled to mass 1; H(P) lies between H_max and H_max + H_min, if P has these
        marginals. For uniform weights and n = m it is H(P) / log n - 1, as in OTT.
        """
        p = self._one
        return _normalized(self.entropy, self.transport_mass, p.a, p.b)

    def rows(self, start: int, stop: int) -> jax.Array:
        """The rows start to stop of the plan, [stop - start, m].

        Args:
            start: at least 0.
            stop: at most n.

        Returns:
            A dense block, computed by all devices; its share of a pass, and memory for
            a few times its entries.

        Raises:
            ValueError, TypeError: if there are no such rows.

        Example:
            >>> import jax.numpy as jnp, ott_shard as otts
            >>> x = jnp.asarray([[0.0], [1.0], [2.0]])
            >>> out = otts.solve(otts.PointCloud(x, x + 3, epsilon=0.01))
            >>> out.rows(1, 2).round(3)
            Array([[0.   , 0.333, 0.   ]], dtype=float32)
        """
        start = _checks.integer("start", start, at_least=0)
        stop = _checks.integer("stop", stop, at_least=start + 1)
        if stop > self.geom.n:
            raise ValueError(f"stop must be at most n = {self.geom.n}, got {stop}")
        p, (phi, psi) = self._one, self._potentials
        block = _rows(p, phi, psi, start, stop - start)
        return block[:, : self.geom.m]

    @property
    def matrix(self) -> jax.Array:
        """The plan as an [n, m] array, for small problems.

        Raises:
            ValueError: if n m exceeds 2^24 entries.
        """
        n, m = self.geom.shape
        if n * m > _MAX_DENSE_ENTRIES:
            raise ValueError(
                f"matrix would have {n} x {m} entries, more than {_MAX_DENSE_ENTRIES}: "
                "use apply, marginal, barycentric_map, argmax, top_k, to_bcoo or "
                "sample, which never form it, or rows(start, stop) for a part of it"
            )
        return self.rows(0, n)


# Jitted: on several devices each operation on its own would be a program to compile.
@jax.jit
def _with_transforms(problem: Problem, found: Found) -> Found:
    rows = problem.to_rows(found.psi, found.rows)
    return found._replace(rows=rows, cols=problem.to_cols(found.phi, found.cols))


@functools.partial(jax.jit, static_argnums=3)
def _potential(
    phi: jax.Array, weights: jax.Array, epsilon: jax.Array, size: int
) -> jax.Array:
    some = jnp.where(weights > 0, weights, 1.0)
    f = jnp.where(weights > 0, phi + epsilon * jnp.log(some), -jnp.inf)
    return meshes.unpad(f, size)


@jax.jit
def _barycentres(problem: Problem, psi: jax.Array, rows: jax.Array) -> jax.Array:
    return problem.barycentres(psi, rows)


@jax.jit
def _cost(problem: Problem, potentials, pairs: Pairs) -> jax.Array:
    """<C, P> with the costs of `pairs`."""
    phi, psi = potentials
    of = (pairs.cost, pairs.centre, pairs.scale), pairs.x, pairs.y
    own = problem.pairs
    block = own.block.within(pairs.block)
    at = dataclasses.replace(problem, pairs=dataclasses.replace(own, block=block))
    return at.plan_sum(terms.cost, phi, psi, of).sum()


@jax.jit
def _dual_cost(potentials, weights, epsilon) -> jax.Array:
    (phi, psi), (a, b) = potentials, weights
    own = entropy(a) + entropy(b)
    return dot(a, phi) + dot(b, psi) - epsilon * own


@jax.jit
def _entropy_of_plan(problem: Problem, found: Found) -> jax.Array:
    of_density = problem.plan_sum(terms.log_density, found.phi, found.psi, ((), (), ()))
    sums = objective.row_sums(problem, found), objective.row_sums(problem.T, found.T)
    logs = (_log(w) for w in (problem.a, problem.b))
    own = (dot(*pair) for pair in zip(sums, logs, strict=True))
    return -of_density.sum() - sum(own)


@jax.jit
def _normalized(of_plan: jax.Array, mass: jax.Array, a, b) -> jax.Array:
    def at_mass_1(entropy, mass):
        return entropy / mass + jnp.log(mass)

    low, high = jnp.sort(jnp.stack([at_mass_1(entropy(w), w.sum()) for w in (a, b)]))
    # A plan of one row or one column is sharp and independent; call it sharp.
    some = low > 0
    apart = at_mass_1(of_plan, mass) - high
    return jnp.where(some, apart / jnp.where(some, low, 1.0), 0.0)


def entropy(w: jax.Array) -> jax.Array:
    """-sum w log w."""
    return -dot(w, _log(w))


def _log(w: jax.Array) -> jax.Array:
    return jnp.log(jnp.where(w > 0, w, 1.0))


@functools.partial(jax.jit, static_argnums=4)
def _rows(problem: Problem, phi, psi, start: jax.Array, size: int) -> jax.Array:
    """`size` rows of the plan from `start` on."""
    # To slice along a dimension that is split would gather all of it first.
    pairs, index = problem.pairs, start + jnp.arange(size, dtype=jnp.int32)

    def some(z: jax.Array, pad: Literal["edge", "constant"] = "edge"):
        return meshes.place(z[index], pairs.mesh, pairs.row_axes, pad=pad)

    part = dataclasses.replace(pairs, x=some(pairs.x))
    weights = some(problem.a, "constant"), problem.b
    block = operators.plan_rows(part, (some(phi), psi), weights, problem.epsilon)
    return meshes.unpad(block, size)
