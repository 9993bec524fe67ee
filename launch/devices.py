"""Which devices to compute on."""

from typing import Any

import jax
from jax.sharding import Mesh

import ott_shard as otts

from .config import Command
from .errors import BadInput, complain
from .processes import Beat

# What is usually the matter, by the backend that was wanted.
_REMEDIES = {
    "gpu": "JAX may be without CUDA (pip install 'ott_shard[cuda13]'), "
    "CUDA_VISIBLE_DEVICES empty, or JAX_PLATFORMS or --cpu_devices set",
    "tpu": "JAX may be without its TPU library (pip install 'jax[tpu]'), or "
    "JAX_PLATFORMS or --cpu_devices set",
    "cpu": "give --cpu_devices=N, or set JAX_PLATFORMS=cpu",
}


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


def require(backend: str | None) -> None:
    """Refuse to compute on another backend than the one that was asked for.

    Raises:
        BadInput: if JAX has chosen another one, or finds none.
    """
    if backend is None:
        return
    try:
        found = f"JAX computes on {(kind := jax.default_backend())}"
    except RuntimeError as error:  # JAX_PLATFORMS names what is not there
        kind, found = None, str(error).partition("\n")[0]
    if kind != backend:
        raise BadInput(f"--require={backend}: {found}: {_REMEDIES[backend]}")


def mesh_of(command: Command) -> Mesh:
    """The mesh that a command asks for; with a warning if devices are left idle.

    Raises:
        BadInput: if there are too few devices.
    """
    mesh, count = make_mesh(command.mesh), jax.device_count()
    if mesh.size < count and jax.process_index() == 0:
        shape = "x".join(str(size) for size in mesh.devices.shape)
        idle = f"leaves {count - mesh.size} of {count} devices idle"
        complain("warning", f"mesh {shape} {idle}")
    return mesh


def show(command: Command, _: Beat) -> int:
    """Print what there is to compute on; the exit code is 0.

    Raises:
        BadInput: if that is not what the command asks for.
    """
    require(command.require)
    rows, cols = mesh_of(command).devices.shape
    local = jax.local_devices()
    print(
        f"{'backend':<15}{jax.default_backend()}\n"
        f"{'process':<15}{jax.process_index()} of {jax.process_count()}\n"
        f"{'devices':<15}{len(local)} here, {jax.device_count()} in all"
    )
    for device in local:
        name = f"{device.platform}:{device.id}"
        print(f"  {name:<13}{device.device_kind}, {_memory(device)}")
    print(f"{'mesh':<15}{rows}x{cols}: x split by {rows}, y by {cols}", flush=True)
    return 0


def memory_limit(device: Any) -> int | None:
    """Bytes that a device lets JAX have; None if it does not say."""
    return (device.memory_stats() or {}).get("bytes_limit")


def _memory(device: Any) -> str:
    limit = memory_limit(device)
    return "memory unknown" if limit is None else f"{limit / 2**30:.1f} GiB for JAX"
