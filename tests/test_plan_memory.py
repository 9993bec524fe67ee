"""What the uses of a plan keep in memory, and what travels, by compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_memory import gathered

import ott_shard as otts


def pot(out):
    return out.to_dual_potentials()


# Of a solution, and x.
GATHERLESS = {
    "start": lambda out, x: (
        otts.solve(
            otts.PointCloud(x + 1, x, epsilon=1.0, mesh=out.geom.mesh),
            init=out,
            max_iterations=1,
        ).reg_ot_cost
    ),
    "gaussian": lambda out, x: (
        otts.solve(
            otts.PointCloud(x + 1, x, epsilon=1.0, mesh=out.geom.mesh),
            init=otts.initializers.Gaussian(),
            max_iterations=1,
        ).reg_ot_cost
    ),
    "subsample": lambda out, x: (
        otts.solve(
            otts.PointCloud(x + 1, x, epsilon=1.0, mesh=out.geom.mesh),
            init=otts.initializers.Subsample(64, max_iterations=1),
            max_iterations=1,
        ).reg_ot_cost
    ),
    "hard": lambda out, x: pot(out).f(x, hard=True),
    "transport": lambda out, x: pot(out).transport(x),
    "barycentric_map": lambda out, x: out.barycentric_map(),
    "top_k": lambda out, x: out.top_k(5, 1),
    "sample": lambda out, x: out.sample(jax.random.key(0), 100),
    "duality_gap": lambda out, x: out.duality_gap,
}


OPERATIONS = {
    "entropy": lambda out, v: out.entropy,
    "duality_gap": lambda out, v: out.duality_gap,
    "barycentric_map": lambda out, v: out.barycentric_map(),
    "rows": lambda out, v: out.rows(5, 69),
    "transport_cost_at_geom": lambda out, v: out.transport_cost_at_geom(
        otts.PointCloud(
            v[:, :3], v[:, :3], cost_fn=otts.costs.Euclidean(), mesh=out.geom.mesh
        )
    ),
    "apply": lambda out, v: out.apply(v, 1),
    "to_bcoo": lambda out, v: out.to_bcoo(k=10).data,
}


@pytest.mark.parametrize(
    "name", ["rows", *(pytest.param(n, marks=pytest.mark.wide) for n in GATHERLESS)]
)
def test_nothing_gathers_a_cloud(name):
    """On 4 x 2 devices no result of an all-gather is of the size of a cloud."""
    n, d = 4096, 64

    def run(x, y):
        geom = otts.PointCloud(x, y, epsilon=1.0, mesh=otts.make_mesh(4, 2))
        out = otts.solve(geom, max_iterations=1)
        return (GATHERLESS | {"rows": lambda out, x: out.rows(5, 69)})[name](out, x)

    cloud = jax.ShapeDtypeStruct((n, d), np.float32)
    sizes = gathered(jax.jit(run).lower(cloud, cloud).compile().as_text())
    assert all(size < n * d for size in sizes), sizes


def test_a_costly_cost_in_a_block():
    """A cost that makes d numbers of each pair is still computed by small tiles."""

    def sorted_apart(x, y):
        return jnp.sum(jnp.sort(jnp.abs(x - y)) * jnp.arange(len(x)))

    def run(x):
        mesh = otts.make_mesh(1, 1)
        options = dict(cost_fn=sorted_apart, epsilon=1.0, mesh=mesh)
        geom = otts.PointCloud(x, x + 1, **options)
        out = otts.solve(geom, max_iterations=1)
        squared = otts.PointCloud(x, x, epsilon=1.0, mesh=mesh)
        plan = otts.Plan.from_potentials(squared, x[:, 0], x[:, 1])
        return out.rows(0, 1024), plan.transport_cost_at_geom(geom)

    cloud = jax.ShapeDtypeStruct((4096, 50), np.float32)
    memory = jax.jit(run).lower(cloud).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 100 * 2**20  # one array of pairs x d is 800


@pytest.mark.parametrize(
    "name",
    ["duality_gap", "apply"]
    + [
        pytest.param(name, marks=pytest.mark.wide)
        for name in OPERATIONS
        if name not in ("duality_gap", "apply")
    ],
)
def test_no_dense_array(name):
    """n = m = 50,000, d = 50, and 2,000 vectors: one array is 381 MiB, the plan 9 GiB.

    Doubling n at most doubles the memory besides arguments and results.
    """

    def run(x, y, v):
        geom = otts.PointCloud(x, y, epsilon=1.0, mesh=otts.make_mesh(1, 1))
        return OPERATIONS[name](otts.solve(geom, max_iterations=1), v)

    def temp(n):
        x, v = (jax.ShapeDtypeStruct((n, k), np.float32) for k in (50, 2000))
        memory = jax.jit(run).lower(x, x, v).compile().memory_analysis()
        return memory.temp_size_in_bytes

    small, large = map(temp, (25_000, 50_000))
    assert large <= 2 * small and large < 128 * 2**20
