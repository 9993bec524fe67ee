"""Derivatives of potentials, plans and costs, and second derivatives.

Four ways: by the linear system, through the iteration, by JAX on dense arrays, and by
finite differences.
"""

import functools

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref

import ott_shard as otts

N, M = 13, 21
NAMES = ("x", "y", "a", "b", "epsilon", "tau_a", "tau_b", "scale")
VALUES = np.random.default_rng(0).normal(size=(M, 2))
SCALE = (0.9, 1.1, 1.0)
SOLVED = {"threshold": 1e-12, "max_iterations": 3000}
UNROLLED = {
    "implicit_diff": None,
    "threshold": 1e-30,
    "max_iterations": 300,
    "min_iterations": 300,
}


def cost_fn(name, scale):
    if name == "Custom":
        return jax.tree_util.Partial(dense.weighted, scale)
    return getattr(otts.costs, name)()


def dense_cost(name, scale, x, y):
    if name == "Custom":
        over_cols = jax.vmap(dense.weighted, (None, None, 0))
        return jax.vmap(over_cols, (None, 0, None))(scale, x, y)
    return dense.COSTS[name](x, y)


def solved(name, mesh, x, y, a, b, epsilon, tau_a, tau_b, scale, **options):
    geom = otts.PointCloud(
        x,
        y,
        cost_fn=cost_fn(name, scale),
        epsilon=epsilon,
        mesh=mesh,
        batch_size=(4, 7),
    )
    return otts.solve(geom, a, b, tau_a=tau_a, tau_b=tau_b, **options)


def ours(name, mesh, *arguments, **options):
    """A number made of potentials, the plan times a matrix, and <C, P>."""
    x, y, a, b, epsilon, *others = arguments
    # A schedule has no part in the derivative at its end.
    epsilon = otts.Epsilon(epsilon, init=2 * epsilon, decay=0.7)
    out = solved(name, mesh, x, y, a, b, epsilon, *others, **options)
    image = out.apply(VALUES.astype(x.dtype), axis=1)
    return dense.quantity(out.phi[:N], out.psi[:M], image, out.primal_cost)


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.value_and_grad, argnums=range(1, 9))
def dense_quantity(name, x, y, a, b, epsilon, tau_a, tau_b, scale):
    out = dense.sinkhorn(
        dense_cost(name, scale, x, y), a, b, epsilon, (tau_a, tau_b), 1000
    )
    image, cost = out.plan @ VALUES, jnp.sum(out.plan * out.cost)
    return dense.quantity(out.phi, out.psi, image, cost)


def problems(dtype):
    """Zero weights; uniform weights; unbalanced, of unequal mass; semi-unbalanced."""
    p = ref.problem(N, M, dtype=np.float32)
    uniform = np.full(N, 1 / N), np.full(M, 1 / M)
    for (a, b), *taus in (
        ((p.a, p.b), 1.0, 1.0),
        (uniform, 1.0, 1.0),
        ((p.a, 1.3 * p.b), 0.8, 0.6),
        ((p.a, p.b), 1.0, 0.7),
    ):
        numbers = (p.x, p.y, a, b, 0.3, *taus, SCALE)
        yield taus == [1.0, 1.0], [jnp.asarray(z, dtype) for z in numbers]


def compare(balanced, got, want, tol):
    for name, mine, other in zip(NAMES, got, want, strict=True):
        if balanced and name.startswith("tau"):
            continue  # at 1 the constant of the potentials is in it
        if balanced and name in "ab":
            mine, other = (z - np.mean(z) for z in (mine, other))
        if np.any(other):
            ref.assert_close(mine, other, tol, f"d/d{name}")
        else:
            assert not np.any(mine)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def wide(*values):
    return pytest.param(*values, marks=pytest.mark.wide)


FLOAT, DOUBLE = np.float32, np.float64
PLACES = [
    ("SqEuclidean", (4, 2), DOUBLE),
    slow("Euclidean", (8, 1), DOUBLE),
    wide("Custom", (1, 1), DOUBLE),
    slow("Cosine", (1, 8), FLOAT),
    slow("SqEuclidean", (2, 4), FLOAT),
    slow("SqEuclidean", (1, 1), DOUBLE),
    slow("SqEuclidean", (8, 1), FLOAT),
    slow("Euclidean", (4, 2), DOUBLE),
    slow("Cosine", (4, 2), DOUBLE),
    slow("Cosine", (1, 1), DOUBLE),
    slow("Custom", (4, 2), DOUBLE),
    slow("Custom", (8, 1), DOUBLE),  # float32 ends before cubes have converged
]


@pytest.mark.parametrize(("name", "shape", "dtype"), PLACES)
def test_implicit_is_dense_autodiff(name, shape, dtype):
    with jax.enable_x64(True):
        mesh, options = otts.make_mesh(*shape), SOLVED
        if dtype == FLOAT:
            options = {"threshold": 1e-5, "implicit_diff": otts.ImplicitDiff(1e-6)}
        fn = functools.partial(ours, name, mesh, **options)
        mine = jax.jit(jax.value_and_grad(fn, range(8)))
        for balanced, arguments in problems(dtype):
            value, got = mine(*arguments)
            cast = [jnp.asarray(z, DOUBLE) for z in arguments]
            want_value, want = dense_quantity(name, *cast)
            tol = 2e-3 if dtype == FLOAT else 1e-9
            if name == "Custom":
                tol = max(tol, 1e-6)  # cubes converge slowly
            np.testing.assert_allclose(value, want_value, rtol=tol)
            compare(balanced, got, want, tol)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        slow("SqEuclidean", (4, 2)),
        slow("SqEuclidean", (1, 1)),
        slow("Euclidean", (8, 1)),
        slow("Cosine", (4, 2)),
        slow("Custom", (1, 1)),
    ],
)
def test_unrolled_is_dense_autodiff(name, shape):
    with jax.enable_x64(True):
        fn = functools.partial(ours, name, otts.make_mesh(*shape), **UNROLLED)
        mine = jax.jit(jax.grad(fn, range(8)))
        for balanced, arguments in problems(DOUBLE):
            compare(
                balanced, mine(*arguments), dense_quantity(name, *arguments)[1], 1e-9
            )


def test_unrolled_is_exact_before_convergence(iterations=7):
    """What 7 iterations computed, the value too, is what is differentiated."""
    with jax.enable_x64(True):
        x, y, a, b, epsilon, *rest = next(problems(DOUBLE))[1]
        options = UNROLLED | {
            "max_iterations": iterations,
            "min_iterations": iterations,
            "inner_iterations": 3,
        }

        def mine(*arguments):
            out = solved(
                "SqEuclidean", otts.make_mesh(4, 2), *arguments, *rest, **options
            )
            return out.reg_ot_cost + jnp.sin(out.phi[:N]).sum()

        def want(x, y, a, b, epsilon):
            cost = dense.sqeuclidean(x, y)
            out = dense.sinkhorn(cost, a, b, epsilon, iterations=iterations)
            return out.value + jnp.sin(out.phi).sum()

        arguments = x, y, a, b, epsilon
        got = jax.jit(jax.value_and_grad(mine, range(5)))(*arguments)
        for one, other in zip(
            jax.tree.leaves(got),
            jax.tree.leaves(jax.value_and_grad(want, range(5))(*arguments)),
            strict=True,
        ):
            ref.assert_close(one, other, 1e-10)


@pytest.mark.parametrize(
    "name", [wide("SqEuclidean"), slow("Euclidean"), slow("Custom")]
)
def test_finite_differences_and_forward_mode(name):
    with jax.enable_x64(True):
        fn = functools.partial(ours, name, otts.make_mesh(4, 2), **SOLVED)
        forward = jax.jit(lambda z, t: jax.jvp(fn, z, t)[1])
        run, rng = jax.jit(fn), np.random.default_rng(3)
        for balanced, z in problems(DOUBLE):
            t = [jnp.asarray(rng.normal(size=np.shape(v))) for v in z]
            for k in (2, 3):
                t[k] = jnp.where(z[k] > 0, t[k], 0)
                t[k] -= z[k] * t[k].sum() / z[k].sum()
            if balanced:
                t[5] = t[6] = jnp.zeros(())
            t[5] = jnp.where(z[5] < 1, t[5], 0)  # tau is at most 1
            ends = [
                run(*(v + h * w for v, w in zip(z, t, strict=True)))
                for h in (1e-5, -1e-5)
            ]
            difference = (ends[0] - ends[1]) / 2e-5
            np.testing.assert_allclose(forward(z, t), difference, rtol=1e-6)


@pytest.mark.slow
def test_unrolled_divergence_is_the_implicit_one():
    """Its symmetric terms too; one program for every epsilon."""
    with jax.enable_x64(True):
        mesh = otts.make_mesh(4, 2)
        x, y, a, b, *_ = next(problems(DOUBLE))[1]

        def loss(x, y, epsilon, options):
            options = options | {"epsilon": epsilon, "mesh": mesh}
            value, out = otts.sinkhorn_divergence(x, y, a, b, **options)
            between, own, _ = out.outputs
            phi = own.phi[:N] - own.phi[0]
            return value + jnp.sin(phi).sum() + between.primal_cost

        def derivative(options):
            return jax.jit(jax.grad(lambda *z: loss(*z, options), (0, 1, 2)))

        implicit, unrolled = derivative(SOLVED), derivative(UNROLLED)
        for epsilon in (0.5, 0.4):
            for one, other in zip(
                implicit(x, y, epsilon), unrolled(x, y, epsilon), strict=True
            ):
                ref.assert_close(one, other, 1e-8)
        assert implicit._cache_size() == unrolled._cache_size() == 1


# ------------------------------------------------------------------- second order


def directions(n, m):
    rng = np.random.default_rng(2)
    return jnp.asarray(rng.normal(size=(n, 3))), jnp.asarray(rng.normal(size=(m, 3)))


ORDERS = {
    "forward over reverse": lambda f, z, t: jax.jvp(jax.grad(f, (0, 1)), z, t)[1],
    "reverse over reverse": lambda f, z, t: jax.grad(
        lambda z: sum(map(jnp.vdot, jax.grad(f, (0, 1))(*z), t))
    )(z),
    "reverse over forward": lambda f, z, t: jax.grad(lambda z: jax.jvp(f, z, t)[1])(z),
}


@pytest.mark.parametrize(
    ("what", "order", "shape"),
    [
        ("value", "forward over reverse", (4, 2)),
        slow("divergence", "forward over reverse", (1, 1)),
        slow("value", "reverse over reverse", (4, 2)),
        slow("value", "reverse over forward", (4, 2)),
        slow("value", "forward over reverse", (8, 1)),
        slow("divergence", "reverse over reverse", (4, 2)),
    ],
)
def test_hessian_times_vector_is_the_dense_one(what, order, shape):
    """At n = 40, for the Hessian in both clouds, of 240 x 240."""
    n, m = 40, 40
    with jax.enable_x64(True):
        p = ref.problem(n, m, zeros=False, dtype=DOUBLE)
        x, y, a, b = p.cast(DOUBLE)
        mesh, t = otts.make_mesh(*shape), directions(n, m)

        def mine(x, y):
            common = {"epsilon": 0.3, "mesh": mesh, "batch_size": 16}
            if what == "divergence":
                return otts.sinkhorn_divergence(x, y, a, b, **common, **SOLVED)[0]
            geom = otts.PointCloud(x, y, **common)
            return otts.solve(geom, a, b, **SOLVED).reg_ot_cost

        def want(x, y):
            if what == "divergence":
                return dense.divergence(x, y, a, b, 0.3)
            return dense.sinkhorn(dense.sqeuclidean(x, y), a, b, 0.3).value

        got = jax.jit(lambda z, t: ORDERS[order](mine, z, t))((x, y), t)
        hessian = jax.jit(jax.hessian(want, (0, 1)))(x, y)
        for k in range(2):
            product = sum(jnp.tensordot(hessian[k][j], t[j], 2) for j in range(2))
            ref.assert_close(got[k], product, 1e-8)


@pytest.mark.wide
def test_second_derivatives_in_all_arguments_are_symmetric():
    """u . H v = v . H u, over points, weights (zeros among them), epsilon and taus."""
    with jax.enable_x64(True):
        mesh, rng = otts.make_mesh(1, 1), np.random.default_rng(4)
        _, (*arguments, scale) = list(problems(DOUBLE))[2]

        def value(*z):
            return solved("SqEuclidean", mesh, *z, scale, **SOLVED).reg_ot_cost

        @jax.jit
        def product(t):
            gradient = jax.grad(value, range(7))
            return jax.jvp(gradient, arguments, t)[1]

        u, v = (
            [jnp.asarray(rng.normal(size=np.shape(z))) for z in arguments]
            for _ in range(2)
        )
        both = [
            sum(map(jnp.vdot, one, product(other))) for one, other in ((u, v), (v, u))
        ]
        np.testing.assert_allclose(both[0], both[1], rtol=1e-9)


# ------------------------------------------------------------------------ weights


def test_gradient_in_weights_is_the_potential(mesh, dtype):
    """phi = f - eps log a for reg_ot_cost, and f + eps for ent_reg_cost."""
    p = ref.problem(N, M, dtype=dtype)
    x, y, a, b = p.cast(dtype)

    @jax.jit
    def both(a, b):
        def costs(a, b):
            geom = otts.PointCloud(x, y, epsilon=0.3, mesh=mesh)
            # A few iterations and the many that are needed: rows are exact in both.
            out = otts.solve(geom, a, b, threshold=1e-5)
            return (out.reg_ot_cost, out.ent_reg_cost), out

        return jax.jacrev(costs, has_aux=True)(a, b)

    (regularised, entropic), out = both(a, b)
    tol = 1e-5 if dtype == FLOAT else 1e-9
    assert np.all(np.isfinite(regularised)) and np.all(np.isfinite(entropic))
    ref.assert_close(regularised, out.phi[:N], tol)
    support = p.a > 0
    ref.assert_close(entropic[support], out.f[support] + dtype.type(0.3), tol)
