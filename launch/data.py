"""Clouds and weights from files, and the demo clouds."""

import functools
import os
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ott_shard import mesh as meshes

from .config import Problem, Use
from .errors import BadInput

# A checksum is of so many pieces of so many bytes: all of a file of up to 4 MiB.
_PIECES, _PIECE = 64, 2**16


Array = np.ndarray | jax.Array


class Clouds(NamedTuple):
    """Two clouds and their weights, on the host; None for uniform weights."""

    x: Array
    y: Array
    a: Array | None
    b: Array | None

    @property
    def sizes(self) -> tuple[int, int]:
        """(n, m); 0 for a number, which is no cloud, as the library will say."""
        n, m = (points.shape[0] if points.ndim else 0 for points in (self.x, self.y))
        return n, m


class Input(NamedTuple):
    """A file of numbers: where it is, and how to know it again.

    Attributes:
        source: absolute path, with #key as it was given.
        shape: of its array.
        dtype: of its array, before the cast to that of the run.
        crc32: of at most 4 MiB of its array, in pieces that are evenly spaced.
    """

    source: str
    shape: list[int]
    dtype: str
    crc32: int


def load(problem: Problem) -> tuple[Clouds, dict[str, Input]]:
    """The clouds and weights of a problem in its dtype, and the files they come from.

    Shapes and values are not looked at here: the library does, for every caller.

    Raises:
        BadInput: if a file cannot be read.
    """
    arrays, inputs = {}, {}
    # Of several processes each casts its own rows, and reads no others.
    dtype = problem.dtype if jax.process_count() == 1 else None
    for name in Clouds._fields:
        if (source := getattr(problem, name)) is not None:
            arrays[name], inputs[name] = read(f"--{name}={source}", source, dtype)
    if problem.demo:
        assert problem.n is not None
        points = (np.asarray(cloud, problem.dtype) for cloud in discs(problem.n))
        arrays |= zip("xy", points, strict=True)
    x, y = arrays["x"], arrays["y"]
    return Clouds(x, y, arrays.get("a"), arrays.get("b")), inputs


def spread(clouds: Clouds, mesh: Mesh, dtype: str) -> Clouds:
    """The same on the devices of all processes, each of which reads its own rows.

    Padded to a whole number of rows on each device, with points of weight 0; weights
    are then those of all points.

    Raises:
        BadInput: if the shapes do not fit together, which the library cannot see.
    """
    x, y, a, b = clouds
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1] or 0 in x.shape + y.shape:
        raise BadInput(
            f"--x --y: x and y must be [n, d] and [m, d], got {x.shape} and {y.shape}"
        )
    axes, placed = meshes.axes_of(mesh), []
    for name, points, weights, own in zip("ab", (x, y), (a, b), axes, strict=True):
        if weights is not None and weights.shape != (len(points),):
            raise BadInput(
                f"--{name}: must have shape ({len(points)},), one weight for each "
                f"point, got {weights.shape}"
            )
        if weights is None:
            weights = np.full(len(points), 1 / len(points))
        rows = functools.partial(meshes.place, mesh=mesh, axes=own, dtype=dtype)
        placed.append((rows(points), rows(weights, pad="constant")))
    (x, a), (y, b) = placed
    return Clouds(x, y, a, b)


def of_use(use: Use, dtype: str) -> tuple[np.ndarray | None, Input | None]:
    """The numbers in the file that a use of a run names, if it names one.

    Raises:
        BadInput: if the file cannot be read.
    """
    if use.source is None:
        return None, None
    return read(f"--{use.file}={use.source}", use.source, dtype)


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


def read(subject: str, source: str, dtype: str | None) -> tuple[np.ndarray, Input]:
    """The array in a file, in `dtype` if it holds real numbers, and the file.

    Raises:
        BadInput: about the `subject`, if the file cannot be read.
    """
    try:
        array = _read(source)
    except FileNotFoundError:
        raise BadInput(f"{subject}: no such file: check the path") from None
    except OSError as error:
        raise BadInput(
            f"{subject}: cannot be read ({error.strerror or error}): give a .npy file "
            "or archive.npz#key"
        ) from None
    except (ValueError, EOFError, zipfile.BadZipFile):
        raise BadInput(
            f"{subject}: is not a whole .npy or .npz file of numbers: write it by "
            "numpy.save, without objects"
        ) from None
    except KeyError as error:
        raise BadInput(f"{subject}: {error.args[0]}") from None
    described = _describe(source, array)
    if dtype and array.dtype.kind in "fiub":
        with np.errstate(over="ignore"):  # an inf made here is refused later
            array = array.astype(dtype, copy=False)
    return array, described


def _describe(source: str, array: np.ndarray) -> Input:
    path, key = split(source)
    absolute = os.path.abspath(path) + (f"#{key}" if key else "")
    memory = array.ravel(order="K").view(np.uint8)  # no copy of what is mapped
    count = min(_PIECES, max(1, -(-memory.size // _PIECE)))
    checksum = 0
    for start in np.linspace(0, max(0, memory.size - _PIECE), count, dtype=int):
        checksum = zlib.crc32(memory[start : start + _PIECE].tobytes(), checksum)
    return Input(absolute, list(array.shape), str(array.dtype), checksum)


def split(source: str) -> tuple[str, str]:
    """(path, key) of archive.npz#key; the key of a plain file is empty."""
    path, _, key = source.rpartition("#")
    return (source, "") if not path or Path(source).exists() else (path, key)


def _read(source: str) -> np.ndarray:
    """The array in file.npy or archive.npz#key; a .npy file is mapped, not read."""
    path, key = split(source)
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
