"""Clouds and weights from files, and the demo clouds."""

import zipfile
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .config import Config
from .errors import BadInput


class Clouds(NamedTuple):
    """Two clouds and their weights, on the host; None for uniform weights."""

    x: np.ndarray
    y: np.ndarray
    a: np.ndarray | None
    b: np.ndarray | None


def load(config: Config) -> Clouds:
    """The clouds and weights of a run in the dtype of the run.

    Shapes and values are not looked at here: the library does, for every caller.

    Raises:
        BadInput: if a file cannot be read.
    """
    if config.demo:
        assert config.n is not None
        points = tuple(np.asarray(cloud, config.dtype) for cloud in discs(config.n))
    else:
        points = (_array(config, "x"), _array(config, "y"))
    weights = (
        None if getattr(config, name) is None else _array(config, name)
        for name in ("a", "b")
    )
    return Clouds(*points, *weights)


def discs(n: int) -> tuple[jax.Array, jax.Array]:
    """The example of OTT issue 417: n points each in two discs of radius 5 and 10.

    Both clouds come from one key, as there, and from the generator of that time; always
    float32, so that runs in float64 are about the same points.
    """
    with jax.threefry_partitionable(False):
        _, key, _ = jax.random.split(jax.random.PRNGKey(42), 3)
        return _disc(5, n, key), _disc(10, n, key)


def _disc(radius: float, n: int, key: jax.Array) -> jax.Array:
    radius_key, angle_key = jax.random.split(key)
    r = radius * jnp.sqrt(jax.random.uniform(radius_key, (n,), jnp.float32))
    angle = 2 * jnp.pi * jax.random.uniform(angle_key, (n,), jnp.float32)
    return jnp.stack((r * jnp.cos(angle), r * jnp.sin(angle)), axis=1)


def _array(config: Config, name: str) -> np.ndarray:
    source = getattr(config, name)
    try:
        array = _read(source)
    except FileNotFoundError:
        raise BadInput(f"--{name}={source}: no such file: check the path") from None
    except OSError as error:
        raise BadInput(
            f"--{name}={source}: cannot be read ({error.strerror or error}): give a "
            ".npy file or archive.npz#key"
        ) from None
    except (ValueError, EOFError, zipfile.BadZipFile):
        raise BadInput(
            f"--{name}={source}: is not a whole .npy or .npz file of numbers: write it "
            "by numpy.save, without objects"
        ) from None
    except KeyError as error:
        raise BadInput(f"--{name}={source}: {error.args[0]}") from None
    if array.dtype.kind in "fiub":
        with np.errstate(over="ignore"):  # an inf made here is refused later
            array = array.astype(config.dtype, copy=False)
    return array


def _read(source: str) -> np.ndarray:
    """The array in file.npy or archive.npz#key; a .npy file is mapped, not read."""
    path, _, key = source.rpartition("#")
    if not path or Path(source).exists():
        path, key = source, ""
    if not zipfile.is_zipfile(path):
        array = np.asarray(np.lib.format.open_memmap(path, mode="r"))
        if key:
            raise KeyError(f"{path} holds one array: leave #{key} out")
        return array
    with np.load(path, allow_pickle=False) as archive:
        if key not in archive:
            names = ", ".join(archive)
            raise KeyError(f"{path} holds the arrays {names}: choose one as {path}#KEY")
        return archive[key]
