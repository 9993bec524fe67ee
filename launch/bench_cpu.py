"""The suite for CPU: passes against limits and peers, overheads, tiles."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import ott_shard as otts
from ott_shard import operators, tile

from . import bench_tiles
from .bench_cases import clouds, head, measure
from .bench_options import Case, Options
from .bench_peers import PeerError, SolvePeer, SolveTask, tell_unavailable
from .bench_tables import SPEED_AXES, SPEED_HEADER, Point, Record, Suite
from .bench_timing import Timer, measured, of_program, program, summary, take_turns

_POINTS, _FEW = 16_384, (64, 256)
_DIMENSIONS = 3, 64
_SWEPT = 2, 3, 16, 64, 512
# A pass at d = 512 is dozens of times one at d = 3.
_POINTS_SWEPT = {512: 4096}
_TILES = 256, 512, 1024, 2048
_COST = "sqeuclidean"
_THRESHOLD, _MAX_ITERATIONS = 1e-3, 2000


def _records(options: Options, mesh: Mesh, python: str | None) -> Iterator[Record]:
    n = options.n or _POINTS
    one = otts.make_mesh(1, 1, devices=[mesh.devices.flat[0]])
    for d in _DIMENSIONS:
        case = Case(n, n, d, _COST)
        yield _head("pass") | measure(case, options, mesh, python)
        yield _head("overhead") | _overhead(case, options, one)
    for few in _FEW:
        case = Case(min(few, n), min(few, n), _DIMENSIONS[0], _COST)
        yield _head("small") | _small(case, options, one, python)
    for d in _SWEPT:
        size = min(n, _POINTS_SWEPT.get(d, n))
        case = Case(size, size, d, _COST)
        yield _head("tiles") | bench_tiles.sweep(case, _TILES, options, one)


def _head(what: str) -> Record:
    return {"suite": "cpu", "measured": what}


def _overhead(case: Case, options: Options, mesh: Mesh) -> Record:
    """A pass of an iteration by shard_map on one device, and its kernel without."""
    geom = otts.PointCloud(*clouds(case), epsilon=1.0, mesh=mesh)
    pairs, b = geom.pairs, geom.weights(None, 1)
    args = pairs, jnp.zeros_like(b), b, geom.epsilon
    near = operators.softmin(*args)

    @jax.jit
    def unsharded(pairs, psi, b, epsilon, near):
        sharpness = 1 / epsilon
        shared = pairs.cost, pairs.centre, sharpness / pairs.scale
        operands = tile.Operands(shared, pairs.x, (pairs.y, psi * sharpness))
        shift = -near * sharpness
        lse, sure = tile.local_lse_near(pairs.block, (), operands, b, shift)
        return -lse / sharpness, sure

    size = case.n * case.m
    programs = {
        "sharded": program(operators.softmin_if_near, *args, near, pairs=size),
        "unsharded": program(unsharded, *args, near, pairs=size),
    }
    times = measured(programs, options.repeats)
    ratio = times["sharded"]["seconds"] / times["unsharded"]["seconds"]
    return head(case, geom) | times | {"ratio": ratio}


def _small(case: Case, options: Options, mesh: Mesh, python: str | None) -> Record:
    """A whole solution of a small problem, and by OTT with all costs in memory."""
    x, y = clouds(case)

    @jax.jit
    def solve(x, y, epsilon):
        geom = otts.PointCloud(x, y, epsilon=epsilon, mesh=mesh)
        out = otts.solve(geom, threshold=_THRESHOLD, max_iterations=_MAX_ITERATIONS)
        return out.reg_ot_cost, out.f, out.g, out.n_iters

    geom, pairs = otts.PointCloud(x, y, mesh=mesh), case.n * case.m
    epsilon, record = float(geom.epsilon), head(case, geom)
    own = program(solve, x, y, np.float32(epsilon), pairs=pairs)
    timers: dict[str, Timer] = {"solve": own.seconds}
    peers: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        if python:
            task = SolveTask(x, y, epsilon, epsilon, _THRESHOLD, _MAX_ITERATIONS)
            try:
                ott = SolvePeer(stack, python, record["platform"])
                found = ott.solve(task, "default")
                peers["ott"] = {"n_iters": int(found["n_iters"])}
                timers["ott"] = ott.seconds
            except PeerError as error:
                peers["ott"] = {"unavailable": str(error)}
        samples = take_turns(timers, options.repeats, peers)
    times = of_program(own, samples["solve"])
    for name in peers.keys() & samples.keys():
        peers[name] |= summary(samples[name], pairs)
        peers[name]["ratio"] = peers[name]["seconds"] / times["seconds"]
    tell_unavailable(peers)
    n_iters = int(own.run()[-1])
    return record | {"n_iters": n_iters, "solve": times, "peers": peers}


def _rows(record: Record) -> list[tuple[str, ...]]:
    what, n, d, mesh = (str(record[k]) for k in ("measured", "n", "d", "mesh"))
    if what == "tiles":
        return bench_tiles.rows(record)

    def row(name: str, number: float, note: str = "") -> tuple[str, ...]:
        return name, d, mesh, f"{number:.3g}", note

    if what == "overhead":
        return [row("shard_map / without", record["ratio"])]
    times = [
        row(
            f"{what} n = {n}, as fast as {name}", peer["ratio"], peer.get("version", "")
        )
        for name, peer in record["peers"].items()
        if "ratio" in peer
    ]
    if what == "small":
        return [row(f"solution n = {n}, s", record["solve"]["seconds"]), *times]
    rate = record["pass"]["pairs_per_second"]
    return [
        row("pass, pairs/s", rate, "x".join(map(str, record["tile"]))),
        row("first pass, pairs/s", record["first_pass"]["pairs_per_second"]),
        *(
            row(f"pass, of {limit}", rate / record[limit]["pairs_per_second"])
            for limit in ("exp_sum", "dot")
        ),
        row("gradient, passes", record["grad"]["passes"]),
        row("pass and gradient, passes", record["pass_and_grad"]["passes"]),
        *times,
    ]


def _points(record: Record) -> list[Point]:
    if record["measured"] == "tiles":
        return bench_tiles.points(record)
    if record["measured"] != "pass":
        return []
    times = {name: record[name] for name in ("pass", "exp_sum", "dot")}
    times |= {k: v for k, v in record["peers"].items() if "ratio" in v}
    return [
        Point("passes", name, record["d"], time["pairs_per_second"])
        for name, time in times.items()
    ]


SUITE = Suite(_records, SPEED_HEADER, _rows, SPEED_AXES, _points)
