"""The debiased divergence: against the oracle, at equal clouds, and where it began."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref

import ott_shard as otts

COSTS = {"SqEuclidean": otts.costs.SqEuclidean(), "Euclidean": otts.costs.Euclidean()}
EPSILON = 0.3
FIXED = {"threshold": 1e-30, "max_iterations": 25, "min_iterations": 25}
FIXED["acceleration"] = None  # as the oracle iterates


def divergence(x, y, a=None, b=None, epsilon=EPSILON, *, name="SqEuclidean", **options):
    return otts.sinkhorn_divergence(
        x, y, a, b, cost_fn=COSTS[name], epsilon=epsilon, **options
    )


# -------------------------------------------------------------------------- oracle


def test_matches_oracle(mesh, dtype):
    """Value, gradients and all three terms, on sizes that no mesh divides."""
    name = {"float32": "SqEuclidean", "float64": "Euclidean"}[np.dtype(dtype).name]
    p = ref.problem(13, 21, dtype=dtype)

    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def both(x, y, a, b, epsilon):
        return divergence(x, y, a, b, epsilon, name=name, mesh=mesh, **FIXED)

    epsilon = np.dtype(dtype).type(EPSILON)
    (value, out), (grad_x, grad_y) = jax.jit(both)(*p.cast(dtype), epsilon)
    want = ref.divergence(name, p, float(epsilon), iterations=(25, 25, 25))
    tol = {"float32": 1e-5, "float64": 1e-11}[np.dtype(dtype).name]
    ref.assert_close(value, want.value, tol, "value")
    assert out.divergence == value
    for term, mine in zip(("xy", "xx", "yy"), out.outputs, strict=True):
        other = getattr(want, term)
        ref.assert_close(mine.reg_ot_cost, other.reg_ot_cost, tol, term)
        ref.assert_close(mine.f, other.f, tol, f"f of {term}")
        ref.assert_close(mine.g, other.g, tol, f"g of {term}")
    ref.assert_close(grad_x, want.grad_x(name, p.x, p.y), tol, "d/dx")
    ref.assert_close(grad_y, want.grad_y(name, p.x, p.y), tol, "d/dy")
    assert tuple(int(k) for k in out.n_iters) == (25, 25, 25)
    assert np.all(np.asarray(grad_x)[p.a == 0] == 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", COSTS)
def test_finite_differences(name):
    with jax.enable_x64(True):
        p = ref.problem(13, 21, dtype=np.float64)
        mesh = otts.make_mesh(4, 2)

        def fn(x, y, a, b, epsilon):
            return divergence(
                x, y, a, b, epsilon, name=name, mesh=mesh, threshold=1e-13
            )[0]

        arguments = (*p.cast(np.float64), jnp.float64(EPSILON))
        rng = np.random.default_rng(1)
        t = [rng.normal(size=np.shape(z)) for z in arguments]
        for k, weight in ((2, p.a), (3, p.b)):
            t[k] = np.where(weight > 0, t[k] - t[k][weight > 0].mean(), 0)
        gradient = jax.jit(jax.grad(fn, argnums=range(5)))(*arguments)
        run, step = jax.jit(fn), 1e-5
        for k in range(5):
            ends = [
                run(*arguments[:k], arguments[k] + s * step * t[k], *arguments[k + 1 :])
                for s in (1, -1)
            ]
            want = (ends[0] - ends[1]) / (2 * step)
            np.testing.assert_allclose(
                jnp.vdot(gradient[k], t[k]), want, rtol=1e-5, atol=1e-9
            )


@pytest.mark.wide
def test_unbalanced():
    """With masses of 1 and 1.5 the term in their difference counts."""
    taus = {"tau_a": 0.8, "tau_b": 0.6}
    with jax.enable_x64(True):
        p = ref.problem(13, 21, dtype=np.float64)
        p = ref.Problem(p.x, p.y, p.a, 1.5 * p.b)
        mesh = otts.make_mesh(4, 2)
        value, out = divergence(*p.cast(np.float64), mesh=mesh, threshold=1e-13, **taus)
        want = ref.divergence(
            "SqEuclidean", p, EPSILON, iterations=(300, 300, 300), **taus
        )
        assert bool(out.converged)
        np.testing.assert_allclose(value, want.value, rtol=1e-10)
        assert value > 0


@pytest.mark.slow
def test_shared_default_epsilon():
    p = ref.problem(13, 21)
    x, y, a, b = p.cast(np.float32)
    mesh = otts.make_mesh(4, 2)
    _, std, _ = ref.statistics(ref.sqeuclidean(p.x, p.y), p.a, p.b)
    _, out = divergence(x, y, a, b, None, mesh=mesh)
    np.testing.assert_allclose(out.epsilon, 0.05 * std, rtol=1e-5)
    for term in out.outputs:
        assert term.epsilon == out.epsilon


@pytest.mark.slow
def test_scale_cost_and_batch_size():
    p = ref.problem(13, 21)
    arguments = p.cast(np.float32)
    mesh = otts.make_mesh(4, 2)
    plain, _ = divergence(*arguments, mesh=mesh, **FIXED)
    tiled, _ = divergence(*arguments, mesh=mesh, batch_size=(2, 3), **FIXED)
    scaled, _ = divergence(*arguments, EPSILON / 4, mesh=mesh, scale_cost=4.0, **FIXED)
    np.testing.assert_allclose(tiled, plain, rtol=1e-5)
    np.testing.assert_allclose(4 * scaled, plain, rtol=1e-5)


# -------------------------------------------------------------------- equal clouds


@pytest.mark.wide
@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize(
    "shape", [pytest.param((1, 1), marks=pytest.mark.slow), (4, 2)]
)
def test_zero_between_equal_clouds(shape, name):
    p = ref.problem(21, 21)
    x, _, a, _ = p.cast(np.float32)

    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def both(x, y):
        mesh = otts.make_mesh(*shape)
        return divergence(x, y, a, a, name=name, mesh=mesh, threshold=1e-5)

    (value, out), gradients = jax.jit(both)(x, x)
    assert bool(out.converged)
    np.testing.assert_allclose(value, 0, atol=2e-6)
    for gradient in gradients:
        assert bool(jnp.all(jnp.isfinite(gradient)))
        np.testing.assert_allclose(gradient, 0, atol=2e-6)


@pytest.mark.slow
def test_symmetric_in_its_arguments_and_positive():
    x, y, a, b = ref.problem(13, 21).cast(np.float32)
    mesh = otts.make_mesh(4, 2)
    there, _ = divergence(x, y, a, b, mesh=mesh, threshold=1e-5)
    back, _ = divergence(y, x, b, a, mesh=mesh, threshold=1e-5)
    np.testing.assert_allclose(back, there, rtol=1e-4)
    assert there > 0


def test_translation_is_what_is_left():
    """For SqEuclidean a shifted copy is exactly |shift|^2 away, whatever epsilon."""
    with jax.enable_x64(True):
        x, _, a, _ = ref.problem(21, 21, dtype=np.float64).cast(np.float64)
        shift = jnp.asarray([1.0, -2.0, 0.5])
        for epsilon in (0.3, 10.0):
            value, out = divergence(
                x, x + shift, a, a, epsilon, mesh=otts.make_mesh(4, 2), threshold=1e-12
            )
            assert bool(out.converged)
            np.testing.assert_allclose(value, 5.25, rtol=1e-9)


# ------------------------------------------------------------------------- the rest


@pytest.mark.wide
def test_status_is_the_worst_of_three():
    x, y, a, b = ref.problem(13, 21).cast(np.float32)
    mesh = otts.make_mesh(4, 2)
    _, out = divergence(x, y, a, b, 0.01, mesh=mesh, max_iterations=20)
    assert out.outputs[0].status is otts.Status.MAX_ITERATIONS
    assert out.status is otts.Status.MAX_ITERATIONS
    assert not bool(out.converged)
    with pytest.raises(RuntimeError, match="max_iterations"):
        out.raise_if_failed()
    _, out = divergence(x, y, a, b, mesh=mesh)
    assert out.status is otts.Status.CONVERGED and bool(out.converged)
    assert len(out.errors) == 3 and out.raise_if_failed() is None


@pytest.mark.wide
def test_progress_names_the_term():
    x, y, a, b = ref.problem(13, 21).cast(np.float32)
    mesh, seen = otts.make_mesh(4, 2), []
    quiet, _ = divergence(x, y, a, b, mesh=mesh)
    loud, out = divergence(
        x, y, a, b, mesh=mesh, progress=lambda *report: seen.append(report)
    )
    assert loud == quiet
    assert list(dict.fromkeys(term for term, *_ in seen)) == ["xy", "xx", "yy"]
    assert [k for term, k, *_ in seen if term == "xy"][-1] == int(out.n_iters[0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, y: divergence(x, y[:, :2]), "3 and 2"),
        (lambda x, y: divergence(x, y * np.nan), r"\by\b"),
        (lambda x, y: divergence(x, y, np.ones(13), np.ones(21)), "a and b.*13 and 21"),
        (lambda x, y: divergence(x, y, None, -np.ones(21)), r"\bb\b.*-1"),
        (lambda x, y: divergence(x, y, epsilon=0.0), "epsilon.*0"),
        (lambda x, y: divergence(x, y, tau_a=0.0), "tau_a.*0"),
        (lambda x, y: divergence(x, y, max_iterations=0), "max_iterations.*0"),
    ],
)
def test_bad_arguments(call, message):
    p = ref.problem(13, 21)
    with pytest.raises(ValueError, match=message):
        call(p.x, p.y)


# ------------------------------------------------------- the example that began it


def both_of_discs(x, y, epsilon, mesh, **options):
    """Divergence and its gradients as one compiled call."""

    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def both(x, y, epsilon):
        return otts.sinkhorn_divergence(x, y, epsilon=epsilon, mesh=mesh, **options)

    return jax.jit(both)(x, y, epsilon)


@pytest.mark.wide
@pytest.mark.parametrize(
    "shape", [pytest.param((1, 1), marks=pytest.mark.slow), (4, 2)]
)
def test_two_discs_small(shape):
    """n = 200 in float32 against the float64 oracle at the same iterations."""
    x, y = (np.asarray(z) for z in ref.discs(200))
    uniform = np.full(200, 1 / 200)
    p = ref.Problem(x.astype(np.float64), y.astype(np.float64), uniform, uniform)
    np.testing.assert_array_equal(p.y, 2 * p.x)
    epsilon = np.float32(0.05 * ref.sqeuclidean(p.x, p.y).mean())
    mesh = otts.make_mesh(*shape)
    both = both_of_discs(x, y, epsilon, mesh, acceleration=None)
    (value, out), (grad_x, grad_y) = both
    assert bool(out.converged)
    iterations = tuple(int(k) for k in out.n_iters)
    want = ref.divergence("SqEuclidean", p, float(epsilon), iterations=iterations)
    np.testing.assert_allclose(value, want.value, rtol=1e-5)
    ref.assert_close(grad_x, want.grad_x("SqEuclidean", p.x, p.y), 1e-5)
    ref.assert_close(grad_y, want.grad_y("SqEuclidean", p.x, p.y), 1e-5)


@pytest.mark.slow
def test_two_discs_at_full_size():
    """n = 50,000 as in the thread: 12.4717, on 1 device and on 8, and its gradient."""
    x, y = ref.discs(50_000)
    found = {}
    for shape in ((1, 1), (4, 2)):
        mesh = otts.make_mesh(*shape)
        epsilon = 0.05 * otts.PointCloud(x, y, mesh=mesh).mean_cost
        (value, out), gradients = both_of_discs(x, y, epsilon, mesh)
        assert bool(out.converged)
        np.testing.assert_allclose(value, 12.4717, atol=5e-4)
        for gradient in gradients:
            assert bool(jnp.all(jnp.isfinite(gradient)))
        found[shape] = (float(value), *map(np.asarray, gradients))
    for one, eight in zip(found[1, 1], found[4, 2], strict=True):
        ref.assert_close(eight, one, 1e-4)
