"""Programs that tests of small problems share, compiled once a cost and shape."""

import functools

import jax
import numpy as np

import ott_shard as otts
from ott_shard import costs, lbfgs

FLOAT = np.float32
LIMITS = "max_iterations", "inner_iterations", "acceleration"


def mesh():
    return otts.make_mesh(1, 1)


def uniform(n):
    return np.full(n, 1 / n, FLOAT)


def solved(cost, x, y, a, b, epsilon, taus=(1.0, 1.0), threshold=1e-3, **how):
    """Value, what else a solution holds, and gradients."""
    numbers = (np.asarray(z, x.dtype) for z in (epsilon, taus, threshold))
    return compiled(cost, x, y, a, b, *numbers, **how)


@functools.partial(jax.jit, static_argnames="acceleration")
def compiled(cost, x, y, a, b, epsilon, taus, threshold, acceleration=lbfgs.DEFAULT):
    """Once for a cost, dtype and shape."""

    @functools.partial(jax.value_and_grad, argnums=range(5), has_aux=True)
    def run(x, y, a, b, epsilon):
        geom = otts.PointCloud(x, y, cost_fn=cost, epsilon=epsilon, mesh=mesh())
        out = otts.solve(
            *(geom, a, b),
            tau_a=taus[0],
            tau_b=taus[1],
            threshold=threshold,
            acceleration=acceleration,
        )
        rows, columns = out.marginal(1), out.marginal(0)
        return out.reg_ot_cost, (out, out.matrix, out.primal_cost, rows, columns)

    (value, others), gradients = run(x, y, a, b, epsilon)
    return value, *others, dict(zip(("x", "y", "a", "b"), gradients, strict=False))


@functools.partial(jax.jit, static_argnames=LIMITS)
def plainly(cost, x, y, epsilon, b=None, threshold=1e-3, **options):
    """A solution, its marginals and <C, P>, without gradients."""
    geom = otts.PointCloud(x, y, cost_fn=cost, epsilon=epsilon, mesh=mesh())
    out = otts.solve(geom, None, b, threshold=threshold, **options)
    return out, out.marginal(1), out.marginal(0), out.primal_cost


def two_by_two(x, y, a, b, epsilon, **options):
    """Two points each on a line: one program for them all."""
    x, y = (np.asarray(z, FLOAT)[:, None] for z in (x, y))
    a, b = np.asarray(a, FLOAT), np.asarray(b, FLOAT)
    return solved(costs.SqEuclidean(), x, y, a, b, epsilon, **options)


def assert_finite(*trees):
    for leaf in jax.tree.leaves(trees):
        assert np.all(np.isfinite(leaf))
