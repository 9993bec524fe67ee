"""Measurements: `python -m launch.bench` prints one line of JSON per case.

A case is two clouds and a cost. One log-sum-exp pass over its pairs, the gradients of
the value, two limits of the machine and the same pass by other libraries take turns in
one run, so that a ratio is of times that belong together.
"""

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ott_shard as otts
from ott_shard import mesh as meshes, objective, operators
from ott_shard.implicit import DEFAULT
from ott_shard.problem import Problem

from . import devices, flags, kinds, results
from .bench_peers import PeerError, PeerTask, python_with_peers, start
from .errors import BadInput

_PROGRAM = "bench"
_DONE, _BAD_INPUT = 0, 2
# A few iterations give potentials that are not trivial.
_ITERATIONS = 2
_LIMIT_TILE = 1024

# A measurement returns its own seconds.
Timer = Callable[[], float]


class Program(NamedTuple):
    """A compiled program with its arguments, and the pairs that it goes through."""

    run: Callable[[], Any]
    compile_seconds: float
    pairs: int

    def seconds(self) -> float:
        """Run it."""
        begun = time.perf_counter()
        jax.block_until_ready(self.run())
        return time.perf_counter() - begun


class Case(NamedTuple):
    """Sizes of the clouds, and the cost between them."""

    n: int
    m: int
    d: int
    cost: str


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure, how often and where; fields are flags of the same name.

    Attributes:
        peer_python: a Python that has peers; "": no peers; None: this one, if it has.
    """

    cases: tuple[Case, ...]
    repeats: int
    batch_size: tuple[int, ...] | None
    cpu_devices: int | None
    mesh: tuple[int, int] | None
    peer_python: str | None
    memory_only: bool
    out: str | None


# -------------------------------------------------------------------------- flags


def _case(text: str) -> Case:
    sizes, d, cost = text.split(":")
    n, *others = kinds.sizes(sizes)
    (m,) = others or (n,)
    if cost not in kinds.COSTS:
        raise ValueError
    return Case(n, m, int(d), cost)


_CASES = kinds.Checked(
    "n:d:cost or nxm:d:cost, such as 16384:3:sqeuclidean, with commas between cases; "
    f"a cost is {' or '.join(kinds.COSTS)}",
    lambda text: tuple(_case(part) for part in text.split(",")),
    lambda cases: all(min(case[:3]) > 0 for case in cases),
)
_FLAGS = (
    flags.Flag(
        *("cases", "4096:3:euclidean", _CASES),
        "16384:3:sqeuclidean,16384:64:sqeuclidean",
        "n:d:cost or nxm:d:cost, with commas between cases",
    ),
    flags.Flag("repeats", "3", kinds.count(1), 7, "turns, after one to warm up"),
    flags.Flag("batch_size", "512x2048", kinds.TILE, None, "largest tile (chosen)"),
    flags.Flag("mesh", "4x2", kinds.MESH, None, "devices (all)"),
    flags.Flag("cpu_devices", "8", kinds.count(1), None, "use so many CPU devices"),
    flags.Flag(
        *("peer_python", "PATH", kinds.TEXT, None),
        "a Python that has ott-jax or pykeops (this one); empty for no peers",
    ),
    flags.Flag("memory_only", "", kinds.SWITCH, False, "compile, but run nothing"),
    flags.Flag("out", "FILE", kinds.TEXT, None, "also append the lines to FILE"),
    flags.Flag("help", "", kinds.SWITCH, False, "print this and exit"),
)


def parse(argv: Sequence[str]) -> Options | None:
    """The options that the command line asks for; None if it asks for help.

    Raises:
        BadInput: for an unknown flag, a value that a flag cannot have, or no Python at
            --peer_python.
    """
    positional, given, _ = flags.parse(argv, _FLAGS, _PROGRAM)
    if positional:
        raise BadInput(f"unexpected argument {positional[0]!r}: flags start with --")
    if given.pop("help"):
        return None
    python = given["peer_python"]
    if python and shutil.which(python) is None:
        raise BadInput(f"--peer_python={python}: no such program: check the path")
    return Options(**given)


# ----------------------------------------------------------------------- programs


def _program(fn: Any, *args: Any, pairs: int) -> Program:
    """`fn`, a jitted function, compiled for `args`, and run once."""
    begun = time.perf_counter()
    compiled = fn.lower(*args).compile()
    seconds = time.perf_counter() - begun
    run = functools.partial(compiled, *args)
    jax.block_until_ready(run())
    return Program(run, seconds, pairs)


def _programs(case: Case, out: otts.SinkhornOutput) -> dict[str, Program]:
    """What is measured of ott_shard, and the limits: exponentials, products alone."""
    problem, pairs = out.problem, case.n * case.m
    x, y = problem.pairs.x, problem.pairs.y
    softmin_args = problem.pairs, out.psi, problem.b, problem.epsilon
    programs = {
        "pass": _program(operators.softmin, *softmin_args, pairs=pairs),
    }
    for name, value in (("grad", _reg_ot_cost), ("pass_and_grad", _softmin_sum)):
        both = jax.jit(jax.value_and_grad(value, (0, 1)))
        programs[name] = _program(both, x, y, out, pairs=pairs)
    rows, cols = _limit_tiles(case, out.geom.mesh)
    u, v, cols_t = rows[..., 0], cols[..., 0], cols.swapaxes(1, 2)
    pairs = u.size * v.size
    return programs | {
        "exp_sum": _program(_limit(_exponentials), u, v, pairs=pairs),
        "dot": _program(_limit(_products), rows, cols_t, pairs=pairs),
    }


def _moved(problem: Problem, x: jax.Array, y: jax.Array) -> Problem:
    return dataclasses.replace(
        problem, pairs=dataclasses.replace(problem.pairs, x=x, y=y)
    )


def _reg_ot_cost(x: jax.Array, y: jax.Array, out: otts.SinkhornOutput) -> jax.Array:
    """The value as a function of the points, as at the end of a solution."""
    return objective.optimum(DEFAULT, _moved(out.problem, x, y), out.found)


def _softmin_sum(x: jax.Array, y: jax.Array, out: otts.SinkhornOutput) -> jax.Array:
    return _moved(out.problem, x, y).to_rows(out.psi).sum()


def _limit_tiles(case: Case, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """About n points, [blocks, devices, rows, d], and about m, [blocks, cols, d]."""
    rows = min(_LIMIT_TILE, max(case.n // mesh.size, 1))
    cols = min(_LIMIT_TILE, case.m)
    blocks = max(case.n // (rows * mesh.size), 1), case.m // cols
    rng, float32 = np.random.default_rng(0), np.float32
    x = rng.standard_normal((blocks[0], mesh.size, rows, case.d), float32)
    y = rng.standard_normal((blocks[1], cols, case.d), float32)
    specs = PartitionSpec(None, mesh.axis_names), PartitionSpec()
    return jax.device_put((x, y), tuple(NamedSharding(mesh, spec) for spec in specs))


def _limit(tile: Callable[[jax.Array, jax.Array], jax.Array]) -> Any:
    """Sums over j of all tiles, by two scans like those of ott_shard."""
    on_devices = jax.vmap(lambda rows, cols: tile(rows, cols).sum(axis=1), (0, None))

    def over_rows(cols, rows):
        def over_cols(total, cols):
            return total + on_devices(rows, cols), None

        return cols, jax.lax.scan(over_cols, jnp.zeros(rows.shape[:2]), cols)[0]

    return jax.jit(lambda rows, cols: jax.lax.scan(over_rows, cols, rows)[1])


def _exponentials(u: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.exp(u[:, None] + v[None, :])


def _products(x: jax.Array, y_t: jax.Array) -> jax.Array:
    return jnp.matmul(x, y_t, precision="highest")


def _temp_bytes(case: Case, options: Options, mesh: Mesh) -> int | None:
    """Temporary memory per device of the divergence and its gradient; not run."""

    def value(x, y, epsilon):
        cloud = _cloud_options(case, options, mesh)
        return otts.sinkhorn_divergence(x, y, epsilon=epsilon, **cloud)[0]

    def points(size, axes):
        # Other sizes cannot be split before they are padded.
        axes = axes if size % mesh.size == 0 else None
        split = NamedSharding(mesh, PartitionSpec(axes))
        return jax.ShapeDtypeStruct((size, case.d), jnp.float32, sharding=split)

    x, y = map(points, case[:2], meshes.axes_of(mesh))
    epsilon = jax.ShapeDtypeStruct((), jnp.float32)
    program = jax.jit(jax.value_and_grad(value, (0, 1))).lower(x, y, epsilon).compile()
    analysis = program.memory_analysis()
    return None if analysis is None else analysis.temp_size_in_bytes


def _cloud_options(case: Case, options: Options, mesh: Mesh) -> dict[str, Any]:
    cost_fn, sizes = kinds.cost_named(case.cost), options.batch_size
    size = sizes[0] if sizes and len(sizes) == 1 else sizes
    return dict(cost_fn=cost_fn, batch_size=size, mesh=mesh)


# ------------------------------------------------------------------- measurements


def measure(
    case: Case, options: Options, mesh: Mesh, python: str | None
) -> dict[str, Any]:
    """The record of a case, ready for JSON; peers are run by `python`, if any."""
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((size, case.d), np.float32) for size in case[:2])
    y += np.float32(0.5)
    geom = otts.PointCloud(x, y, **_cloud_options(case, options, mesh))
    record = _head(case, geom)
    record["divergence_temp_bytes"] = _temp_bytes(case, options, mesh)
    if options.memory_only:
        return record
    out = otts.solve(geom, max_iterations=_ITERATIONS)
    programs = _programs(case, out)
    timers = {name: program.seconds for name, program in programs.items()}
    peers: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        if python:
            task = _peer_task(case, x, y, out, programs["pass"].run())
            started, peers = start(stack, python, record["platform"], task)
            timers |= {name: peer.seconds for name, peer in started.items()}
        samples = _take_turns(timers, options.repeats, peers)
    return record | _results(programs, samples, peers)


def _peer_task(
    case: Case, x: np.ndarray, y: np.ndarray, out: otts.SinkhornOutput, softmin: Any
) -> PeerTask:
    h = out.psi[: case.m] / out.epsilon - np.log(case.m)
    values = -softmin[: case.n] / out.epsilon
    h, epsilon, values = (np.asarray(array) for array in (h, out.epsilon, values))
    return PeerTask(x, y, h, epsilon, case.cost, values)


def _take_turns(
    timers: dict[str, Timer], repeats: int, peers: dict[str, Any]
) -> dict[str, list[float]]:
    """Seconds of all, A, B, ..., A, B, ...; a peer that fails becomes unavailable."""
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(repeats):
        for name in list(samples):
            try:
                samples[name].append(timers[name]())
            except PeerError as error:
                peers[name] = {"unavailable": str(error)}
                del samples[name]
    return samples


def _results(
    programs: dict[str, Program],
    samples: dict[str, list[float]],
    peers: dict[str, Any],
) -> dict[str, Any]:
    """What came of the turns, by name, and of the peers."""
    found: dict[str, Any] = {}
    for name, program in programs.items():
        found[name] = _summary(samples[name], program.pairs)
        found[name]["compile_seconds"] = program.compile_seconds
    own = found["pass"]["seconds"]
    for name in ("grad", "pass_and_grad"):
        found[name]["passes"] = found[name]["seconds"] / own
    for name, peer in peers.items():
        if name in samples:
            peer |= _summary(samples[name], programs["pass"].pairs)
            peer["ratio"] = peer["seconds"] / own
        else:
            reason = peer["unavailable"]
            print(f"{_PROGRAM}: peer {name} unavailable: {reason}", file=sys.stderr)
    return found | {"peers": peers}


def _summary(seconds: list[float], pairs: int) -> dict[str, float]:
    median = statistics.median(seconds)
    return {
        "seconds": median,
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "pairs_per_second": pairs / median,
    }


def _head(case: Case, geom: otts.PointCloud) -> dict[str, Any]:
    """What is measured, and where."""
    device, block = geom.mesh.devices.flat[0], geom.pairs.block
    return case._asdict() | {
        "dtype": str(geom.dtype),
        "tile": [block.rows, block.cols],
        "mesh": "x".join(str(size) for size in geom.mesh.devices.shape),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "cpu_count": os.cpu_count(),
        "load_average": os.getloadavg(),
        "versions": results.versions(),
    }


# ------------------------------------------------------------------------ command


def run() -> None:
    """The command."""
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Measure what the arguments, without the program's name, say.

    Returns:
        The exit code: 0 done (or help), 2 bad input.
    """
    try:
        options = parse(argv)
        if options is None:
            print("\n".join([f"{_PROGRAM} [flags]", "", *flags.table_text(_FLAGS)]))
            return _DONE
        devices.use_cpu(options.cpu_devices)
        with jax.enable_x64(False), _appending(options.out) as file:
            mesh, python = devices.make_mesh(options.mesh), options.peer_python
            if python is None and not options.memory_only:
                python = python_with_peers()
            for case in options.cases:
                line = json.dumps(measure(case, options, mesh, python), allow_nan=False)
                print(line, flush=True)
                if file:
                    print(line, file=file, flush=True)
        return _DONE
    except BadInput as error:
        print(f"{_PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return _BAD_INPUT


@contextlib.contextmanager
def _appending(out: str | None) -> Iterator[TextIO | None]:
    if out is None:
        yield None
        return
    try:
        file = open(out, "a")
    except OSError as error:
        raise BadInput(
            f"--out={out}: not writable ({error.strerror}): name another file"
        ) from None
    with file:
        yield file


if __name__ == "__main__":
    run()
