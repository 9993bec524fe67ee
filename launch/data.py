"""Clouds and weights from files, and the demo clouds."""

import functools
import math
import os
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ott_shard import mesh as meshes
from ott_shard.collectives import Axes

from . import processes
from .config import Problem, Use
from .errors import BadInput
from .formats import Sliced, Source
from .processes import Beat
from .sources import fingerprint, open_source, split

# Bytes, in the dtype of a file, that are read at once to become those of a run.
_BLOCK = 2**26


class Clouds(NamedTuple):
    """Two clouds and their weights, as arrays; None for uniform weights.

    In one of several processes they are each a `Source` until they are spread.
    """

    x: Any
    y: Any
    a: Any
    b: Any

    @property
    def sizes(self) -> tuple[int, int]:
        """(n, m)."""
        n, m = (points.shape[0] for points in (self.x, self.y))
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
    """The clouds and weights of a problem, and the files they come from.

    In a process that is alone they are arrays in the dtype of the problem. Of several
    each only opens the files: :func:`spread` reads its rows.

    Shapes and values are not looked at here: the library does, for every caller.

    Raises:
        BadInput: if a file cannot be read.
    """
    sources, inputs = {}, {}
    for name in Clouds._fields:
        if (text := getattr(problem, name)) is not None:
            sources[name] = open_source(f"--{name}={text}", text)
            inputs[name] = _described(text, sources[name])
    if problem.demo:
        assert problem.n is not None
        points = (Sliced(np.asarray(cloud)) for cloud in discs(problem.n))
        sources |= zip("xy", points, strict=True)
    if jax.process_count() == 1:
        sources = {k: _whole(source, problem.dtype) for k, source in sources.items()}
    return Clouds(*(sources.get(name) for name in Clouds._fields)), inputs


def spread(
    clouds: Clouds,
    mesh: Mesh,
    dtype: str,
    beat: Beat = lambda _: None,
) -> Clouds:
    """The same on the devices of all processes, each of which reads its own rows.

    Padded to a whole number of rows on each device, with points of weight 0; weights
    are then those of all points. All processes call it, and `beat` is called for what
    is read next.

    Raises:
        BadInput, Refused: as `processes.together`, if the shapes do not fit together,
            which the library cannot see, or if rows cannot be read.
    """

    def read() -> Clouds:
        try:
            return _spread(clouds, mesh, dtype, beat)
        finally:
            beat("waiting for others to read")

    return processes.together(read)


def _spread(clouds: Clouds, mesh: Mesh, dtype: str, beat: Beat) -> Clouds:
    def placed(rows: Source, own: Axes, pad: Literal["edge", "constant"]) -> jax.Array:
        fill = functools.partial(_fill, rows, beat=beat)
        return meshes.place_rows(fill, rows.shape, mesh, own, pad=pad, dtype=dtype)

    x, y, a, b = (rows and rows.shape for rows in clouds)
    if len(x) != 2 or len(y) != 2 or x[1] != y[1] or 0 in x + y:
        raise BadInput(f"--x --y: x and y must be [n, d] and [m, d], got {x} and {y}")
    for name, (size, _), shape in (("a", x, a), ("b", y, b)):
        if shape not in (None, (size,)):
            raise BadInput(
                f"--{name}: must have shape ({size},), one weight for each point, got "
                f"{shape}"
            )
    points, weights = [], []
    for k, own in enumerate(meshes.axes_of(mesh)):
        size = clouds.sizes[k]
        uniform = Sliced(np.broadcast_to(1 / size, size))
        points.append(placed(clouds[k], own, "edge"))
        weights.append(placed(clouds[k + 2] or uniform, own, "constant"))
    return Clouds(*points, *weights)


def _fill(
    source: Source,
    start: int,
    out: np.ndarray,
    beat: Beat = lambda _: None,
) -> None:
    """Rows from `start`, cast block by block: no more is held in the file's dtype."""
    row = source.dtype.itemsize * math.prod(source.shape[1:])
    size = max(1, _BLOCK // max(1, row))
    with np.errstate(over="ignore"):  # an inf made here is refused later
        for at in range(0, len(out), size):
            beat("reading the input")
            part = out[at : at + size]
            part[:] = source.rows(start + at, start + at + len(part))


def _whole(source: Source, dtype: str) -> np.ndarray:
    array = np.empty(source.shape, dtype)
    _fill(source, 0, array)
    return array


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


def read(subject: str, text: str, dtype: str) -> tuple[np.ndarray, Input]:
    """The whole array in a file, in `dtype`, and the file.

    Raises:
        BadInput: about the `subject`, if the file cannot be read.
    """
    source = open_source(subject, text)
    return _whole(source, dtype), _described(text, source)


def _described(text: str, source: Source) -> Input:
    path, key = split(text)
    absolute = os.path.abspath(path) + (f"#{key}" if key else "")
    return Input(absolute, list(source.shape), str(source.dtype), fingerprint(source))
