"""Where the iteration starts: earlier solutions, potentials, guesses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref

import ott_shard as otts
from ott_shard import initializers


def clouds(n, m, seed=0, d=2):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)) @ np.diag([2.0, 0.5])
    y = rng.normal(size=(m, d)) @ np.asarray([[1.0, 0.4], [-0.4, 0.7]]) + 1
    return x.astype(np.float32), y.astype(np.float32)


def solve(x, y, init=None, epsilon=0.1, mesh=None, **options):
    mesh = mesh or otts.make_mesh(4, 2)
    geom = otts.PointCloud(x, y, epsilon=epsilon, mesh=mesh)
    return otts.solve(geom, init=init, inner_iterations=1, **options)


STARTS = {
    "potentials": lambda out: (out.f, out.g),
    "output": lambda out: out,
    "functions": lambda out: out.to_dual_potentials(),
    "subsample": lambda out: initializers.Subsample(100),
    "gaussian": lambda out: initializers.Gaussian(),
}


@pytest.mark.parametrize("name", STARTS)
def test_fewer_iterations_to_the_same_solution(name):
    x, y = clouds(301, 200)
    cold = solve(x, y)
    warm = solve(x, y, init=STARTS[name](cold))
    assert cold.converged and warm.converged
    exact = name in ("potentials", "output", "functions")
    assert warm.n_iters <= (1 if exact else 0.75 * cold.n_iters)
    np.testing.assert_allclose(warm.reg_ot_cost, cold.reg_ot_cost, rtol=1e-3)


def test_a_start_is_exact(mesh, dtype):
    """One iteration from f is the next one; with weights of zero, and other taus."""
    p, tol = ref.problem(13, 21, dtype=dtype), 1e-5 if dtype == np.float32 else 1e-12
    x, y, a, b = p.cast(dtype)
    geom = otts.PointCloud(x, y, epsilon=0.3, mesh=mesh, batch_size=(4, 7))
    taus = dict(tau_a=0.8, tau_b=0.9, acceleration=None)
    three = otts.solve(geom, a, b, max_iterations=3, **taus)
    two = otts.solve(geom, a, b, max_iterations=2, **taus)
    for init in ((two.f, two.g), two):
        last = otts.solve(geom, a, b, max_iterations=1, init=init, **taus)
        ref.assert_close(last.f, three.f, tol)
        ref.assert_close(last.g, three.g, tol)


def test_the_next_mini_batch():
    """Other points, more of them, another scale, unit and epsilon: f(x) is theirs."""
    x, y = clouds(300, 300)
    first = otts.solve(
        otts.PointCloud(x, y, epsilon=0.2, scale_cost=2.0, mesh=otts.make_mesh(4, 2))
    )
    others = clouds(402, 351, seed=1)
    options = dict(threshold=1e-2, acceleration=None)
    cold, warm = (solve(*others, init=init, **options) for init in (None, first))
    assert warm.converged and warm.n_iters <= 0.75 * cold.n_iters
    # Units: with no iteration but one, g is the c-transform of what it started from.
    new = otts.PointCloud(*others, epsilon=0.1, mesh=otts.make_mesh(4, 2))
    f = 2 * np.asarray(first.to_dual_potentials().f(others[0])) + 0.1 * np.log(1 / 402)
    by_hand = otts.solve(new, init=(f, np.zeros(351)), max_iterations=1)
    at_once = otts.solve(new, init=first, max_iterations=1)
    ref.assert_close(at_once.g, by_hand.g, 1e-5)


def test_inside_jit_and_on_another_mesh():
    x, y = clouds(60, 50)
    first = solve(x, y, mesh=otts.make_mesh(2, 2))
    warm = solve(x, y, init=first, mesh=otts.make_mesh(1, 8))
    assert warm.n_iters == 1

    @jax.jit
    def step(x, before):
        geom = otts.PointCloud(x, y, epsilon=0.1, mesh=otts.make_mesh(2, 2))
        return otts.solve(geom, init=before, inner_iterations=1)

    assert step(x, first).n_iters == 1


@pytest.mark.wide
def test_derivatives_do_not_see_the_start():
    x, y = clouds(40, 30)
    first = solve(x, y, threshold=1e-5)

    def value(x, init):
        out = solve(x, y, init=init, threshold=1e-5, max_iterations=500)
        return out.reg_ot_cost + out.f[0]

    cold, warm = (jax.grad(value)(x, init) for init in (None, first))
    ref.assert_close(warm, cold, 1e-3)
    started = jax.grad(lambda f: value(x, (f, first.g)))(first.f)
    np.testing.assert_array_equal(started, 0)


def test_gaussian_is_the_closed_form():
    """Of Gaussian clouds, up to sampling: at their points it is the potential."""
    x, y = clouds(3000, 2500)
    geom = otts.PointCloud(x, y, epsilon=1.0, scale_cost=4.0, mesh=otts.make_mesh(2, 4))
    out = otts.solve(geom, threshold=1e-4)
    data = geom.resolve(*(geom.weights(None, k) for k in (0, 1))), *out_weights(out)
    phi = np.asarray(initializers.Gaussian()(data))[:3000]
    want = np.asarray(out.phi)[:3000]
    apart = phi - phi.mean() - (want - want.mean())
    assert np.std(apart) < 0.05 * np.std(want)


def out_weights(out):
    p = out.problem
    return p.a, p.b, p.tau_a, p.tau_b


def test_a_start_from_what_failed_or_is_far():
    """New points with no allowed partner there, and a solution that is NaN."""

    def cost(x, y):
        same = jnp.round(x[0]) == jnp.round(y[0])
        return jnp.where(same, jnp.sum((x - y) ** 2), jnp.inf)

    def solve(kind, init=None):
        x = np.stack([np.full(8, kind), np.linspace(0, 1, 8)], 1).astype(np.float32)
        options = dict(cost_fn=cost, epsilon=0.1, mesh=otts.make_mesh(2, 2))
        return otts.solve(otts.PointCloud(x, x[:, ::1] + 0.1, **options), init=init)

    first = solve(1.0)
    assert solve(2.0, init=first).status is otts.Status.CONVERGED
    bad = otts.DualPotentials(first.problem, first.phi * np.nan, first.psi * np.nan)
    assert solve(1.0, init=bad).status is otts.Status.CONVERGED


def test_a_snapshot_of_another_dtype():
    x, y = clouds(13, 9)
    kept = []
    solve(x, y, watch=lambda term, now: kept.append(jax.device_get(now)))
    wide = jax.tree.map(lambda z: np.asarray(z, z.dtype.str.replace("4", "8")), kept[0])
    assert wide.phi.dtype == np.float64
    again = solve(x, y, init=wide._replace(iteration=kept[0].iteration))
    assert again.f.dtype == np.float32 and again.converged


def test_another_mesh_inside_jit_is_said():
    x, y = clouds(13, 9)
    first = solve(x, y, mesh=otts.make_mesh(2, 1))
    with pytest.raises(ValueError, match="init must be of the same mesh inside jit"):
        jax.jit(lambda o: solve(x, y, init=o, mesh=otts.make_mesh(1, 2)).f)(first)


@pytest.mark.slow
def test_divergence():
    """Each of its problems starts from its own."""
    x, y = clouds(60, 50)
    options = dict(epsilon=0.3, mesh=otts.make_mesh(4, 2), inner_iterations=1)
    value, out = otts.sinkhorn_divergence(x, y, **options)
    again, warm = otts.sinkhorn_divergence(x, y, init=out, **options)
    np.testing.assert_allclose(again, value, atol=2e-3)
    assert max(warm.n_iters) <= 2 < min(out.n_iters)
    moved, _ = otts.sinkhorn_divergence(x + 1, y, init=out, **options)
    cold, _ = otts.sinkhorn_divergence(x + 1, y, **options)
    np.testing.assert_allclose(moved, cold, rtol=1e-2)


@pytest.mark.parametrize(
    ("init", "error", "words"),
    [
        ("gaussian", TypeError, r"init must be \(f, g\), a SinkhornOutput"),
        (np.zeros(3), TypeError, r"init must be \(f, g\)"),
        ((np.zeros(4), np.zeros(4)), ValueError, r"init\[0\] must have shape \(3,\)"),
        ((np.zeros(3), np.zeros(3)), ValueError, r"init\[1\] must have shape \(4,\)"),
        (
            (np.full(3, np.nan), np.zeros(4)),
            ValueError,
            r"init\[0\] must be finite where the weight is positive",
        ),
        (initializers.Gaussian(), ValueError, r"init=Gaussian\(\) must be for SqEucl"),
    ],
)
def test_bad_starts(init, error, words):
    x, cost = np.eye(3, dtype=np.float32), otts.costs.Euclidean()
    geom = otts.PointCloud(x, np.ones((4, 3), np.float32), cost_fn=cost, epsilon=1.0)
    with pytest.raises(error, match=words):
        otts.solve(geom, init=init)


def test_more_bad_starts():
    x, y = clouds(5, 4)
    first = solve(x, y)
    with pytest.raises(ValueError, match="init must be of points in 3 dimensions"):
        solve(np.ones((5, 3), np.float32), np.ones((4, 3), np.float32), init=first)
    _, out = otts.sinkhorn_divergence(x, y, epsilon=1.0, static_b=True)
    with pytest.raises(ValueError, match="init must hold a solution of"):
        otts.sinkhorn_divergence(x, y, epsilon=1.0, init=out)
    with pytest.raises(TypeError, match="init must be a SinkhornDivergenceOutput"):
        otts.sinkhorn_divergence(x, y, epsilon=1.0, init=first)
    for options, word in ((dict(size=0), "size"), (dict(size=3, seed=-1), "seed")):
        with pytest.raises(ValueError, match=f"{word} must be at least"):
            initializers.Subsample(**options)


def test_a_snapshot_goes_on(mesh, dtype):
    """From the middle, on another mesh, kept as NumPy: as if nothing had happened."""
    p, tol = ref.problem(13, 21, dtype=dtype), 1e-5 if dtype == np.float32 else 1e-12
    x, y, a, b = p.cast(dtype)
    kept = []
    options = dict(threshold=1e-4, inner_iterations=3, tau_a=0.9)

    def solve(mesh, **more):
        epsilon = otts.Epsilon(0.05, init=1.0, decay=0.8)
        geom = otts.PointCloud(x, y, epsilon=epsilon, mesh=mesh, batch_size=(4, 7))
        return otts.solve(geom, a, b, **options, **more)

    whole = solve(mesh, watch=lambda term, now: kept.append(jax.device_get(now)))
    assert len(kept) == len(np.asarray(whole.errors)[whole.errors != -1]) > 3
    again = solve(otts.make_mesh(2, 1), init=kept[1])
    assert int(again.n_iters) == int(whole.n_iters)
    assert again.status == whole.status
    for name in ("f", "g", "reg_ot_cost", "errors"):
        ref.assert_close(getattr(again, name), getattr(whole, name), 10 * tol, name)
    ended = solve(otts.make_mesh(2, 1), init=kept[-1], max_iterations=60)
    assert int(ended.n_iters) == int(whole.n_iters)


@pytest.mark.wide
def test_snapshots_of_a_divergence():
    x, y = clouds(60, 50)
    options = dict(epsilon=0.3, mesh=otts.make_mesh(4, 2), inner_iterations=2)
    kept = {}

    def stop(term, now):
        kept[term] = jax.device_get(now)
        if term == "xx":
            raise KeyboardInterrupt

    value, _ = otts.sinkhorn_divergence(x, y, **options)
    with pytest.raises(KeyboardInterrupt):
        otts.sinkhorn_divergence(x, y, watch=stop, **options)
    assert set(kept) == {"xy", "xx"}
    again, _ = otts.sinkhorn_divergence(x, y, init=kept, **options)
    np.testing.assert_allclose(again, value, rtol=1e-5)


def test_a_snapshot_of_another_problem():
    x, y = clouds(5, 4)
    kept = []
    solve(x, y, watch=lambda term, now: kept.append(now))
    with pytest.raises(ValueError, match=r"init.phi must have shape \(6,\), got"):
        solve(*clouds(6, 4), init=kept[0])
