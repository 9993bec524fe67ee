"""solve: potentials, costs, marginals and iterations against the dense oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref

import ott_shard as otts

COSTS = {"SqEuclidean": otts.costs.SqEuclidean(), "Euclidean": otts.costs.Euclidean()}
EPSILON = 0.3
COST_FIELDS = ("reg_ot_cost", "primal_cost", "dual_cost", "ent_reg_cost")
# n, m, cost and dtypes: sizes that no mesh divides, and sizes that all divide.
CASES = [
    (13, 21, "SqEuclidean", np.float32),
    (40, 24, "Euclidean", np.float64),
]


def tolerance(dtype):
    return {"float32": 1e-5, "float64": 1e-11}[np.dtype(dtype).name]


def fixed(iterations, inner_iterations=10):
    """Options for exactly so many iterations."""
    return {
        "threshold": 1e-30,
        "max_iterations": iterations,
        "min_iterations": iterations,
        "inner_iterations": inner_iterations,
        "acceleration": None,
    }


def pose(n, m, name, dtype, mesh):
    """A problem with zero weights, its geometry and weights, its dense costs."""
    p = ref.problem(n, m, dtype=dtype)
    x, y, a, b = p.cast(dtype)
    geom = otts.PointCloud(
        x, y, cost_fn=COSTS[name], epsilon=EPSILON, batch_size=(4, 7), mesh=mesh
    )
    return p, geom, (a, b), ref.COSTS[name](p.x, p.y)


@jax.jit
def everything(geom, a, b, tau_a, tau_b, v, w):
    """All that a solution has after 25 iterations; compiled once for a geometry."""
    out = otts.solve(
        geom, a, b, tau_a=tau_a, tau_b=tau_b, **fixed(25, inner_iterations=4)
    )
    names = (*COST_FIELDS, "f", "g", "matrix", "errors", "marginal_error", "n_iters")
    return {name: getattr(out, name) for name in (*names, "transport_mass")} | {
        "columns": out.marginal(0),
        "rows": out.marginal(1),
        "P^T v": out.apply(v, 0),
        "P w": out.apply(w, 1),
    }


# -------------------------------------------------------------------- the solution


@pytest.mark.parametrize(("n", "m", "name", "dtype"), CASES)
@pytest.mark.parametrize("taus", [(1.0, 1.0), (0.8, 0.6), (1.0, 0.7)])
def test_matches_oracle(mesh, n, m, name, dtype, taus):
    tol = tolerance(dtype)
    rng = np.random.default_rng(0)
    v, w = rng.normal(size=(n, 3)).astype(dtype), rng.normal(size=m).astype(dtype)
    with jax.enable_x64(dtype == np.float64):
        p, geom, (a, b), cost = pose(n, m, name, dtype, mesh)
        got = everything(geom, a, b, *taus, v, w)
    want = ref.sinkhorn(
        cost,
        p.a,
        p.b,
        float(dtype(EPSILON)),
        iterations=25,
        tau_a=float(dtype(taus[0])),
        tau_b=float(dtype(taus[1])),
    )
    plan = want.plan
    dtypes = {value.dtype for name, value in got.items() if name != "n_iters"}
    assert dtypes == {np.dtype(dtype)}
    assert int(got["n_iters"]) == 25
    for field in ("f", "g", *COST_FIELDS):
        ref.assert_close(got[field], getattr(want, field), tol, field)
    tol *= 5  # the exponential multiplies errors of potentials by 1 / epsilon
    ref.assert_close(got["matrix"], plan, tol, "matrix")
    ref.assert_close(got["columns"], plan.sum(0), tol, "columns")
    ref.assert_close(got["rows"], plan.sum(1), tol, "rows")
    ref.assert_close(got["transport_mass"], plan.sum(), tol, "mass")
    ref.assert_close(got["P^T v"], plan.T @ v, tol, "P^T v")
    ref.assert_close(got["P w"], plan @ w, tol, "P w")
    # The history is what the iteration went through: at 4, 8, ..., 24 and 25.
    checks = [3, 7, 11, 15, 19, 23, 24]
    np.testing.assert_allclose(got["errors"], want.errors[checks], atol=tol)
    np.testing.assert_allclose(got["marginal_error"], want.errors[24], atol=tol)
    # Exactly zero, and exact marginals, not just close.
    assert np.all(np.asarray(got["matrix"])[p.a == 0] == 0)
    assert np.all(np.asarray(got["matrix"])[:, p.b == 0] == 0)
    assert np.all(np.asarray(got["rows"])[p.a == 0] == 0)
    if taus[0] == 1:
        ref.assert_close(got["rows"], p.a, tol, "row marginals are exact")


@pytest.mark.wide
def test_meshes_agree_when_converged():
    """They stop at the same iteration; one mesh has a size that divides nothing."""

    def solve(*shape):
        _, geom, weights, _ = pose(
            40, 21, "SqEuclidean", np.float32, otts.make_mesh(*shape)
        )
        return otts.solve(geom, *weights, threshold=1e-4)

    want = solve(1, 1)
    assert bool(want.converged)
    for shape in ((3, 2), (1, 7)):
        out = solve(*shape)
        assert int(out.n_iters) == int(want.n_iters)
        ref.assert_close(out.f, want.f, 1e-5)
        ref.assert_close(out.g, want.g, 1e-5)
        np.testing.assert_allclose(out.reg_ot_cost, want.reg_ot_cost, rtol=1e-5)
        np.testing.assert_allclose(out.errors, want.errors, atol=1e-5)


@pytest.mark.parametrize("taus", [(1.0, 1.0), (0.8, 0.6), (0.7, 1.0)])
def test_a_converged_solution_is_optimal(taus):
    """The duality gap closes: primal and dual objectives are one number."""
    with jax.enable_x64(True):
        mesh = otts.make_mesh(4, 2)
        p, geom, (a, b), cost = pose(13, 21, "Euclidean", np.float64, mesh)
        b = b * (1.0 if taus == (1.0, 1.0) else 1.5)  # masses may differ if tau < 1
        out = otts.solve(geom, a, b, tau_a=taus[0], tau_b=taus[1], threshold=1e-13)
        assert bool(out.converged)
        plan, b = np.asarray(out.matrix), np.asarray(b)
        primal = (plan * cost).sum() + EPSILON * ref.kl(plan, np.outer(p.a, b))
        for tau, axis, weight in ((taus[0], 1, p.a), (taus[1], 0, b)):
            if tau == 1:
                np.testing.assert_allclose(plan.sum(axis), weight, atol=1e-12)
            else:
                primal += ref.rho(EPSILON, tau) * ref.kl(plan.sum(axis), weight)
        np.testing.assert_allclose(out.reg_ot_cost, primal, rtol=1e-11)


def test_uniform_weights_are_the_default():
    p, mesh = ref.problem(13, 21), otts.make_mesh(4, 2)
    geom = otts.PointCloud(p.x, p.y, epsilon=EPSILON, mesh=mesh)
    default = otts.solve(geom)
    given = otts.solve(geom, np.full(13, 1 / 13), np.full(21, 1 / 21))
    np.testing.assert_array_equal(default.f, given.f)
    np.testing.assert_array_equal(default.reg_ot_cost, given.reg_ot_cost)


@pytest.mark.wide
@pytest.mark.parametrize(
    "size", [(1, 1), (1, 6), pytest.param((5, 1), marks=pytest.mark.slow)]
)
def test_one_point(size):
    """All mass goes to, or comes from, one point: the plan is a b^T at once."""
    mesh = otts.make_mesh(4, 2)
    p = ref.problem(*size, zeros=False)
    x, y, a, b = p.cast(jnp.float32)
    out = otts.solve(otts.PointCloud(x, y, epsilon=EPSILON, mesh=mesh), a, b)
    assert bool(out.converged)
    ref.assert_close(out.matrix, np.outer(p.a, p.b), 1e-5)
    want = p.a @ ref.sqeuclidean(p.x, p.y) @ p.b
    np.testing.assert_allclose(out.reg_ot_cost, want, rtol=1e-5)
    np.testing.assert_allclose(out.primal_cost, want, rtol=1e-5)


@pytest.mark.slow
def test_swapping_the_clouds_transposes_the_plan():
    with jax.enable_x64(True):
        mesh = otts.make_mesh(4, 2)
        _, geom, (a, b), _ = pose(13, 21, "SqEuclidean", jnp.float64, mesh)
        there = otts.solve(geom, a, b, threshold=1e-12)
        swapped = otts.PointCloud(geom.y, geom.x, epsilon=EPSILON, mesh=mesh)
        back = otts.solve(swapped, b, a, threshold=1e-12)
        ref.assert_close(back.matrix.T, there.matrix, 1e-10)
        np.testing.assert_allclose(back.reg_ot_cost, there.reg_ot_cost, rtol=1e-11)


# ------------------------------------------------------------------- zero weights


def test_a_point_of_weight_zero_is_as_if_it_were_not_there():
    p, geom, weights, _ = pose(13, 21, "Euclidean", np.float32, otts.make_mesh(4, 2))
    out = otts.solve(geom, *weights, **fixed(20))
    rows, cols = p.a > 0, p.b > 0
    assert (~rows).sum() == (~cols).sum() == 2
    x, y, a, b = p.cast(np.float32)
    small = otts.PointCloud(
        x[rows], y[cols], cost_fn=COSTS["Euclidean"], epsilon=EPSILON, mesh=geom.mesh
    )
    alone = otts.solve(small, a[rows], b[cols], **fixed(20))
    ref.assert_close(out.f[rows], alone.f, 1e-5)
    ref.assert_close(out.g[cols], alone.g, 1e-5)
    for field in COST_FIELDS:
        ref.assert_close(getattr(out, field), getattr(alone, field), 1e-5, field)


@pytest.mark.wide
def test_a_whole_device_of_zero_weights():
    """The slices of some devices hold no mass at all."""
    p = ref.problem(40, 24, zeros=False)
    x, y, _, _ = p.cast(jnp.float32)
    a = jnp.where(jnp.arange(40) < 5, 0.2, 0.0)
    b = jnp.where(jnp.arange(24) >= 20, 0.25, 0.0)
    geom = otts.PointCloud(x, y, epsilon=EPSILON, mesh=otts.make_mesh(4, 2))
    out = otts.solve(geom, a, b, **fixed(20))
    cost = ref.sqeuclidean(p.x[:5], p.y[20:])
    want = ref.sinkhorn(cost, np.full(5, 0.2), np.full(4, 0.25), EPSILON, iterations=20)
    ref.assert_close(out.f[:5], want.f, 1e-5)
    ref.assert_close(out.g[20:], want.g, 1e-5)
    np.testing.assert_allclose(out.reg_ot_cost, want.reg_ot_cost, rtol=1e-5)


@pytest.mark.wide
def test_tau_close_to_one_is_balanced():
    p, geom, weights, _ = pose(13, 21, "SqEuclidean", np.float32, otts.make_mesh(4, 2))
    near = otts.solve(geom, *weights, tau_a=0.9999, tau_b=0.9999, threshold=1e-5)
    exact = otts.solve(geom, *weights, threshold=1e-5)
    np.testing.assert_allclose(near.reg_ot_cost, exact.reg_ot_cost, rtol=1e-2)


# ---------------------------------------------------------------- plan operations


@pytest.mark.parametrize("axis", [0, 1])
def test_apply_takes_vectors_and_columns(axis):
    mesh = otts.make_mesh(4, 2)
    _, geom, weights, _ = pose(13, 21, "SqEuclidean", np.float32, mesh)
    out = otts.solve(geom, *weights)
    plan = np.asarray(out.matrix, np.float64)
    plan = plan if axis == 1 else plan.T
    for shape in ((), (1,), (3,)):
        v = np.random.default_rng(0).normal(size=(plan.shape[1], *shape))
        got = out.apply(v, axis)
        assert got.shape == (plan.shape[0], *shape)
        ref.assert_close(got, plan @ v, 1e-5)
    integers = np.arange(plan.shape[1])
    ref.assert_close(out.apply(integers, axis), plan @ integers, 1e-5)


def test_the_output_is_a_pytree():
    _, geom, weights, _ = pose(13, 21, "SqEuclidean", np.float32, otts.make_mesh(4, 2))
    out = jax.jit(otts.solve)(geom, *weights)
    assert out.status is otts.Status.CONVERGED
    np.testing.assert_allclose(out.matrix.sum(), 1, rtol=1e-5)


@pytest.mark.parametrize("mapped", ["epsilon", "a", "x"])
def test_inside_vmap(mapped):
    """A batch is a loop over its items: finished problems stop changing."""
    mesh = otts.make_mesh(4, 2)
    p = ref.problem(13, 21, zeros=False)
    x, y, a, b = p.cast(jnp.float32)
    epsilons = jnp.asarray([0.1, 0.5, 2.0])
    weights = jnp.stack([a, jnp.full(13, 1 / 13), a[::-1]])

    clouds = jnp.stack([x, 3 * x, x + 1])

    def solve(epsilon=0.3, a=a, x=x):
        out = otts.solve(otts.PointCloud(x, y, epsilon=epsilon, mesh=mesh), a, b)
        return out.n_iters, out.f, out.reg_ot_cost

    batch = {"epsilon": epsilons, "a": weights, "x": clouds}[mapped]
    many = jax.jit(jax.vmap(lambda item: solve(**{mapped: item})))(batch)
    each = [solve(**{mapped: item}) for item in batch]
    assert mapped == "a" or len({int(n_iters) for n_iters, *_ in each}) > 1
    for k, single in enumerate(each):
        assert int(many[0][k]) == int(single[0])
        for mine, want in zip(many, single, strict=True):
            ref.assert_close(mine[k], want, 1e-5)


def test_matrix_is_refused_when_large():
    x = np.zeros((5000, 1), np.float32)
    geom = otts.PointCloud(x, x, epsilon=1.0, mesh=otts.make_mesh(1, 1))
    out = otts.solve(geom, max_iterations=1)
    with pytest.raises(ValueError, match="5000 x 5000.*apply"):
        _ = out.matrix


# ----------------------------------------------------------------------- iterations


@pytest.mark.wide
@pytest.mark.parametrize(
    ("iterations", "inner"), [(1, 1), (1, 10), (7, 10), (10, 10), (25, 10), (6, 4)]
)
def test_max_iterations_is_exact(iterations, inner):
    p, geom, weights, cost = pose(
        13, 21, "SqEuclidean", np.float32, otts.make_mesh(4, 2)
    )
    out = otts.solve(
        geom,
        *weights,
        threshold=1e-30,
        max_iterations=iterations,
        inner_iterations=inner,
        acceleration=None,
    )
    want = ref.sinkhorn(cost, p.a, p.b, EPSILON, iterations=iterations)
    assert int(out.n_iters) == iterations
    ref.assert_close(out.f, want.f, 1e-5)
    assert out.errors.shape == (-(-iterations // inner),)
    assert np.all(np.asarray(out.errors) >= 0)
    np.testing.assert_allclose(out.errors[-1], want.errors[-1], atol=1e-6)


def test_stops_at_the_first_error_within_the_threshold():
    p, geom, weights, cost = pose(
        13, 21, "SqEuclidean", np.float32, otts.make_mesh(4, 2)
    )
    want = ref.sinkhorn(cost, p.a, p.b, EPSILON, iterations=60).errors
    threshold = 1e-3
    for inner in (1, 4, 10):
        out = otts.solve(
            geom,
            *weights,
            threshold=threshold,
            max_iterations=60,
            inner_iterations=inner,
            acceleration=None,
        )
        end = int(np.argmax(want <= threshold)) + 1
        assert 1 < end < 60
        assert int(out.n_iters) == end
        count = -(-end // inner)
        checks = np.append(want[inner - 1 : end - 1 : inner], want[end - 1])
        errors = np.asarray(out.errors)
        assert errors.shape == (-(-60 // inner),)
        np.testing.assert_allclose(errors[:count], checks, atol=1e-6)
        assert np.all(errors[count:] == -1)
        assert errors[count - 1] <= threshold
        assert np.all(errors[: count - 1] > threshold)
        assert bool(out.converged)


@pytest.mark.wide
@pytest.mark.parametrize(("minimum", "expected"), [(0, 1), (5, 5), (6, 6), (20, 20)])
def test_min_iterations(minimum, expected):
    _, geom, weights, _ = pose(13, 21, "SqEuclidean", np.float32, otts.make_mesh(4, 2))
    options = dict(threshold=10.0, inner_iterations=5, acceleration=None)
    out = otts.solve(geom, *weights, min_iterations=minimum, **options)
    assert int(out.n_iters) == expected
    assert bool(out.converged)


def test_numpy_integers_are_integers():
    with jax.enable_x64(True):
        _, geom, weights, _ = pose(13, 21, "SqEuclidean", np.float64, otts.make_mesh())
        out = otts.solve(geom, *weights, max_iterations=np.int64(3))
        assert int(out.n_iters) == 3


def test_new_numbers_do_not_compile_again():
    mesh = otts.make_mesh(4, 2)
    x, y, a, b = ref.problem(13, 21).cast(jnp.float32)
    traces = []

    @jax.jit
    def solve(epsilon, tau, threshold):
        traces.append(1)
        geom = otts.PointCloud(x, y, epsilon=epsilon, mesh=mesh)
        out = otts.solve(geom, a, b, tau_a=tau, tau_b=tau, threshold=threshold)
        return out.reg_ot_cost

    values = [solve(0.3, 1.0, 1e-3), solve(0.4, 0.9, 1e-3), solve(0.3, 1.0, 1e-3)]
    assert len(traces) == 1
    assert values[0] == values[2] != values[1]


@pytest.mark.wide
def test_progress_changes_no_number():
    _, geom, weights, _ = pose(13, 21, "SqEuclidean", np.float32, otts.make_mesh(4, 2))
    seen = []
    quiet = otts.solve(geom, *weights, threshold=1e-5, inner_iterations=5)
    loud = otts.solve(
        geom,
        *weights,
        threshold=1e-5,
        inner_iterations=5,
        progress=lambda *report: seen.append(report),
    )
    for mine, want in zip(jax.tree.leaves(loud), jax.tree.leaves(quiet), strict=True):
        np.testing.assert_array_equal(mine, want)
    terms, iterations, errors, paces = zip(*seen, strict=True)
    count = len(seen)
    assert set(terms) == {"xy"}
    assert list(iterations) == [5 * (k + 1) for k in range(count)]
    np.testing.assert_array_equal(errors, quiet.errors[:count])
    assert min(paces) > 0
