"""What a solution tells about its plan, against the dense plan."""

import functools

import jax
import numpy as np
import pytest
import reference as ref

import ott_shard as otts


def dense_top(plan, k):
    """Of equal entries the first; -1 where there is no mass."""
    order = np.argsort(-plan, axis=1, kind="stable")[:, :k]
    values = np.take_along_axis(plan, order, axis=1)
    return np.where(values > 0, order, -1), values


@pytest.mark.parametrize("axis", [0, 1])
def test_top_k(mesh, dtype, axis):
    """13 x 21 in tiles of 4 x 7, weights of zero among them; k beyond a tile."""
    p = ref.problem(13, 21, dtype=dtype)
    x, y, a, b = p.cast(dtype)
    geom = otts.PointCloud(x, y, epsilon=0.3, mesh=mesh, batch_size=(4, 7))
    out = otts.solve(geom, a, b, threshold=1e-5)
    plan = np.asarray(out.matrix)
    plan = plan if axis == 1 else plan.T
    for k in (1, 3, plan.shape[1]):
        indices, values = out.top_k(k, axis)
        assert indices.shape == values.shape == (len(plan), k)
        want, shares = dense_top(plan, k)
        ref.assert_close(values, shares, 1e-5 if dtype == np.float32 else 1e-12)
        np.testing.assert_array_equal(indices >= 0, shares > 0)
        np.testing.assert_array_equal(indices[:, 0], want[:, 0])
        # Further on neighbours as close as rounding may change places.
        entries = np.take_along_axis(plan, np.maximum(indices, 0), axis=1)
        np.testing.assert_allclose(entries * (indices >= 0), shares, rtol=1e-4)
    np.testing.assert_array_equal(out.argmax(axis), out.top_k(1, axis)[0][:, 0])


def test_of_equals_the_first():
    x, y = np.zeros((3, 2), np.float32), np.zeros((40, 2), np.float32)
    geom = otts.PointCloud(x, y, epsilon=1.0, mesh=otts.make_mesh(2, 4), batch_size=3)
    indices, values = jax.jit(lambda: otts.solve(geom).top_k(25, axis=1))()
    np.testing.assert_array_equal(indices, np.tile(np.arange(25), (3, 1)))
    np.testing.assert_allclose(values, 1 / 120, rtol=1e-5)


def test_top_k_takes_no_dense_array():
    """n = m = 50,000 and d = 50, of which the plan is 9.3 GiB; doubling n doubles."""

    def run(x, y):
        geom = otts.PointCloud(x, y, epsilon=1.0, mesh=otts.make_mesh(1, 1))
        out = otts.solve(geom, max_iterations=1)
        return out.top_k(10, axis=1)

    def temp(n):
        cloud = jax.ShapeDtypeStruct((n, 50), np.float32)
        memory = jax.jit(run).lower(cloud, cloud).compile().memory_analysis()
        return memory.temp_size_in_bytes

    small, large = map(temp, (25_000, 50_000))
    assert small < large <= 2 * small and large < 128 * 2**20


@pytest.mark.parametrize(
    ("k", "axis", "error"),
    [(0, 1, ValueError), (5, 1, ValueError), (1.5, 1, TypeError), (1, 2, ValueError)],
)
def test_bad_arguments(k, axis, error):
    x = np.eye(3, dtype=np.float32)
    out = functools.partial(otts.PointCloud, x, np.ones((4, 3), np.float32))
    with pytest.raises(error, match="k must|axis must"):
        otts.solve(out(epsilon=1.0)).top_k(k, axis)
