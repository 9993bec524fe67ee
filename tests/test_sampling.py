"""Pairs drawn from a plan."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref

import ott_shard as otts
from ott_shard import sampling


def solution(mesh, dtype, batch_size=(4, 7)):
    p = ref.problem(13, 21, dtype=dtype)
    x, y, a, b = p.cast(dtype)
    geom = otts.PointCloud(x, y, epsilon=0.5, mesh=mesh, batch_size=batch_size)
    return otts.solve(geom, a, b, threshold=1e-5)


@pytest.mark.parametrize("method", ["iid", "systematic"])
def test_frequencies_are_those_of_the_plan(mesh, dtype, method):
    """Chi-square over cells that expect 5 draws or more, with a fixed seed."""
    out, num = solution(mesh, dtype), 20_011
    i, j = out.sample(jax.random.key(0), num, method=method)
    assert i.shape == j.shape == (num,) and i.dtype == j.dtype == np.int32
    plan = np.asarray(out.matrix, np.float64)
    expected = num * plan / plan.sum()
    drawn = np.zeros_like(plan)
    np.add.at(drawn, (np.asarray(i), np.asarray(j)), 1)
    assert not np.any(drawn[plan == 0])
    often = expected >= 5
    statistic = np.sum((drawn - expected)[often] ** 2 / expected[often])
    freedom = often.sum()
    assert abs(statistic - freedom) < 4 * np.sqrt(2 * freedom)
    if method == "systematic":
        of_rows = expected.sum(1)
        counts = np.bincount(i, minlength=13)
        assert np.all(np.abs(counts - of_rows) < 1 + 1e-2)
        assert np.all(np.diff(i) >= 0)


def test_each_row_once():
    x = np.random.default_rng(0).normal(size=(1003, 2)).astype(np.float32)
    geom = otts.PointCloud(x, x[:500] + 1, epsilon=0.5, mesh=otts.make_mesh(4, 2))
    out = otts.solve(geom)
    for seed in range(3):
        i, _ = out.sample(jax.random.key(seed), 1003, method="systematic")
        np.testing.assert_array_equal(i, np.arange(1003))
    i, _ = out.sample(jax.random.key(0), 3000, method="systematic")
    assert set(np.bincount(i)) == {2, 3}


def test_the_same_on_every_mesh_and_in_every_tile():
    """Neither mesh nor tile has a part, and a column is what inversion says."""
    with jax.enable_x64(True):
        draws = [
            solution(otts.make_mesh(*shape), np.float64, tile).sample(
                jax.random.key(1), 57
            )
            for shape, tile in (((1, 1), 32), ((4, 2), (4, 7)), ((1, 8), 5))
        ]
    for i, j in draws[1:]:
        np.testing.assert_array_equal(i, draws[0][0])
        np.testing.assert_array_equal(j, draws[0][1])


@pytest.mark.slow
def test_so_many_rows_that_a_number_cannot_tell_them_apart():
    """3 million in float32, in which a uniform number has 2^23 values."""
    n, num = 3_000_000, 6_000_000
    masses = jnp.full(n, 1 / n)
    drawn = np.bincount(
        sampling.independent(jax.random.key(0), masses, num), minlength=n
    )
    # Poisson with mean 2: of each count the share that it has.
    for count in range(6):
        share = math.exp(-2) * 2**count / math.factorial(count)
        np.testing.assert_allclose(np.mean(drawn == count), share, rtol=5e-3)
    masses = jnp.asarray(np.random.default_rng(0).uniform(0.1, 1.9, n), jnp.float32)
    drawn = np.bincount(
        sampling.systematic(jax.random.key(0), masses, num), minlength=n
    )
    expected = num * np.float64(masses) / np.float64(masses).sum()
    # Up to the rounding of what is expected, and of its sum at the end.
    assert np.all(np.abs(drawn - expected)[:-1] < 1 + 1e-3) and drawn.sum() == num


def test_a_plan_that_is_a_permutation():
    """No rounding leads to a column without mass, the last ones among them."""
    x = np.arange(40, dtype=np.float32)[:, None]
    order = np.random.default_rng(0).permutation(40)
    y = np.concatenate([x[order], np.full((20, 1), 17, np.float32)])
    b = np.concatenate([np.full(40, 1 / 40), np.zeros(20)])
    geom = otts.PointCloud(x, y, epsilon=0.01, mesh=otts.make_mesh(1, 8), batch_size=4)
    out = otts.solve(geom, b=b)
    i, j = jax.jit(lambda: out.sample(jax.random.key(0), 10_000))()
    np.testing.assert_array_equal(j, np.argsort(order)[i])


def test_an_epoch_of_batches():
    """Each row once, whoever draws; all processes together are the one that is all."""
    x = np.random.default_rng(0).normal(size=(203, 2)).astype(np.float32)
    geom = otts.PointCloud(x, x[:100] + 1, epsilon=0.5, mesh=otts.make_mesh(4, 2))
    out = otts.solve(geom)

    def epoch(process, seed=0):
        args = jax.random.key(seed), 10
        return [np.asarray(b) for b in out.batches(*args, process=process)]

    alone, shares = epoch((0, 1)), [epoch((k, 3)) for k in range(3)]
    assert len(alone) == 20 and all(len(share) == 6 for share in shares)
    assert alone[0].shape == (2, 10)
    rows = np.concatenate([i for i, _ in alone])
    assert len(set(rows)) == 200 and np.any(np.diff(rows) < 0)
    for k, share in enumerate(shares):
        np.testing.assert_array_equal(share, alone[k:18:3])
    other = np.concatenate([i for i, _ in epoch((0, 1), seed=1)])
    assert np.any(other != rows) and len(set(other)) == 200
    best = np.asarray(out.matrix)[tuple(np.concatenate(alone, axis=1))]
    assert best.mean() > 2 / 203 / 100  # better than any pair


@pytest.mark.slow
def test_long_epochs():
    """More pairs than points, of frequencies of the plan."""
    out = solution(otts.make_mesh(4, 2), np.float32)
    options = dict(num_pairs=4000, method="iid")
    pairs = list(out.batches(jax.random.key(3), 1000, **options))
    i, j = (np.concatenate(side) for side in zip(*pairs, strict=True))
    plan = np.asarray(out.matrix, np.float64)
    drawn = np.zeros_like(plan)
    np.add.at(drawn, (i, j), 1)
    assert np.abs(drawn / 4000 - plan / plan.sum()).sum() < 0.25
    for axis in (0, 1):
        counts = drawn.sum(axis)
        expected = 4000 * (plan / plan.sum()).sum(axis)
        assert np.all(np.abs(counts - expected) < 5 * np.sqrt(expected + 1))


def test_no_dense_array():
    def run(x, y, key):
        geom = otts.PointCloud(x, y, epsilon=1.0, mesh=otts.make_mesh(1, 1))
        out = otts.solve(geom, max_iterations=1)
        return out.sample(key, len(x))

    def temp(n):
        cloud = jax.ShapeDtypeStruct((n, 50), np.float32)
        compiled = jax.jit(run).lower(cloud, cloud, jax.random.key(0)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = map(temp, (25_000, 50_000))
    assert small < large <= 2 * small and large < 128 * 2**20


@pytest.mark.parametrize(
    ("num_pairs", "method", "error"),
    [(0, "iid", ValueError), (2.5, "iid", TypeError), (3, "random", ValueError)],
)
def test_bad_arguments(num_pairs, method, error):
    x = np.eye(3, dtype=np.float32)
    out = otts.solve(otts.PointCloud(x, x, epsilon=1.0))
    with pytest.raises(error, match="num_pairs must|method must"):
        out.sample(jax.random.key(0), num_pairs, method)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (dict(batch_size=0), ValueError, "batch_size must be at least 1"),
        (dict(batch_size=4), ValueError, "batch_size must leave a batch for each of 1"),
        (dict(batch_size=2, process=(0, 2)), ValueError, "each of 2 processes"),
        (dict(batch_size=1, process=(2, 2)), ValueError, "process must be at least 3"),
        (dict(batch_size=1, process=3), TypeError, r"process must be \(index, count"),
        (dict(batch_size=1, num_pairs=0), ValueError, "num_pairs must be at least 1"),
        (dict(batch_size=1, method="all"), ValueError, "method must be one of"),
    ],
)
def test_bad_batches(options, error, words):
    x = np.eye(3, dtype=np.float32)
    out = otts.solve(otts.PointCloud(x, x, epsilon=1.0))
    with pytest.raises(error, match=words):
        out.batches(jax.random.key(0), **options)
