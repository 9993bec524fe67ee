"""What the command line asks for, as data; fields are flags of the same name."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from .errors import BadInput

_DEMO_SIZE = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """What every task can be told: what to compute on, and with which others.

    Attributes:
        task: the name of the task, the only field that is not a flag.
        mesh: (rows, cols); None: all devices.
        require: the backend to compute on, or not at all; None: any.
        compilation_cache: a folder of compiled programs; None: they are not kept.
        local_processes: so many, on this machine; None: this one.
        coordinator_address: this and what follows is how the processes of a job find
            each other; None: as the environment says.
        watchdog_seconds: a process in which nothing moves for so long ends; 0: never.
    """

    task: str
    mesh: tuple[int, int] | None
    cpu_devices: int | None
    require: Literal["cpu", "gpu", "tpu"] | None
    compilation_cache: str | None
    local_processes: int | None
    coordinator_address: str | None
    num_processes: int | None
    process_id: int | None
    local_device_ids: tuple[int, ...] | None
    start_seconds: int
    watchdog_seconds: float

    @classmethod
    def flags(cls) -> list[str]:
        """The flags that a task of this class takes."""
        return [f.name for f in dataclasses.fields(cls) if f.name != "task"]

    @classmethod
    def of(cls, task: str, values: Mapping[str, Any]) -> Self:
        """The command for the values of all flags.

        Raises:
            BadInput: if they do not make a whole.
        """
        for name in ("out", "compilation_cache", "log_json"):
            if values[name] == "":
                raise BadInput(
                    f"--{name}=: is empty: name a path, or leave the flag out"
                )
        fields: dict[str, Any] = {name: values[name] for name in cls.flags()}
        fields["task"] = task
        return cls(**fields)

    def common(self) -> str:
        """What must be the same for all processes of a job."""
        fields = dataclasses.asdict(self)
        del fields["process_id"], fields["local_device_ids"]
        return json.dumps(fields)

    def blame(self, message: str) -> BadInput | None:
        """The library's complaint about arguments as one about flags.

        Arguments and flags have the same names, and a complaint starts with the name:
        "x must be ..." or "a and b must have ...". None if `message` is not of a flag.
        """
        subject = _subject(message)
        if not set(self.flags()).issuperset(subject):
            return None
        given = [(name, getattr(self, name)) for name in subject]
        names = " ".join(f"--{name}={v}" for name, v in given if v is not None)
        return BadInput(f"{names}: {message}")


def _subject(message: str) -> list[str]:
    """The arguments that a complaint of the library is about."""
    return message.partition(" must ")[0].split(" and ")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computation(Command):
    """What every task can be told that goes through pairs of points.

    Attributes:
        batch_size: (size,) or (rows, cols) of the largest tile; None: chosen.
    """

    out: str | None
    batch_size: tuple[int, ...] | None
    precision: Literal["default", "high", "highest"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What is solved.

    Attributes:
        n: size of the demo clouds; None without a demo.
    """

    x: str | None
    y: str | None
    a: str | None
    b: str | None
    demo: str | None
    n: int | None
    cost: str
    scale_cost: float | str
    epsilon: float | None
    tau_a: float
    tau_b: float
    dtype: Literal["float32", "float64"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(Command):
    """What is told of a run, and kept of it if it ends too early.

    Attributes:
        checkpoint_seconds: between two checkpoints.
        checkpoint_checks: so many checks of the error; None: by time alone.
        progress_seconds: between two lines for people.
        log_json: a file to add events to; None: none.
    """

    checkpoint_seconds: float
    checkpoint_checks: int | None
    progress_seconds: float
    log_json: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Problem, Job, Computation):
    """One run: a problem, and how to solve it."""

    epsilon_init: float | None
    epsilon_decay: float
    epsilon_unit: Literal["absolute", "mean", "std"]
    threshold: float
    max_iterations: int
    min_iterations: int
    inner_iterations: int
    acceleration: Literal["lbfgs", "none"]
    grad: bool

    @classmethod
    def of(cls, task: str, values: Mapping[str, Any]) -> Self:
        """The run; its clouds come from two files or from a demo."""
        _check_source(values)
        config = super().of(task, values)
        if config.demo and config.n is None:
            config = dataclasses.replace(config, n=_DEMO_SIZE)
        return config

    @classmethod
    def kept(cls, fields: Mapping[str, Any], resume: "Resume") -> Self:
        """The run whose fields a checkpoint has, with devices and processes of now."""
        known = {name: fields[name] for name in cls.flags() if name in fields}
        now = {name: getattr(resume, name) for name in Resume.flags() if name != "run"}
        own = {"out": resume.run, "task": fields["task"]}
        return cls(**{**known, **now, **own})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate(Config):
    """What a run would need: one that is not made.

    Attributes:
        task: that of the run; here it is a flag.
        memory: of one device, in bytes; None: what the device says.
    """

    memory: int | None

    @classmethod
    def flags(cls) -> list[str]:
        """Those of the run, and which task it is of."""
        return ["task", *super().flags()]

    @classmethod
    def of(cls, task: str, values: Mapping[str, Any]) -> Self:
        """The run, as if it had been asked for."""
        return super().of(values["task"], values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resume(Job, Computation):
    """A run that ended too early and is to go on.

    Attributes:
        run: the folder of the run.
    """

    run: str

    @classmethod
    def of(cls, task: str, values: Mapping[str, Any]) -> Self:
        """Its results go to the folder of the run."""
        if values["run"] is None:
            raise BadInput("--run is missing: resume needs it (see --help)")
        if values["out"] is not None:
            raise BadInput(
                f"--out={values['out']}: results go to the folder of the run: leave it "
                "out"
            )
        return super().of(task, values)


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


# ------------------------------------------------------------- uses of a finished run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use(Computation):
    """A use of a finished run; what a subclass adds is of its task alone.

    Attributes:
        run: the folder of the run.
        file: the field that names a file of numbers, if there is one.
    """

    file: ClassVar[str | None] = None
    run: str

    @classmethod
    def of(cls, task: str, values: Mapping[str, Any]) -> Self:
        """The use; a flag is needed unless it has a default, here or in its table."""
        values = dict(values)
        for field in dataclasses.fields(cls):
            if field.name in ("run", *cls.own()) and values[field.name] is None:
                if field.default is dataclasses.MISSING:
                    raise BadInput(
                        f"--{field.name} is missing: {task} needs it (see --help)"
                    )
                values[field.name] = field.default
        return super().of(task, values)

    @classmethod
    def own(cls) -> list[str]:
        """The flags of this task alone."""
        return [name for name in cls.flags() if name not in Use.flags()]

    @property
    def folder(self) -> str:
        """Where results go."""
        return self.run if self.out is None else self.out

    @property
    def options(self) -> dict[str, Any]:
        """The values of :meth:`own`."""
        return {name: getattr(self, name) for name in self.own()}

    @property
    def source(self) -> str | None:
        """The value of the field `file`."""
        return None if self.file is None else getattr(self, self.file)

    def blame(self, message: str) -> BadInput | None:
        """As for every command; what came with the run is the fault of --run."""
        if refusal := super().blame(message):
            return refusal
        if _OF_RUN.issuperset(_subject(message)):
            return BadInput(f"--run={self.run}: {message}")
        return None


_OF_RUN = {"f", "g", *(field.name for field in dataclasses.fields(Problem))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Apply(Use):
    """The plan times the numbers in a file."""

    file = "v"
    v: str
    axis: Literal[0, 1] = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match(Use):
    """The largest entries of the plan."""

    k: int
    axis: Literal[0, 1] = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample(Use):
    """Pairs drawn from the plan."""

    num_pairs: int
    method: Literal["iid", "systematic"]
    seed: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transport(Use):
    """Where the plan sends the points in a file."""

    file = "points"
    points: str
    backward: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report(Use):
    """Pictures of a run."""


# ------------------------------------------------------------------- the command line


def resolve(
    positional: Sequence[str],
    values: Mapping[str, Any],
    given: Sequence[str],
    tasks: Mapping[str, type[Command]],
) -> Command:
    """What positional arguments and flags ask for.

    Args:
        positional: what is no flag.
        values: of all flags.
        given: the flags on the command line.
        tasks: the class of each task.

    Raises:
        BadInput: if they do not make one command of one of the `tasks`.
    """
    choices = " or ".join(tasks)
    if not positional:
        raise BadInput(f"no task: name one, {choices} (see --help)")
    task, *extra = positional
    if task not in tasks:
        raise BadInput(f"unknown task {task!r}: choose {choices}")
    if extra:
        raise BadInput(f"unexpected argument {extra[0]!r}: flags start with --")
    for name in given:
        _check_taken(name, task, tasks)
    return tasks[task].of(task, values)


def _check_taken(name: str, task: str, tasks: Mapping[str, type[Command]]) -> None:
    """Each task takes its own flags and no others."""
    takers = [other for other, kind in tasks.items() if name in kind.flags()]
    if not takers or task in takers:  # nobody takes --help
        return
    solving = issubclass(tasks[takers[0]], Config)
    using = issubclass(tasks[task], Use | Resume)
    fixed = " (the run that is used fixes the problem)" if solving and using else ""
    raise BadInput(
        f"--{name} is for {' or '.join(takers)}, not for {task}{fixed}: leave it out"
    )
