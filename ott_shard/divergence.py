"""The debiased Sinkhorn divergence: three problems that share one epsilon."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.tree_util import register_dataclass
from jax.typing import ArrayLike

from ott_shard import _checks, implicit, initial, lbfgs, sinkhorn
from ott_shard.costs import CostFn
from ott_shard.epsilon import Epsilon
from ott_shard.geometry import PointCloud
from ott_shard.implicit import ImplicitDiff
from ott_shard.lbfgs import Acceleration
from ott_shard.potentials import DebiasedPotentials
from ott_shard.sinkhorn import Progress, Watch
from ott_shard.solution import SinkhornOutput
from ott_shard.state import Limits, Snapshot
from ott_shard.status import Status
from ott_shard.transposed import is_symmetric


@register_dataclass
@dataclasses.dataclass(frozen=True)
class SinkhornDivergenceOutput:
    """Value of the divergence and the three solutions it is made of; a pytree.

    Attributes:
        divergence: scalar, in units of cost.
        outputs: solutions of (x, y), (x, x) and, unless `static_b`, (y, y).
    """

    divergence: jax.Array
    outputs: tuple[SinkhornOutput, ...]

    @property
    def epsilon(self) -> jax.Array:
        """The regularisation of all three problems, scalar, in units of cost."""
        return self.outputs[0].epsilon

    @property
    def converged(self) -> jax.Array:
        """Bool scalar: all problems converged."""
        return functools.reduce(jnp.logical_and, (o.converged for o in self.outputs))

    @property
    def status(self) -> Status:
        """The worst of all; on the host only."""
        return max(out.status for out in self.outputs)

    @property
    def n_iters(self) -> tuple[jax.Array, ...]:
        """Iterations of (x, y), (x, x) and (y, y)."""
        return tuple(out.n_iters for out in self.outputs)

    @property
    def errors(self) -> tuple[jax.Array, ...]:
        """Error histories of (x, y), (x, x) and (y, y)."""
        return tuple(out.errors for out in self.outputs)

    def to_dual_potentials(self) -> DebiasedPotentials:
        """Debiased f and g as functions, and the map that they make."""
        own = [out.to_dual_potentials() for out in self.outputs]
        return DebiasedPotentials(*own, *[None] * (3 - len(own)))

    def raise_if_failed(self) -> None:
        """Raise RuntimeError, with the reason, unless all converged."""
        for out in self.outputs:
            out.raise_if_failed()


def sinkhorn_divergence(
    x: ArrayLike,
    y: ArrayLike,
    a: ArrayLike | None = None,
    b: ArrayLike | None = None,
    *,
    cost_fn: CostFn | Callable | None = None,
    epsilon: ArrayLike | Epsilon | None = None,
    relative_epsilon: Literal["mean", "std"] | None = None,
    scale_cost: ArrayLike | str = 1.0,
    tau_a: ArrayLike = 1.0,
    tau_b: ArrayLike = 1.0,
    static_b: bool = False,
    batch_size: int | tuple[int, int] | None = None,
    mesh: Mesh | None = None,
    precision: Literal["default", "high", "highest"] = "highest",
    threshold: ArrayLike = 1e-3,
    max_iterations: int = 2000,
    min_iterations: int = 0,
    inner_iterations: int = 10,
    init: SinkhornDivergenceOutput | Mapping[str, Snapshot] | None = None,
    acceleration: Acceleration | None = lbfgs.DEFAULT,
    implicit_diff: ImplicitDiff | None = implicit.DEFAULT,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> tuple[jax.Array, SinkhornDivergenceOutput]:
    """Sinkhorn divergence between two clouds.

    OT(x, y) - (OT(x, x) + OT(y, y)) / 2 + eps (sum a - sum b)^2 / 2, where OT is
    ``reg_ot_cost``. It is 0 for equal measures and, for the costs here, never negative
    at the optimum (Feydy et al. 2019; Sejourne et al. 2019 for tau_a = tau_b < 1). The
    problems (x, x) and (y, y) have the same tau_a and tau_b as (x, y), as in OTT; where
    the two are known to be equal, they are solved by symmetric updates.

    Args:
        x: [n, d] points.
        y: [m, d] points.
        a: [n] weights of x. None: uniform.
        b: [m] weights of y. None: uniform.
        cost_fn: see :class:`PointCloud`, as are the next three and `batch_size`,
            `mesh`, `precision`.
        epsilon: shared by the three problems. None: 0.05 x std of the costs of (x, y).
        relative_epsilon: statistic of the costs of (x, y) that `epsilon` multiplies.
        scale_cost: what the costs of all three are divided by: a scalar or a statistic
            of the costs of (x, y).
        tau_a: marginal of x, see :func:`ott_shard.solve`, as are all others.
        tau_b: marginal of y.
        static_b: leave (y, y) out, which does not depend on x: the value is too large
            by half of its ``reg_ot_cost``, the gradient in x and a is the same.
        batch_size: largest tile.
        mesh: where to compute.
        precision: of matrix products.
        threshold: on the L1 marginal error of each problem.
        max_iterations: of each problem.
        min_iterations: of each problem.
        inner_iterations: iterations between two records of the error.
        init: an earlier output, also of other points, that each problem starts from; or
            a snapshot of each term that goes on, by name.
        acceleration: how iterations of the problem (x, y) are saved.
        implicit_diff: how potentials, and so values twice, are differentiated.
        progress: called with (term, iteration, error, seconds per iteration), where
            term is "xy", "xx" or "yy".
        watch: called with (term, :class:`Snapshot`).

    Returns:
        The divergence, scalar, differentiable as the value of :func:`ott_shard.solve`,
        and a :class:`SinkhornDivergenceOutput`.

    Raises:
        ValueError, TypeError: for bad arguments, before anything is compiled.

    Cost: 2 passes over n m pairs and one each over n^2 and m^2 per iteration. O((n + m)
    d (1 / rows + 1 / cols) + tile) memory on a device, forward and backward.

    Example:
        >>> import jax, jax.numpy as jnp, ott_shard as otts
        >>> x = jnp.arange(6.0)[:, None]
        >>> value, out = otts.sinkhorn_divergence(x, x + 3, epsilon=0.5)
        >>> round(float(value), 2), bool(out.converged)
        (9.0, True)
        >>> grad = jax.grad(lambda x: otts.sinkhorn_divergence(x, x0, epsilon=0.5)[0])
        >>> x0 = x + 3
        >>> grad(x).shape
        (6, 1)
    """
    settings = sinkhorn.settings_of(
        Limits(max_iterations, min_iterations, inner_iterations),
        implicit_diff,
        acceleration,
        progress=progress,
        watch=watch,
    )
    _checks.choice("static_b", static_b, (False, True))
    earlier = _earlier(init, static_b)
    symmetric = tau_a is tau_b or _equal(tau_a, tau_b)
    geom = PointCloud(
        x,
        y,
        cost_fn=cost_fn,
        epsilon=epsilon,
        relative_epsilon=relative_epsilon,
        scale_cost=scale_cost,
        batch_size=batch_size,
        mesh=mesh,
        precision=precision,
    )
    symmetric = symmetric and is_symmetric(geom.cost_fn)
    own = settings._replace(symmetric=True, acceleration=None)
    tau_a, tau_b, threshold = (
        _checks.scalar(name, value, up_to=limit, dtype=geom.dtype)
        for name, value, limit in (
            ("tau_a", tau_a, 1.0),
            ("tau_b", tau_b, 1.0),
            ("threshold", threshold, float("inf")),
        )
    )
    a, b = geom.weights(a, 0), geom.weights(b, 1)
    _checks.equal_mass(a, b, tau_a, tau_b)
    geom = geom.resolve(a, b)

    def term(name: str, geom: PointCloud, a, b) -> SinkhornOutput:
        data = geom, a, b, tau_a, tau_b
        return sinkhorn.run(
            data,
            own if symmetric and name != "xy" else settings,
            start=initial.potential(earlier[name], data),
            threshold=threshold,
            term=name,
            on_check=(progress, watch),
        )

    pairs = geom.pairs
    a_cols, b_rows = pairs.T.mirror(a), pairs.mirror(b)
    outputs = [
        term("xy", geom, a, b),
        term("xx", geom.against_itself(0, a), a, a_cols),
    ]
    if not static_b:
        outputs.append(term("yy", geom.against_itself(1, b_rows), b_rows, b))
    values = [out.reg_ot_cost for out in outputs]
    divergence = _debias(values, geom.schedule.target, a, b)
    return divergence, SinkhornDivergenceOutput(divergence, tuple(outputs))


def _earlier(init: Any, static_b: bool) -> dict[str, Any]:
    """What each of the problems starts from."""
    terms = ("xy", "xx", "yy")
    if init is None:
        return dict.fromkeys(terms)
    if isinstance(init, Mapping) and set(init) <= set(terms):
        return {**dict.fromkeys(terms), **init}
    if not isinstance(init, SinkhornDivergenceOutput):
        raise TypeError(
            "init must be a SinkhornDivergenceOutput, or a Snapshot by term, got "
            f"{init!r}"
        )
    if len(init.outputs) < 3 and not static_b:
        raise ValueError(
            "init must hold a solution of (y, y) unless static_b, got one without"
        )
    return dict(zip(terms, init.outputs, strict=False))


def _equal(tau_a: Any, tau_b: Any) -> bool:
    known = [_checks.concrete(tau) for tau in (tau_a, tau_b)]
    return all(tau is not None for tau in known) and bool(np.all(known[0] == known[1]))


@jax.jit
def _debias(
    values: list[jax.Array], epsilon: jax.Array, a: jax.Array, b: jax.Array
) -> jax.Array:
    between, *own = values
    masses = epsilon * jnp.square(a.sum() - b.sum()) / 2
    return between - sum(own, jnp.zeros_like(between)) / 2 + masses
