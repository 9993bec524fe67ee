"""Point clouds on a mesh: the data, its layout and the statistics of its costs.

Conventions of the whole package, which are OTT's:

* P_ij = exp((f_i + g_j - C_ij) / epsilon): the weights a, b are part of f, g.
* epsilon, f, g and every cost are in units of C, after division by `scale_cost`.
* Points of x carry a (axis 0 of the plan), points of y carry b (axis 1).
* Inside, potentials are kept without the weights, phi = f - epsilon log a, for these
  are finite also where a weight is zero.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.tree_util import register_pytree_node_class
from jax.typing import ArrayLike

from ott_shard import _checks, costs, mesh as meshes, units
from ott_shard.collectives import Axes
from ott_shard.epsilon import Epsilon
from ott_shard.operators import Pairs
from ott_shard.tile import Block
from ott_shard.units import CostStatistics

# The side of a tile: the best one measured on CPU (BUILD_NOTES M1); elsewhere a step of
# the scan must be long beside the start of its kernels (M22, a model of GPUs).
_TILE_ON_CPU, _TILE_ELSEWHERE = 1024, 4096
# OTT's default: epsilon = 0.05 x standard deviation of the costs.
DEFAULT_EPSILON = 0.05
_PRECISIONS = ("default", "high", "highest")


@register_pytree_node_class
@dataclasses.dataclass(frozen=True, init=False)
class PointCloud:
    """Two point clouds, split over a mesh, and the cost between them.

    The n x m cost matrix is never formed. Points of x are split over the rows of the
    mesh, points of y over its columns, whatever n and m. A pytree: it can be an
    argument of ``jit`` and ``grad`` and can be built inside them.

    Args:
        x: [n, d] points. Computed with as float64 if they are and x64 is on, else as
            float32; float16 and bfloat16 are stored as they are, and so are gradients.
        y: [m, d] points.
        cost_fn: ground cost, see :mod:`ott_shard.costs`, or a function of two points,
            (x [d], y [d]) -> scalar (:class:`ott_shard.costs.Custom`).
        epsilon: regularisation, a positive scalar in units of cost (or of
            `relative_epsilon`), may be traced; or an :class:`ott_shard.Epsilon` that
            comes down to it. None: 0.05 x std of the costs.
        relative_epsilon: "mean" or "std": `epsilon` is a multiple of this statistic of
            the scaled costs.
        scale_cost: what costs are divided by: a positive scalar, or one of "mean",
            "std", "max_cost" (of the costs), "max_norm" and "max_bound" (largest
            squared norm of a point, and largest cost that such norms allow; for
            SqEuclidean and NegDotProduct; they depend on the origin). Statistics are
            weighted by a_i b_j, are 1 where there is no spread, and are constants to
            differentiation.
        batch_size: the most rows and columns in one tile on each device, an int for
            both or a pair. None: by the kind of device, 1024 on CPU and 4096 on GPU,
            less for a `Custom` cost. It changes memory, not results.
        mesh: where to compute. None: the mesh of x if it lies on one, else all visible
            devices. Inside jit the mesh of x is not known: pass it. The axis named
            "rows", or else the first, splits x; all others split y.
        precision: of matrix products: "highest", "high" or "default".

    Raises:
        TypeError: if an argument has the wrong kind.
        ValueError: if a cloud is empty, not [n, d] or not finite, if the dimensions
            differ, or if another argument is out of range.

    Memory is O(n d / rows + m d / cols + tile) on a device.

    Example:
        >>> import jax.numpy as jnp, ott_shard as otts
        >>> x, y = jnp.eye(3), jnp.ones((2, 3))
        >>> geom = otts.PointCloud(x, y, epsilon=0.1)
        >>> geom.shape, round(float(geom.mean_cost), 3)
        ((3, 2), 2.0)
    """

    pairs: Pairs
    schedule: Epsilon
    relative_epsilon: str | None
    relative_scale: str | None
    n: int
    m: int

    def __init__(
        self,
        x: ArrayLike,
        y: ArrayLike,
        *,
        cost_fn: costs.CostFn | Callable | None = None,
        epsilon: ArrayLike | Epsilon | None = None,
        relative_epsilon: Literal["mean", "std"] | None = None,
        scale_cost: ArrayLike | str = 1.0,
        batch_size: int | tuple[int, int] | None = None,
        mesh: Mesh | None = None,
        precision: Literal["default", "high", "highest"] = "highest",
    ):
        arrays = _checks.real_array("x", x), _checks.real_array("y", y)
        dtype = _checks.working_dtype(*arrays)
        xs, ys = (_checks.points(*p, dtype) for p in zip("xy", arrays, strict=True))
        if xs.shape[1] != ys.shape[1]:
            raise ValueError(
                f"x and y must have the same dimension d, got {xs.shape[1]} and "
                f"{ys.shape[1]} (shapes {xs.shape} and {ys.shape})"
            )
        cost = _as_cost(cost_fn, xs.shape[1], dtype)
        units.check(relative_epsilon, scale_cost, cost)
        if epsilon is None:
            epsilon, relative_epsilon = DEFAULT_EPSILON, relative_epsilon or "std"
        if not isinstance(epsilon, Epsilon):
            number = _checks.scalar("epsilon", epsilon, dtype=dtype)
            epsilon = Epsilon.constant(number)
        relative_scale = scale_cost if isinstance(scale_cost, str) else None
        _checks.choice("precision", precision, _PRECISIONS)
        _checks.warn_if_narrowed(dtype, x=x, y=y)
        mesh = meshes.resolve_mesh(mesh, xs)
        row_axes, col_axes = meshes.axes_of(mesh)
        rows = meshes.place(xs, mesh, row_axes)
        if y is x:
            cols = meshes.exchange(rows, mesh, row_axes, col_axes)
        else:
            cols = meshes.place(ys, mesh, col_axes)
        scale = 1.0 if relative_scale else scale_cost
        pairs = Pairs(
            x=rows,
            y=cols,
            centre=jnp.zeros(xs.shape[1], dtype),
            scale=_checks.scalar("scale_cost", scale, dtype=dtype),
            cost=cost,
            mesh=mesh,
            row_axes=row_axes,
            col_axes=col_axes,
            block=_block(batch_size, precision, cost, xs.shape[1], mesh),
        )
        self._set(
            *(pairs, epsilon.checked(dtype), relative_epsilon),
            *(relative_scale, len(xs), len(ys)),
        )

    def _set(self, *values: Any) -> None:
        for field, value in zip(dataclasses.fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)

    # Not register_dataclass: it rebuilds through __init__, which checks and places.
    def tree_flatten(self):
        """Arrays, then static data."""
        data = (self.pairs, self.schedule)
        return data, (self.relative_epsilon, self.relative_scale, self.n, self.m)

    @classmethod
    def tree_unflatten(cls, static, data):
        """Inverse of :meth:`tree_flatten`."""
        geom = object.__new__(cls)
        geom._set(*data, *static)
        return geom

    @property
    def x(self) -> jax.Array:
        """[n, d], the points of x."""
        return meshes.unpad(self.pairs.x, self.n)

    @property
    def y(self) -> jax.Array:
        """[m, d], the points of y."""
        return meshes.unpad(self.pairs.y, self.m)

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        return self.n, self.m

    @property
    def dtype(self) -> np.dtype:
        """The dtype computed with."""
        return self.pairs.centre.dtype

    @property
    def mesh(self) -> Mesh:
        """The mesh computed on."""
        return self.pairs.mesh

    @property
    def cost_fn(self) -> costs.CostFn:
        """The ground cost."""
        return self.pairs.cost

    def against_itself(self, axis: Literal[0, 1], weights: jax.Array) -> "PointCloud":
        """The geometry of (x, x) for axis 0 or of (y, y) for axis 1, if resolved.

        The cloud moves between the rows and the columns of the mesh piece by piece.
        `weights` are those of its rows.
        """
        pairs, size = self.pairs, self.shape[axis]
        if axis == 0:
            pairs = dataclasses.replace(pairs, y=pairs.T.mirror(pairs.x))
        else:
            pairs = dataclasses.replace(pairs, x=pairs.mirror(pairs.y))
        # Its own centre keeps more digits when the two clouds are far apart.
        pairs = units.centred(pairs, weights, pairs.T.mirror(weights))
        return self.resolved(pairs, self.schedule, size, size)

    @staticmethod
    def resolved(pairs: Pairs, schedule: Epsilon, n: int, m: int) -> "PointCloud":
        """The geometry of placed pairs, n x m of them without padding."""
        geom = object.__new__(PointCloud)
        geom._set(pairs, schedule, None, None, n, m)
        return geom

    def weights(self, a: Any, axis: Literal[0, 1]) -> jax.Array:
        """Weights of the points of x (axis 0) or y (axis 1), checked, padded, placed.

        Args:
            a: [n] or [m] weights, zeros allowed. None: uniform, with sum 1.
            axis: 0 for x, 1 for y.

        Returns:
            The weights of the padded cloud, split like it, 0 for the padding.
        """
        name, cloud = (("a", "x"), ("b", "y"))[axis]
        size = self.shape[axis]
        if a is None:
            a = np.full(size, 1 / size)
        a = _checks.weights(name, a, size, cloud, self.dtype)
        return meshes.place(a, self.mesh, self._axes[axis], pad="constant")

    @property
    def _axes(self) -> tuple[Axes, Axes]:
        """What the points of x and of y are split over."""
        return self.pairs.row_axes, self.pairs.col_axes

    def potential(
        self, name: str, f: Any, weights: jax.Array, axis: Literal[0, 1]
    ) -> jax.Array:
        """phi = f - epsilon log a of a potential f, padded and placed; 0 where a is 0.

        Args:
            name: what the caller calls it.
            f: [n] or [m], finite where the weight is positive.
            weights: the padded weights of the cloud.
            axis: 0 for x, 1 for y.

        Returns:
            [n padded] or [m padded], split like the points.

        Raises:
            ValueError, TypeError: if its shape or a number is wrong.
        """
        f = self.check_potential(name, f, axis)
        f = meshes.place(f, self.mesh, self._axes[axis])
        phi, finite = _without_weights(f, weights, self.epsilon)
        if _checks.concrete(finite) not in (None, True):
            raise ValueError(f"{name} must be finite where the weight is positive")
        return phi

    def check_potential(
        self, name: str, f: Any, axis: Literal[0, 1]
    ) -> jax.Array | np.ndarray:
        """`f` as one number for each point of x (axis 0) or y (axis 1)."""
        f = _checks.real_array(name, f).astype(self.dtype)
        if f.shape != self.shape[axis : axis + 1]:
            raise ValueError(
                f"{name} must have shape ({self.shape[axis]},), got {f.shape}"
            )
        return f

    def cost_statistics(self, a: Any = None, b: Any = None) -> CostStatistics:
        """Mean, std and maximum of the costs with weights a_i b_j.

        Args:
            a: [n] weights. None: uniform. A point of weight 0 does not count.
            b: [m] weights, likewise.

        Returns:
            Scalars in units of cost (divided by `scale_cost`). One pass over the pairs,
            O(n + m + tile) memory. Not differentiated.
        """
        a, b = self.weights(a, 0), self.weights(b, 1)
        return units.statistics(self.resolve(a, b).pairs, a, b)

    @property
    def mean_cost(self) -> jax.Array:
        """Mean of the costs under uniform weights."""
        return self.cost_statistics().mean

    @property
    def std_cost(self) -> jax.Array:
        """Standard deviation of the costs under uniform weights."""
        return self.cost_statistics().std

    @property
    def max_cost(self) -> jax.Array:
        """Largest cost."""
        return self.cost_statistics().max

    @property
    def epsilon(self) -> jax.Array:
        """Regularisation in units of cost, under uniform weights if it is relative."""
        return self._of_uniform.schedule.target

    @property
    def scale_cost(self) -> jax.Array:
        """What costs are divided by, under uniform weights if it is a statistic."""
        return self._of_uniform.pairs.scale

    @property
    def _of_uniform(self) -> "PointCloud":
        if not self._relative:
            return self
        return self.resolve(self.weights(None, 0), self.weights(None, 1))

    @property
    def _relative(self) -> bool:
        return bool(self.relative_epsilon or self.relative_scale)

    def resolve(self, a: jax.Array, b: jax.Array) -> "PointCloud":
        """The same, centred, with scale and epsilon as numbers, for padded weights.

        One pass if scale or epsilon is a statistic, else none.
        """
        pairs, schedule = units.centred(self.pairs, a, b), self.schedule
        if self._relative:
            scale, schedule = units.resolve(
                pairs, schedule, a, b, self.relative_epsilon, self.relative_scale
            )
            pairs = dataclasses.replace(pairs, scale=scale)
        return self.resolved(pairs, schedule, self.n, self.m)


@jax.jit
def _without_weights(f: jax.Array, weights: jax.Array, epsilon: jax.Array):
    """f - epsilon log a, 0 where a is 0, and whether all is finite."""
    some = weights > 0
    phi = jnp.where(some, f - epsilon * jnp.log(jnp.where(some, weights, 1.0)), 0.0)
    return phi, jnp.all(jnp.isfinite(phi))


def _as_cost(cost_fn: Any, d: int, dtype: Any) -> costs.CostFn:
    """`cost_fn` if it is a cost of points [d]; a function of two points is made one."""
    if cost_fn is None:
        return costs.SqEuclidean()
    known = isinstance(cost_fn, costs.CostFn)
    if isinstance(cost_fn, type) or not (known or callable(cost_fn)):
        raise TypeError(
            "cost_fn must be a cost such as ott_shard.costs.SqEuclidean(), or a "
            f"function of two points, got {cost_fn!r}"
        )
    cost = cost_fn if known else costs.Custom(cost_fn)
    if any(leaf is cost for leaf in jax.tree.leaves(cost)):
        raise TypeError(
            f"cost_fn must be a pytree, got {cost_fn!r}: decorate its class with "
            "ott_shard.costs.register"
        )
    point = jax.ShapeDtypeStruct((1, d), dtype)
    try:
        out = jax.eval_shape(lambda x, y: cost.pairwise(x, y, "highest"), point, point)
    except Exception as error:
        raise TypeError(
            f"cost_fn must take two points of shape [{d}], got {cost_fn!r}, which "
            f"fails on them: {error}"
        ) from error
    if getattr(out, "shape", None) != (1, 1) or out.dtype != dtype:
        raise TypeError(
            f"cost_fn must give one number of {dtype} for two points, got {out} of "
            f"{cost_fn!r}, for 1 x 1 pairs"
        )
    return cost


def _block(
    batch_size: Any, precision: str, cost: costs.CostFn, d: int, mesh: Mesh
) -> Block:
    if batch_size is None:
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        batch_size = _TILE_ON_CPU if on_cpu else _TILE_ELSEWHERE
        # A function of two points may make something of size d for each of them.
        costly = isinstance(cost, costs.Custom)
        while costly and batch_size > 64 and batch_size**2 * d > 2**20:
            batch_size //= 2
    pair = isinstance(batch_size, tuple | list)
    sizes = batch_size if pair else (batch_size, batch_size)
    if len(sizes) != 2:
        raise ValueError(
            f"batch_size must be an int or a pair (rows, cols), got {batch_size!r}"
        )
    rows, cols = (_checks.integer("batch_size", size) for size in sizes)
    return Block(rows, cols, precision, costs.classes_in(cost))
