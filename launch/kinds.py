"""Kinds of values that flags have: how each is read, and which are refused."""

import math
import re
from collections.abc import Callable
from typing import Any

from absl import flags

from ott_shard import costs, units
from ott_shard.epsilon import SLOWEST_DECAY

_MAX_COUNT = 2**31 - 1  # iterations are counted in int32


class Checked(flags.ArgumentParser):
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


def sizes(text: str) -> tuple[int, ...]:
    """The numbers of "4x2"."""
    return tuple(int(part) for part in text.split("x"))


# Each cost, and how many numbers follow its name.
COSTS: dict[str, tuple[Callable[..., costs.CostFn], int]] = {
    "sqeuclidean": (costs.SqEuclidean, 0),
    "euclidean": (costs.Euclidean, 0),
    "pnormp": (costs.PNormP, 1),
    "sqpnorm": (costs.SqPNorm, 1),
    "elastic": (costs.Elastic, 2),
    "cosine": (costs.Cosine, 0),
    "negdotproduct": (costs.NegDotProduct, 0),
    "arccos": (costs.Arccos, 1),
}
UNITS = (*units.OF_COSTS, *units.OF_POINTS)


def cost_named(text: str) -> costs.CostFn:
    """The cost that "elastic:0.5,1" says.

    Raises:
        ValueError: with the library's words if it refuses the numbers.
    """
    make, numbers = _split_cost(text)
    return make(*(int(v) if v.is_integer() else v for v in numbers))


def _split_cost(text: str) -> tuple[Callable[..., costs.CostFn], list[float]]:
    name, _, numbers = text.partition(":")
    values = [float(number) for number in numbers.split(",")] if numbers else []
    make, count = COSTS.get(name, (None, -1))
    if make is None or len(values) != count:
        raise ValueError(text)
    return make, values


def _cost(text: str) -> str:
    _split_cost(text)
    return text


def _scale(text: str) -> float | str:
    return text if text in UNITS else float(text)


def count(low: int) -> Checked:
    """An integer, at least `low`."""
    form = f"an integer from {low} to {_MAX_COUNT}"
    return Checked(form, int, lambda value: low <= value <= _MAX_COUNT)


def one_of(*names: str) -> Checked:
    """One of these words."""
    return Checked(f"one of {', '.join(names)}", str, lambda name: name in names)


TEXT = flags.ArgumentParser()
SWITCH = Checked("true or false", flags.BooleanParser().parse, lambda _: True)
POSITIVE = Checked("a number greater than 0", float, lambda value: 0 < value < math.inf)
DURATION = Checked("a number, at least 0", float, lambda value: value >= 0)
DECAY = Checked(
    f"greater than 0 and at most {SLOWEST_DECAY}",
    float,
    lambda value: 0 < value <= SLOWEST_DECAY,
)
TAU = Checked(
    "greater than 0 and at most 1 (1 keeps the marginal)",
    float,
    lambda value: 0 < value <= 1,
)
COST = Checked(
    f"one of {', '.join(COSTS)}, with its numbers, such as pnormp:1.5, "
    "elastic:0.5,1 or arccos:1",
    _cost,
    lambda _: True,
)
SCALE = Checked(
    f"a number greater than 0 or one of {', '.join(UNITS)}",
    _scale,
    lambda value: isinstance(value, str) or 0 < value < math.inf,
)
IDS = Checked(
    "numbers, such as 0,1",
    lambda text: tuple(int(part) for part in text.split(",")),
    lambda ids: min(ids) >= 0 and len(set(ids)) == len(ids),
)


def _bytes(text: str) -> int:
    """The bytes of "80GiB", "80GB" or "85899345920"."""
    found = re.fullmatch(r"([\d.]+)([KMGT]?)(i?)B?", text)
    if not found:
        raise ValueError(text)
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix))


BYTES = Checked(
    "bytes, such as 80GiB, 500MB or 1073741824", _bytes, lambda value: value > 0
)
AXIS = Checked("0 or 1", int, lambda value: value in (0, 1))
MESH = Checked("rows x cols, such as 4x2", sizes, lambda s: len(s) == 2 and min(s) > 0)
TILE = Checked(
    "one size or rows x cols, such as 1024 or 512x2048",
    sizes,
    lambda s: len(s) in (1, 2) and 0 < min(s) and max(s) <= _MAX_COUNT,
)
