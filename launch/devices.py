"""Which devices to compute on."""

import jax
from jax.sharding import Mesh

import ott_shard as otts

from .errors import BadInput


def use_cpu(count: int | None) -> None:
    """Compute on `count` CPU devices, in a process that has not computed yet.

    None leaves the choice to JAX.
    """
    if count is None:
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:
        raise BadInput(
            f"--cpu_devices={count}: jax already runs in this process on "
            f"{jax.device_count()} devices: leave the flag out, or use a new process"
        ) from None


def make_mesh(shape: tuple[int, int] | None) -> Mesh:
    """A mesh of `shape`, (rows, cols); None: of all devices.

    Raises:
        BadInput: if there are too few devices.
    """
    if shape is None:
        return otts.make_mesh()
    rows, cols = shape
    if (needed := rows * cols) > (count := jax.device_count()):
        raise BadInput(
            f"--mesh={rows}x{cols}: needs {needed} devices, {count} visible: choose a "
            f"smaller mesh, or compute on CPU with --cpu_devices={needed}"
        )
    return otts.make_mesh(rows, cols)
