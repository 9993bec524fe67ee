"""A use of a finished run, from its command to its exit code."""

import zlib
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from . import data, devices, processes, report, results, saved, uses
from .config import Apply, Match, Use
from .data import Input
from .errors import BadInput, complain
from .job import CONVERGED, NOT_CONVERGED, tell
from .processes import Beat
from .results import Rows
from .saved import Arrays, Run


class Found(NamedTuple):
    """The run that is used, and the file that is used with it."""

    run: Run
    arrays: Arrays
    numbers: np.ndarray | None
    file: Input | None


def use(command: Use, beat: Beat) -> int:
    """Do a task with the plan of a finished run."""
    found = processes.together(
        lambda: _opened(command), lambda found: _facts(command, found)
    )
    run, arrays, numbers, file = found
    processes.check_shared(f"--out={command.folder}", command.folder)
    with jax.enable_x64(run.problem.dtype == "float64"):
        mesh = devices.mesh_of(command)
        tell(report.use(command, mesh, run, arrays.clouds, numbers))
        if not run.converged and jax.process_index() == 0:
            complain("warning", report.warning(run))
        sizes = arrays.clouds.sizes
        if jax.process_count() > 1:
            arrays, numbers = _spread(command, mesh, run, arrays, numbers, beat)
        beat(f"the work of {command.task}")
        made = uses.perform(command, mesh, run, arrays, numbers)
        beat("writing results")
        rows = {k: _own(command, sizes, z) for k, z in made.arrays.items()}
        record = results.of_use(command, mesh, run, file, rows, made.seconds)
        tell(report.summary_of_use(record))
        results.write(command.folder, command.task, record, rows, beat)
    tell(f"{'written to':<15}{command.folder}")
    return CONVERGED if run.converged else NOT_CONVERGED


def _opened(command: Use) -> Found:
    uses.check_possible(command)
    devices.require(command.require)
    run = saved.read(command.run)
    inputs = [file.source for file in run.inputs.values()]
    results.check_directory(command.folder, command.task, [*inputs, command.source])
    arrays = saved.load(run)
    numbers, file = data.of_use(command, run.problem.dtype)
    if jax.process_count() > 1:
        _check_sizes(command, arrays.clouds.sizes, numbers)
    return Found(run, arrays, numbers, file)


def _facts(command: Use, found: Found) -> dict[str, str]:
    """What must be the same for all processes."""
    potentials = [zlib.crc32(z.data) for z in (found.arrays.f, found.arrays.g)]
    return {
        "flags": command.common(),
        "the run": str([*found.run[1:], potentials]),
        "the input file": str(found.file and found.file[1:]),
        "versions": str(results.versions()),
    }


def _check_sizes(
    command: Use, sizes: tuple[int, int], numbers: np.ndarray | None
) -> None:
    """Refuse what padding would hide from the library."""
    if isinstance(command, Match) and command.k > sizes[command.axis]:
        raise BadInput(f"--k={command.k}: must be at most {sizes[command.axis]}")
    if isinstance(command, Apply) and numbers is not None:
        wanted = sizes[command.axis]
        if len(numbers) != wanted:
            raise BadInput(
                f"--v={command.v}: must have {wanted} rows, one for each point, got "
                f"shape {numbers.shape}"
            )


def _spread(
    command: Use,
    mesh: Mesh,
    run: Run,
    arrays: Arrays,
    numbers: np.ndarray | None,
    beat: Beat,
) -> tuple[Arrays, np.ndarray | None]:
    """Everything with padding, clouds and weights on the devices of all processes."""
    clouds = data.spread(arrays.clouds, mesh, run.problem.dtype, beat)
    f, g = map(_padded, (arrays.f, arrays.g), clouds.sizes)
    if isinstance(command, Apply) and numbers is not None:
        numbers = _padded(numbers, clouds.sizes[command.axis])
    return Arrays(clouds, f, g), numbers


def _padded(array: np.ndarray, size: int) -> np.ndarray:
    """With rows of 0, for points of weight 0."""
    missing = [(0, size - len(array))] + [(0, 0)] * (array.ndim - 1)
    return np.pad(array, missing)


def _own(command: Use, sizes: tuple[int, int], made: jax.Array | bytes) -> Rows | bytes:
    """What is made for the points of one cloud has rows for its padding too."""
    if isinstance(made, bytes):
        return made
    axis = command.axis if isinstance(command, Apply | Match) else None
    return Rows(made, len(made) if axis is None else sizes[1 - axis])
