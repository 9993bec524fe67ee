"""A finished run, read from its folder to be used again."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import ott_shard as otts

from . import data
from .config import Problem
from .data import Clouds, Input
from .errors import BadInput
from .flags import checked

RECORD = "result.json"
_VALUES = ("cost", "scale_cost", "epsilon", "tau_a", "tau_b", "dtype")


class Run(NamedTuple):
    """What a run was about and how it ended; its arrays stay in their files.

    Attributes:
        folder: as it was given.
        problem: with epsilon and scale_cost as the numbers that they came to.
        inputs: the files of the problem by flag.
        status: why it stopped.
    """

    folder: str
    problem: Problem
    inputs: dict[str, Input]
    status: otts.Status

    @property
    def converged(self) -> bool:
        """Whether its plan is within the threshold."""
        return self.status is otts.Status.CONVERGED


class Arrays(NamedTuple):
    """The clouds and the potentials of a run, on the host."""

    clouds: Clouds
    f: np.ndarray
    g: np.ndarray


def read(folder: str) -> Run:
    """The run in a folder.

    Raises:
        BadInput: if there is none, or none that says all that a plan is made of.
    """
    record = read_record(folder)
    if str(record.get("status")) not in otts.Status.__members__:
        raise _refused(folder, "is not of a run of solve or divergence")
    if "inputs" not in record:
        raise _refused(folder, "does not say what its input was (older version)")
    try:
        inputs = {name: _input(item) for name, item in record["inputs"].items()}
        status = otts.Status[record["status"]]
        return Run(folder, _problem(record, inputs), inputs, status)
    except KeyError as error:
        raise _refused(folder, f"says nothing of {error.args[0]}") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise _refused(folder, f"is not as it was written ({error})") from None


def load(run: Run) -> Arrays:
    """What the plan of a run is made of.

    Raises:
        BadInput: if a file is gone, or is not what it was at the time of the run.
    """
    label = f"--run={run.folder}: its"
    try:
        clouds, inputs = data.load(run.problem)
    except BadInput as error:
        raise BadInput(f"{label} {error}, or solve again") from None
    for name, was in run.inputs.items():
        if inputs.get(name) != was:
            raise BadInput(
                f"{label} --{name}={was.source} has changed since the run: put the "
                "file back as it was, or solve again"
            )
    files = (Path(run.folder) / f"{name}.npy" for name in "fg")
    f, g = (
        data.read(f"{label} {file.name}", str(file), run.problem.dtype)[0]
        for file in files
    )
    return Arrays(clouds, f, g)


def read_record(folder: str) -> dict[str, Any]:
    """What a run wrote of itself.

    Raises:
        BadInput: if there is nothing, or not all of it.
    """
    if not Path(folder).is_dir():
        raise BadInput(f"--run={folder}: no such directory: name the --out of a run")
    try:
        record = json.loads(contents(folder, RECORD, "that has ended"))
    except (ValueError, RecursionError):
        raise _refused(folder, "is not whole JSON") from None
    return record if isinstance(record, dict) else {}


def contents(folder: str, name: str, which: str) -> bytes:
    """A file of a run's folder.

    Raises:
        BadInput: if there is none; `which` run has one.
    """
    try:
        return (Path(folder) / name).read_bytes()
    except FileNotFoundError:
        raise BadInput(
            f"--run={folder}: holds no {name}: name the --out of a run {which}"
        ) from None
    except OSError as error:
        raise BadInput(
            f"--run={folder}: its {name} cannot be read ({error.strerror or error})"
        ) from None


def _refused(folder: str, reason: str) -> BadInput:
    return BadInput(f"--run={folder}: its {RECORD} {reason}: solve again")


def _input(item: dict[str, Any]) -> Input:
    shape = [int(size) for size in item["shape"]]
    return Input(str(item["source"]), shape, str(item["dtype"]), int(item["crc32"]))


def _problem(record: dict[str, Any], inputs: dict[str, Input]) -> Problem:
    """The problem of a record, its values as the flags would have them."""

    def value(name: str) -> Any:
        try:
            return checked(name, record[name])
        except ValueError as error:
            raise ValueError(f"{name} {error}, got {record[name]!r}") from None

    demo = None if record["demo"] is None else value("demo")
    return Problem(
        x=None if demo else inputs["x"].source,
        y=None if demo else inputs["y"].source,
        a=inputs["a"].source if "a" in inputs else None,
        b=inputs["b"].source if "b" in inputs else None,
        demo=demo,
        n=value("n") if demo else None,
        **{name: value(name) for name in _VALUES},
    )
