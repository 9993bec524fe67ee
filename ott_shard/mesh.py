"""Meshes, and the way of an array onto one: the only module that knows mesh axes.

A mesh has rows and columns. Rows of x (and f, a) are split over the row axes, rows of
y (and g, b) over the column axes. Every cloud is padded to a multiple of the number of
devices by repeating its last point, with weight 0: whatever is finite for the cloud is
finite for its padding.
"""

import collections
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ott_shard import _checks
from ott_shard.collectives import Axes

ROWS, COLS = "rows", "cols"


def make_mesh(
    rows: int | None = None,
    cols: int | None = None,
    *,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore (a variable to it)
) -> Mesh:
    """A rows x cols mesh of devices for :class:`ott_shard.PointCloud`.

    Args:
        rows: devices over which x is split. None: what `cols` leaves, or, if that is
            None too, the most square shape with rows >= cols, which needs the least
            memory (n / rows + m / cols points on a device).
        cols: devices over which y is split. None: what `rows` leaves.
        devices: the devices to use, row by row. None: all visible devices, or the
            first rows * cols of them.

    Returns:
        A ``jax.sharding.Mesh`` with the axes "rows" and "cols".

    Raises:
        ValueError: if there are too few devices, or the one number given does not
            divide them.

    Example:
        >>> import jax, ott_shard as otts
        >>> mesh = otts.make_mesh(1, 1)
        >>> dict(mesh.shape)
        {'rows': 1, 'cols': 1}
    """
    pool = list(jax.devices() if devices is None else devices)
    if not pool or len(set(pool)) < len(pool) or isinstance(devices, str):
        raise ValueError(f"devices must be distinct jax devices, got {devices!r}")
    for name, size in (("rows", rows), ("cols", cols)):
        if size is not None:
            _checks.integer(name, size)
    if rows is None and cols is None:
        cols = max(c for c in range(1, math.isqrt(len(pool)) + 1) if len(pool) % c == 0)
    elif (given := rows or cols) and not (rows and cols) and len(pool) % given:
        name = "rows" if rows else "cols"
        raise ValueError(
            f"{name} must divide the {len(pool)} devices, got {given}: give both rows "
            "and cols to use fewer devices"
        )
    rows = rows or len(pool) // (cols or 1)
    cols = cols or len(pool) // rows
    if rows * cols > len(pool):
        raise ValueError(
            f"mesh of {rows} x {cols} needs {rows * cols} devices, got "
            f"{len(pool)}: choose a smaller shape, or make more devices visible (on "
            "CPU: jax.config.update('jax_num_cpu_devices', ...) before first use)"
        )
    return Mesh(np.array(pool[: rows * cols]).reshape(rows, cols), (ROWS, COLS))


def axes_of(mesh: Mesh) -> tuple[Axes, Axes]:
    """The row axes and the column axes of any mesh, those of more than one device.

    The axis named "rows", or else the first one, is the rows; all others together are
    the columns. Over one device a sum is a copy, and XLA makes it.
    """
    names = tuple(mesh.axis_names)
    rows = (ROWS,) if ROWS in names else names[:1]
    real = [name for name in names if mesh.shape[name] > 1]
    return (
        tuple(name for name in real if name in rows),
        tuple(name for name in real if name not in rows),
    )


def resolve_mesh(mesh: Mesh | None, x: object) -> Mesh:
    """The mesh asked for, else the one x lives on, else all visible devices."""
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        raise ValueError(
            "a mesh with explicit axes must not be the context, got "
            f"{jax.sharding.get_abstract_mesh()}: wrap your function in "
            "jax.sharding.auto_axes, or leave jax.set_mesh"
        )
    if mesh is None:
        sharding = getattr(_checks.concrete(x), "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            mesh = sharding.mesh
    if mesh is None:
        return make_mesh()
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}: "
            "make one with ott_shard.make_mesh(rows, cols)"
        )
    # Explicit axes would type every intermediate; the solver leaves that to the
    # compiler, so the same devices are used with automatic axes.
    return Mesh(mesh.devices, mesh.axis_names)


def padded_size(n: int, mesh: Mesh) -> int:
    """The smallest multiple of the number of devices that holds n rows."""
    return -(-n // mesh.size) * mesh.size


def place(
    x: jax.Array | np.ndarray,
    mesh: Mesh,
    axes: Axes,
    *,
    pad: Literal["edge", "constant"] = "edge",
    dtype: Any = None,
) -> jax.Array:
    """Pad the rows of `x` to a multiple of the devices and split them over `axes`.

    `pad` is "edge" for points and "constant" (zeros) for weights. Concrete arrays go
    straight to their devices, and a gradient comes back to where the array was. Under
    a trace the layout is asked of the compiler. On a mesh of several processes all must
    give the same NumPy array, of which each reads only its own rows, and casts these to
    `dtype`.
    """
    if isinstance(x, np.ndarray) and not _split(mesh, axes).is_fully_addressable:

        def fill(start: int, out: np.ndarray) -> None:
            out[:] = x[start : start + len(out)]

        own = x.dtype if dtype is None else dtype
        return place_rows(fill, x.shape, mesh, axes, pad=pad, dtype=own)
    missing = padded_size(x.shape[0], mesh) - x.shape[0]
    if missing:
        padding = [(0, missing)] + [(0, 0)] * (x.ndim - 1)
        # NumPy arrays are padded on the host, so that they go straight to their shards.
        x = (np if isinstance(x, np.ndarray) else jnp).pad(x, padding, mode=pad)
    if _checks.concrete(x) is not None:
        return jax.device_put(x, _split(mesh, axes))
    return jax.lax.with_sharding_constraint(x, _split(mesh, axes))


def place_rows(
    fill: Callable[[int, np.ndarray], None],
    shape: tuple[int, ...],
    mesh: Mesh,
    axes: Axes,
    *,
    pad: Literal["edge", "constant"] = "edge",
    dtype: Any,
) -> jax.Array:
    """As `place`, of rows that nobody has as an array; each process asks for its own.

    Args:
        fill: writes rows into an array; it is told the first one, and called once for
            each part of the rows that this process has, in ascending order.
        shape: of all rows, without padding.
        mesh: of one process or several.
        axes: over which rows are split.
        pad: see :func:`place`.
        dtype: of what is placed.
    """
    whole = (padded_size(shape[0], mesh), *shape[1:])
    holders, arrays = collections.defaultdict(list), []
    for device, index in (
        _split(mesh, axes).addressable_devices_indices_map(whole).items()
    ):
        assert index is not None
        holders[index[0].indices(whole[0])[:2]].append(device)
    for (start, stop), devices in sorted(holders.items()):
        part = np.empty((stop - start, *shape[1:]), dtype)
        own, extra = np.split(part, [max(0, shape[0] - start)])
        if len(own):
            fill(start, own)
        if pad == "constant":
            extra[:] = 0
        elif len(own):
            extra[:] = own[-1]
        else:
            fill(shape[0] - 1, extra[:1])
            extra[1:] = extra[0]
        # One part at a time is on the host: a copy to a device is waited for.
        arrays += jax.block_until_ready([jax.device_put(part, d) for d in devices])
    return jax.make_array_from_single_device_arrays(whole, _split(mesh, axes), arrays)


def unpad(x: jax.Array, n: int) -> jax.Array:
    """The first n rows, which are the caller's."""
    return x if x.shape[0] == n else x[:n]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def exchange(x: jax.Array, mesh: Mesh, source: Axes, target: Axes) -> jax.Array:
    """Move an array whose rows are split over `source` onto `target`.

    In steps that the partitioner does piecewise: split further, permute, gather over
    `source` only. Asked for at once it would gather the whole array first.
    """
    for axes in (source, source + target, target + source, target):
        x = jax.lax.with_sharding_constraint(x, _split(mesh, axes))
    return x


def _split(mesh: Mesh, axes: Axes) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(axes or None))
