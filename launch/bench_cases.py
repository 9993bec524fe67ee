"""One case: a pass over its pairs, gradients, limits of the machine, other libraries.

All take turns in one run, so that a ratio is of times that belong together.
"""

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import ott_shard as otts
from ott_shard import objective, operators
from ott_shard.implicit import DEFAULT
from ott_shard.problem import Problem

from . import bench_limits
from .bench_memory import cloud_options, temp_bytes
from .bench_options import Case, Options
from .bench_peers import PassTask, start, tell_unavailable
from .bench_timing import Program, of_program, place, program, summary, take_turns

# A few iterations give potentials that are not trivial.
_ITERATIONS = 2


def measure(
    case: Case, options: Options, mesh: Mesh, python: str | None
) -> dict[str, Any]:
    """The record of a case, ready for JSON; peers are run by `python`, if any."""
    x, y = clouds(case)
    geom = otts.PointCloud(x, y, **cloud_options(case, options, mesh))
    record = head(case, geom)
    record["divergence_temp_bytes"] = temp_bytes(case, options, mesh)
    if options.memory_only:
        return record
    out = otts.solve(geom, max_iterations=_ITERATIONS)
    programs = of_solution(out) | bench_limits.of_tiles(case, mesh)
    timers = {name: program.seconds for name, program in programs.items()}
    peers: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        if python:
            task = _task(case, x, y, out, programs["pass"].run())
            started, peers = start(stack, python, record["platform"], task)
            timers |= {name: peer.seconds for name, peer in started.items()}
        samples = take_turns(timers, options.repeats, peers)
    return record | _results(programs, samples, peers)


def clouds(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Two normal clouds, half a unit apart in every direction."""
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((size, case.d), np.float32) for size in case[:2])
    return x, y + np.float32(0.5)


def head(case: Case, geom: otts.PointCloud) -> dict[str, Any]:
    """What is measured, and where."""
    block = geom.pairs.block
    what = {"dtype": str(geom.dtype), "tile": [block.rows, block.cols]}
    return case._asdict() | what | place(geom.mesh)


def of_solution(out: otts.SinkhornOutput) -> dict[str, Program]:
    """A pass of an iteration, and of one that knows nothing of its result; gradients.

    Of the value at known potentials, and with a pass of an iteration.
    """
    problem, (n, m) = out.problem, out.geom.shape
    x, y = problem.pairs.x, problem.pairs.y
    args = problem.pairs, out.psi, problem.b, problem.epsilon
    near = problem.to_rows(out.psi)
    programs = {
        "pass": program(operators.softmin_near, *args, near, pairs=n * m),
        "first_pass": program(operators.softmin, *args, pairs=n * m),
    }
    for name, value in (("grad", _reg_ot_cost), ("pass_and_grad", _softmin_sum)):
        both = jax.jit(jax.value_and_grad(value, (0, 1)))
        programs[name] = program(both, x, y, out, pairs=n * m)
    return programs


def _moved(problem: Problem, x: jax.Array, y: jax.Array) -> Problem:
    return dataclasses.replace(
        problem, pairs=dataclasses.replace(problem.pairs, x=x, y=y)
    )


def _reg_ot_cost(x: jax.Array, y: jax.Array, out: otts.SinkhornOutput) -> jax.Array:
    """The value as a function of the points, as at the end of a solution."""
    return objective.optimum(DEFAULT, _moved(out.problem, x, y), out.found)


def _softmin_sum(x: jax.Array, y: jax.Array, out: otts.SinkhornOutput) -> jax.Array:
    return _moved(out.problem, x, y).to_rows_near(out.psi, out.found.rows).sum()


def _task(
    case: Case, x: np.ndarray, y: np.ndarray, out: otts.SinkhornOutput, softmin: Any
) -> PassTask:
    h = out.psi[: case.m] / out.epsilon - np.log(case.m)
    values = -softmin[: case.n] / out.epsilon
    h, epsilon, values = (np.asarray(array) for array in (h, out.epsilon, values))
    return PassTask(x, y, h, epsilon, case.cost, values)


def _results(
    programs: dict[str, Program],
    samples: dict[str, list[float]],
    peers: dict[str, Any],
) -> dict[str, Any]:
    """What came of the turns, by name, and of the peers."""
    found: dict[str, Any] = {
        name: of_program(program, samples[name]) for name, program in programs.items()
    }
    own = found["pass"]["seconds"]
    for name in ("grad", "pass_and_grad"):
        found[name]["passes"] = found[name]["seconds"] / own
    tell_unavailable(peers)
    for name in peers.keys() & samples.keys():
        peers[name] |= summary(samples[name], programs["pass"].pairs)
        peers[name]["ratio"] = peers[name]["seconds"] / own
    return found | {"peers": peers}
