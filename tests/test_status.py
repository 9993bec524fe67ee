"""Why a run stopped: flags that can be trusted, and inputs that are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref

import ott_shard as otts

MESH_SHAPE = (4, 2)


def pose(epsilon=0.3, **options):
    p = ref.problem(13, 21)
    x, y, a, b = p.cast(jnp.float32)
    options = {"mesh": otts.make_mesh(*MESH_SHAPE)} | options
    return otts.PointCloud(x, y, epsilon=epsilon, **options), a, b


def true_error(out, a, b):
    """L1 errors of both marginals of the returned potentials, dense and in float64."""
    geom = out.geom
    x, y = np.asarray(geom.x, np.float64), np.asarray(geom.y, np.float64)
    f, g = np.asarray(out.f, np.float64), np.asarray(out.g, np.float64)
    cost = ref.sqeuclidean(x, y)
    plan = np.exp((f[:, None] + g[None] - cost) / float(out.epsilon))
    columns = np.abs(plan.sum(0) - np.asarray(b, np.float64)).sum()
    rows = np.abs(plan.sum(1) - np.asarray(a, np.float64)).sum()
    return columns, rows


def test_too_few_iterations_are_reported():
    geom, a, b = pose(epsilon=0.01)
    out = otts.solve(geom, a, b, max_iterations=10)
    assert not bool(out.converged)
    assert out.status is otts.Status.MAX_ITERATIONS
    assert float(out.marginal_error) > 1e-3
    assert np.isfinite(float(out.reg_ot_cost))
    with pytest.raises(RuntimeError, match="max_iterations.*10 iterations"):
        out.raise_if_failed()


def test_success_does_not_raise():
    geom, a, b = pose()
    out = otts.solve(geom, a, b)
    assert bool(out.converged)
    assert out.status is otts.Status.CONVERGED
    assert out.raise_if_failed() is None


def test_every_status_has_a_sentence():
    assert [s.name for s in otts.Status] == [
        "CONVERGED",
        "STALLED",
        "MAX_ITERATIONS",
        "NOT_FINITE",
        "INVALID_INPUT",
    ]
    assert len({s.sentence for s in otts.Status}) == len(otts.Status)
    for status in otts.Status:
        assert len(status.sentence) > 20 and "\n" not in status.sentence


@pytest.mark.parametrize("exponent", range(6))
def test_converged_means_a_small_error(exponent):
    """From easy to impossible in float32: the flag is never better than the plan."""
    epsilon = 10.0**-exponent
    geom, a, b = pose(epsilon=epsilon)
    out = otts.solve(geom, a, b, max_iterations=300)
    columns, rows = true_error(out, a, b)
    # A rounding of f moves the plan by eps32 |f| / epsilon, relatively.
    rounding = 4e-7 * float(geom.max_cost) / epsilon
    if bool(out.converged):
        assert max(columns, rows) <= 1e-3
    if rounding < 0.1:
        np.testing.assert_allclose(out.marginal_error, columns, atol=rounding + 1e-6)
        np.testing.assert_allclose(rows, 0, atol=rounding + 1e-6)
    errors = np.asarray(out.errors)
    last = errors[errors >= 0][-1]
    assert last == out.marginal_error
    within = last + out.error_floor <= np.float32(1e-3)
    assert bool(out.converged) == bool(within)
    assert np.isfinite(float(out.reg_ot_cost)) and np.all(np.isfinite(errors))


def test_costs_fall_with_epsilon_or_the_flag_does():
    """n = 100, m = 150 in [0, 1]^5 with random weights, down to where float32 ends."""
    rng = np.random.default_rng(0)
    x, y = rng.uniform(size=(100, 5)), rng.uniform(size=(150, 5))
    a, b = rng.uniform(size=100), rng.uniform(size=150)
    geom = {e: otts.PointCloud(x, y, epsilon=e) for e in 10.0 ** -np.arange(0, 10, 3)}
    out = {
        e: otts.solve(g, a / a.sum(), b / b.sum(), max_iterations=200)
        for e, g in geom.items()
    }
    for o in out.values():
        finite = bool(jnp.isfinite(o.reg_ot_cost))
        assert finite == (o.status is not otts.Status.NOT_FINITE)
    values = [float(o.reg_ot_cost) for o in out.values()]
    values = [value for value in values if np.isfinite(value)]
    assert len(values) >= 3 and values == sorted(values, reverse=True)
    assert bool(out[1.0].converged)
    assert not bool(out[1e-9].converged)


def test_a_sweep_of_epsilon_in_float32():
    """From 10 to 1e-6 of the std of the costs: falling values, and flags that hold."""
    p = ref.problem(60, 80, zeros=False)
    x, y, a, b = p.cast(jnp.float32)
    cost = ref.sqeuclidean(p.x, p.y)
    _, std, _ = ref.statistics(cost, p.a, p.b)

    @jax.jit
    def solve(epsilon):
        schedule = otts.Epsilon(epsilon, init=jnp.maximum(epsilon, std), decay=0.8)
        geom = otts.PointCloud(x, y, epsilon=schedule, mesh=otts.make_mesh(1, 1))
        return otts.solve(geom, a, b, max_iterations=4000)

    outs = [solve(jnp.float32(10.0**k * std)) for k in range(1, -7, -1)]
    values = [float(out.reg_ot_cost) for out in outs]
    assert np.all(np.isfinite(values)) and values == sorted(values, reverse=True)
    for out in outs:
        if bool(out.converged):
            assert max(true_error(out, a, b)) <= 1e-3
    kinds = [out.status for out in outs]
    assert kinds[:4] == [otts.Status.CONVERGED] * 4
    assert kinds[-1] is otts.Status.STALLED


def test_a_stall_is_said_and_ends_the_run():
    """float32 cannot tell exponents of 1e7 apart, and 2000 iterations do not help."""
    geom, a, b = pose(epsilon=1e-7)
    for how in (otts.Acceleration(), None):
        out = otts.solve(geom, a, b, acceleration=how)
        assert out.status is otts.Status.STALLED and not bool(out.converged)
        assert int(out.n_iters) < 1000
        assert float(out.error_floor) > 1e-3
    with pytest.raises(RuntimeError, match="rounding allows no smaller.*float64.*0\\."):
        out.raise_if_failed()


@pytest.mark.parametrize(
    ("shift", "threshold", "status"),
    [(3.0, 1e-8, "CONVERGED"), (-2.0, 1e-6, "STALLED")],
)
def test_the_floor_is_that_of_the_mass_of_the_plan(shift, threshold, status):
    """An unbalanced plan may be much lighter or heavier than its weights."""
    p = ref.problem(13, 21)
    x, y, a, b = p.cast(jnp.float32)

    @jax.jit
    def solve(shift, threshold):
        cost = jax.tree_util.Partial(lambda s, x, y: jnp.sum((x - y) ** 2) + s, shift)
        mesh = otts.make_mesh(*MESH_SHAPE)
        geom = otts.PointCloud(x, y, cost_fn=cost, epsilon=0.05, mesh=mesh)
        out = otts.solve(geom, a, b, tau_a=0.8, tau_b=0.6, threshold=threshold)
        return out, out.transport_mass

    out, mass = solve(shift, threshold)
    cost = ref.sqeuclidean(p.x, p.y) + shift
    want = ref.sinkhorn(cost, p.a, p.b, 0.05, iterations=300, tau_a=0.8, tau_b=0.6)
    assert out.status.name == status
    np.testing.assert_allclose(mass, want.plan.sum(), rtol=1e-4)


def test_the_floor_is_that_of_the_dtype():
    """In float64 the same problem has no floor to speak of, and goes on."""
    with jax.enable_x64(True):
        p = ref.problem(13, 21, dtype=np.float64)
        x, y, a, b = p.cast(np.float64)
        geom = otts.PointCloud(x, y, epsilon=1e-4, mesh=otts.make_mesh(*MESH_SHAPE))
        out = otts.solve(geom, a, b, max_iterations=300)
        assert out.status is otts.Status.MAX_ITERATIONS
        assert float(out.error_floor) < 1e-9


def test_a_rest_is_not_a_stall():
    """At a small epsilon the error may rest far above rounding: the run goes on."""
    geom, a, b = pose(epsilon=2e-3)
    options = dict(threshold=1e-4, max_iterations=500, acceleration=None)
    out = otts.solve(geom, a, b, **options)
    assert out.status is otts.Status.MAX_ITERATIONS
    assert int(out.n_iters) == 500


@pytest.mark.parametrize(("iterations", "enough"), [(5, False), (60, True)])
def test_a_fixed_number_of_iterations_has_a_true_flag(iterations, enough):
    geom, a, b = pose()
    out = otts.solve(geom, a, b, min_iterations=iterations, max_iterations=iterations)
    columns, _ = true_error(out, a, b)
    assert int(out.n_iters) == iterations
    assert bool(out.converged) is enough
    assert bool(columns <= 1e-3) is enough
    np.testing.assert_allclose(out.marginal_error, columns, atol=1e-6)


# ------------------------------------------------------- what a trace cannot refuse


@jax.jit
def solve(x, y, a, b, epsilon, tau=1.0, scale=1.0):
    """Compiled once for all the values below."""
    mesh = otts.make_mesh(*MESH_SHAPE)
    geom = otts.PointCloud(x, y, epsilon=epsilon, scale_cost=scale, mesh=mesh)
    return otts.solve(geom, a, b, tau_a=tau, tau_b=tau)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["x", "y", "a", "b", "epsilon"])
def test_not_finite_inside_jit(where, bad):
    _, a, b = pose()
    p = ref.problem(13, 21)
    arguments = {
        "x": jnp.asarray(p.x, jnp.float32),
        "y": jnp.asarray(p.y, jnp.float32),
        "a": a,
        "b": b,
        "epsilon": jnp.float32(0.3),
    }
    value = arguments[where]
    arguments[where] = value.at[(0,) * value.ndim].set(bad)

    out = solve(**arguments)
    assert not bool(out.converged)
    assert out.status in (otts.Status.NOT_FINITE, otts.Status.INVALID_INPUT)
    if where in ("x", "y"):
        assert out.status is otts.Status.NOT_FINITE
    assert int(out.n_iters) <= 2000
    with pytest.raises(RuntimeError, match=rf"Not finite: {where}\b"):
        out.raise_if_failed()


def test_nan_stops_early():
    geom, a, b = pose()
    x = geom.x.at[3, 1].set(jnp.nan)

    out = solve(x, geom.y, a, b, 0.3)
    assert out.status is otts.Status.NOT_FINITE
    assert int(out.n_iters) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"b": 2.0},
        {"a": -1.0, "b": -1.0},
        {"epsilon": -1.0},
        {"scale": -1.0},
        {"tau": -1.0},
        {"tau": 1.5},
        {"tau": 0.0},
    ],
    ids=str,
)
def test_invalid_input_inside_jit(change):
    p = ref.problem(13, 21)

    factors = {"a": 1.0, "b": 1.0, "epsilon": 1.0, "tau": 1.0, "scale": 1.0} | change
    x, y, a, b = p.cast(jnp.float32)
    out = solve(
        x,
        y,
        factors["a"] * a,
        factors["b"] * b,
        0.3 * factors["epsilon"],
        factors["tau"],
        factors["scale"],
    )
    assert not bool(out.converged)
    assert out.status is otts.Status.INVALID_INPUT
    with pytest.raises(RuntimeError, match="no solution as posed"):
        out.raise_if_failed()


def test_status_is_for_the_host():
    geom, a, b = pose()
    with pytest.raises(TypeError, match="converged"):
        jax.jit(lambda geom: otts.solve(geom, a, b).status.value)(geom)


# ------------------------------------------------------------- what is refused


def weights(size, index=None, value=None):
    w = np.full(size, 1 / size)
    if index is not None:
        w[index] = value
    return w


# Each: the call, the error, what its message must say.
BAD_CALLS = {
    "progress": (
        lambda g: otts.solve(g, progress="yes"),
        TypeError,
        "progress must be a function or None.*yes",
    ),
    "long": (
        lambda g: otts.solve(g, max_iterations=2**31),
        ValueError,
        "max_iterations.*at most 2147483647.*2147483648",
    ),
    "progress in jit": (
        lambda g: jax.jit(lambda: otts.solve(g, progress=print).f)(),
        TypeError,
        "progress must be None inside jit",
    ),
    "batch": (
        lambda g: (
            jax.vmap(lambda w: otts.solve(g, b=w, max_iterations=1))(
                jnp.full((2, 21), 1 / 21)
            ).f
        ),
        ValueError,
        r"batch of \(2,\) solutions",
    ),
    "mass": (
        lambda g: otts.solve(g, None, 2 * weights(21)),
        ValueError,
        r"a and b.*1\S* and 2.*tau",
    ),
    "mass, one tau": (
        lambda g: otts.solve(g, 3 * weights(13), None, tau_a=1.0, tau_b=1.0),
        ValueError,
        r"a and b.*3\S* and 1",
    ),
    "negative": (
        lambda g: otts.solve(g, weights(13, 2, -0.25)),
        ValueError,
        r"\ba\b.*-0\.25.*index 2",
    ),
    "NaN weight": (
        lambda g: otts.solve(g, None, weights(21, 4, np.nan)),
        ValueError,
        r"\bb\b.*row 4",
    ),
    "all zero": (
        lambda g: otts.solve(g, np.zeros(13), np.zeros(21)),
        ValueError,
        r"\ba\b.*zero",
    ),
    "length": (lambda g: otts.solve(g, weights(12)), ValueError, r"13.*\(12,\)"),
    "rank": (
        lambda g: otts.solve(g, None, weights(21)[:, None]),
        ValueError,
        r"\bb\b.*\(21, 1\)",
    ),
    "text": (lambda g: otts.solve(g, "uniform"), TypeError, r"\ba\b.*"),
    "tau 0": (lambda g: otts.solve(g, tau_a=0.0), ValueError, "tau_a.*0"),
    "tau > 1": (lambda g: otts.solve(g, tau_b=1.5), ValueError, r"tau_b.*1\.5"),
    "tau NaN": (lambda g: otts.solve(g, tau_b=np.nan), ValueError, "tau_b.*nan"),
    "threshold": (lambda g: otts.solve(g, threshold=-1.0), ValueError, "threshold.*-1"),
    "max 0": (
        lambda g: otts.solve(g, max_iterations=0),
        ValueError,
        "max_iterations.*0",
    ),
    "max float": (
        lambda g: otts.solve(g, max_iterations=10.5),
        TypeError,
        r"max_iterations.*10\.5",
    ),
    "inner 0": (
        lambda g: otts.solve(g, inner_iterations=0),
        ValueError,
        "inner_iterations.*0",
    ),
    "min < 0": (
        lambda g: otts.solve(g, min_iterations=-3),
        ValueError,
        "min_iterations.*-3",
    ),
    "min > max": (
        lambda g: otts.solve(g, min_iterations=30, max_iterations=20),
        ValueError,
        "min_iterations.*20.*30",
    ),
    "min float": (
        lambda g: otts.solve(g, min_iterations=2.5),
        TypeError,
        r"min_iterations.*2\.5",
    ),
    "unknown": (lambda g: otts.solve(g, lse_mode=True), TypeError, "lse_mode"),
    "no geometry": (lambda g: otts.solve(g.x), TypeError, "geom.*PointCloud"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_arguments(case):
    call, error, message = BAD_CALLS[case]
    geom, _, _ = pose()
    with pytest.raises(error, match=message):
        call(geom)


def test_mass_may_differ_by_rounding_only():
    geom, _, _ = pose()
    a = np.full(13, 1 / 13, np.float32)
    out = otts.solve(geom, a, np.full(21, 1 / 21, np.float64))
    assert bool(out.converged)
    with pytest.raises(ValueError, match="mass"):
        otts.solve(geom, a, np.full(21, 1.001 / 21))
    assert bool(otts.solve(geom, a, np.full(21, 1.5 / 21), tau_a=0.9).converged)


BAD_PLAN_CALLS = {
    "axis": (lambda out: out.apply(np.ones(13), 2), "axis.*2"),
    "length": (lambda out: out.apply(np.ones(13), 1), r"v .*21.*\(13,\)"),
    "rank": (lambda out: out.apply(np.ones((13, 1, 1)), 0), r"v .*\(13, 1, 1\)"),
    "marginal": (lambda out: out.marginal(-1), "axis.*-1"),
}


@pytest.mark.parametrize("case", BAD_PLAN_CALLS)
def test_bad_arguments_to_the_plan(case):
    call, message = BAD_PLAN_CALLS[case]
    with pytest.raises(ValueError, match=message):
        call(otts.solve(*pose()))
