"""Tasks that use a finished run. To add one: a class in `config`, a function here."""

import importlib.util
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

import ott_shard as otts

from . import pictures, tasks
from .config import Apply, Match, Report, Sample, Transport, Use
from .errors import BadInput
from .saved import Arrays, Run


class UseTask(NamedTuple):
    """What a task makes of a plan.

    Attributes:
        text: what --help says.
        names: of its arrays or pictures, and of their files.
        compute: from the command, the plan and the numbers in its file to the arrays,
            or to pictures as the bytes of PNG files.
        command: what it can be told; its fields are the flags that the task takes.
        needs: an optional package.
    """

    text: str
    names: tuple[str, ...]
    compute: Callable[[Any, otts.Plan, Any], tuple[jax.Array | bytes, ...]]
    command: type[Use]
    needs: str | None = None

    @property
    def files(self) -> list[str]:
        """What it writes beside its record."""
        suffix = ".png" if self.command is Report else ".npy"
        return [f"{name}{suffix}" for name in self.names]


class Made(NamedTuple):
    """What came of a use.

    Attributes:
        arrays: by name; pictures are bytes.
        seconds: from the clouds to the arrays, compilation included.
    """

    arrays: dict[str, jax.Array | bytes]
    seconds: float


def apply(use: Apply, plan: otts.Plan, v: np.ndarray) -> tuple[jax.Array, ...]:
    """P^T v or P v."""
    return (plan.apply(v, use.axis),)


def match(use: Match, plan: otts.Plan, _: None) -> tuple[jax.Array, ...]:
    """The k largest entries of every row or column, in descending order."""
    return plan.top_k(use.k, use.axis)


def sample(use: Sample, plan: otts.Plan, _: None) -> tuple[jax.Array, ...]:
    """Pairs (i, j), drawn in proportion to the plan."""
    pairs = plan.sample(jax.random.key(use.seed), use.num_pairs, use.method)
    return (jax.numpy.stack(pairs, axis=1),)


def transport(
    use: Transport, plan: otts.Plan, points: np.ndarray
) -> tuple[jax.Array, ...]:
    """The mean of where the plan sends each point."""
    potentials = plan.to_dual_potentials()
    return (potentials.transport(points, forward=not use.backward),)


USES = {
    "apply": UseTask(
        *("the plan times the numbers in v: apply.npy", ("apply",), apply, Apply)
    ),
    "match": UseTask(
        "the k best matches of every point: match_indices.npy, match_values.npy",
        *(("match_indices", "match_values"), match, Match),
    ),
    "sample": UseTask(
        "pairs (i, j) drawn from the plan: pairs.npy",
        *(("pairs",), sample, Sample),
    ),
    "transport": UseTask(
        "where the plan sends new points: transport.npy",
        *(("transport",), transport, Transport),
    ),
    "report": UseTask(
        "pictures of the run (needs matplotlib): convergence.png, clouds.png",
        *(("convergence", "clouds"), pictures.draw, Report, "matplotlib"),
    ),
}


def check_possible(use: Use) -> None:
    """Refuse a use that needs what is not there, before it computes.

    Raises:
        BadInput: if so.
    """
    if isinstance(use, Report) and jax.process_count() > 1:
        raise BadInput("report: draws in one process: start it without others")
    needs = USES[use.task].needs
    if needs and importlib.util.find_spec(needs) is None:
        raise BadInput(
            f"{use.task}: needs {needs}: pip install 'ott_shard[{use.task}]'"
        )


def perform(
    use: Use, mesh: Mesh, run: Run, saved: Arrays, numbers: np.ndarray | None
) -> Made:
    """Do the task of `use` with the plan of a run; `numbers` are those of its file.

    Raises:
        BadInput: if the library refuses what came with the run, or an option.
    """
    task = USES[use.task]
    begun = time.perf_counter()
    with tasks.blaming(use):
        arrays = task.compute(use, _plan(use, mesh, run, saved), numbers)
        jax.block_until_ready(arrays)
    named = zip(task.names, arrays, strict=True)
    return Made(dict(named), time.perf_counter() - begun)


def _plan(use: Use, mesh: Mesh, run: Run, saved: Arrays) -> otts.Plan:
    """The plan of the run, on any mesh."""
    problem, clouds = run.problem, saved.clouds
    geom = otts.PointCloud(
        *(clouds.x, clouds.y),
        cost_fn=tasks.cost(problem),
        epsilon=problem.epsilon,
        scale_cost=problem.scale_cost,
        **tasks.layout(use, mesh),
    )
    return otts.Plan.from_potentials(
        *(geom, saved.f, saved.g, clouds.a, clouds.b),
        tau_a=problem.tau_a,
        tau_b=problem.tau_b,
    )
