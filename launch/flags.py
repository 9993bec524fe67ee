"""The flags of the command: names, kinds, defaults and wording, in one place."""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from .errors import BadInput

PROGRAM = "ott-shard"
_MAX_COUNT = 2**31 - 1  # iterations are counted in int32


class _Checked(flags.ArgumentParser):
    """A value of one form: `convert` reads it, `accept` says whether it is in range."""

    def __init__(
        self, form: str, convert: Callable[[Any], Any], accept: Callable[[Any], bool]
    ):
        self._form, self._convert, self._accept = form, convert, accept

    def parse(self, argument: Any) -> Any:
        """The value, or a ValueError that absl turns into one naming the flag."""
        try:
            value = self._convert(argument)
        except ValueError:
            value = None
        if value is None or not self._accept(value):
            raise ValueError(f"must be {self._form}")
        return value


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("x"))


def _count(low: int) -> _Checked:
    form = f"an integer from {low} to {_MAX_COUNT}"
    return _Checked(form, int, lambda value: low <= value <= _MAX_COUNT)


def _one_of(*names: str) -> _Checked:
    return _Checked(f"one of {', '.join(names)}", str, lambda name: name in names)


_TEXT = flags.ArgumentParser()
_SWITCH = _Checked("true or false", flags.BooleanParser().parse, lambda _: True)
_POSITIVE = _Checked(
    "a number greater than 0", float, lambda value: 0 < value < math.inf
)
_DURATION = _Checked("a number, at least 0", float, lambda value: value >= 0)
_TAU = _Checked(
    "greater than 0 and at most 1 (1 keeps the marginal)",
    float,
    lambda value: 0 < value <= 1,
)
_MESH = _Checked(
    "rows x cols, such as 4x2", _sizes, lambda s: len(s) == 2 and min(s) > 0
)
_TILE = _Checked(
    "one size or rows x cols, such as 1024 or 512x2048",
    _sizes,
    lambda s: len(s) in (1, 2) and 0 < min(s) and max(s) <= _MAX_COUNT,
)


class _Flag(NamedTuple):
    name: str
    example: str
    parser: flags.ArgumentParser
    default: Any
    text: str


_FLAGS = (
    _Flag("x", "x.npy", _TEXT, None, "points [n, d]: a .npy file or archive.npz#key"),
    _Flag("y", "y.npy", _TEXT, None, "points [m, d], likewise"),
    _Flag("a", "a.npy", _TEXT, None, "weights [n] of x (1 / n each)"),
    _Flag("b", "b.npy", _TEXT, None, "weights [m] of y (1 / m each)"),
    _Flag(
        *("demo", "discs", _one_of("discs"), None),
        "instead of x and y: n points each in two discs of radius 5 and 10",
    ),
    _Flag("n", "10000", _count(1), None, "points per cloud of the demo (10000)"),
    _Flag(
        *("cost", "euclidean", _one_of("sqeuclidean", "euclidean"), "sqeuclidean"),
        "|x - y|^2: sqeuclidean, |x - y|: euclidean",
    ),
    _Flag(
        *("epsilon", "0.05", _POSITIVE, None),
        "regularisation (0.05 x the std of all costs, or of the unit named next)",
    ),
    _Flag(
        *("epsilon_unit", "mean", _one_of("absolute", "mean", "std"), "absolute"),
        "epsilon is absolute, or a multiple of the mean or std of all costs",
    ),
    _Flag("tau_a", "0.9", _TAU, 1.0, "marginal of x: 1 exact, below 1 relaxed"),
    _Flag("tau_b", "0.9", _TAU, 1.0, "marginal of y, likewise"),
    _Flag(
        *("threshold", "1e-4", _POSITIVE, 1e-3),
        "converged when the L1 error of the marginal is at most this",
    ),
    _Flag("max_iterations", "500", _count(1), 2000, "never more iterations"),
    _Flag("min_iterations", "20", _count(0), 0, "never fewer iterations"),
    _Flag("inner_iterations", "5", _count(1), 10, "iterations between two checks"),
    _Flag("grad", "", _SWITCH, False, "also the gradient with respect to x and y"),
    _Flag(
        *("out", "DIR", _TEXT, None),
        "write result.json, f.npy, g.npy and, with --grad, grad_x.npy, grad_y.npy",
    ),
    _Flag(
        *("mesh", "4x2", _MESH, None),
        "devices that split x, by devices that split y (all, as square as possible)",
    ),
    _Flag(
        *("batch_size", "512x2048", _TILE, None),
        "largest tile on a device: one size, or rows x cols (chosen for speed)",
    ),
    _Flag("cpu_devices", "8", _count(1), None, "compute on so many CPU devices"),
    _Flag("dtype", "float64", _one_of("float32", "float64"), "float32", "of all work"),
    _Flag(
        *("precision", "high", _one_of("default", "high", "highest"), "highest"),
        "of matrix products",
    ),
    _Flag(
        *("progress_seconds", "1", _DURATION, 5.0),
        "time between two lines of progress; 0: a line at every check",
    ),
    _Flag("help", "", _SWITCH, False, "print this and exit"),
)


def parse(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split the command line into positional arguments and the values of all flags.

    Every call has its own flags: nothing is kept between calls.

    Raises:
        BadInput: for an unknown flag or a value that a flag cannot have.
    """
    values = flags.FlagValues()
    values.set_gnu_getopt(True)  # flags may come after the task
    for name, _, parser, default, text in _FLAGS:
        switch = parser is _SWITCH
        flag = flags.Flag(parser, None, name, default, text, boolean=switch)
        flags.DEFINE_flag(flag, values)
    try:
        _, *positional = values([PROGRAM, *argv])
    except flags.Error as error:
        message = str(error).removeprefix("flag ")
        raise BadInput(f"{message} (all flags: {PROGRAM} --help)") from None
    return positional, {flag.name: values[flag.name].value for flag in _FLAGS}


def help_text(tasks: Mapping[str, str]) -> str:
    """What --help prints, for tasks given as name: sentence."""
    lines = [f"{PROGRAM} TASK --x=x.npy --y=y.npy [flags]", "", "Tasks"]
    lines += [f"  {name:<26}{text}" for name, text in tasks.items()]
    lines += ["", "Flags, with an example (and what holds without)"]
    for flag in _FLAGS:
        usage = f"--{flag.name}" + (f"={flag.example}" if flag.example else "")
        known = flag.default is None or flag.parser is _SWITCH
        text = flag.text + ("" if known else f" ({flag.default})")
        first, *rest = textwrap.wrap(text, 60)
        lines += [f"  {usage:<26}{first}", *(" " * 28 + line for line in rest)]
    lines += ["", "Exit codes: 0 converged, 2 bad input, 3 not converged."]
    return "\n".join(lines)
