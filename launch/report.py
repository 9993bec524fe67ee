"""What the command prints on the way."""

import time
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from ott_shard.geometry import DEFAULT_EPSILON

from .config import Config
from .data import Clouds

# Short runs print no progress.
_FIRST_LINE_SECONDS = 2.0


def configuration(config: Config, mesh: Mesh, clouds: Clouds) -> str:
    """One line: what is computed, and where."""
    # Shapes as they are: the library has yet to accept them.
    x, y = (list(points.shape) for points in (clouds.x, clouds.y))
    rows, cols = mesh.devices.shape
    return (
        f"{config.task}: x {x}, y {y}, {config.dtype}, {config.cost} cost, epsilon "
        f"{_epsilon(config)}, on {mesh.size} {mesh.devices.flat[0].device_kind} "
        f"device{'s' * (mesh.size > 1)} (mesh {rows}x{cols})"
    )


def _epsilon(config: Config) -> str:
    unit = config.epsilon_unit
    factor = DEFAULT_EPSILON if config.epsilon is None else config.epsilon
    text = f"{factor:g}"
    if config.epsilon_init is not None:
        text = f"{config.epsilon_init:g} down to {text}"
    if config.epsilon is not None and unit == "absolute":
        return text
    return f"{text} x {'std' if unit == 'absolute' else unit} of costs"


class ProgressPrinter:
    """Prints a line at a check if the last one is long enough ago."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._seconds, self._clock = seconds, clock
        self._next = clock() + min(seconds, _FIRST_LINE_SECONDS)

    def __call__(
        self, term: str, iteration: int, error: float, seconds_per_iteration: float
    ) -> None:
        """Called at every check."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + self._seconds
        print(
            f"  {term}  iteration {iteration}  marginal error {error:.2e}  "
            f"{seconds_per_iteration:.2g} s/iteration",
            flush=True,
        )


def summary(record: dict[str, Any], value_name: str) -> str:
    """The lines printed at the end, from the record of the run."""
    lines = {value_name: _number(record[value_name])}
    if record["grad_norm"]:
        x, y = (_number(norm) for norm in record["grad_norm"])
        lines["gradient norm"] = f"{x} (x), {y} (y)"
    iterations, memory = record["n_iters"], record["temp_bytes_per_device"]
    if isinstance(iterations, list):
        counts = zip(iterations, record["terms"], strict=True)
        iterations = ", ".join(f"{count} ({term})" for count, term in counts)
    in_mib = "unknown" if memory is None else f"{memory / 2**20:.2f} MiB per device"
    lines |= {
        "iterations": iterations,
        "epsilon": _number(record["epsilon"]),
        "temp memory": in_mib,
        "seconds": f"{record['seconds']:.1f} (with compilation)",
        "stopped": f"{record['status'].lower()}: {record['status_sentence']}",
    }
    return "\n".join(f"{name:<15}{text}" for name, text in lines.items())


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.7g}"
