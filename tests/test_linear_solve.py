"""Conjugate gradients, their status, and what a failure looks like from outside."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref

import ott_shard as otts
from ott_shard.linear_solve import LinearStatus, conjugate_gradients

LIMITS = {"tolerance": 1e-6, "max_iterations": 50}


def positive_definite(n, condition):
    rng = np.random.default_rng(0)
    q = np.linalg.qr(rng.normal(size=(n, n)))[0]
    return q * np.geomspace(1, 1 / condition, n) @ q.T


def solve(matrix, rhs, **limits):
    matrix = jnp.asarray(matrix, jnp.float32)
    diagonal = jnp.abs(jnp.diag(matrix))
    out = conjugate_gradients(
        lambda v: matrix @ v,
        jnp.asarray(rhs, jnp.float32),
        diagonal=diagonal,
        **(LIMITS | limits),
    )
    return out, LinearStatus(int(out.code))


def test_solution_and_residual():
    matrix, rhs = positive_definite(12, 10), np.arange(12.0)
    out, status = solve(matrix, rhs, tolerance=1e-5)
    assert status is LinearStatus.CONVERGED and 0 < out.n_iters <= 50
    np.testing.assert_allclose(out.x, np.linalg.solve(matrix, rhs), rtol=1e-3)
    rest, weight = rhs - matrix @ np.float64(out.x), 1 / np.diag(matrix)
    want = np.sqrt(np.sum(rest**2 * weight) / np.sum(rhs**2 * weight))
    np.testing.assert_allclose(out.residual, want, atol=1e-6)
    assert want <= 2e-5


def test_zero_is_solved_at_once():
    out, status = solve(np.eye(3), np.zeros(3))
    assert status is LinearStatus.CONVERGED
    assert out.n_iters == 0 and not np.any(out.x)


@pytest.mark.parametrize(
    ("matrix", "rhs", "limits", "want"),
    [
        (positive_definite(12, 1e3), 1.0, {"max_iterations": 3}, "MAX_ITERATIONS"),
        (positive_definite(12, 1e3), 1.0, {"tolerance": 1e-7}, "ROUNDED"),
        (positive_definite(12, 1e7), 1.0, {"max_iterations": 500}, "SINGULAR"),
        (-np.eye(12), 1.0, {}, "SINGULAR"),
        (np.eye(12), np.nan, {}, "NOT_FINITE"),
    ],
)
def test_status(matrix, rhs, limits, want):
    assert solve(matrix, np.full(12, rhs), **limits)[1].name == want


# ---------------------------------------------------------------- of a transport


def potential_sum(x, epsilon=0.3, threshold=1e-3, **options):
    geom = otts.PointCloud(x, x + 1, epsilon=epsilon, mesh=otts.make_mesh(4, 2))
    cg = otts.ImplicitDiff(**options)
    return otts.solve(geom, threshold=threshold, implicit_diff=cg).g[::2].sum()


def test_failure_is_a_nan_and_a_line(caplog):
    x = jnp.asarray(ref.problem(13, 21).x, jnp.float32)
    with caplog.at_level(logging.WARNING, "ott_shard"):
        got = jax.jit(jax.grad(lambda x: potential_sum(x, max_iterations=1)))(x)
        jax.block_until_ready(got)
        jax.effects_barrier()
    assert np.all(np.isnan(got))
    assert "max_iterations was reached" in caplog.text and "raise" in caplog.text


@pytest.mark.wide
def test_success_is_silent(caplog):
    x = jnp.asarray(ref.problem(13, 21).x, jnp.float32)
    with caplog.at_level(logging.WARNING, "ott_shard"):
        got = jax.jit(jax.grad(potential_sum))(x)
        jax.block_until_ready(got)
        jax.effects_barrier()
    assert np.all(np.isfinite(got)) and not caplog.text


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20])
def test_scale_of_the_right_hand_side(size):
    matrix, rhs = positive_definite(12, 10), np.arange(12.0)
    out, status = solve(matrix, size * rhs)
    want, _ = solve(matrix, rhs)
    assert status is LinearStatus.CONVERGED
    np.testing.assert_allclose(out.x, size * np.float64(want.x), rtol=1e-4)


def test_clusters_are_singular_and_nan_is_seen():
    """Two clusters, 50 apart: what they have to do with each other is lost."""
    x = np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32)
    x[:10] += 50
    v = np.where(np.arange(20) < 10, 1.0, -1.0)

    def code(x, **options):
        how = otts.ImplicitDiff(**options)
        geom = otts.PointCloud(x, x, epsilon=1.0, mesh=otts.make_mesh(1, 1))
        out = otts.solve(geom, implicit_diff=how)
        solved = out.linear_solve(v)
        return otts.LinearStatus(int(solved.code)).name

    assert code(x) == "SINGULAR"
    assert code(x, ridge=1e-2) == "CONVERGED"
    # Inside jit, where a NaN is not refused.
    x[3] = np.nan

    @jax.jit
    def code_of_nan(x):
        geom = otts.PointCloud(x, x, epsilon=1.0, mesh=otts.make_mesh(1, 1))
        return otts.solve(geom).linear_solve(v).code

    assert code_of_nan(x) == otts.LinearStatus.NOT_FINITE


@pytest.mark.wide
def test_a_batch_of_derivatives_is_its_members():
    with jax.enable_x64(True):
        batch = np.random.default_rng(0).normal(size=(2, 13, 3))
        derivative = jax.grad(
            functools.partial(potential_sum, epsilon=3.0, threshold=1e-8)
        )
        together = jax.jit(jax.vmap(derivative))(batch)
        for one, x in zip(together, batch, strict=True):
            ref.assert_close(one, jax.jit(derivative)(x), 1e-3)


@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_status_of_a_solution_and_ridge(ridge):
    """The system as it stands in the docstring, dense."""
    with jax.enable_x64(True):
        p = ref.problem(13, 21, dtype=np.float64)
        cost, v = ref.sqeuclidean(p.x, p.y), np.random.default_rng(1).normal(size=21)
        geom = otts.PointCloud(p.x, p.y, epsilon=0.3, mesh=otts.make_mesh(4, 2))
        how = otts.ImplicitDiff(ridge=ridge, max_iterations=100)
        out = otts.solve(geom, p.a, p.b, threshold=1e-12, implicit_diff=how)
        got = out.linear_solve(v)
        assert got.code == otts.LinearStatus.CONVERGED and 0 < got.n_iters < 25
        plan = ref.sinkhorn(cost, p.a, p.b, 0.3, iterations=300).plan
        rows, sums = plan.sum(1), plan.sum(0)
        some = rows > 0
        matrix = np.diag((1 + ridge) * sums) + np.outer(sums, sums) / sums.sum()
        matrix -= plan[some].T @ np.diag(1 / rows[some]) @ plan[some]
        support = sums > 0
        want = np.zeros(21)
        inside = np.ix_(support, support)
        want[support] = np.linalg.solve(matrix[inside], (sums * v)[support])
        ref.assert_close(got.x, want, 1e-8)


@pytest.mark.wide
def test_max_iterations_of_a_solution():
    x = jnp.asarray(ref.problem(13, 21).x, jnp.float32)
    how = otts.ImplicitDiff(max_iterations=1)
    geom = otts.PointCloud(x, x + 1, epsilon=0.3, mesh=otts.make_mesh(4, 2))
    out = otts.solve(geom, implicit_diff=how)
    got = out.linear_solve(out.g)
    assert otts.LinearStatus(int(got.code)).name == "MAX_ITERATIONS"
    assert got.n_iters == 1 and got.residual > 1e-5
    with pytest.raises(ValueError, match=r"v must have shape \[13\], got \(14,\)"):
        out.linear_solve(np.ones(14))


# -------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tolerance": 0.0}, ValueError, "tolerance must"),
        ({"tolerance": 2.0}, ValueError, "tolerance must"),
        ({"tolerance": float("nan")}, ValueError, "tolerance must"),
        ({"tolerance": "1e-3"}, TypeError, "tolerance must"),
        ({"ridge": -1.0}, ValueError, "ridge must"),
        ({"ridge": float("inf")}, ValueError, "ridge must"),
        ({"max_iterations": 0}, ValueError, "max_iterations must"),
        ({"max_iterations": 1.5}, TypeError, "max_iterations must"),
        ({"tol": 1e-3}, TypeError, "tol"),
    ],
)
def test_bad_settings(options, error, words):
    with pytest.raises(error, match=words):
        otts.ImplicitDiff(**options)


@pytest.mark.parametrize("solver", ["solve", "divergence"])
def test_bad_ways_to_differentiate(solver):
    x = np.eye(3, dtype=np.float32)

    def call(**options):
        if solver == "divergence":
            return otts.sinkhorn_divergence(x, x, epsilon=1.0, **options)
        return otts.solve(otts.PointCloud(x, x, epsilon=1.0), **options)

    with pytest.raises(TypeError, match="implicit_diff must be an ott_shard.Implicit"):
        call(implicit_diff=True)
    with pytest.raises(ValueError, match="progress must be None with implicit_diff"):
        call(implicit_diff=None, progress=print)
