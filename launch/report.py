"""What the command prints on the way."""

import collections
from typing import Any

import numpy as np
from jax.sharding import Mesh

from ott_shard.geometry import DEFAULT_EPSILON

from .config import Config, Problem, Use
from .data import Clouds
from .saved import Run

_SIZES = (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")


def configuration(config: Config, mesh: Mesh, clouds: Clouds) -> str:
    """One line: what is computed, and where."""
    epsilon = _epsilon(config)
    return f"{config.task}: {_problem(config, clouds)}, epsilon {epsilon}, {_on(mesh)}"


def use(
    command: Use, mesh: Mesh, run: Run, clouds: Clouds, numbers: np.ndarray | None
) -> str:
    """One line: what is computed of which run, and where."""
    options = command.options
    if numbers is not None:
        options |= {command.file: list(numbers.shape)}
    told = "".join(f"{name} {value}, " for name, value in options.items())
    problem = f"{_problem(run.problem, clouds)}, epsilon {run.problem.epsilon:g}"
    return f"{command.task}: {told}of {run.folder} ({problem}), {_on(mesh)}"


def _problem(problem: Problem, clouds: Clouds) -> str:
    # Shapes as they are: the library has yet to accept them.
    x, y = (list(points.shape) for points in (clouds.x, clouds.y))
    return f"x {x}, y {y}, {problem.dtype}, {problem.cost} cost"


def _on(mesh: Mesh) -> str:
    rows, cols = mesh.devices.shape
    kind = mesh.devices.flat[0].device_kind
    return f"on {mesh.size} {kind} device{'s' * (mesh.size > 1)} (mesh {rows}x{cols})"


def _epsilon(config: Config) -> str:
    unit = config.epsilon_unit
    factor = DEFAULT_EPSILON if config.epsilon is None else config.epsilon
    text = f"{factor:g}"
    if config.epsilon_init is not None:
        text = f"{config.epsilon_init:g} down to {text}"
    if config.epsilon is not None and unit == "absolute":
        return text
    return f"{text} x {'std' if unit == 'absolute' else unit} of costs"


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
    in_mib = "unknown" if record["processes"] == 1 else "see ott-shard estimate"
    if memory is not None:
        in_mib = f"{memory / 2**20:.2f} MiB per device"
    lines |= {
        "iterations": iterations,
        "epsilon": _number(record["epsilon"]),
        "temp memory": in_mib,
        "seconds": _seconds(record),
        "stopped": _ending(record),
    }
    return _table(lines)


def summary_of_use(record: dict[str, Any]) -> str:
    """The lines printed at the end, from the record of a use."""
    lines = {name: str(shape) for name, shape in record["shapes"].items()}
    lines = lines or {"pictures": ", ".join(record["files"])}
    return _table(lines | {"seconds": _seconds(record), "its run": _ending(record)})


def estimate(record: dict[str, Any]) -> str:
    """The lines printed of an estimate, from its record."""
    rows, cols = record["tile"]
    lines = {"tile": f"{rows}x{cols}"}
    for name in ("forward", "backward"):
        if memory := record[name]:
            arguments, output, temporary = map(_size, memory.values())
            lines[name] = (
                f"arguments {arguments}, output {output}, temporary {temporary}"
            )
    total, limit, fits = (record[k] for k in ("bytes_per_device", "memory", "fits"))
    verdict = {True: "fits", False: "does not fit", None: "nobody knows if it fits"}
    memory = f"{_size(total)} per device, of {_size(limit)}: {verdict[fits]}"
    lines["memory"] = memory
    if record["would_fit"]:
        lines["would fit"] = record["would_fit"]
    for term, sizes in record["all_reduces"].items():
        counts = collections.Counter(sizes).items()
        what = " + ".join(f"{count} x {_size(size)}" for size, count in counts)
        what = f"{what or 'no'} all-reduces in its passes"
        pace = f"{record['seconds_per_iteration'][term]:.2g} s"
        lines[f"iteration ({term})"] = f"{pace}, {what}"
    limit = record["max_iterations"]
    lines["seconds"] = f"{record['seconds']:.3g} for {limit} iterations (of each term)"
    return _table(lines)


def _size(size: int | None) -> str:
    if size is None:
        return "unknown"
    unit, name = next((u, n) for u, n in _SIZES if size >= u or u == 1)
    return f"{size / unit:.2f} {name}" if unit > 1 else f"{size} B"


def warning(run: Run) -> str:
    """One line about a run that had not converged."""
    status = run.status
    return (
        f"--run={run.folder} had not converged ({status.name}: {status.sentence}): its "
        "plan is used as it is"
    )


def _seconds(record: dict[str, Any]) -> str:
    return f"{record['seconds']:.1f} (with compilation)"


def _ending(record: dict[str, Any]) -> str:
    return f"{record['status'].lower()}: {record['status_sentence']}"


def _table(lines: dict[str, str]) -> str:
    return "\n".join(f"{name:<15}{text}" for name, text in lines.items())


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.7g}"
