"""Temporary memory of value_and_grad of a divergence: compiled for, but not run."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ott_shard as otts
from ott_shard import mesh as meshes

from . import kinds
from .bench_options import Case, Options
from .bench_tables import Point, Record, Suite
from .bench_timing import place

_SIZES = 50_000, 100_000
_DIMENSIONS = 2, 64
_COSTS = "sqeuclidean", "euclidean"
_MIB = 2**20


def temp_bytes(case: Case, options: Options, mesh: Mesh) -> int | None:
    """Temporary bytes on each device; None where the compiler keeps no account."""

    def value(x, y, epsilon):
        cloud = cloud_options(case, options, mesh)
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


def cloud_options(case: Case, options: Options, mesh: Mesh) -> dict[str, Any]:
    """How ott_shard is to see the clouds of a case."""
    cost_fn, sizes = kinds.cost_named(case.cost), options.batch_size
    size = sizes[0] if sizes and len(sizes) == 1 else sizes
    return dict(cost_fn=cost_fn, batch_size=size, mesh=mesh)


def one_and_all(mesh: Mesh) -> list[Mesh]:
    """The first device alone, and the mesh if it has more."""
    one = otts.make_mesh(1, 1, devices=[mesh.devices.flat[0]])
    return [one] if mesh.size == 1 else [one, mesh]


def _records(options: Options, mesh: Mesh, _: str | None) -> Iterator[Record]:
    sizes = [options.n] if options.n else _SIZES
    for on in one_and_all(mesh):
        for case in (
            Case(n, n, d, cost) for n in sizes for d in _DIMENSIONS for cost in _COSTS
        ):
            found = {"divergence_temp_bytes": temp_bytes(case, options, on)}
            yield {"suite": "memory"} | case._asdict() | place(on) | found


def _rows(record: Record) -> list[tuple[str, ...]]:
    found = record["divergence_temp_bytes"]
    size = "unknown" if found is None else f"{found / _MIB:.1f}"
    return [(*(str(record[k]) for k in ("n", "d", "cost", "mesh")), size)]


def _points(record: Record) -> list[Point]:
    found = record["divergence_temp_bytes"]
    label = f"{record['cost']}, d = {record['d']}"
    panel = f"mesh {record['mesh']}"
    return [Point(panel, label, record["n"], found / _MIB)] if found else []


SUITE = Suite(
    _records,
    ("n", "d", "cost", "mesh", "MiB per device"),
    _rows,
    ("n", "temporary MiB per device"),
    _points,
)
