"""Gradients of reg_ot_cost: closed forms, autodiff, finite differences, meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref
from jax.sharding import NamedSharding, PartitionSpec as P

import ott_shard as otts

COSTS = {"SqEuclidean": otts.costs.SqEuclidean(), "Euclidean": otts.costs.Euclidean()}
ARGUMENTS = ("x", "y", "a", "b", "epsilon")
EPSILON = 0.3
FIXED = {"threshold": 1e-30, "max_iterations": 25, "min_iterations": 25}
FIXED["acceleration"] = None  # as the oracle iterates
CASES = [
    (13, 21, "SqEuclidean", np.float32),
    (13, 21, "Euclidean", np.float64),
]


def value(x, y, a, b, epsilon, *, name="SqEuclidean", mesh=None, **options):
    """reg_ot_cost as a function of all that it can be differentiated in."""
    cloud = functools.partial(
        otts.PointCloud, cost_fn=COSTS[name], batch_size=(4, 7), mesh=mesh
    )
    return otts.solve(cloud(x, y, epsilon=epsilon), a, b, **options).reg_ot_cost


def finite_difference(fn, arguments, directions, step=1e-5):
    """Central difference of `fn` along `directions`."""
    ends = [
        fn(*(z + sign * step * t for z, t in zip(arguments, directions, strict=True)))
        for sign in (1, -1)
    ]
    return float(ends[0] - ends[1]) / (2 * step)


def directions_for(p, *, keep_mass):
    """Random directions: one in all arguments at once, and one in each alone."""
    rng = np.random.default_rng(5)
    full = {}
    for name in ("x", "y", "a", "b"):
        t = rng.normal(size=getattr(p, name).shape)
        if name in "ab":
            support = getattr(p, name) > 0
            t = np.where(support, t - keep_mass * t[support].mean(), 0)
        full[name] = t
    full["epsilon"] = np.asarray(1.0)
    zero = {name: np.zeros_like(t) for name, t in full.items()}
    yield "all", tuple(full.values())
    for name in ARGUMENTS:
        yield name, tuple((zero | {name: full[name]}).values())


# ------------------------------------------------------------------------ values


@pytest.mark.parametrize(("n", "m", "name", "dtype"), CASES)
def test_closed_forms_with_zero_weights(mesh, n, m, name, dtype):
    """The envelope theorem, exactly: potentials after 25 iterations held fixed.

    For SqEuclidean the gradient in x is 2 r_i x_i - 2 sum_j P_ij y_j.
    """
    p = ref.problem(n, m, dtype=dtype)
    with jax.enable_x64(dtype == np.float64):
        fn = functools.partial(value, name=name, mesh=mesh, **FIXED)
        gradient = jax.jit(jax.grad(fn, argnums=range(5)))
        got = gradient(*p.cast(dtype), dtype(EPSILON))
    eps = float(dtype(EPSILON))
    cost = ref.COSTS[name](p.x, p.y)
    want = ref.sinkhorn(cost, p.a, p.b, eps, iterations=25).gradients(name, p.x, p.y)
    if name == "SqEuclidean":
        plan = ref.sinkhorn(cost, p.a, p.b, eps, iterations=25).plan
        closed = 2 * (plan.sum(1)[:, None] * p.x - plan @ p.y)
        np.testing.assert_allclose(want["x"], closed, atol=1e-13)
    tol = {np.float32: 1e-5, np.float64: 1e-11}[dtype]
    for argument, mine in zip(ARGUMENTS, got, strict=True):
        assert mine.shape == np.shape(want[argument]) and mine.dtype == dtype
        ref.assert_close(mine, want[argument], tol, f"d/d{argument}")
    assert np.all(np.asarray(got[0])[p.a == 0] == 0)
    assert np.all(np.asarray(got[1])[p.b == 0] == 0)


@pytest.mark.wide
@pytest.mark.parametrize(
    "name", ["SqEuclidean", pytest.param("Euclidean", marks=pytest.mark.slow)]
)
def test_dense_autodiff_through_the_iterations(name):
    """At convergence the envelope is the derivative of the unrolled iteration."""
    with jax.enable_x64(True):
        p = ref.problem(13, 21, zeros=False, dtype=np.float64)
        arguments = (*p.cast(np.float64), EPSILON)
        fn = functools.partial(
            value, name=name, mesh=otts.make_mesh(4, 2), threshold=1e-14
        )
        got = jax.jit(jax.grad(fn, argnums=range(5)))(*arguments)
        dense = functools.partial(ref.dense_value, name, 300)
        want = jax.jit(jax.grad(dense, argnums=range(5)))(*arguments)
        for argument, mine, other in zip(ARGUMENTS, got, want, strict=True):
            if argument in "ab":  # up to a constant: only directions of mass 0 matter
                mine, other = ref.centred(mine), ref.centred(other)
            ref.assert_close(mine, other, 1e-10, f"d/d{argument}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "taus"),
    [
        pytest.param("SqEuclidean", (1, 1), marks=pytest.mark.slow),
        ("Euclidean", (1, 1)),
        pytest.param("SqEuclidean", (0.8, 0.6), marks=pytest.mark.slow),
    ],
)
def test_finite_differences_and_forward_mode(name, taus):
    with jax.enable_x64(True):
        p = ref.problem(13, 21, dtype=np.float64)
        arguments = (*p.cast(np.float64), jnp.float64(EPSILON))
        fn = functools.partial(
            value,
            name=name,
            mesh=otts.make_mesh(4, 2),
            threshold=1e-13,
            tau_a=taus[0],
            tau_b=taus[1],
        )
        gradient = jax.jit(jax.grad(fn, argnums=range(5)))(*arguments)
        forward = jax.jit(lambda t: jax.jvp(fn, arguments, t)[1])
        run = jax.jit(fn)
        for label, t in directions_for(p, keep_mass=taus == (1, 1)):
            t = tuple(jnp.asarray(v) for v in t)
            reverse = sum(jnp.vdot(g, v) for g, v in zip(gradient, t, strict=True))
            np.testing.assert_allclose(forward(t), reverse, rtol=1e-11, err_msg=label)
            difference = finite_difference(run, arguments, t)
            np.testing.assert_allclose(reverse, difference, rtol=1e-6, err_msg=label)


@pytest.mark.wide
def test_derivative_in_tau():
    with jax.enable_x64(True):
        *arguments, b = ref.problem(13, 21, dtype=np.float64).cast(np.float64)

        @jax.jit
        def fn(tau_a, tau_b):
            return value(
                *arguments,
                1.5 * b,
                EPSILON,
                mesh=otts.make_mesh(4, 2),
                tau_a=tau_a,
                tau_b=tau_b,
                threshold=1e-13,
            )

        # At 1 from one side, where 1 - tau is 0 / 0 in the penalty.
        h = 1e-4
        below = [fn(1.0 - k * h, 0.6) for k in range(3)]
        want = (3 * below[0] - 4 * below[1] + below[2]) / (2 * h)
        np.testing.assert_allclose(jax.grad(fn)(1.0, 0.6), want, rtol=1e-5)
        got = jax.grad(fn, argnums=(0, 1))(0.8, 0.6)
        for k, t in enumerate(((1.0, 0.0), (0.0, 1.0))):
            want = finite_difference(fn, (0.8, 0.6), t)
            np.testing.assert_allclose(got[k], want, rtol=1e-6)


@pytest.mark.slow
def test_eager_and_jitted_gradients_agree():
    arguments = (*ref.problem(13, 21).cast(np.float32), EPSILON)
    fn = functools.partial(value, mesh=otts.make_mesh(4, 2), **FIXED)
    gradient = jax.grad(fn, argnums=range(5))
    for mine, want in zip(
        gradient(*arguments), jax.jit(gradient)(*arguments), strict=True
    ):
        ref.assert_close(mine, want, 2e-6)


@pytest.mark.wide
def test_a_closed_over_cloud_and_default_weights():
    """The everyday call: a loss of x alone, eager and jitted, y a constant."""
    p = ref.problem(13, 21, zeros=False)
    x, y, _, _ = p.cast(np.float32)

    def loss(x):
        return otts.solve(otts.PointCloud(x, y, epsilon=EPSILON)).reg_ot_cost

    cost = ref.sqeuclidean(p.x, p.y)
    uniform = np.full(13, 1 / 13), np.full(21, 1 / 21)
    want = ref.sinkhorn(cost, *uniform, EPSILON, iterations=50)
    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        ref.assert_close(transform(loss)(x), want.grad_x("SqEuclidean", p.x, p.y), 1e-3)


@pytest.mark.slow
def test_statistics_are_constants_to_differentiation():
    """A default epsilon moves with the clouds; its gradient is not followed."""
    x, y, a, b = ref.problem(13, 21).cast(np.float32)
    mesh = otts.make_mesh(4, 2)

    def loss(x, epsilon):
        return value(x, y, a, b, epsilon, mesh=mesh, **FIXED)

    geom = otts.PointCloud(x, y, mesh=mesh)
    epsilon = geom.resolve(geom.weights(a, 0), geom.weights(b, 1)).epsilon
    gradient = jax.jit(jax.grad(loss))
    ref.assert_close(gradient(x, None), gradient(x, epsilon), 1e-5)


def test_scale_cost_scales_the_gradient():
    x, y, a, b = ref.problem(13, 21).cast(np.float32)
    mesh = otts.make_mesh(4, 2)

    def loss(x, scale):
        geom = otts.PointCloud(
            x, y, epsilon=EPSILON / scale, scale_cost=scale, mesh=mesh
        )
        return otts.solve(geom, a, b, **FIXED).reg_ot_cost

    gradient = jax.jit(jax.grad(loss))
    ref.assert_close(4.0 * gradient(x, 4.0), gradient(x, 1.0), 1e-5)


# --------------------------------------------------------------------- degenerate


@pytest.mark.wide
@pytest.mark.parametrize(
    ("d", "name"),
    [
        (3, "Euclidean"),
        (12, "SqEuclidean"),
        pytest.param(3, "SqEuclidean", marks=pytest.mark.slow),
        pytest.param(12, "Euclidean", marks=pytest.mark.slow),
    ],
)
def test_coincident_points(name, d):
    """Every point of y lies on one of x: finite, and as the closed form says."""
    p = ref.problem(16, 16, d, zeros=False)
    x, _, a, b = p.cast(np.float32)
    mesh = otts.make_mesh(4, 2)
    fn = functools.partial(value, name=name, mesh=mesh, **FIXED)
    got = jax.jit(jax.grad(fn, argnums=(0, 1)))(x, x, a, b, EPSILON)
    want = ref.sinkhorn(
        ref.COSTS[name](p.x, p.x), p.a, p.b, float(np.float32(EPSILON)), iterations=25
    )
    scale = np.abs(p.x).max() / 16
    for mine, other in zip(
        got, (want.grad_x(name, p.x, p.x), want.grad_y(name, p.x, p.x)), strict=True
    ):
        np.testing.assert_allclose(mine, other, atol=2e-5 * scale + 1e-6)


@pytest.mark.parametrize(
    "name", [pytest.param("SqEuclidean", marks=pytest.mark.slow), "Euclidean"]
)
def test_all_points_equal(name):
    """Five copies of one point: cost 0, gradient 0, nothing divided by nothing."""
    x = jnp.full((5, 3), 0.7)
    fn = functools.partial(value, name=name, mesh=otts.make_mesh(4, 2))
    weights = jnp.full(5, 0.2)
    both = jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))
    cost, gradient = both(x, x, weights, weights, None)
    np.testing.assert_allclose(cost, 0, atol=1e-6)
    for part in gradient:
        np.testing.assert_allclose(part, 0, atol=1e-6)


def test_one_point_each():
    x, y = jnp.asarray([[1.0, 2.0]]), jnp.asarray([[4.0, 6.0]])
    one = jnp.ones(1)
    got = jax.jit(jax.grad(value, argnums=(0, 1)))(x, y, one, one, 0.1)
    np.testing.assert_allclose(got[0], [[-6.0, -8.0]], rtol=1e-6)
    np.testing.assert_allclose(got[1], [[6.0, 8.0]], rtol=1e-6)


# ----------------------------------------------------------------------- sharding


@pytest.mark.slow
def test_eager_gradients_carry_the_sharding_of_their_inputs(mesh):
    check_sharding_of_gradients(mesh, jitted=False)


@pytest.mark.wide
def test_gradients_carry_the_sharding_of_their_inputs(mesh):
    check_sharding_of_gradients(mesh, jitted=True)


def check_sharding_of_gradients(mesh, *, jitted):
    p = ref.problem(24, 40)
    x, y, a, b = p.cast(np.float32)
    rows, cols = NamedSharding(mesh, P("rows")), NamedSharding(mesh, P("cols"))
    x, a = jax.device_put((x, a), rows)
    y, b = jax.device_put((y, b), cols)
    fn = functools.partial(value, mesh=mesh, **FIXED)
    gradient = jax.grad(fn, argnums=(0, 1, 2, 3))
    got = (jax.jit(gradient) if jitted else gradient)(x, y, a, b, EPSILON)
    for argument, mine, like in zip(ARGUMENTS, got, (x, y, a, b), strict=False):
        assert mine.sharding.is_equivalent_to(like.sharding, mine.ndim), (
            f"d/d{argument}: {mine.sharding} instead of {like.sharding}"
        )
    want = ref.sinkhorn(ref.sqeuclidean(p.x, p.y), p.a, p.b, EPSILON, iterations=25)
    ref.assert_close(got[0], want.grad_x("SqEuclidean", p.x, p.y), 1e-5)
