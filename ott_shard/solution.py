"""What a solver returns: potentials, costs, and why it stopped."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass
from jax.typing import ArrayLike

from ott_shard import _checks, implicit, mesh as meshes
from ott_shard.implicit import ImplicitDiff
from ott_shard.linear_solve import LinearSolve
from ott_shard.plan import Plan
from ott_shard.plan_sums import entropy
from ott_shard.status import Status


@register_dataclass
@dataclasses.dataclass(frozen=True)
class SinkhornOutput(Plan):
    """Solution of one regularised transport problem; a pytree.

    All is differentiable, in forward and reverse mode and to any order, with respect to
    points, weights, epsilon, tau and parameters of the cost. The first derivative of
    ``reg_ot_cost`` and ``ent_reg_cost`` takes one pass (envelope theorem); potentials,
    the plan, and all second derivatives take a linear system, see
    :class:`ott_shard.ImplicitDiff`. Derivatives in a and b are those of directions that
    keep the masses equal, unless tau < 1. Of a batch of solutions, from ``vmap``, the
    fields and the (worst) `status` can be read; all else belongs inside the mapped
    function.

    Its plan is used as any :class:`ott_shard.Plan` is.

    Attributes:
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

    implicit_diff: ImplicitDiff | None = dataclasses.field(metadata=dict(static=True))
    reg_ot_cost: jax.Array
    marginal_error: jax.Array
    error_floor: jax.Array
    errors: jax.Array
    n_iters: jax.Array
    code: jax.Array

    @property
    def _potentials(self) -> tuple[jax.Array, jax.Array]:
        if self.implicit_diff is None:
            return super()._potentials
        return implicit.potentials(self.implicit_diff, self.problem, self.found)

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

    @property
    def ent_reg_cost(self) -> jax.Array:
        """reg_ot_cost - eps (H(a) + H(b)): <C, P> - eps H(P) at equal masses of 1."""
        p = self._one
        return self.reg_ot_cost - p.epsilon * (entropy(p.a) + entropy(p.b))

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
