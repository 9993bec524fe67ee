"""Is the tile that is chosen as fast as the best one? A sweep over tiles."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.sharding import Mesh

import ott_shard as otts
from ott_shard import operators

from .bench_cases import clouds, head
from .bench_options import Case, Options
from .bench_tables import Point, Record
from .bench_timing import measured, program


def sweep(case: Case, sizes: Sequence[int], options: Options, mesh: Mesh) -> Record:
    """Times of a pass of an iteration with every tile of `sizes`, and the chosen one.

    Tiles larger than the clouds are left out.

    Returns:
        A record with "tile" (the chosen one), "pairs_per_second" by tile, "best" (a
        tile) and "of_best", the speed of the chosen one relative to it.
    """
    chosen = _geometry(case, None, mesh)
    own = chosen.pairs.block.rows, chosen.pairs.block.cols
    rows, cols = ([size for size in sizes if size <= n] for n in case[:2])
    tiles = dict.fromkeys([own, *((r, c) for r in rows for c in cols)])
    b = chosen.weights(None, 1)
    near = operators.softmin(chosen.pairs, jnp.zeros_like(b), b, chosen.epsilon)
    programs = {}
    for tile in tiles:
        pairs = _geometry(case, tile, mesh).pairs
        args = pairs, jnp.zeros_like(b), b, chosen.epsilon, near
        of_iteration, size = operators.softmin_near, case.n * case.m
        programs[_name(tile)] = program(of_iteration, *args, pairs=size)
    found = measured(programs, options.repeats)
    speeds = {tile: times["pairs_per_second"] for tile, times in found.items()}
    best = max(speeds, key=lambda tile: speeds[tile])
    return head(case, chosen) | {
        "pairs_per_second": speeds,
        "best": best,
        "of_best": speeds[_name(own)] / speeds[best],
    }


def _geometry(case: Case, tile: tuple[int, int] | None, mesh: Mesh) -> otts.PointCloud:
    return otts.PointCloud(*clouds(case), epsilon=1.0, batch_size=tile, mesh=mesh)


def _name(tile: Sequence[int]) -> str:
    return "x".join(map(str, tile))


def rows(record: Record) -> list[tuple[str, ...]]:
    """(what, d, mesh, number, note) of a sweep."""
    tile, share = _name(record["tile"]), f"{record['of_best']:.2f}"
    note = f"{tile}; best {record['best']}"
    return [("tile, of the best", str(record["d"]), record["mesh"], share, note)]


def points(record: Record) -> list[Point]:
    """Speed by the columns of a tile, a curve for each number of rows."""
    found, panel = [], f"tiles at d = {record['d']}"
    for tile, speed in record["pairs_per_second"].items():
        rows, cols = map(int, tile.split("x"))
        found.append(Point(panel, f"{rows} rows", cols, speed))
    return found
