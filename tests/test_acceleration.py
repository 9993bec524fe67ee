"""Accelerated solutions: the same ones, in fewer iterations, whatever a step is."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref

import ott_shard as otts
from ott_shard import iteration, lbfgs

PLAIN = {"acceleration": None}
TAUS = [(1.0, 1.0), (0.8, 1.0), (0.9, 0.7)]


def clouds(n=60, m=45, d=2, dtype=np.float32):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(n, d)), 0.7 * rng.normal(size=(m, d)) + 1
    return x.astype(dtype), y.astype(dtype)


def solve(epsilon, *, x=None, y=None, mesh=None, **options):
    if x is None:
        x, y = clouds()
    mesh = mesh or otts.make_mesh(1, 1)
    return otts.solve(otts.PointCloud(x, y, epsilon=epsilon, mesh=mesh), **options)


def test_the_same_solution(mesh, dtype):
    """As the dense oracle has it, with weights of zero, balanced and not."""
    p = ref.problem(13, 21, dtype=dtype)
    x, y, a, b = p.cast(dtype)
    cost, tol = ref.sqeuclidean(p.x, p.y), 1e-3 if dtype == np.float32 else 1e-9

    @jax.jit
    def solution(taus):
        geom = otts.PointCloud(x, y, epsilon=0.05, mesh=mesh, batch_size=(4, 7))
        limits = dict(threshold=tol / 10, max_iterations=1000)
        out = otts.solve(geom, a, b, tau_a=taus[0], tau_b=taus[1], **limits)
        return out, out.matrix

    for taus in TAUS:
        out, matrix = solution(np.asarray(taus, dtype))
        how = dict(tau_a=taus[0], tau_b=taus[1], iterations=5_000)
        want = ref.sinkhorn(cost, p.a, p.b, 0.05, **how)
        assert out.converged and int(out.n_iters) < 500
        if taus == (1.0, 1.0):  # the constant is not left to chance
            np.testing.assert_allclose(a @ out.phi[:13], b @ out.psi[:21], atol=tol)
        ref.assert_close(matrix, want.plan, 10 * tol, f"plan, {taus}")
        ref.assert_close(out.reg_ot_cost, want.reg_ot_cost, tol, f"value, {taus}")
        # A point without weight has the potential that it would have with some.
        f = np.asarray(out.f, np.float64)
        cols = -0.05 * np.log(np.sum(np.exp((f[:, None] - cost) / 0.05), axis=0))
        ref.assert_close(np.asarray(out.psi)[:21] / taus[1], cols, 100 * tol, f"{taus}")


@pytest.mark.parametrize(("epsilon", "times"), [(0.03, 3), (0.003, 10)])
def test_fewer_iterations(epsilon, times):
    with jax.enable_x64(True):
        x, y = clouds(dtype=np.float64)
        options = dict(x=x, y=y, max_iterations=20_000)
        plain = solve(epsilon, **options, **PLAIN)
        fast = solve(epsilon, **options)
        assert plain.converged and fast.converged
        assert times * int(fast.n_iters) < int(plain.n_iters)


@pytest.mark.parametrize(("memory", "decay"), [(1, 0.7), (8, 1.0)])
def test_options(memory, decay):
    """None is needed to converge."""
    seen = []
    watch = dict(inner_iterations=1, watch=lambda _, now: seen.append(now))
    out = solve(0.01, acceleration=otts.Acceleration(memory, decay), **watch)
    assert out.converged and int(out.n_iters) < 150
    assert seen[-1].steps.shape == seen[-1].changes.shape == (45, memory)
    assert int(seen[-1].count) > 0 and np.any(np.asarray(seen[-1].steps) != 0)
    epsilons = np.asarray([float(now.epsilon) for now in seen])
    lowered = epsilons[epsilons < epsilons[0]]
    assert bool(len(lowered)) == (decay < 1)
    np.testing.assert_allclose(lowered[:1], decay * epsilons[:1][: len(lowered)])


def test_epsilon_comes_down_by_itself():
    seen = []
    out = solve(0.01, inner_iterations=1, watch=lambda _, now: seen.append(now))
    epsilons = np.asarray([float(now.epsilon) for now in seen])
    steps = epsilons[1:] / epsilons[:-1]
    assert epsilons[0] > 0.3 and epsilons[-1] == np.float32(0.01)
    lowered, at_target = steps < 1, epsilons[1:] == epsilons[-1]
    assert np.all((steps == 1) | (np.abs(steps - 0.25) < 1e-6) | at_target)
    # Only where the error was small, and always there.
    errors = np.asarray([float(now.error) for now in seen])
    on_the_way = epsilons[:-1] > 0.011
    np.testing.assert_array_equal(lowered, (errors[:-1] <= 0.05) & on_the_way)
    assert float(out.epsilon) == np.float32(0.01)


def test_a_start_and_a_schedule_are_followed():
    first = solve(0.05)
    seen = []
    watch = dict(inner_iterations=1, watch=lambda _, now: seen.append(now.epsilon))
    assert int(solve(0.05, init=first, **watch).n_iters) == 1
    solve(otts.Epsilon(0.05, init=0.4, decay=0.5), **watch)
    want = [0.05, 0.4, 0.2, 0.1] + [0.05] * (len(seen) - 4)
    np.testing.assert_allclose(seen, want, rtol=1e-6)


def test_the_last_iteration_is_at_the_target():
    out = solve(1e-3, max_iterations=4)
    assert out.status is otts.Status.MAX_ITERATIONS and int(out.n_iters) == 4
    columns = jnp.abs(out.marginal(0) - 1 / 45).sum()
    np.testing.assert_allclose(out.marginal_error, columns, rtol=1e-3)


# Sizes of its own for each: programs are kept, those with wrong steps too.
WRONG = {"long": 61, "backwards": 62, "nan": 63, "noise": 64, "huge": 65}
SELDOM = [pytest.param(name, marks=pytest.mark.slow) for name in ("backwards", "huge")]


@pytest.mark.parametrize("wrong", ["long", "nan", "noise", *SELDOM])
def test_a_wrong_direction_costs_only_time(monkeypatch, wrong):
    """Steps are tested: what leads nowhere is given up for Sinkhorn's."""
    known, count = lbfgs.direction, []

    def direction(memory, gradient, inverse):
        count.append(1)
        right = known(memory, gradient, inverse)
        noise = jax.random.normal(jax.random.key(0), gradient.shape)
        noise *= jnp.any(right != 0)  # there is none without a memory
        return {
            "long": 30 * right,
            "backwards": -right,
            "nan": right * jnp.nan,
            "huge": right * 1e37,
            "noise": right + noise * jnp.sign(jnp.vdot(gradient, noise)),
        }[wrong]

    monkeypatch.setattr(lbfgs, "direction", direction)
    x, y = clouds(WRONG[wrong], 44)
    out = solve(0.05, x=x, y=y, max_iterations=2000)
    monkeypatch.undo()
    assert count and out.converged
    plain = solve(0.05, x=x, y=y, max_iterations=2000, **PLAIN)
    assert int(out.n_iters) <= 3 * int(plain.n_iters) + 20
    np.testing.assert_allclose(out.reg_ot_cost, plain.reg_ot_cost, rtol=1e-3)


def test_an_epsilon_that_does_not_converge_is_left(monkeypatch):
    """Its iterations are bounded: those of the target are what counts."""
    monkeypatch.setattr(iteration, "_ROUGH", -1.0)
    x, y = clouds(29, 31)  # sizes of its own
    out = solve(0.1, x=x, y=y, max_iterations=2000)
    assert out.converged and 100 < int(out.n_iters) < 500


def test_a_huge_slope_without_weight_disturbs_nothing():
    """At tau < 1 a far point may have one: mass would be made at no cost there."""
    x, y = clouds()
    far = np.append(y, [[40.0, 0.0]], axis=0)
    taus = dict(tau_a=0.98, tau_b=0.98)
    alone = solve(1e4, x=1e3 * x, y=1e3 * y, b=np.full(45, 1 / 45), **taus)
    b = np.append(np.full(45, 1 / 45), 0)
    beside = solve(1e4, x=1e3 * x, y=1e3 * far.astype(np.float32), b=b, **taus)
    assert alone.converged and beside.converged
    assert abs(int(alone.n_iters) - int(beside.n_iters)) <= 2


def test_constants_stay_small():
    """Of a mass far from 1 too: digits of float32 would be lost in them."""
    x, y = clouds()
    a, b = (np.full(k, 1e-6 / k, np.float32) for k in (60, 45))
    options = dict(x=x, y=y, a=a, b=b, threshold=1e-9, max_iterations=5000)
    fast, plain = (solve(0.01, **options, **how) for how in ({}, PLAIN))
    assert fast.converged and plain.converged
    assert fast.error_floor < 1.5 * plain.error_floor


@pytest.mark.parametrize("taus", [(0.9, 0.5), (1.0, 0.5), (0.5, 1.0), (1.0, 0.9)])
def test_uneven_weights_at_tau_below_one(taus):
    """The plan has other weights than b there."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(60, 3)), rng.normal(size=(50, 3))
        b = np.exp(4 * rng.normal(size=50))
        options = dict(x=x, y=y, b=b / b.sum(), threshold=1e-5)
        options |= dict(tau_a=taus[0], tau_b=taus[1])
        fast, plain = (solve(0.05, **options, **how) for how in ({}, PLAIN))
        assert fast.converged and plain.converged
        assert int(fast.n_iters) <= 1.5 * int(plain.n_iters) + 20


@pytest.mark.parametrize("count", [0, 1, 4, 6, 9])
def test_the_direction_is_that_of_the_two_loops(count):
    """Compact form and recursion agree, also where some steps are still missing."""
    with jax.enable_x64(True):
        rng, size = np.random.default_rng(0), 6
        hessian, gradient = np.diag(rng.uniform(0.1, 2, 30)) + 0.1, rng.normal(size=30)
        inverse = rng.uniform(0, 2, size=30)
        pairs = [(s, hessian @ s) for s in rng.normal(size=(count, 30))]
        memory = lbfgs.Memory.empty(jnp.zeros(30), size)
        for s, y in pairs:
            memory = memory.learnt(s, y, jnp.array(True)).learnt(y, s, jnp.array(False))
        args = jnp.asarray(gradient), jnp.asarray(inverse)
        got = lbfgs.direction(memory, *args)
        assert not np.any(lbfgs.direction(memory.cleared(True), *args))
        np.testing.assert_allclose(got, two_loops(pairs[-size:], *args), rtol=1e-9)


def two_loops(pairs, q, inverse):
    """As in the textbooks."""
    if not pairs:
        return 0 * q
    alphas = []
    for s, y in reversed(pairs):
        alphas.append((s @ q) / (s @ y))
        q = q - alphas[-1] * y
    s, y = pairs[-1]
    q = inverse * q * (s @ y) / (y @ (inverse * y))
    for (s, y), alpha in zip(pairs, reversed(alphas), strict=True):
        q = q + s * (alpha - (y @ q) / (s @ y))
    return q


def test_a_snapshot_goes_on(mesh, dtype):
    """With what was learnt, in the middle of annealing; roundings may grow."""
    x, y = clouds(13, 21, dtype=dtype)
    kept = []
    options = dict(x=x, y=y, threshold=1e-4, inner_iterations=3, max_iterations=300)
    watch = dict(watch=lambda _, now: kept.append(jax.device_get(now)))
    whole = solve(0.02, mesh=mesh, **options, **watch)
    assert len(kept) > 4
    again = solve(0.02, mesh=mesh, init=kept[1], **options)
    assert int(again.n_iters) == int(whole.n_iters)
    ref.assert_close(again.f, whole.f, 1e-9 if dtype == np.float64 else 1e-4)
    # What comes next is the same at every point of it: nothing learnt is lost.
    for k, start in enumerate(kept[:-2]):
        again = solve(0.02, mesh=mesh, init=start, **options)
        near = 1e-9 if dtype == np.float64 else 1e-2
        np.testing.assert_allclose(again.errors[k + 1], whole.errors[k + 1], rtol=near)
    for start in (kept[1], kept[-2]):
        elsewhere = solve(0.02, mesh=otts.make_mesh(2, 1), init=start, **options)
        assert elsewhere.converged
        ref.assert_close(elsewhere.reg_ot_cost, whole.reg_ot_cost, 1e-4)


def test_a_snapshot_goes_on_otherwise():
    """Without acceleration, with less memory, or at the target from there on."""
    kept = []
    solve(0.02, inner_iterations=3, watch=lambda _, now: kept.append(now))
    for how in (None, otts.Acceleration(3), otts.Acceleration(decay=1.0)):
        out = solve(0.02, init=kept[3], acceleration=how, max_iterations=5000)
        assert out.converged
        assert how is None or int(out.n_iters) < 150


@pytest.mark.parametrize("of", [lambda z: z[:, 0], lambda z: z[:, :2], lambda z: z[1:]])
@pytest.mark.parametrize("name", ["steps", "changes"])
def test_steps_of_a_wrong_shape_are_refused(name, of):
    kept = []
    solve(0.02, watch=lambda _, now: kept.append(now))
    wrong = kept[0]._replace(**{name: of(getattr(kept[0], name))})
    with pytest.raises(ValueError, match=r"init\.(steps|changes) must have shape"):
        solve(0.02, init=wrong)


def test_differentiated_iterations_are_plain():
    x, y = clouds(13, 9)
    limits = dict(max_iterations=7, implicit_diff=None)
    fast, plain = (solve(0.1, x=x, y=y, **limits, **how) for how in ({}, PLAIN))
    np.testing.assert_array_equal(fast.f, plain.f)


def test_tau_just_below_one_converges():
    """The common shift of the potentials is one direction, which is learnt."""
    b = np.full(45, 2 / 45, np.float32)
    options = dict(b=b, tau_a=0.9995, tau_b=0.9995)
    out = solve(0.5, **options)
    assert out.converged and int(out.n_iters) < 250
    assert not solve(0.5, **options, **PLAIN).converged


def test_masses_that_differ_by_a_rounding():
    """The dual has no maximum then, and a slope along constants that is not climbed."""
    with jax.enable_x64(True):
        x, y = clouds(13, 9, dtype=np.float64)
        b = np.full(9, (1 + 4e-9) / 9)
        limits = dict(x=x, y=y, threshold=1e-12, max_iterations=1000)
        out = jax.jit(lambda b: solve(0.3, b=b, **limits))(b)
        plain = solve(0.3, **limits)
        assert out.status is not otts.Status.CONVERGED and plain.converged
        np.testing.assert_allclose(out.marginal_error, 4e-9, rtol=0.1)
        ref.assert_close(out.f - out.f[0], plain.f - plain.f[0], 1e-8)
        assert abs(out.f).max() < 10


def test_a_batch_of_problems():
    x, y = clouds(13, 9)
    epsilons = np.asarray([0.05, 0.2, 1.0], np.float32)
    together = jax.vmap(lambda e: solve(e, x=x, y=y).reg_ot_cost)(epsilons)
    alone = [float(solve(e, x=x, y=y).reg_ot_cost) for e in epsilons]
    np.testing.assert_allclose(together, alone, rtol=1e-3)


def test_no_program_gathers():
    """What iterations learn from is split as points are; sums of it are few."""
    mesh = otts.make_mesh(4, 2)
    x, y = clouds(64, 48)

    run = jax.jit(lambda e: solve(e, x=x, y=y, mesh=mesh).f)
    text = run.lower(0.1).compile().as_text()
    assert "all-gather(" not in text
    found = re.findall(r"= (.*) all-reduce\(.*op_name=\S*/while/body/while/body/", text)
    sums = collections.Counter(re.findall(r"f32\[([\d,]*)\]", " ".join(found)))
    # Of a pass two each; numbers; products of what is learnt from.
    assert sums.pop("") <= 14
    assert sums == {"16": 2, "24": 2, "8,8": 2, "8": 2}


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: otts.Acceleration(memory=0), ValueError, "memory must be at least 1"),
        (lambda: otts.Acceleration(memory=2.5), TypeError, "memory must be an int"),
        (
            lambda: otts.Acceleration(decay=0.0),
            ValueError,
            r"decay must be in \(0, 0.9",
        ),
        (lambda: otts.Acceleration(decay="1"), TypeError, "decay must be a number"),
        (lambda: solve(1.0, acceleration=True), TypeError, "acceleration must be an"),
        (
            lambda: otts.sinkhorn_divergence(*clouds(), acceleration="lbfgs"),
            TypeError,
            "acceleration must be an",
        ),
    ],
)
def test_bad_arguments(make, error, words):
    with pytest.raises(error, match=words):
        make()
