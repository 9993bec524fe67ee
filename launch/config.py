"""A whole run as data: what the flags say together."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from .errors import BadInput

_DEMO_SIZE = 10_000


@dataclasses.dataclass(frozen=True)
class Config:
    """One run. Fields are flags of the same name, except `task`.

    Attributes:
        task: the name of the task.
        n: size of the demo clouds; None without a demo.
        mesh: (rows, cols); None: all devices.
        batch_size: (size,) or (rows, cols) of the largest tile; None: chosen.
    """

    task: str
    x: str | None
    y: str | None
    a: str | None
    b: str | None
    demo: str | None
    n: int | None
    cost: str
    scale_cost: float | str
    epsilon: float | None
    epsilon_init: float | None
    epsilon_decay: float
    epsilon_unit: Literal["absolute", "mean", "std"]
    tau_a: float
    tau_b: float
    threshold: float
    max_iterations: int
    min_iterations: int
    inner_iterations: int
    grad: bool
    out: str | None
    mesh: tuple[int, int] | None
    batch_size: tuple[int, ...] | None
    cpu_devices: int | None
    dtype: Literal["float32", "float64"]
    precision: Literal["default", "high", "highest"]
    progress_seconds: float

    def blame(self, message: str) -> BadInput | None:
        """The library's complaint about arguments as one about flags.

        Arguments and flags have the same names, and a complaint starts with the name:
        "x must be ..." or "a and b must have ...". None if `message` is not of a flag.
        """
        subject = message.partition(" must ")[0].split(" and ")
        if not {field.name for field in dataclasses.fields(self)}.issuperset(subject):
            return None
        given = [(name, getattr(self, name)) for name in subject]
        names = " ".join(f"--{name}={v}" for name, v in given if v is not None)
        return BadInput(f"{names}: {message}")


def resolve(
    positional: Sequence[str], flags: Mapping[str, Any], tasks: Collection[str]
) -> Config:
    """The run that positional arguments and flags ask for.

    Raises:
        BadInput: if they do not make one run of one of the `tasks`.
    """
    choices = " or ".join(tasks)
    if not positional:
        raise BadInput(f"no task: name one, {choices} (see --help)")
    task, *extra = positional
    if task not in tasks:
        raise BadInput(f"unknown task {task!r}: choose {choices}")
    if extra:
        raise BadInput(f"unexpected argument {extra[0]!r}: flags start with --")
    _check_source(flags)
    if flags["out"] == "":
        raise BadInput("--out=: name a directory, or leave the flag out")
    names = [f.name for f in dataclasses.fields(Config) if f.name != "task"]
    config = Config(task, **{name: flags[name] for name in names})
    if config.demo and config.n is None:
        config = dataclasses.replace(config, n=_DEMO_SIZE)
    return config


def _check_source(flags: Mapping[str, Any]) -> None:
    """The clouds come from two files or from a demo."""
    for name in ("x", "y"):
        if flags["demo"] and flags[name] is not None:
            raise BadInput(
                f"--{name}={flags[name]}: --demo={flags['demo']} makes its own points: "
                "leave one of the two out"
            )
        if not flags["demo"] and flags[name] is None:
            raise BadInput(
                f"--{name} is missing: give --x=x.npy --y=y.npy, or --demo=discs"
            )
    if not flags["demo"] and flags["n"] is not None:
        raise BadInput(
            f"--n={flags['n']}: is for --demo=discs; files have the size they have"
        )
