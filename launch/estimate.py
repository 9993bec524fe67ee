"""What a run would need: memory, communication and time, without its numbers.

Programs are compiled for shapes, and the compiler is asked; only the time is measured,
of one iteration with a few random points on one device.
"""

import dataclasses
import math
import os
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import ott_shard as otts
from ott_shard import loops, operators
from ott_shard.problem import Problem

from . import devices, processes, report, results, tasks
from .config import Estimate
from .data import Clouds
from .processes import Beat
from .programs import count
from .sources import open_source

FITS, DOES_NOT_FIT = 0, 4
_TASK = "estimate"
_TIMED = 4096  # the most points of each cloud that are timed
_SMALLER_TILES = 2048, 1024, 512, 256, 128
_MOST_DEVICES = 2**16
Sizes = tuple[int, int, int]


class Memory(NamedTuple):
    """Bytes on each device, by the compiler's account; None where it has none."""

    argument_bytes: int | None
    output_bytes: int | None
    temp_bytes: int | None

    @property
    def total(self) -> int | None:
        """All that is held at once."""
        known = [size for size in self if size is not None]
        return sum(known) if len(known) == len(self) else None


def run(config: Estimate, beat: Beat) -> int:
    """Estimate, print and write; the exit code is 0, or 4 for what does not fit.

    Raises:
        BadInput: for what a run would be refused for, but for the numbers in its files.
    """
    clouds = processes.together(
        lambda: _opened(config), lambda clouds: {"shapes": str(clouds)}
    )
    beat("the compiler, and a tile")
    first = jax.process_index() == 0
    with jax.enable_x64(config.dtype == "float64"):
        mesh = devices.mesh_of(config)
        if first:
            print(f"estimate of {report.configuration(config, mesh, clouds)}")
        with tasks.blaming(config):
            record = measure(config, mesh, clouds)
    if first:
        print(report.estimate(record), flush=True)
    if config.out is not None:
        results.write(config.out, _TASK, record, {}, beat)
        if first:
            print(f"{'written to':<15}{config.out}")
    return DOES_NOT_FIT if record["fits"] is False else FITS


def _opened(config: Estimate) -> Clouds:
    """The shapes of the clouds and weights, if the estimate can be made."""
    devices.require(config.require)
    if config.out is not None:
        given = (getattr(config, name) for name in Clouds._fields)
        results.check_directory(config.out, _TASK, given)
    return _shapes(config)


def _shapes(config: Estimate) -> Clouds:
    """Of what is in the files, or of the demo; no numbers are read."""
    found: dict[str, Any] = dict.fromkeys(Clouds._fields)
    if config.demo:
        found["x"] = found["y"] = jax.ShapeDtypeStruct((config.n, 2), config.dtype)
    for name in found:
        if (text := getattr(config, name)) is not None:
            source = open_source(f"--{name}={text}", text)
            found[name] = jax.ShapeDtypeStruct(source.shape, config.dtype)
    for weights, points in (("a", "x"), ("b", "y")):
        if found[weights] is None:  # the library would make uniform ones, on the host
            size = found[points].shape[:1]
            found[weights] = jax.ShapeDtypeStruct(size, config.dtype)
    return Clouds(**found)


def measure(config: Estimate, mesh: Mesh, clouds: Clouds) -> dict[str, Any]:
    """The record of an estimate, ready for JSON; `clouds` are shapes.

    Raises:
        ValueError: if the library refuses them, or an option.
    """
    _posed(config, mesh, clouds)  # as they came: padding would hide what is wrong
    (n, d), (m, _) = clouds.x.shape, clouds.y.shape
    sizes = n, m, d
    shapes = tasks.shapes(mesh, sizes, config.dtype)
    problems = _posed(config, mesh, shapes)
    return {
        "task": _TASK,
        "of": config.task,
        "inputs": {
            name: os.path.abspath(text)
            for name in Clouds._fields
            if (text := getattr(config, name)) is not None
        },
        "demo": config.demo,
        **dict(zip("nmd", sizes, strict=True)),
        "dtype": config.dtype,
        "cost": config.cost,
        **_space(config, mesh, sizes, _tile(problems["xy"])),
        "all_reduces": {
            term: _all_reduces(config, term, problem)
            for term, problem in problems.items()
        },
        **_time(config, problems),
        **results.place(mesh),
    }


# ------------------------------------------------------------------------- programs


def _posed(config: Estimate, mesh: Mesh, clouds: Clouds) -> dict[str, Problem]:
    """The problem of each term, of shapes."""

    def pose(clouds: Clouds) -> list[Problem]:
        geom = tasks.geometry(config, mesh, clouds)
        a, b = geom.weights(clouds.a, 0), geom.weights(clouds.b, 1)
        geom = geom.resolve(a, b)
        posed = [(geom, a, b)]
        if config.task == "divergence":
            a_cols, b_rows = geom.pairs.T.mirror(a), geom.pairs.mirror(b)
            posed.append((geom.against_itself(0, a), a, a_cols))
            posed.append((geom.against_itself(1, b_rows), b_rows, b))
        return [_problem(*term) for term in posed]

    return dict(zip(tasks.TERMS, jax.eval_shape(pose, clouds), strict=False))


def _problem(geom: otts.PointCloud, a: jax.Array, b: jax.Array) -> Problem:
    one = jnp.ones((), geom.dtype)  # tau takes no part in what is asked
    return Problem(geom.pairs, a, b, geom.schedule, one, one)


def _symmetric(config: Estimate, term: str) -> bool:
    """Whether the library iterates on one potential, with one pass."""
    return term != "xy" and config.tau_a == config.tau_b


def _updated(problem: Problem, psi: jax.Array, symmetric: bool, many: bool) -> Any:
    """The passes of one iteration of :func:`ott_shard.solve`, and what they send.

    Not its arithmetic on potentials, nor what that sums over devices: up to 14 numbers
    and, where it learns from its steps, their products, by default twice [8, 8] and [8]
    numbers.
    """
    phi, *sure = (
        (problem.pairs.mirror(psi),) if symmetric else _pass(problem, psi, many)
    )
    return phi, sure, _pass(problem.T, phi, many)


def _pass(problem: Problem, psi: jax.Array, many: bool) -> tuple[jax.Array, ...]:
    """As it is if the last iteration told where it ends, which is seldom not so."""
    if not many:
        return (problem.to_rows(psi),)
    args = problem.pairs, psi, problem.b, problem.epsilon, jnp.zeros_like(problem.a)
    rows, sure = operators.softmin_if_near(*args)
    return rows, loops.for_all(sure)


_update = jax.jit(_updated, static_argnums=(2, 3))


def _all_reduces(config: Estimate, term: str, problem: Problem) -> list[int]:
    """Bytes of each all-reduce of the passes, as they are compiled for all devices."""
    how = _symmetric(config, term), problem.many
    update = _update.lower(problem, problem.b, *how).compile()
    found = count(update.as_text() or "").all_reduces
    return sorted(size for _, size in found.elements())


def _tile(problem: Problem) -> list[int]:
    """The largest tile of a device, rows and columns."""
    block = problem.pairs.block
    return [min(*ends) for ends in zip(block[:2], _local(problem), strict=True)]


def _local(problem: Problem) -> tuple[int, int]:
    """Rows and columns of one device."""
    pairs = problem.pairs
    rows, cols = (
        math.prod(pairs.mesh.shape[axis] for axis in axes)
        for axes in (pairs.row_axes, pairs.col_axes)
    )
    return len(problem.a) // rows, len(problem.b) // cols


# --------------------------------------------------------------------------- memory


def _space(config: Estimate, mesh: Mesh, sizes: Sizes, tile: list[int]) -> dict:
    """What a record says of memory."""
    forward = _memory(dataclasses.replace(config, grad=False), mesh, sizes)
    backward = _memory(config, mesh, sizes) if config.grad else None
    totals = [memory.total or 0 for memory in (forward, backward) if memory]
    needed = max(totals) or None
    limit = config.memory or devices.memory_limit(jax.local_devices()[0])
    fits = needed <= limit if needed and limit else None
    would_fit = None
    if needed and limit and fits is False:
        smaller = _smaller_tiles(config, mesh, sizes, tile)
        would_fit = _would_fit(mesh, sizes, {max(tile): needed} | smaller, limit)
    return {
        "tile": tile,
        "forward": forward._asdict(),
        "backward": backward and backward._asdict(),
        "temp_bytes_per_device": (backward or forward).temp_bytes,
        "bytes_per_device": needed,
        "memory": limit,
        "fits": fits,
        "would_fit": would_fit,
    }


def _memory(config: Estimate, mesh: Mesh, sizes: Sizes) -> Memory:
    analysis = tasks.compiled(config, mesh, sizes).memory_analysis()
    if analysis is None:
        return Memory(None, None, None)
    return Memory(
        analysis.argument_size_in_bytes,
        analysis.output_size_in_bytes,
        analysis.temp_size_in_bytes,
    )


def _smaller_tiles(
    config: Estimate, mesh: Mesh, sizes: Sizes, tile: list[int]
) -> dict[int, int]:
    """Bytes that smaller tiles would need, by their size, the largest first."""
    needed = {}
    for size in _SMALLER_TILES:
        if size < max(tile):
            smaller = dataclasses.replace(config, batch_size=(size,))
            needed[size] = _memory(smaller, mesh, sizes).total or 0
    return needed


def _would_fit(mesh: Mesh, sizes: Sizes, needed: dict[int, int], limit: int) -> str:
    """What would fit, by what some tiles need of which the largest is too large."""
    for size, total in needed.items():
        if total <= limit:
            return f"a smaller tile, --batch_size={size}"
    size, least = list(needed.items())[-1]
    # What is left is of the points of a device, and of these a larger mesh has fewer.
    (rows, cols), (n, m, _) = mesh.devices.shape, sizes
    wanted = (n / rows + m / cols) * limit / least
    rows = cols = 1
    while rows * cols <= _MOST_DEVICES:
        if rows * cols > mesh.size and n / rows + m / cols <= wanted:
            mesh_flag, tile_flag = f"--mesh={rows}x{cols}", f"--batch_size={size}"
            return f"about {rows * cols} devices, {mesh_flag} {tile_flag}"
        rows, cols = (2 * rows, cols) if rows == cols else (rows, 2 * cols)
    return f"fewer points: not even {_MOST_DEVICES} devices would do"


# ----------------------------------------------------------------------------- time


def _time(config: Estimate, problems: dict[str, Problem]) -> dict[str, Any]:
    """What a record says of time, as if communication took none."""
    sizes = [min(size, _TIMED) for size in _local(problems["xy"])]
    d, many = problems["xy"].pairs.x.shape[1], problems["xy"].many
    per_pair = _seconds_of_update(config, sizes, d, many) / (2 * math.prod(sizes))
    seconds, sharing = {}, _sharing(problems["xy"].pairs.mesh)
    for term, problem in problems.items():
        passes = 1 if _symmetric(config, term) else 2
        seconds[term] = sharing * per_pair * passes * math.prod(_local(problem))
    return {
        "seconds_per_iteration": seconds,
        "max_iterations": config.max_iterations,
        "seconds": config.max_iterations * sum(seconds.values()),
    }


def _sharing(mesh: Mesh) -> int:
    """How many devices of the mesh share what one alone was timed with."""
    mine = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    return max(1, len(mine)) if jax.default_backend() == "cpu" else 1  # the cores


def _seconds_of_update(config: Estimate, sizes: list[int], d: int, many: bool) -> float:
    """Of an iteration on one device with so many random points; median of 3."""
    simple = dataclasses.replace(
        config, epsilon=None, epsilon_unit="absolute", epsilon_init=None, scale_cost=1.0
    )
    mesh = otts.make_mesh(1, 1, devices=jax.local_devices()[:1])
    rng, dtype = np.random.default_rng(0), np.dtype(config.dtype)
    x, y = (rng.standard_normal((size, d)).astype(dtype) for size in sizes)
    geom = tasks.geometry(simple, mesh, Clouds(x, y, None, None))
    a, b = geom.weights(None, 0), geom.weights(None, 1)
    problem = _problem(geom.resolve(a, b), a, b)
    samples, psi = [], jnp.zeros_like(b)
    for _ in range(4):  # the first one compiles
        begun = time.perf_counter()
        jax.block_until_ready(_update(problem, psi, False, many))
        samples.append(time.perf_counter() - begun)
    return statistics.median(samples[1:])
