"""Passes that know about where they end: their values, and what if it was not there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref
from test_sharding import collectives

import ott_shard as otts
from ott_shard import operators
from ott_shard.problem import Problem

EPSILON, N, M = 0.3, 13, 21
TOLERANCE = {"float32": 1e-5, "float64": 1e-11}
# On every mesh a device has at least 16 of these: then the guess is used.
TILE = (1, 2)
# Further from the guess than this, in units of epsilon, none is believed.
REACH = {"float32": 39.9, "float64": 319.4}


def posed(mesh, dtype, tile=TILE, cost_fn=None):
    """A problem with points of no weight, a potential of y, and its c-transform."""
    p = ref.problem(N, M, dtype=dtype)
    x, y, a, b = p.cast(dtype)
    options = dict(epsilon=EPSILON, batch_size=tile, mesh=mesh)
    geom = otts.PointCloud(x, y, cost_fn=cost_fn, **options)
    a, b = geom.weights(a, 0), geom.weights(b, 1)
    geom, one = geom.resolve(a, b), jnp.ones((), dtype)
    problem = Problem(geom.pairs, a, b, geom.schedule, one, one)
    psi = np.random.default_rng(3).normal(size=M)
    exponents = (psi - ref.COSTS["SqEuclidean"](p.x, p.y)) / float(geom.epsilon)
    want = -float(geom.epsilon) * ref.logsumexp(ref.safe_log(p.b) + exponents)
    psi = np.pad(psi.astype(dtype), (0, len(b) - M))
    return problem, jax.device_put(psi, b.sharding), want


def moved(problem, rows, by, only=None):
    """A guess so many epsilon away, for all rows or one."""
    offsets = np.zeros(len(rows)) if only is not None else np.full(len(rows), by)
    if only is not None:
        offsets[only] = by
    offsets = jnp.asarray(offsets * float(problem.epsilon), rows.dtype)
    return jax.device_put(rows + offsets, rows.sharding)


def passes(problem, psi):
    """The pass by a guess, and the one that makes sure, as functions of the guess."""
    args = problem.pairs, psi, problem.b, problem.epsilon
    return (
        functools.partial(operators.softmin_if_near, *args),
        functools.partial(operators.softmin_near, *args),
    )


def test_values_are_those_of_a_softmin(mesh, dtype):
    problem, psi, want = posed(mesh, dtype)
    rows, tol = problem.to_rows(psi), TOLERANCE[dtype.name]
    if_near, surely = passes(problem, psi)
    for share in (0, 0.9, -0.9):
        near = moved(problem, rows, share * REACH[dtype.name])
        found, sure = if_near(near)
        assert np.all(sure)
        ref.assert_close(found[:N], want, tol, share)
        assert found.sharding.is_equivalent_to(rows.sharding, 1)
    for by, only in ((1.1, 4), (-1.1, 0), (3, None), (np.inf, 2), (np.nan, 2)):
        near = moved(problem, rows, by * REACH[dtype.name], only)
        kept = np.arange(len(rows)) != only
        assert np.array_equal(if_near(near)[1], kept & (only is not None))
        np.testing.assert_array_equal(surely(near), rows)  # the same program


def test_a_guess_has_no_part_in_a_derivative(mesh, dtype):
    """Nor does the branch: all is as without, in points, weights and epsilon."""
    problem, psi, _ = posed(mesh, dtype)
    near = moved(problem, problem.to_rows(psi), 3.0)

    def slopes(guess):
        def total(problem, psi, guess):
            values = problem.to_rows(psi)
            if guess is not None:
                values = problem.to_rows_near(psi, guess)
            return (values * jnp.arange(1, len(values) + 1)).sum()

        return jax.jit(jax.grad(total, (0, 1)))(problem, psi, guess)

    assert problem.many
    trees = slopes(None), slopes(near)
    for want, got in zip(*map(jax.tree.leaves, trees), strict=True):
        # The largest of all is about 100.
        np.testing.assert_allclose(got, want, rtol=0, atol=100 * TOLERANCE[dtype.name])
    assert not np.any(
        jax.grad(lambda guess: problem.to_rows_near(psi, guess).sum())(near)
    )


def test_one_of_a_batch_that_is_far_does_not_harm_the_others():
    """And a batch takes one branch, not both."""
    problem, psi, _ = posed(otts.make_mesh(2, 2), np.dtype("float32"))
    rows = problem.to_rows(psi)
    near = jnp.stack([moved(problem, rows, by) for by in (0.0, 100.0, 1.0)])
    batch = jax.jit(jax.vmap(passes(problem, psi)[1]))
    np.testing.assert_allclose(batch(near), jnp.tile(rows, (3, 1)), rtol=1e-5)
    assert batch.lower(near).compile().as_text().count(" conditional(") == 1


@pytest.mark.parametrize("transposed", [False, True], ids=["f", "g"])
def test_one_all_reduce_and_a_flag(transposed):
    """Where a pass without a guess has two; only the branch not taken has these."""
    problem, psi, _ = posed(otts.make_mesh(4, 2), np.dtype("float32"))
    if transposed:
        problem, psi = problem.T, jnp.zeros_like(problem.a)
    surely = jax.jit(passes(problem, psi)[1])
    compiled = surely.lower(jnp.zeros_like(problem.a)).compile()
    for top_level_only, count in ((True, 2), (False, 4)):
        found = collectives(compiled, top_level_only=top_level_only)
        assert found.pop("all-reduce") == count, found
        assert not any(found.values()), found


def test_it_is_for_passes_that_take_long_and_costs_that_are_finite():
    mesh, dtype = otts.make_mesh(1, 1), np.dtype("float32")

    def many(*args):
        return posed(mesh, dtype, *args)[0].many

    assert many((4, 5)) and not many((4, 7))  # 4 x 5 tiles, and 4 x 3
    assert not many(TILE, otts.costs.Euclidean())
    on_eight, _, _ = posed(otts.make_mesh(8, 1), dtype, (1, 7))  # 2 rows a device
    assert not on_eight.many and on_eight.T.many == on_eight.many


@pytest.mark.parametrize("how", [{}, {"acceleration": None}], ids=["default", "plain"])
@pytest.mark.parametrize("taus", [(1.0, 1.0), (0.9, 1.0)], ids=str)
def test_solutions_are_the_same(mesh, dtype, how, taus):
    """With so many tiles that guesses are used, and with one: and within rounding."""
    p = ref.problem(37, 50, dtype=dtype)
    x, y, a, b = p.cast(dtype)
    tau_a, tau_b = taus
    limits = dict(threshold=1e-4, max_iterations=400, tau_a=tau_a, tau_b=tau_b)

    def solved(tile):
        geom = otts.PointCloud(x, y, epsilon=0.1, batch_size=tile, mesh=mesh)
        return otts.solve(geom, a, b, **limits, **how)

    ours, whole = solved((2, 3)), solved(None)
    assert ours.problem.many and not whole.problem.many
    assert ours.converged and whole.converged
    assert abs(int(ours.n_iters) - int(whole.n_iters)) <= 2
    tol = 1e-3  # both are within the threshold
    np.testing.assert_allclose(ours.reg_ot_cost, whole.reg_ot_cost, rtol=tol)
    plan = np.asarray(ours.matrix, np.float64)
    if taus == (1.0, 1.0):
        assert np.abs(plan.sum(0) - p.b).sum() < 2e-4
        assert np.abs(plan.sum(1) - p.a).sum() < 2e-4
