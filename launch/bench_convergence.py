"""Passes over all pairs until the marginal error is small, ours and OTT's.

A flag that says "converged" is not believed: the marginals of the potentials that came
back are computed again here, in float64.
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import ott_shard as otts

from .bench_families import FAMILIES, Clouds, missing
from .bench_options import PROGRAM, Options
from .bench_peers import PeerError, SolvePeer, SolveTask, tell_unavailable
from .bench_tables import Point, Record, Suite
from .bench_timing import place
from .bench_worker import OTT_VARIANTS

# What `solve` is asked to do, by name.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"acceleration": None},
    "default": {},
}
_OTT = {f"ott {name}": name for name in OTT_VARIANTS}
_SOLVERS = *VARIANTS, *_OTT
_POINTS = 1000
_MAX_ITERATIONS = 10_000
_PASSES = 2  # of an iteration: one for g, one for f
# Below one of these (epsilon in units of the std) float32 has not enough digits.
_SMALLEST_THRESHOLD, _SMALLEST_EPSILON = 1e-4, 5e-4
_BLOCK = 1024
# What is within the threshold but for rounding, which adds to it in float64 as well.
_SLACK = 1.1


def _records(options: Options, mesh: Mesh, python: str | None) -> Iterator[Record]:
    with contextlib.ExitStack() as stack:
        ott = SolvePeer(stack, python, place(mesh)["platform"]) if python else None
        for family, clouds in _families(options.n or _POINTS):
            for threshold in options.thresholds:
                for multiple in options.epsilons:
                    task = _task(clouds, multiple, threshold, mesh)
                    record = _head(family, multiple, task) | place(mesh)
                    runs = {name: _own(task, name, mesh) for name in VARIANTS}
                    try:
                        runs |= _others(ott, task) if ott else {}
                    except PeerError as error:
                        record["peers"] = {"ott": {"unavailable": str(error)}}
                        tell_unavailable(record["peers"])
                        ott = None
                    yield record | {"runs": runs}


def _families(n: int) -> Iterator[tuple[str, Clouds]]:
    """All that there are here, and a line about any other."""
    for family, make in FAMILIES.items():
        if reason := missing(family):
            print(f"{PROGRAM}: no {family}: {reason}", file=sys.stderr)
        else:
            yield family, make(n)


def _task(clouds: Clouds, multiple: float, threshold: float, mesh: Mesh) -> SolveTask:
    """What is to be solved for an epsilon in units of the std of the costs."""
    wide = threshold < _SMALLEST_THRESHOLD or multiple < _SMALLEST_EPSILON
    x, y = (cloud.astype("float64" if wide else "float32") for cloud in clouds)
    with jax.enable_x64(wide):
        std = float(otts.PointCloud(x, y, mesh=mesh).std_cost)
    return SolveTask(x, y, multiple * std, std, threshold, _MAX_ITERATIONS)


def _head(family: str, multiple: float, task: SolveTask) -> Record:
    return {
        "suite": "convergence",
        "family": family,
        **dict(n=len(task.x), m=len(task.y), d=task.x.shape[1]),
        "dtype": str(task.x.dtype),
        "epsilon": multiple,
        "epsilon_unit": "std",
        "threshold": task.threshold,
        "max_iterations": task.max_iterations,
    }


def _own(task: SolveTask, variant: str, mesh: Mesh) -> dict[str, Any]:
    begun = time.perf_counter()
    with jax.enable_x64(task.x.dtype == np.float64):
        out = otts.solve(
            otts.PointCloud(task.x, task.y, epsilon=task.epsilon, mesh=mesh),
            threshold=task.threshold,
            max_iterations=task.max_iterations,
            **VARIANTS[variant],
        )
        found = {"n_iters": out.n_iters, "converged": out.converged}
        found |= {"f": out.f, "g": out.g, "value": out.reg_ot_cost}
        arrays = {name: np.asarray(value) for name, value in found.items()}
    return _run(task, arrays | {"seconds": time.perf_counter() - begun})


def _others(ott: SolvePeer, task: SolveTask) -> dict[str, Any]:
    """Runs of OTT, by name.

    Raises:
        PeerError: if it fails.
    """
    runs = {}
    for name, variant in _OTT.items():
        found = ott.solve(task, variant)
        runs[name] = _run(task, found) | {"version": found["version"]}
    return runs


def _run(task: SolveTask, found: dict[str, Any]) -> dict[str, Any]:
    """The record of a solution; its seconds include compilation."""
    errors = marginal_errors(task.x, task.y, found["f"], found["g"], task.epsilon)
    error = _finite(max(errors))
    return {
        "n_iters": int(found["n_iters"]),
        "passes": _PASSES * int(found["n_iters"]),
        "flag": bool(found["converged"]),
        "error": error,
        "converged": error is not None and error <= _SLACK * task.threshold,
        "value": _finite(found["value"]),
        "seconds": found["seconds"],
    }


def _finite(number: Any) -> float | None:
    return float(number) if np.isfinite(number) else None


def marginal_errors(
    x: np.ndarray, y: np.ndarray, f: np.ndarray, g: np.ndarray, epsilon: float
) -> tuple[float, float]:
    """L1 distances of the plan's marginals from uniform ones, in float64.

    Args:
        x: [n, d].
        y: [m, d].
        f: [n], with P_ij = exp((f_i + g_j - |x_i - y_j|^2) / epsilon).
        g: [m].
        epsilon: positive.
    """
    centre = y.mean(axis=0, dtype=np.float64)
    x, y = x - centre, y - centre
    rows, cols = np.empty(len(x)), np.zeros(len(y))
    for start in range(0, len(x), _BLOCK):
        part = slice(start, start + _BLOCK)
        square = (x[part] ** 2).sum(axis=1)[:, None] + (y**2).sum(axis=1)
        costs = square - 2 * x[part] @ y.T
        with np.errstate(over="ignore", invalid="ignore"):
            plan = np.exp((f[part, None].astype(np.float64) + g - costs) / epsilon)
        rows[part] = plan.sum(axis=1)
        cols += plan.sum(axis=0)
    errors = (np.abs(sums - 1 / len(sums)).sum() for sums in (rows, cols))
    return float(next(errors)), float(next(errors))


def _rows(record: Record) -> list[tuple[str, ...]]:
    head = record["family"], f"{record['epsilon']:g}", f"{record['threshold']:g}"
    return [(*head, *(_cell(record["runs"].get(name)) for name in _SOLVERS))]


def _cell(run: dict[str, Any] | None) -> str:
    """Passes to the threshold, or without coming there."""
    if run is None:
        return ""
    if run["converged"]:
        return str(run["passes"])
    return f"not in {run['passes']}" + (", says it did" if run["flag"] else "")


def _points(record: Record) -> list[Point]:
    panel = f"{record['family']}, {record['threshold']:g}"
    return [
        Point(panel, name, record["epsilon"], run["passes"])
        for name, run in record["runs"].items()
        if run.get("converged")
    ]


SUITE = Suite(
    _records,
    ("family", "epsilon / std", "threshold", *_SOLVERS),
    _rows,
    ("epsilon / std of the costs", "passes over all pairs"),
    _points,
)
