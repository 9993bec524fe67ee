"""What a solver returns: potentials, costs, and why it stopped."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass
from jax.typing import ArrayLike

from ott_shard import _checks, implicit, mesh as meshes, operators, sampling
from ott_shard.geometry import PointCloud
from ott_shard.implicit import ImplicitDiff
from ott_shard.linear_solve import LinearSolve
from ott_shard.operators import Pairs
from ott_shard.potentials import DualPotentials
from ott_shard.problem import Found, Problem
from ott_shard.status import Status

_MAX_DENSE_ENTRIES = 2**24  # 64 MiB in float32


@register_dataclass
@dataclasses.dataclass(frozen=True)
class SinkhornOutput:
    """Solution of one regularised transport problem; a pytree.

    All is differentiable, in forward and reverse mode and to any order, with respect to
    points, weights, epsilon, tau and parameters of the cost. The first derivative of
    ``reg_ot_cost`` and ``ent_reg_cost`` takes one pass (envelope theorem); potentials,
    the plan, and all second derivatives take a linear system, see
    :class:`ott_shard.ImplicitDiff`. Derivatives in a and b are those of directions that
    keep the masses equal, unless tau < 1. Of a batch of solutions, from ``vmap``, the
    fields and the (worst) `status` can be read; all else belongs inside the mapped
    function.

    Attributes:
        geom: the geometry that was solved.
        problem: the padded problem.
        found: potentials and c-transforms as they were found.
        implicit_diff: how they are differentiated; None if `found` itself is.
        reg_ot_cost: scalar, the optimum of <C, P> + eps KL(P | a b^T), and of the
            penalties for tau < 1, in units of cost.
        marginal_error: scalar, L1 distance between the column sums of the plan and what
            they should be; the row sums are exact.
        error_floor: scalar, an estimate of the error that rounding makes besides.
        errors: [ceil(max_iterations / inner_iterations)], the error at every check, -1
            for checks that did not take place.
        n_iters: int scalar, number of iterations.
        code: int scalar, the :class:`Status`.
    """

    geom: PointCloud
    problem: Problem
    found: Found
    implicit_diff: ImplicitDiff | None = dataclasses.field(metadata=dict(static=True))
    reg_ot_cost: jax.Array
    marginal_error: jax.Array
    error_floor: jax.Array
    errors: jax.Array
    n_iters: jax.Array
    code: jax.Array

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
    def _potentials(self) -> tuple[jax.Array, jax.Array]:
        if self.implicit_diff is None:
            return self.found.phi, self.found.psi
        return implicit.potentials(self.implicit_diff, self.problem, self.found)

    @property
    def _one(self) -> Problem:
        """The problem, if it is one."""
        if jnp.ndim(self.code):
            raise ValueError(
                f"this output is a batch of {self.code.shape} solutions: use "
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

    @property
    def epsilon(self) -> jax.Array:
        """The regularisation used, scalar, in units of cost."""
        return self.problem.epsilon

    @property
    def converged(self) -> jax.Array:
        """Bool scalar: marginal_error + error_floor is within the threshold."""
        return self.code == Status.CONVERGED

    @property
    def status(self) -> Status:
        """Why the iteration stopped. On the host only: inside jit use `code`."""
        if _checks.concrete(self.code) is None:
            raise TypeError(
                "status is for the host, got a traced value: use `code` or `converged` "
                "inside jit"
            )
        return Status(int(np.max(self.code)))

    def raise_if_failed(self) -> None:
        """Raise unless converged.

        Raises:
            RuntimeError: with the reason, its likely causes and what to try.
        """
        if self.status is not Status.CONVERGED:
            where = _not_finite(self)
            raise RuntimeError(
                f"Sinkhorn did not converge: {self.status.sentence}. "
                + (f"Not finite: {where}. " if where else "")
                + f"Stopped after {np.max(self.n_iters)} iterations with marginal "
                f"error {np.max(self.marginal_error):.3g} (rounding makes about "
                f"{np.max(self.error_floor):.1g}) at epsilon {np.min(self.epsilon):.3g}"
            )

    def apply(self, v: ArrayLike, axis: Literal[0, 1]) -> jax.Array:
        """The plan times a vector: P^T v (axis 0) or P v (axis 1), as in OTT.

        Args:
            v: [n] or [n, k] for axis 0, [m] or [m, k] for axis 1, of any sign.
            axis: 0 or 1.

        Returns:
            [m] or [m, k] for axis 0, [n] or [n, k] for axis 1. One pass; O(n (d + k)
            / rows + m (d + k) / cols + tile) memory on a device, one all-reduce.

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
        p, (pairs, ends) = self._one, self._reduced_over(axis)
        if values.ndim not in (1, 2) or len(values) != self.geom.shape[axis]:
            raise ValueError(
                f"v must have shape [{self.geom.shape[axis]}] or "
                f"[{self.geom.shape[axis]}, k] for axis={axis}, got {values.shape}"
            )
        columns = values.reshape(len(values), -1)
        columns = meshes.place(columns, pairs.mesh, pairs.col_axes)
        out = operators.apply_plan(pairs, *ends, columns, p.epsilon)
        out = meshes.unpad(out, self.geom.shape[1 - axis])
        return out if values.ndim == 2 else out[:, 0]

    def marginal(self, axis: Literal[0, 1]) -> jax.Array:
        """Sums of the plan: over rows, [m] (axis 0), or over columns, [n] (axis 1)."""
        _checks.choice("axis", axis, (0, 1))
        return self.apply(np.ones(self.geom.shape[axis]), axis)

    def to_dual_potentials(self) -> DualPotentials:
        """f and g as functions, and the map that they make, for new points."""
        p, (phi, psi) = self._one, self._potentials
        return DualPotentials(p, phi, psi)

    def argmax(self, axis: Literal[0, 1]) -> jax.Array:
        """Where the plan is largest: for each y_j an i (axis 0), for each x_i a j (1).

        ``top_k(1, axis)`` without the values.
        """
        return self.top_k(1, axis)[0][:, 0]

    def top_k(self, k: int, axis: Literal[0, 1]) -> tuple[jax.Array, jax.Array]:
        """The k largest entries of every column (axis 0) or row (axis 1) of the plan.

        Args:
            k: from 1 to the number of entries.
            axis: 0 or 1, as in `apply`.

        Returns:
            (indices, values), [m, k] for axis 0 and [n, k] for axis 1, in descending
            order, of equal entries the one of the lowest index first. Where fewer than
            k entries have mass, the index is -1 and the value 0. One pass; O(n d / rows
            + m d / cols + n k cols / rows + tile) memory on a device. Constants to
            differentiation.

        Raises:
            ValueError, TypeError: if k or axis is out of range.

        Example:
            >>> import jax.numpy as jnp, ott_shard as otts
            >>> x = jnp.asarray([[0.0], [1.0], [2.0]])
            >>> otts.solve(otts.PointCloud(x, x[::-1], epsilon=0.1)).argmax(axis=1)
            Array([2, 1, 0], dtype=int32)
        """
        _checks.choice("axis", axis, (0, 1))
        k = _checks.integer("k", k)
        if k > self.geom.shape[axis]:
            raise ValueError(
                f"k must be at most {self.geom.shape[axis]}, the number of entries for "
                f"axis={axis}, got {k}"
            )
        pairs, ends = self._reduced_over(axis)
        found = operators.largest(k, pairs, *ends, self.epsilon)
        size = self.geom.shape[1 - axis]
        indices, values = (meshes.unpad(part, size) for part in found)
        return indices, values

    def sample(
        self,
        key: jax.Array,
        num_pairs: int,
        method: Literal["iid", "systematic"] = "iid",
    ) -> tuple[jax.Array, jax.Array]:
        """Pairs of points drawn in proportion to the plan, for training on them.

        Args:
            key: of jax.random. The same key draws the same pairs on every mesh and in
                every tile, unless rounding decides between two neighbours.
            num_pairs: how many.
            method: "iid": independent. "systematic": x_i appears num_pairs times its
                share of the mass, rounded up or down (for uniform weights and num_pairs
                = n exactly once), in ascending order; its y_j is drawn from the row.

        Returns:
            (i, j), each [num_pairs] int32, rows of x and of y. Two passes over
            num_pairs x m; O(num_pairs d / rows + m d / cols + tile) memory on a device.
            Constants to differentiation.

        Raises:
            ValueError, TypeError: if num_pairs or method is out of range.

        Example:
            >>> import jax, jax.numpy as jnp, ott_shard as otts
            >>> x = jnp.asarray([[0.0], [1.0], [2.0]])
            >>> out = otts.solve(otts.PointCloud(x, x[::-1], epsilon=0.01))
            >>> out.sample(jax.random.key(0), 3, method="systematic")[1]
            Array([2, 1, 0], dtype=int32)
        """
        num_pairs = _checks.integer("num_pairs", num_pairs)
        _checks.choice("method", method, ("iid", "systematic"))
        return sampling.sample(self._one, self.found, key, num_pairs, method)

    @property
    def transport_mass(self) -> jax.Array:
        """Sum of the plan, scalar."""
        return self.marginal(1).sum()

    @property
    def primal_cost(self) -> jax.Array:
        """<C, P>, scalar in units of cost; one pass."""
        p, ends = self._one, self._potentials
        return operators.plan_cost(p.pairs, ends, (p.a, p.b), p.epsilon).sum()

    @property
    def dual_cost(self) -> jax.Array:
        """<a, f> + <b, g> over the support, scalar, as in OTT."""
        p = self._one
        return _dual_cost(self._potentials, (p.a, p.b), p.epsilon)

    @property
    def ent_reg_cost(self) -> jax.Array:
        """reg_ot_cost - eps (H(a) + H(b)): <C, P> - eps H(P) at equal masses of 1."""
        p = self._one
        return self.reg_ot_cost - p.epsilon * _entropy(p.a, p.b)

    @property
    def matrix(self) -> jax.Array:
        """The plan as an [n, m] array, for small problems; n m min(n, m) operations.

        Raises:
            ValueError: if n m exceeds 2^24 entries.
        """
        n, m = self.geom.shape
        if n * m > _MAX_DENSE_ENTRIES:
            raise ValueError(
                f"matrix would have {n} x {m} entries, more than {_MAX_DENSE_ENTRIES}: "
                "use apply(v, axis) or marginal(axis), which never form it"
            )
        if n < m:
            return self.apply(jnp.eye(n), axis=0).T
        return self.apply(jnp.eye(m), axis=1)

    def linear_solve(self, v: ArrayLike) -> LinearSolve:
        """The linear system behind derivatives of potentials, for one right-hand side.

        A derivative cannot return a status beside its value; this can. The system is
        c (1 - tau_a tau_b V W) x = c v, see :mod:`ott_shard.implicit`.

        Args:
            v: [m], such as a cotangent of g, divided by b.

        Returns:
            A :class:`ott_shard.LinearSolve`, with x of [m].

        Example:
            >>> import jax.numpy as jnp, ott_shard as otts
            >>> x = jnp.linspace(0, 1, 5)[:, None]
            >>> out = otts.solve(otts.PointCloud(x, x + 1, epsilon=0.1))
            >>> otts.LinearStatus(int(out.linear_solve(out.g).code)).name
            'CONVERGED'
        """
        p = self._one
        v = _checks.real_array("v", v).astype(self.geom.dtype)
        if v.shape != (self.geom.m,):
            raise ValueError(f"v must have shape [{self.geom.m}], got {v.shape}")
        v = meshes.place(v, p.pairs.mesh, p.pairs.col_axes, pad="constant")
        settings = self.implicit_diff or ImplicitDiff()
        solved = implicit.linear_solve(settings, p, self.found, v)
        return solved._replace(x=meshes.unpad(solved.x, self.geom.m))


def _not_finite(out: SinkhornOutput) -> str:
    """What of a problem or its solution holds a NaN or an infinity, for people."""
    p = out.problem
    suspects = {
        "x": p.pairs.x,
        "y": p.pairs.y,
        "a": p.a,
        "b": p.b,
        "epsilon": p.epsilon,
        "scale_cost": p.pairs.scale,
        "tau_a": p.tau_a,
        "tau_b": p.tau_b,
        "a parameter of the cost": jax.tree.leaves(p.pairs.cost),
    }
    if not (bad := _with_nan(suspects)):
        # The potentials are made of all of these: they only count where no other does.
        bad = _with_nan(
            {"the potentials": tuple(out.found[:2]), "the value": out.reg_ot_cost}
        )
    return ", ".join(bad)


def _with_nan(suspects: dict[str, Any]) -> list[str]:
    return [name for name, bad in _any_not_finite(suspects).items() if bad]


@jax.jit
def _any_not_finite(suspects: dict[str, Any]) -> dict[str, jax.Array]:
    def bad(tree: Any) -> jax.Array:
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        counts = [jnp.sum(~jnp.isfinite(leaf)) for leaf in leaves]
        return sum(counts, jnp.int32(0)) > 0

    return {name: bad(tree) for name, tree in suspects.items()}


# Jitted: on several devices each operation on its own would be a program to compile.
@functools.partial(jax.jit, static_argnums=3)
def _potential(
    phi: jax.Array, weights: jax.Array, epsilon: jax.Array, size: int
) -> jax.Array:
    some = jnp.where(weights > 0, weights, 1.0)
    f = jnp.where(weights > 0, phi + epsilon * jnp.log(some), -jnp.inf)
    return meshes.unpad(f, size)


@jax.jit
def _dual_cost(potentials, weights, epsilon) -> jax.Array:
    (phi, psi), (a, b) = potentials, weights
    return jnp.vdot(a, phi) + jnp.vdot(b, psi) - epsilon * _entropy(a, b)


@jax.jit
def _entropy(a: jax.Array, b: jax.Array) -> jax.Array:
    """H(a) + H(b)."""
    in_a, in_b = (w * jnp.log(jnp.where(w > 0, w, 1.0)) for w in (a, b))
    return -in_a.sum() - in_b.sum()
