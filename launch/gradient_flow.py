"""Example: points flow to a shape, down the gradient of the Sinkhorn divergence.

    python -m launch.gradient_flow --n=500
    python -m launch.gradient_flow --out=points.npy
    python -m launch.gradient_flow --n=500 --lbfgs  # needs optax

A plain step is x - grad / (2 a): each point moves by the difference of two means, of
what the plan to the shape sends it to and of what the plan to its own cloud does. A
large epsilon brings the points near in few iterations, a smaller one sharpens the
shape. Epsilon is an argument of the compiled program: there is one for all of them. At
one epsilon L-BFGS comes nearer in many steps; with few steps at each of a row of
epsilons the plain step does.
"""

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled

import ott_shard as otts

EPSILONS = (0.3, 0.1, 0.03)  # in units of squared distance: the shapes are of size 1
STEPS = 5  # for each epsilon
THRESHOLD = 1e-4  # the divergence itself comes down to some 1e-5


class Place(NamedTuple):
    """Where a flow is: points [n, 2], the loss there and the step down from there."""

    x: np.ndarray
    loss: float
    step: np.ndarray


def disc(n: int, rng: np.random.Generator) -> np.ndarray:
    """[n, 2] points in the disc of radius 1."""
    radius, angle = np.sqrt(rng.uniform(size=n)), rng.uniform(0, 2 * np.pi, n)
    points = [radius * np.cos(angle), radius * np.sin(angle)]
    return np.stack(points, 1).astype(np.float32)


def moons(n: int, rng: np.random.Generator) -> np.ndarray:
    """[n, 2] points near two half circles that reach into each other."""
    side, angle = np.where(np.arange(n) % 2, 1, -1), rng.uniform(0, np.pi, n)
    halves = [side * (np.cos(angle) - 0.5), side * (np.sin(angle) - 0.25)]
    return (np.stack(halves, 1) + rng.normal(0, 0.05, (n, 2))).astype(np.float32)


def compiled_loss(n: int, mesh: Mesh) -> Compiled:
    """The program for (x, y, epsilon), with the gradient in x, for n points each.

    The loss is the divergence and half of OT(y, y), which does not depend on x. The
    program takes any epsilon; given points of another shape, it raises.
    """

    def loss(x, y, epsilon):
        return otts.sinkhorn_divergence(
            *(x, y), epsilon=epsilon, static_b=True, threshold=THRESHOLD, mesh=mesh
        )

    points = jax.ShapeDtypeStruct((n, 2), np.float32)
    program = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return program.lower(points, points, EPSILONS[0]).compile()


def look(program: Compiled, y: np.ndarray, epsilon: float, x: np.ndarray) -> Place:
    """Loss and step at x; a RuntimeError says why if the plans did not converge."""
    (loss, solutions), gradient = program(x, y, epsilon)
    solutions.raise_if_failed()
    return Place(x, float(loss), np.asarray(gradient) * len(x) / 2)


def descend(look: Callable[[np.ndarray], Place], x: np.ndarray) -> Iterator[Place]:
    """The places on a way down from x; a step that leads no lower is halved."""
    place, length = look(x), 1.0
    while True:
        yield place
        new = look(place.x - length * place.step)
        if new.loss < place.loss:
            place = new
        else:
            length /= 2


def flow(
    program: Compiled, x: np.ndarray, y: np.ndarray
) -> Iterator[tuple[float, float, Place]]:
    """(epsilon, divergence, place), for each epsilon before and after each step."""
    for epsilon in EPSILONS:
        here = functools.partial(look, program, y, epsilon)
        least = here(y).loss  # the divergence is 0 at x = y
        for place in itertools.islice(descend(here, x), STEPS + 1):
            yield epsilon, place.loss - least, place
            x = place.x


def lbfgs_step(mesh: Mesh) -> tuple[Any, Callable]:
    """optax's L-BFGS, and its jitted (x, state, y, epsilon) to (x, state, divergence).

    The loss is in units in which the plain step has length 1.
    """
    import optax  # pyright: ignore[reportMissingImports] (optional)

    solver = optax.lbfgs(scale_init_precond=False)

    @jax.jit
    def step(x, state, y, epsilon):
        def loss(x):
            value, out = otts.sinkhorn_divergence(
                *(x, y), epsilon=epsilon, threshold=THRESHOLD, mesh=mesh
            )
            # The line search passes no status on.
            return jnp.where(out.converged, value, jnp.nan) * len(x) / 2

        value, gradient = optax.value_and_grad_from_state(loss)(x, state=state)
        update, state = solver.update(
            gradient, state, x, value=value, grad=gradient, value_fn=loss
        )
        value = optax.tree_utils.tree_get(state, "value")  # its line search ended there
        return optax.apply_updates(x, update), state, value * 2 / len(x)

    return solver, step


def lbfgs_flow(
    x: np.ndarray, y: np.ndarray, mesh: Mesh
) -> Iterator[tuple[float, float, np.ndarray]]:
    """(epsilon, divergence, points) after each step, a new L-BFGS for each epsilon."""
    solver, step = lbfgs_step(mesh)
    for epsilon in EPSILONS:
        state = jax.device_get(solver.init(jnp.asarray(x)))
        for _ in range(STEPS):
            # On the host in between: what came back placed would be another program.
            x, state, divergence = jax.device_get(step(x, state, y, epsilon))
            if np.isnan(divergence):
                raise RuntimeError(f"a plan did not converge at epsilon {epsilon}")
            yield epsilon, float(divergence), x


def main(argv: Sequence[str]) -> int:
    """From a disc to two moons, a line for each step."""
    parser = argparse.ArgumentParser("python -m launch.gradient_flow")
    parser.add_argument("--n", type=int, default=20_000, help="points of each cloud")
    parser.add_argument("--out", type=Path, help="write the points to this .npy file")
    parser.add_argument("--lbfgs", action="store_true", help="L-BFGS steps, by optax")
    args = parser.parse_args(argv)
    if args.n < 1:
        parser.error(f"--n must be at least 1, got {args.n}")
    if args.out and not args.out.absolute().parent.is_dir():
        parser.error(f"--out must be in a folder that exists, got {args.out}")
    rng, begun = np.random.default_rng(0), time.perf_counter()
    x, y = disc(args.n, rng), moons(args.n, rng)
    if args.lbfgs:
        print(f"{'epsilon':>8}{'divergence':>12}{'seconds':>9}")
        for epsilon, divergence, points in lbfgs_flow(x, y, otts.make_mesh()):
            seconds, begun = time.perf_counter() - begun, time.perf_counter()
            print(f"{epsilon:8g}{divergence:12.2e}{seconds:9.2f}", flush=True)
            save(args.out, points)
        return 0
    program = compiled_loss(args.n, otts.make_mesh())
    seconds, begun = time.perf_counter() - begun, time.perf_counter()
    print(f"1 program compiled in {seconds:.1f} s")
    if memory := program.memory_analysis():
        print(f"{memory.temp_size_in_bytes / 2**20:.1f} MiB of temporary memory")
    print(f"{'epsilon':>8}{'divergence':>12}{'gradient':>10}{'seconds':>9}")
    for epsilon, divergence, place in flow(program, x, y):
        seconds, begun = time.perf_counter() - begun, time.perf_counter()
        norm = np.sqrt(np.mean(np.sum(place.step**2, axis=1)))
        print(f"{epsilon:8g}{divergence:12.2e}{norm:10.1e}{seconds:9.2f}", flush=True)
        x = place.x
    save(args.out, x)
    return 0


def save(path: Path | None, x: np.ndarray) -> None:
    """Write the points, if asked to."""
    if path:
        np.save(path, x)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
