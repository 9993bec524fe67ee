"""Result files: a record in JSON and arrays, of a run or of a use of one."""

import functools
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import ott_shard as otts

from . import processes, saved, sources
from .config import Config, Use
from .data import Clouds, Input
from .errors import BadInput
from .files import appears, check_folder, not_writable, replacing, strict
from .processes import Beat
from .saved import Run
from .tasks import TASKS, TERMS, Outcome
from .uses import USES

_ARRAYS = ("f", "g", "grad_x", "grad_y")


class Rows(NamedTuple):
    """An array of which the first `size` rows are somebody's; others are padding."""

    array: jax.Array | np.ndarray
    size: int


def files_of(task: str) -> list[str]:
    """The files that a task writes, the record first."""
    if task in TASKS:
        return [saved.RECORD, *(f"{name}.npy" for name in _ARRAYS)]
    return [f"{task}.json", *(USES[task].files if task in USES else [])]


def _replaced(directory: Path, task: str) -> list[Path]:
    """The files that a task replaces or removes: a run leaves no uses of another.

    A file that only has the name of a use's, without its record, is somebody else's.
    """
    own = [directory / name for name in files_of(task)]
    for use in USES if task in TASKS else ():
        record, *others = (directory / name for name in files_of(use))
        if record.exists():
            own += [record, *others]
    return own


def check_directory(out: str, task: str, inputs: Iterable[str | None]) -> None:
    """Refuse a directory that cannot be written to, before anything is computed.

    Also one where the results of `task` would replace a file among its `inputs`.
    """
    check_folder(f"--out={out}", out)
    ours = {path.resolve() for path in _replaced(Path(out), task)}
    for source in filter(None, inputs):
        if (file := Path(sources.split(source)[0])).resolve() in ours:
            raise BadInput(
                f"--out={out}: {file} is input, and would be replaced: name another "
                "directory"
            )


def of_run(
    config: Config,
    mesh: Mesh,
    clouds: Clouds,
    inputs: dict[str, Input],
    outcome: Outcome,
) -> tuple[dict[str, Any], dict[str, Rows]]:
    """The record of a run, ready for JSON, and its arrays by file name."""
    main = outcome.terms[0]
    primal, dual, f, g = _details(main)
    sizes, norms = clouds.sizes, None
    arrays = {"f": Rows(f, sizes[0]), "g": Rows(g, sizes[1])}
    if outcome.gradients:
        for name, array, size in zip("xy", outcome.gradients, sizes, strict=True):
            arrays[f"grad_{name}"] = Rows(array, size)
        norms = [float(norm) for norm in _norms(outcome.gradients)]
    record = {
        "task": config.task,
        outcome.value_name: float(outcome.value),
        "primal_cost": float(primal),
        "dual_cost": float(dual),
        **_ending(outcome.status),
        **_histories(outcome),
        "grad_norm": norms,
        "error_floor": max(float(term.error_floor) for term in outcome.terms),
        "epsilon": float(main.epsilon),
        "cost": config.cost,
        "scale_cost": float(main.problem.pairs.scale),
        "tau_a": config.tau_a,
        "tau_b": config.tau_b,
        "threshold": config.threshold,
        "inner_iterations": config.inner_iterations,
        "acceleration": config.acceleration,
        "demo": config.demo,
        "inputs": {name: file._asdict() for name, file in inputs.items()},
        "n": clouds.x.shape[0],
        "m": clouds.y.shape[0],
        "d": clouds.x.shape[1],
        "dtype": config.dtype,
        "seconds": outcome.seconds,
        "temp_bytes_per_device": None,  # known later, in one process: see job
        **place(mesh),
    }
    return strict(record), arrays


def of_use(
    use: Use,
    mesh: Mesh,
    run: Run,
    numbers: Input | None,
    made: Mapping[str, Rows | bytes],
    seconds: float,
) -> dict[str, Any]:
    """The record of a use of a run, ready for JSON; `numbers` is the file it read."""
    read = {} if numbers is None else {use.file: numbers._asdict()}
    options = use.options | {
        name: getattr(use, name) for name in ("batch_size", "precision")
    }
    return {
        "task": use.task,
        "run": os.path.abspath(use.run),
        **_ending(run.status),
        "inputs": read,
        "options": {key: v for key, v in options.items() if key not in read},
        "shapes": {
            name: [rows.size, *rows.array.shape[1:]]
            for name, rows in made.items()
            if isinstance(rows, Rows)
        },
        "files": USES[use.task].files,
        "dtype": run.problem.dtype,
        "seconds": seconds,
        **place(mesh),
    }


def _ending(status: otts.Status) -> dict[str, Any]:
    return {
        "converged": status is otts.Status.CONVERGED,
        "status": status.name,
        "status_sentence": status.sentence,
    }


def place(mesh: Mesh) -> dict[str, Any]:
    """Where a number was computed, and by what."""
    return {
        "mesh": "x".join(str(size) for size in mesh.devices.shape),
        "devices": mesh.size,
        "device_kind": mesh.devices.flat[0].device_kind,
        "processes": jax.process_count(),
        "versions": versions(),
    }


@jax.jit
def _details(out: otts.SinkhornOutput) -> tuple[jax.Array, ...]:
    return out.primal_cost, out.dual_cost, out.f, out.g


@jax.jit
def _norms(arrays: tuple[jax.Array, ...]) -> list[jax.Array]:
    return [jnp.sqrt(jnp.sum(jnp.square(array))) for array in arrays]


def _histories(outcome: Outcome) -> dict[str, Any]:
    """n_iters and errors at the checks made: of the only term, or of all in a list."""
    n_iters = [int(term.n_iters) for term in outcome.terms]
    histories = [np.asarray(term.errors) for term in outcome.terms]
    errors = [history[history != -1].tolist() for history in histories]
    if len(outcome.terms) == 1:
        return {"n_iters": n_iters[0], "errors": errors[0]}
    return {"terms": list(TERMS), "n_iters": n_iters, "errors": errors}


def versions() -> dict[str, str]:
    """Of Python and of the packages that numbers depend on."""
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
        "numpy": np.__version__,
        "ott_shard": otts.__version__,
    }


def write(
    out: str,
    task: str,
    record: dict[str, Any],
    arrays: Mapping[str, Rows | bytes],
    beat: Beat,
) -> None:
    """Write record and arrays into the directory `out`, each file whole or not at all.

    The record comes last: where it stands, all files of the task are of the same run.
    All processes call it, and each writes the rows that it has; to a folder that all of
    them see.

    Raises:
        BadInput, Refused: as `processes.together`, if the directory cannot be written
            to after all.
    """
    directory = Path(out)
    _step(out, lambda: _begin(directory, task))
    for name, made in arrays.items():
        beat(f"writing {name}")
        if isinstance(made, Rows):
            _save(out, directory / f"{name}.npy", made, beat)
        else:
            _step(out, functools.partial(_put, directory / f"{name}.png", made))
    beat("writing the record")
    write_record(out, task, record)


def write_record(out: str, task: str, record: dict[str, Any]) -> None:
    """Write the record alone, over the last one; all processes call it.

    Raises:
        BadInput, Refused: as :func:`write`.
    """
    text = json.dumps(record, indent=2, allow_nan=False)
    _step(out, lambda: _put(Path(out) / files_of(task)[0], f"{text}\n".encode()))


def _step(out: str, step: Callable[[], None]) -> None:
    """What all processes take part in, or are refused."""

    def attempt() -> None:
        try:
            step()
        except OSError as error:
            raise not_writable(f"--out={out}", error) from None

    processes.together(attempt)


def _begin(directory: Path, task: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if jax.process_index() == 0:
        for stale in _replaced(directory, task):
            stale.unlink(missing_ok=True)


def _put(path: Path, content: bytes | np.ndarray) -> None:
    if jax.process_index() == 0:
        with replacing(path) as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                np.save(file, content)


def _save(out: str, path: Path, rows: Rows, beat: Beat) -> None:
    """Write one .npy file, to which each process writes the rows that it has."""
    array, size = rows
    if isinstance(array, np.ndarray) or array.is_fully_addressable:
        return _step(out, lambda: _put(path, np.asarray(array)[:size]))
    part, first = path.with_name(f".{path.name}.part"), jax.process_index() == 0

    def begin() -> None:
        if first:
            shape = (size, *array.shape[1:])
            np.lib.format.open_memmap(part, "w+", array.dtype, shape).flush()

    def fill() -> None:
        appears(part)
        _fill(part, array, size)

    def end() -> None:
        if first:
            part.replace(path)

    try:
        for step in (begin, fill, end):
            beat(f"writing {path.stem}")
            _step(out, step)
    finally:
        if first:
            part.unlink(missing_ok=True)


def _fill(part: Path, array: jax.Array, size: int) -> None:
    """Write those of the first `size` rows that are here and in no other process."""
    offset = np.lib.format.open_memmap(part, "r").offset
    # Not through a map, where a full disk is fatal and whole pages go over a network,
    # with old rows of others; nor a file that may be read, of which pages go too.
    with os.fdopen(os.open(part, os.O_WRONLY), "wb") as file:
        for shard in array.addressable_shards:
            start, _, _ = shard.index[0].indices(array.shape[0])
            if shard.replica_id == 0 and start < size:
                rows = np.ascontiguousarray(np.asarray(shard.data)[: size - start])
                file.seek(offset + start * rows[0].nbytes)
                file.write(rows.data)
