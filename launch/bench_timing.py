"""Times of programs and peers that belong together: they take turns in one run."""

import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from . import results
from .bench_peers import PeerError

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


def program(fn: Any, *args: Any, pairs: int) -> Program:
    """`fn`, a jitted function, compiled for `args`, and run once."""
    begun = time.perf_counter()
    compiled = fn.lower(*args).compile()
    seconds = time.perf_counter() - begun
    run = functools.partial(compiled, *args)
    jax.block_until_ready(run())
    return Program(run, seconds, pairs)


def take_turns(
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


def measured(programs: dict[str, Program], repeats: int) -> dict[str, Any]:
    """A summary of each program, when all have taken turns."""
    timers: dict[str, Timer] = {name: p.seconds for name, p in programs.items()}
    samples = take_turns(timers, repeats, {})
    return {name: of_program(p, samples[name]) for name, p in programs.items()}


def of_program(program: Program, seconds: list[float]) -> dict[str, float]:
    """The summary of its times."""
    compiling = {"compile_seconds": program.compile_seconds}
    return summary(seconds, program.pairs) | compiling


def summary(seconds: list[float], pairs: int) -> dict[str, float]:
    """Median and range, and pairs in a second by the median."""
    median = statistics.median(seconds)
    return {
        "seconds": median,
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "pairs_per_second": pairs / median,
    }


def place(mesh: Mesh) -> dict[str, Any]:
    """Where something is measured, and beside what."""
    device = mesh.devices.flat[0]
    return {
        "mesh": "x".join(str(size) for size in mesh.devices.shape),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "cpu_count": os.cpu_count(),
        "load_average": os.getloadavg(),
        "versions": results.versions(),
    }
