"""Tasks that solve. To add one: write a function like those here, enter it in TASKS."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ott_shard as otts
from ott_shard import mesh as meshes
from ott_shard.geometry import DEFAULT_EPSILON

from .config import Command, Computation, Config, Problem
from .data import Clouds
from .errors import BadInput
from .kinds import cost_named

Watch = Callable[[str, otts.Snapshot], None]


class Hooks(NamedTuple):
    """What is called on the way of a run, and where it starts.

    Attributes:
        watch: called at every check of a solution, see `ott_shard.solve`.
        known: the snapshot that a term goes on from, by its name.
        solved: called between solutions and their gradients.
    """

    watch: Watch | None = None
    known: Mapping[str, otts.Snapshot] = {}
    solved: Callable[[], None] | None = None


# Solutions, in the order of TERMS.
Terms = tuple[otts.SinkhornOutput, ...]
Compute = Callable[[Config, Mesh, Clouds, Hooks], tuple[jax.Array, Terms]]

# The pairs of clouds that solutions are between; the first is the one to save.
TERMS = ("xy", "xx", "yy")


class Task(NamedTuple):
    """What a task does, for people, files and the machine.

    Attributes:
        text: what --help says.
        value_name: the name of the value in a result.
        compute: from run, mesh and clouds to the value, differentiable in the clouds,
            and its terms.
        command: what it can be told; its fields are the flags that the task takes.
    """

    text: str
    value_name: str
    compute: Compute
    command: type[Config] = Config


class Outcome(NamedTuple):
    """What came of a run.

    Attributes:
        value_name: what `value` is.
        value: scalar.
        terms: the solutions.
        gradients: with respect to x and y, if asked for.
        seconds: from the clouds to value and gradients, compilation included.
    """

    value_name: str
    value: jax.Array
    terms: Terms
    gradients: tuple[jax.Array, jax.Array] | None
    seconds: float

    @property
    def status(self) -> otts.Status:
        """The worst of all terms."""
        return max(term.status for term in self.terms)


def solve(
    config: Config, mesh: Mesh, clouds: Clouds, hooks: Hooks
) -> tuple[jax.Array, Terms]:
    """Entropic optimal transport between x and y."""
    geom = geometry(config, mesh, clouds)
    options: Any = _solve_options(config, hooks) | {"init": hooks.known.get("xy")}
    out = otts.solve(geom, clouds.a, clouds.b, **options)
    return out.reg_ot_cost, (out,)


def divergence(
    config: Config, mesh: Mesh, clouds: Clouds, hooks: Hooks
) -> tuple[jax.Array, Terms]:
    """Debiased Sinkhorn divergence between x and y."""
    options = _cloud_options(config, mesh) | _solve_options(config, hooks)
    options |= {"init": hooks.known}
    value, out = otts.sinkhorn_divergence(*clouds, **options)
    return value, out.outputs


TASKS = {
    "solve": Task("entropic optimal transport", "reg_ot_cost", solve),
    "divergence": Task("debiased Sinkhorn divergence", "divergence", divergence),
}


def geometry(config: Config, mesh: Mesh, clouds: Clouds) -> otts.PointCloud:
    """The clouds of a run, as its task takes them."""
    return otts.PointCloud(clouds.x, clouds.y, **_cloud_options(config, mesh))


def _cloud_options(config: Config, mesh: Mesh) -> dict[str, Any]:
    return dict(
        cost_fn=cost(config),
        **_epsilon(config),
        scale_cost=config.scale_cost,
        **layout(config, mesh),
    )


def cost(problem: Problem) -> otts.costs.CostFn:
    """The cost of a problem.

    Raises:
        BadInput: if its numbers are out of range.
    """
    try:
        return cost_named(problem.cost)
    except ValueError as error:
        raise BadInput(f"--cost={problem.cost}: {error}") from None


def layout(command: Computation, mesh: Mesh) -> dict[str, Any]:
    """How a `PointCloud` is computed with, whatever its problem."""
    sizes = command.batch_size
    return dict(
        batch_size=sizes[0] if sizes and len(sizes) == 1 else sizes,
        mesh=mesh,
        precision=command.precision,
    )


def _epsilon(config: Config) -> dict[str, Any]:
    unit = None if config.epsilon_unit == "absolute" else config.epsilon_unit
    if config.epsilon_init is None:
        return dict(epsilon=config.epsilon, relative_epsilon=unit)
    target = config.epsilon
    if target is None:  # the library's default, which a schedule must name
        target, unit = DEFAULT_EPSILON, unit or "std"
    try:
        schedule = otts.Epsilon(target, config.epsilon_init, config.epsilon_decay)
    except ValueError as error:
        raise BadInput(f"--epsilon_init={config.epsilon_init:g}: {error}") from None
    return dict(epsilon=schedule, relative_epsilon=unit)


def _solve_options(config: Config, hooks: Hooks) -> dict[str, Any]:
    return dict(
        tau_a=config.tau_a,
        tau_b=config.tau_b,
        threshold=config.threshold,
        max_iterations=config.max_iterations,
        min_iterations=config.min_iterations,
        inner_iterations=config.inner_iterations,
        acceleration=otts.Acceleration() if config.acceleration == "lbfgs" else None,
        watch=hooks.watch,
    )


def perform(config: Config, mesh: Mesh, clouds: Clouds, hooks: Hooks) -> Outcome:
    """Run the task of `config`.

    Raises:
        BadInput: if the library refuses the clouds, the weights or an option.
    """
    task = TASKS[config.task]
    last, begun = dict(hooks.known), time.perf_counter()

    def watch(term: str, now: otts.Snapshot) -> None:
        last[term] = now
        if hooks.watch:
            hooks.watch(term, now)

    with blaming(config):
        value, terms = task.compute(config, mesh, clouds, hooks._replace(watch=watch))
        gradients = None
        if config.grad:  # from where the solutions ended: hooks may not be in a trace
            if hooks.solved:
                hooks.solved()
            ends = Hooks(known=last)
            gradients = _program(config, task.compute, mesh, clouds, ends)[1]
        jax.block_until_ready((value, terms, gradients))
    seconds = time.perf_counter() - begun
    return Outcome(task.value_name, value, terms, gradients, seconds)


def temp_bytes(config: Config, mesh: Mesh, clouds: Clouds) -> int | None:
    """Temporary memory of a run on each device; None if the backend does not say.

    It takes one more compilation.
    """
    (n, d), (m, _) = clouds.x.shape, clouds.y.shape
    analysis = compiled(config, mesh, (n, m, d)).memory_analysis()
    return None if analysis is None else analysis.temp_size_in_bytes


@contextlib.contextmanager
def blaming(command: Command) -> Iterator[None]:
    """What the library refuses is bad input, if it came from a flag."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if refusal := command.blame(str(error)):
            raise refusal from None
        raise


def _program(
    config: Config, compute: Compute, mesh: Mesh, clouds: Clouds, hooks: Hooks
) -> tuple[tuple[jax.Array, Terms], tuple[jax.Array, jax.Array] | None]:
    """((value, terms), gradients)."""

    def value(x, y):
        return compute(config, mesh, clouds._replace(x=x, y=y), hooks)

    if not config.grad:
        return value(clouds.x, clouds.y), None
    return jax.value_and_grad(value, (0, 1), has_aux=True)(clouds.x, clouds.y)


def compiled(
    config: Config, mesh: Mesh, sizes: tuple[int, int, int]
) -> jax.stages.Compiled:
    """The run as one program for clouds of n, m points in d dimensions; it is not run.

    The run itself goes by smaller programs, so that it can report progress between
    them, and none of those needs more. Arguments are what a run keeps on its devices:
    padded clouds and weights, split over the mesh; results are what it adds to them.
    """

    def program(clouds: Clouds) -> Any:
        compute = TASKS[config.task].compute
        (value, terms), gradients = _program(config, compute, mesh, clouds, Hooks())
        return value, [term.found for term in terms], gradients

    return jax.jit(program).lower(shapes(mesh, sizes, config.dtype)).compile()


def shapes(mesh: Mesh, sizes: tuple[int, int, int], dtype: str) -> Clouds:
    """Padded clouds and weights on their devices, without numbers."""
    *counts, d = sizes
    ends = []
    for size, axes in zip(counts, meshes.axes_of(mesh), strict=True):
        split = NamedSharding(mesh, PartitionSpec(axes or None))
        size = meshes.padded_size(size, mesh)
        for shape in ((size, d), (size,)):
            ends.append(jax.ShapeDtypeStruct(shape, dtype, sharding=split))
    x, a, y, b = ends
    return Clouds(x, y, a, b)
