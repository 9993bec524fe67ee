"""The suite for a GPU: passes and gradients against what the device can do.

It is to fit in eight minutes. What matters most comes first, every record is told when
it is measured, and what the time does not reach is left out, and said.
"""

import functools
import math
import sys
import time
from collections.abc import Callable, Iterator

from jax.sharding import Mesh

import ott_shard as otts

from . import bench_tiles
from .bench_cases import clouds, head, of_solution
from .bench_limits import of_device
from .bench_memory import cloud_options, one_and_all
from .bench_model import H200, MORE_FEATURES, scanned
from .bench_options import PROGRAM, Case, Options
from .bench_tables import SPEED_AXES, SPEED_HEADER, Point, Record, Suite
from .bench_timing import measured, place

_BUDGET_SECONDS = 420.0
_POINTS = 131_072
_DIMENSIONS = 3, 64, 2, 16, 512
_SWEPT = 3, 64
_TILES = 512, 1024, 2048, 4096, 8192
_COST = "sqeuclidean"
_ITERATIONS = 1
_RATE = "_per_second"
_UNITS = {"copy": "bytes", "matmul": "flops", "exp": "exponentials"}


def _records(options: Options, mesh: Mesh, _: str | None) -> Iterator[Record]:
    begun = time.perf_counter()
    n = options.n or _POINTS
    one = one_and_all(mesh)[0]
    limits = _limits(n, options, one)
    yield limits
    jobs: dict[str, Callable[[], Record]] = {}
    for on in one_and_all(mesh):
        for d in _DIMENSIONS:
            case = Case(n, n, d, _COST)
            job = functools.partial(_pass, case, options, on, limits)
            jobs[f"pass at d = {d} on {on.size} devices"] = job
    for d in _SWEPT:
        case = Case(n, n, d, _COST)
        job = functools.partial(bench_tiles.sweep, case, _TILES, options, one)
        jobs[f"tiles at d = {d}"] = job
    for name, job in jobs.items():
        if time.perf_counter() - begun > _BUDGET_SECONDS:
            print(f"{PROGRAM}: no time left for: {name}", file=sys.stderr)
            continue
        yield {"suite": "gpu", "measured": name.split()[0]} | job()


def _limits(n: int, options: Options, mesh: Mesh) -> Record:
    """Bytes copied, operations of a product and exponentials, in a second."""
    found = {}
    for name, times in measured(of_device(n), options.repeats).items():
        rate = times.pop("pairs_per_second")
        found[name] = times | {_UNITS[name] + _RATE: rate}
    return {"suite": "gpu", "measured": "limits", "n": n} | found | place(mesh)


def _pass(case: Case, options: Options, mesh: Mesh, limits: Record) -> Record:
    """Times of a pass and of gradients, and what the limits would make of them."""
    geom = otts.PointCloud(*clouds(case), **cloud_options(case, options, mesh))
    out = otts.solve(geom, max_iterations=_ITERATIONS)
    times = measured(of_solution(out), options.repeats)
    own = times["pass"]["pairs_per_second"] / mesh.size
    for name in ("grad", "pass_and_grad"):
        times[name]["passes"] = times[name]["seconds"] / times["pass"]["seconds"]
    shares = zip(geom.pairs.block[:2], case[:2], mesh.devices.shape, strict=True)
    entries = math.prod(min(size, -(-n // k)) for size, n, k in shares)
    operations, bandwidth = 2 * (case.d + MORE_FEATURES), limits["copy"]
    memory = (mesh.devices.flat[0].memory_stats() or {}).get("peak_bytes_in_use")
    found = {
        "of_exp": own / limits["exp"]["exponentials_per_second"],
        "of_matmul": operations * own / limits["matmul"]["flops_per_second"],
        "of_model_of_h200": own * scanned(entries, case.d, 4, H200, guessed=True),
        "bytes_copied_in_the_time_of_a_pair": bandwidth["bytes_per_second"] / own,
    }
    return head(case, geom) | times | found | {"process_peak_bytes": memory}


def _rows(record: Record) -> list[tuple[str, ...]]:
    what, mesh = record["measured"], record["mesh"]
    if what == "tiles":
        return bench_tiles.rows(record)
    if what == "limits":
        return [
            (f"{name}, {unit}/s", "", mesh, f"{record[name][unit + _RATE]:.3g}", "")
            for name, unit in _UNITS.items()
        ]
    d, tile = str(record["d"]), "x".join(map(str, record["tile"]))
    numbers = {
        "pass, pairs/s": record["pass"]["pairs_per_second"],
        "pass, of exp": record["of_exp"],
        "pass, of matmul": record["of_matmul"],
        "pass, of the model of an H200": record["of_model_of_h200"],
        "pass, bytes copied meanwhile": record["bytes_copied_in_the_time_of_a_pair"],
        "gradient, passes": record["grad"]["passes"],
        "pass and gradient, passes": record["pass_and_grad"]["passes"],
    }
    return [(name, d, mesh, f"{number:.3g}", tile) for name, number in numbers.items()]


def _points(record: Record) -> list[Point]:
    if record["measured"] == "tiles":
        return bench_tiles.points(record)
    if record["measured"] == "limits":
        return []
    return [
        Point(
            "passes",
            f"{name}, mesh {record['mesh']}",
            record["d"],
            record[name]["pairs_per_second"],
        )
        for name in ("pass", "grad", "pass_and_grad")
    ]


SUITE = Suite(_records, SPEED_HEADER, _rows, SPEED_AXES, _points)
