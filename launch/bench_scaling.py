"""Scaling by counted work, which needs no machine; and a model of when it pays.

On devices that share the cores of one CPU time cannot show how an iteration scales.
What a device computes and sends is in its program.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

import ott_shard as otts
from ott_shard.loops import for_all
from ott_shard.operators import Pairs, softmin, softmin_if_near

from .bench_options import Options
from .bench_tables import Point, Record, Suite
from .bench_timing import place
from .programs import Work, count

_POINTS = 16_384
# So many that pairs are counted by products of matrices in every version of the kernel.
_DIMENSION = 64
_MOST_DEVICES = 16


class Link(NamedTuple):
    """What devices are connected by.

    Attributes:
        name: for people.
        bytes_per_second: from one device, in one direction.
        latency: seconds of a step from one device to the next, which is assumed.
    """

    name: str
    bytes_per_second: float
    latency: float


# NVLink 4 of H100 and H200 (900 GB/s in both directions); a network card for each GPU.
LINKS = Link("NVLink", 450e9, 2e-6), Link("400 Gb/s", 50e9, 5e-6)


def crossover(shape: tuple[int, int], pairs_per_second: float, link: Link) -> float:
    """The n = m from which an iteration computes for longer than it communicates.

    The model: an iteration has two passes, so it computes for 2 n^2 / (P r) seconds on
    P = R C devices of r pairs per second. The pass over columns ends in an all-reduce
    of n / R float32 along C devices and one of a flag along R, the other one in one of
    n / C along R and one of a flag along C. An all-reduce of s bytes along a ring of k
    devices has 2 (k - 1) steps, each of which sends s / k bytes: 2 (k - 1) (s / (k B) +
    L) seconds for a link of B bytes per second and a latency of L. Nothing overlaps. In
    both directions s / k = 4 n / P, and of a flag only the latency counts, so
    times are equal where

        2 n^2 / (P r) = 2 (R + C - 2) (4 n / (P B) + 2 L),

    a quadratic equation in n, whose root is returned; 0 for one device.
    """
    rows, cols = shape
    devices, steps = rows * cols, 2 * (rows + cols - 2)
    square = 2 / (devices * pairs_per_second)
    linear = steps * 4 / (devices * link.bytes_per_second)
    constant = steps * 2 * link.latency
    return (linear + math.sqrt(linear**2 + 4 * square * constant)) / (2 * square)


def _records(options: Options, mesh: Mesh, _: str | None) -> Iterator[Record]:
    n, pool = options.n or _POINTS, list(mesh.devices.flat)
    for kind in ("strong", "weak"):
        devices = 1
        while devices <= min(len(pool), _MOST_DEVICES):
            # Weak: as many pairs on each device, so points grow with the root.
            size = n if kind == "strong" else round(n * math.sqrt(devices))
            on = otts.make_mesh(devices=pool[:devices])
            yield {"suite": "scaling", "kind": kind} | _counted(size, on, options)
            devices *= 2


def _counted(n: int, mesh: Mesh, options: Options) -> Record:
    """What one device does in an iteration, and sends in a gradient."""
    points = np.random.default_rng(0).standard_normal((n, _DIMENSION), np.float32)
    geom = otts.PointCloud(points, points + 1, epsilon=1.0, mesh=mesh)
    a, b = geom.weights(None, 0), geom.weights(None, 1)
    args = geom.pairs, a, b, geom.epsilon
    iteration, gradient = (
        count(program.lower(*args).compile().as_text() or "")
        for program in (_iteration, _gradient)
    )
    shape, rate = geom.pairs.mesh.devices.shape, options.pairs_per_second
    return {
        **dict(n=n, d=_DIMENSION, devices=mesh.size),
        "pairs": iteration.products,
        "pairs_ideal": 2 * n * n / mesh.size,
        "iteration": _traffic(iteration),
        "gradient": _traffic(gradient),
        "pairs_per_second": rate,
        "crossover": {link.name: crossover(shape, rate, link) for link in LINKS},
        **place(mesh),
    }


def _traffic(work: Work) -> dict[str, float]:
    return {
        "all_reduces": work.all_reduces.total(),
        "bytes_sent": work.bytes_sent,
        "other_collectives": work.others,
    }


@jax.jit
def _iteration(
    pairs: Pairs, a: jax.Array, b: jax.Array, epsilon: jax.Array
) -> tuple[jax.Array, ...]:
    """Two passes, from weights for potentials: only the shapes matter."""
    rows, near = softmin_if_near(pairs, b, b, epsilon, a)
    cols, also = softmin_if_near(pairs.T, rows, a, epsilon, b)
    return cols, for_all(near), for_all(also)


@jax.jit
def _gradient(
    pairs: Pairs, a: jax.Array, b: jax.Array, epsilon: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """In both clouds, of a value that is known."""

    def total(x, y):
        moved = dataclasses.replace(pairs, x=x, y=y)
        return softmin(moved, b, b, epsilon, a).sum()

    return jax.grad(total, (0, 1))(pairs.x, pairs.y)


def _rows(record: Record) -> list[tuple[str, ...]]:
    traffic = [record[name] for name in ("iteration", "gradient")]
    return [
        (
            *(str(record[k]) for k in ("kind", "mesh", "n")),
            f"{record['pairs'] / 1e6:.1f}",
            f"{record['pairs'] / record['pairs_ideal']:.3f}",
            *(f"{one['bytes_sent'] / 1e3:.1f}" for one in traffic),
            *(str(one["all_reduces"]) for one in traffic),
            *(f"{n:.0f}" for n in record["crossover"].values()),
        )
    ]


def _points(record: Record) -> list[Point]:
    label, devices = f"{record['kind']} scaling", record["devices"]
    points = [Point("pairs of an iteration", label, devices, record["pairs"])]
    for name in ("iteration", "gradient"):
        if sent := record[name]["bytes_sent"]:
            points.append(Point(f"bytes sent, {name}", label, devices, sent))
    return points


SUITE = Suite(
    _records,
    (
        *("scaling", "mesh", "n", "1e6 pairs", "of ideal"),
        *("kB sent", "of gradient", "all-reduces", "of gradient"),
        *(f"crossover n, {link.name}" for link in LINKS),
    ),
    _rows,
    ("devices", "on one device"),
    _points,
)
