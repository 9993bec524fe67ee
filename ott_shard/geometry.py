"""Point clouds on a mesh: the data, its layout and the statistics of its costs.

Conventions of the whole package, which are OTT's:

* P_ij = exp((f_i + g_j - C_ij) / epsilon): the weights a, b are part of f, g.
* epsilon, f, g and every cost are in units of C, after division by `scale_cost`.
* Points of x carry a (axis 0 of the plan), points of y carry b (axis 1).
* Inside, potentials are kept without the weights, phi = f - epsilon log a, for these
  are finite also where a weight is zero.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.tree_util import register_pytree_node_class
from jax.typing import ArrayLike

from ott_shard import _checks, costs, mesh as meshes, operators
from ott_shard.operators import Pairs
from ott_shard.tile import Block

# Measured on CPU (BUILD_NOTES M1): the best tile at d = 3 and 64.
_DEFAULT_BLOCK = (1024, 1024)
# OTT's default: epsilon = 0.05 x standard deviation of the costs.
_DEFAULT_EPSILON = 0.05
_PRECISIONS = ("default", "high", "highest")


class CostStatistics(NamedTuple):
    """Mean, standard deviation and maximum of the costs, scalars in units of cost."""

    mean: jax.Array
    std: jax.Array
    max: jax.Array


@register_pytree_node_class
@dataclasses.dataclass(frozen=True, init=False)
class PointCloud:
    """Two point clouds, split over a mesh, and the cost between them.

    The n x m cost matrix is never formed. Points of x are split over the rows of the
    mesh, points of y over its columns, whatever n and m. A pytree: it can be an
    argument of ``jit`` and ``grad`` and can be built inside them.

    Args:
        x: [n, d] points. Floating points of less than 32 bits and integers are
            computed with as float32.
        y: [m, d] points.
        cost_fn: ground cost, see :mod:`ott_shard.costs`.
        epsilon: regularisation, a positive scalar in units of cost (or of
            `relative_epsilon`), may be traced. None: 0.05 x std of the costs.
        relative_epsilon: "mean" or "std": `epsilon` is a multiple of this statistic of
            the costs. Statistics are not differentiated.
        scale_cost: positive scalar by which costs are divided.
        batch_size: the most rows and columns in one tile on each device, an int for
            both or a pair. None: chosen for speed. It changes memory, not results.
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
        >>> import numpy as np, ott_shard as otts
        >>> x, y = np.eye(3), np.ones((2, 3))
        >>> geom = otts.PointCloud(x, y, epsilon=0.1)
        >>> geom.shape, round(float(geom.mean_cost), 3)
        ((3, 2), 2.0)
    """

    pairs: Pairs
    given_epsilon: jax.Array | None
    relative_epsilon: str | None
    n: int
    m: int

    def __init__(
        self,
        x: ArrayLike,
        y: ArrayLike,
        *,
        cost_fn: costs.CostFn | None = None,
        epsilon: ArrayLike | None = None,
        relative_epsilon: Literal["mean", "std"] | None = None,
        scale_cost: ArrayLike = 1.0,
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
        cost_fn = costs.SqEuclidean() if cost_fn is None else cost_fn
        if not isinstance(cost_fn, costs.CostFn) or isinstance(cost_fn, type):
            raise TypeError(
                "cost_fn must be a cost such as ott_shard.costs.SqEuclidean(), "
                f"got {cost_fn!r}"
            )
        if any(leaf is cost_fn for leaf in jax.tree.leaves(cost_fn)):
            raise TypeError(
                f"cost_fn must be a pytree, got {cost_fn!r}: decorate its class with "
                "jax.tree_util.register_dataclass"
            )
        _checks.choice("relative_epsilon", relative_epsilon, (None, "mean", "std"))
        _checks.choice("precision", precision, _PRECISIONS)
        mesh = meshes.resolve_mesh(mesh, xs)
        row_axes, col_axes = meshes.axes_of(mesh)
        rows = meshes.place(xs, mesh, row_axes)
        if y is x:
            cols = meshes.exchange(rows, mesh, row_axes, col_axes)
        else:
            cols = meshes.place(ys, mesh, col_axes)
        pairs = Pairs(
            x=rows,
            y=cols,
            centre=_centre(rows, cols) * cost_fn.translation_invariant,
            scale=_checks.scalar("scale_cost", scale_cost, dtype=dtype),
            cost=cost_fn,
            mesh=mesh,
            row_axes=row_axes,
            col_axes=col_axes,
            block=_block(batch_size, precision),
        )
        if epsilon is not None:
            epsilon = _checks.scalar("epsilon", epsilon, dtype=dtype)
        self._set(pairs, epsilon, relative_epsilon, len(xs), len(ys))

    def _set(self, *values: Any) -> None:
        for field, value in zip(dataclasses.fields(self), values, strict=True):
            object.__setattr__(self, field.name, value)

    # Not register_dataclass: it rebuilds through __init__, which checks and places.
    def tree_flatten(self):
        """Arrays, then static data."""
        data = (self.pairs, self.given_epsilon)
        return data, (self.relative_epsilon, self.n, self.m)

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
        return self.pairs.x.dtype

    @property
    def mesh(self) -> Mesh:
        """The mesh computed on."""
        return self.pairs.mesh

    @property
    def cost_fn(self) -> costs.CostFn:
        """The ground cost."""
        return self.pairs.cost

    def against_itself(self, axis: Literal[0, 1], epsilon: jax.Array) -> "PointCloud":
        """The geometry of (x, x) for axis 0 or of (y, y) for axis 1.

        The cloud moves between the rows and the columns of the mesh piece by piece.
        """
        pairs, size = self.pairs, self.shape[axis]
        if axis == 0:
            pairs = dataclasses.replace(pairs, y=pairs.T.mirror(pairs.x))
        else:
            pairs = dataclasses.replace(pairs, x=pairs.mirror(pairs.y))
        # Its own centre keeps more digits when the two clouds are far apart.
        centre = _centre(pairs.x, pairs.y) * pairs.cost.translation_invariant
        pairs = dataclasses.replace(pairs, centre=centre)
        geom = object.__new__(PointCloud)
        geom._set(pairs, epsilon, None, size, size)
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
        axes = self.pairs.row_axes if axis == 0 else self.pairs.col_axes
        return meshes.place(a, self.mesh, axes, pad="constant")

    def cost_statistics(self, a: Any = None, b: Any = None) -> CostStatistics:
        """Mean, std and maximum of the costs with weights a_i b_j.

        Args:
            a: [n] weights. None: uniform. A point of weight 0 does not count.
            b: [m] weights, likewise.

        Returns:
            Scalars in units of cost (divided by `scale_cost`). One pass over the pairs,
            O(n + m + tile) memory. Not differentiated.
        """
        return _statistics(self, self.weights(a, 0), self.weights(b, 1))

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
        if self.given_epsilon is not None and self.relative_epsilon is None:
            return self.given_epsilon
        return self.resolve_epsilon(self.weights(None, 0), self.weights(None, 1))

    def resolve_epsilon(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Epsilon in units of cost, for padded weights.

        Without spread every positive epsilon gives the same plan a b^T, and the
        statistic is taken to be 1.
        """
        if self.given_epsilon is not None and self.relative_epsilon is None:
            return self.given_epsilon
        return _relative_epsilon(self, a, b)


def _block(batch_size: Any, precision: str) -> Block:
    if batch_size is None:
        return Block(*_DEFAULT_BLOCK, precision)
    pair = isinstance(batch_size, tuple | list)
    sizes = batch_size if pair else (batch_size, batch_size)
    if len(sizes) != 2:
        raise ValueError(
            f"batch_size must be an int or a pair (rows, cols), got {batch_size!r}"
        )
    rows, cols = (_checks.integer("batch_size", size) for size in sizes)
    return Block(rows, cols, precision)


@jax.jit
def _centre(x: jax.Array, y: jax.Array) -> jax.Array:
    """A point in the midst of both clouds, [d]; costs do not depend on which."""
    return jax.lax.stop_gradient((x.mean(0) + y.mean(0)) / 2)


@jax.jit
def _relative_epsilon(geom: PointCloud, a: jax.Array, b: jax.Array) -> jax.Array:
    stats = _statistics(geom, a, b)
    unit = getattr(stats, geom.relative_epsilon or "std")
    noise = 8 * jnp.finfo(geom.dtype).eps * jnp.abs(stats.max)
    factor = _DEFAULT_EPSILON if geom.given_epsilon is None else geom.given_epsilon
    return factor * jnp.where(unit > noise, unit, 1.0)


@jax.jit
def _statistics(geom: PointCloud, a: jax.Array, b: jax.Array) -> CostStatistics:
    moments = operators.cost_moments(*jax.lax.stop_gradient((geom.pairs, a, b)))
    return CostStatistics(moments.mean, jnp.sqrt(moments.deviation), moments.max)
