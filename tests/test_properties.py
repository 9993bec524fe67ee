"""Properties of every problem: what a change of the input does to the solution.

One program is compiled for a cost, mesh and shape, and all else is traced.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref
from drawing import (
    COSTS,
    LIMITS,
    POWER,
    SMALL_ERROR,
    D,
    Drawn,
    M,
    N,
    for_all,
    integers,
    pose,
    powers_of_ten,
    problems,
)
from hypothesis import strategies as st

import ott_shard as otts
from ott_shard import Status

pytestmark = pytest.mark.slow

# ---------------------------------------------------------- exact changes of the input


def assert_same(got, want, p, factor=1.0, rows=slice(None)):
    """Potentials, value and plan of `got` are those of `want`, costs times factor.

    Both have made the same number of iterations. Roundings of them add up.
    """
    for field in ("f", "g", "reg_ot_cost"):
        mine, other = got[field] / factor, want[field]
        other = other[rows] if field == "f" else other
        finite = np.isfinite(other)
        np.testing.assert_array_equal(np.isfinite(mine), finite, field)
        size = np.abs(other[finite]).max() / (p.cost.max() + p.epsilon)
        np.testing.assert_allclose(
            np.where(finite, mine, 0),
            np.where(finite, other, 0),
            rtol=0,
            atol=50 * p.rounding * (1 + size),
            err_msg=field,
        )
    plan = want["matrix"][rows]
    np.testing.assert_allclose(
        got["matrix"], plan, rtol=0, atol=100 * p.rounding / p.epsilon * plan.max()
    )


taus = st.sampled_from([(1.0, 1.0), (0.75, 0.625), (1.0, 0.5)])


@for_all(drawn=problems(), order=st.permutations(range(N)), taus=taus)
def test_the_order_of_points_does_not_matter(where, drawn, order, taus):
    p = pose(where, drawn, taus=taus)
    assert_same(
        p.but(x=p.x[order], a=p.a[order]).solve(), p.solve(), p, rows=list(order)
    )


@for_all(drawn=problems(), offset=integers(D, most=64_000), taus=taus)
def test_translation(where, drawn, offset, taus):
    p = pose(where, drawn, taus=taus)
    offset = offset / 64
    assert_same(p.but(x=p.x + offset, y=p.y + offset).solve(), p.solve(), p)


@for_all(
    drawn=problems(),
    triple=st.sampled_from([(3, 4, 5), (12, -5, 13), (-8, 15, 17)]),
    reflected=st.booleans(),
    taus=taus,
)
def test_rotation(where, drawn, triple, reflected, taus):
    """By angles of whole-number triangles, times their hypotenuse: nothing rounds."""
    c, s, h = triple
    turn = np.array([[c, -s, 0], [s, c, 0], [0, 0, -h if reflected else h]])
    p = pose(where, drawn, taus=taus)
    factor = float(h) ** POWER[where.name]
    turned = p.but(x=p.x @ turn.T, y=p.y @ turn.T, epsilon=p.epsilon * factor)
    assert_same(turned.solve(), p.solve(), p, factor)


@for_all(drawn=problems(), unit=powers_of_ten(-6, 6), taus=taus)
def test_the_unit_of_length(where, drawn, unit, taus):
    p = pose(where, drawn, taus=taus)
    unit = float(np.asarray(unit, where.dtype))
    factor = unit ** POWER[where.name]
    scaled = p.but(x=p.x * unit, y=p.y * unit, epsilon=p.epsilon * factor)
    assert_same(scaled.solve(), p.solve(), p, factor)


@for_all(drawn=problems(), scale=powers_of_ten(-6, 6), taus=taus)
def test_scale_cost_is_a_unit_of_epsilon(where, drawn, scale, taus):
    p = pose(where, drawn, taus=taus)
    p_scaled = p.but(scale=scale)
    p_scaled = p_scaled.but(epsilon=p.epsilon / p_scaled.scale)
    assert_same(p_scaled.solve(), p.solve(), p, 1 / p_scaled.scale)


# ------------------------------------------------------------------- at convergence


def rest(p, out):
    """How far a value may be from the optimum, by what the solution says of itself.

    The dual objective is concave, its slope is the error of the marginal, and the
    potentials are bounded by the costs.
    """
    error = out["marginal_error"] + out["error_floor"]
    return 2 * error * p.cost.max() + 20 * p.rounding * p.a.sum()


converging = problems(exponents=(-1.3, 1))


@for_all(drawn=converging, taus=taus, usual=2)
def test_swapping_the_clouds_transposes_the_plan(where, drawn, taus):
    p = pose(where, drawn, taus=taus, threshold=SMALL_ERROR[where.dtype])
    there = p.solve()
    back = p.but(x=p.y, y=p.x, a=p.b, b=p.a, taus=taus[::-1]).solve()
    off = rest(p, there) + rest(p, back)
    np.testing.assert_allclose(back["reg_ot_cost"], there["reg_ot_cost"], atol=off)
    # KL is strongly convex in the L1 distance, by Pinsker's inequality.
    apart = np.abs(back["matrix"].T - there["matrix"]).sum()
    assert apart <= np.sqrt(2 * off / p.epsilon) + 20 * p.rounding / p.epsilon


@for_all(drawn=problems(exponents=(-2, 1)), taus=taus)
def test_primal_and_dual_objectives_meet(where, drawn, taus):
    """They differ by <P^T 1 - wanted, psi>, whatever the potentials are."""
    p = pose(where, drawn, taus=taus, threshold=SMALL_ERROR[where.dtype])
    out = p.solve()
    plan = out["matrix"]
    primal = (plan * p.cost).sum() + p.epsilon * ref.kl(plan, np.outer(p.a, p.b))
    for axis, (w, tau) in enumerate(zip((p.b, p.a), p.taus[::-1], strict=True)):
        if tau < 1:
            primal += ref.rho(p.epsilon, tau) * ref.kl(plan.sum(axis), w)
    error = out["marginal_error"] + out["error_floor"]
    off = 2 * error * (p.cost.max() + p.epsilon) + 20 * p.rounding
    np.testing.assert_allclose(out["reg_ot_cost"], primal, rtol=0, atol=off)


@for_all(drawn=converging, row=st.integers(0, N - 2), taus=taus)
def test_a_point_may_be_split(where, drawn, row, taus):
    """Two copies with half its weight each: f, value and sums of the plan stay."""
    a = drawn.a * (np.arange(N) < N - 1)
    a[0] += drawn.a[-1]
    p = pose(where, drawn._replace(a=a), taus=taus)
    half, copies = p.a.copy(), p.x.copy()
    half[[row, -1]] = p.a[row] / 2
    copies[-1] = p.x[row]
    whole, split = p.solve(), p.but(x=copies, a=half).solve()
    split["matrix"][row] += split["matrix"][-1]
    np.testing.assert_array_equal(split["f"][-1], split["f"][row])
    split["matrix"][-1] = 0
    for f in (whole["f"], split["f"]):
        f[[row, -1]] = 0
    assert_same(split, whole, p)


@for_all(drawn=converging, row=st.integers(1, N - 1), taus=taus)
def test_a_tiny_weight_is_like_none(where, drawn, row, taus):
    a = drawn.a.copy()
    a[0] += a[row]
    a[row] = 0
    p = pose(where, drawn._replace(a=a), taus=taus)
    a[row] = 1e-30
    without, tiny = p.solve(), p.but(a=a).solve()
    assert np.isfinite(tiny["f"][row]) and tiny["matrix"][row].sum() < 1e-28
    tiny["f"][row] = without["f"][row]
    assert_same(tiny, without, p)


@for_all(
    drawn=converging,
    row=st.integers(1, N - 1),
    far=powers_of_ten(0, 6),
    taus=taus,
)
def test_a_point_without_weight_may_be_anywhere(where, drawn, row, far, taus):
    """Not even rounding, or what is said of it, depends on it."""
    a, x = drawn.a.copy(), drawn.x.copy()
    a[0] += a[row]
    a[row] = 0
    x[row] = far
    p = pose(where, drawn._replace(a=a), taus=taus, threshold=1e-3)
    near, away = p.solve(), p.but(x=x).solve()
    assert away["code"] == near["code"] and away["n_iters"] == near["n_iters"]
    np.testing.assert_allclose(away["error_floor"], near["error_floor"], rtol=1e-3)
    assert_same(away, near, p)


def true_errors(p, out):
    """L1 errors of both marginals of the returned potentials, dense and in float64."""
    plan = np.exp((out["f"][:, None] + out["g"][None] - p.cost) / p.epsilon)
    for axis, (name, w, tau) in enumerate(
        zip("gf", (p.b, p.a), p.taus[::-1], strict=True)
    ):
        log_w = np.log(np.where(w > 0, w, 1))
        potential = np.where(w > 0, out[name], 0) - p.epsilon * log_w
        wanted = w * ref.slope(potential, ref.rho(p.epsilon, tau))
        yield np.abs(plan.sum(axis) - wanted).sum()


ONE_PAIR = Drawn(
    np.full((N, D), [0.1875, 0, 0]),
    np.full((M, D), [-0.46875, 0, 0]),
    np.full(N, 1 / N),
    np.full(M, 1 / M),
    0.0011904025 / 0.65625**2,
)


FAR_BUT_WITHOUT_WEIGHT = Drawn(
    np.eye(N)[:, :D],
    np.eye(M)[:, :D],
    np.full(N, 1 / N),
    np.eye(M)[-1],
    0.001,
)


@for_all(
    # Costs that are all the same round all to the same side.
    {"drawn": ONE_PAIR, "unit": 1.0, "threshold": 3e-5, "taus": (1.0, 1.0)},
    # exp of its potential / epsilon overflows, and is multiplied by 0.
    {
        "drawn": FAR_BUT_WITHOUT_WEIGHT,
        "unit": 1.0,
        "threshold": 1e-3,
        "taus": (0.75, 0.625),
    },
    drawn=problems(exponents=(-7, 1)),
    unit=powers_of_ten(-6, 6),
    threshold=powers_of_ten(-5, -2),
    taus=taus,
)
def test_every_flag_is_honest(where, drawn, unit, threshold, taus):
    """From easy to impossible: all is finite, and `converged` means it."""
    drawn = drawn._replace(x=drawn.x * unit, y=drawn.y * unit)
    p = pose(where, drawn, threshold=threshold, taus=taus)
    out = p.solve()
    assert np.isfinite(out["reg_ot_cost"]) and np.all(np.isfinite(out["matrix"]))
    assert np.all(np.isfinite(out["f"]) == (p.a > 0))
    assert np.all(np.isfinite(out["g"]) == (p.b > 0))
    status = Status(int(out["code"]))
    assert status in (Status.CONVERGED, Status.STALLED, Status.MAX_ITERATIONS)
    if status is Status.CONVERGED:
        assert max(true_errors(p, out)) <= p.threshold
    if status is Status.STALLED:
        assert out["error_floor"] > p.threshold / 40


# ------------------------------------------------------------------------ unbalanced


@for_all(
    drawn=converging,
    tau=st.floats(0.1, 0.9),
    other=st.floats(0.1, 0.9),
    mass=powers_of_ten(-1, 1),
)
def test_unbalanced_mass(where, drawn, tau, other, mass):
    """What holds at an optimum: scaling the plan makes nothing better.

    The derivative in the scale gives the mass from the value.
    """
    threshold = SMALL_ERROR[where.dtype]
    p = pose(where, drawn, taus=(tau, other), threshold=threshold)
    p = p.but(b=p.b * mass)
    out = p.solve()
    plan, value = out["matrix"], out["reg_ot_cost"]
    assert np.all(plan >= 0) and plan.sum() > 0
    rho_a, rho_b = (ref.rho(p.epsilon, t) for t in p.taus)
    masses = p.a.sum(), p.b.sum()
    penalties = (
        p.epsilon * masses[0] * masses[1] + rho_a * masses[0] + rho_b * masses[1]
    )
    want = (penalties - value) / (p.epsilon + rho_a + rho_b)
    assert Status(int(out["code"])) in (Status.CONVERGED, Status.STALLED)
    error = out["marginal_error"] + 3 * out["error_floor"]
    np.testing.assert_allclose(plan.sum(), want, rtol=0, atol=2 * error)
    assert -2 * error * (rho_a + rho_b) <= value <= penalties


@for_all(drawn=converging, low=st.floats(0.1, 0.9), high=st.floats(0.1, 0.9))
def test_value_rises_with_tau_to_the_balanced_one(where, drawn, low, high):
    low, high = sorted((low, high))
    p = pose(where, drawn, threshold=SMALL_ERROR[where.dtype])
    outs = [p.but(taus=(tau, tau)).solve() for tau in (low, high, 1.0)]
    values = [out["reg_ot_cost"] for out in outs]
    # Each is at most its optimum, so only the larger one may be short.
    assert values[0] <= values[1] + rest(p, outs[1])
    assert values[1] <= values[2] + rest(p, outs[2])


# ------------------------------------------------------------------------ divergence


@functools.partial(jax.jit, static_argnums=(0, 1))
def diverged(name, mesh, x, y, a, b, epsilon, taus, threshold):
    value, out = otts.sinkhorn_divergence(
        *(x, y, a, b),
        cost_fn=COSTS[name],
        epsilon=epsilon,
        tau_a=taus[0],
        tau_b=taus[0],
        threshold=threshold,
        mesh=mesh,
        max_iterations=LIMITS["max_iterations"],
    )
    errors = [o.marginal_error + o.error_floor for o in out.outputs]
    return value, jnp.stack(errors)


def divergence(p):
    """Value, and how far from the optimum it may be."""
    mesh = otts.make_mesh(*p.where.shape)
    arrays = p.cast("x", "y", "a", "b", "epsilon", "taus", "threshold")
    value, errors = diverged(p.where.name, mesh, *arrays)
    largest = ref.COSTS[p.where.name](*[np.concatenate([p.x, p.y])] * 2).max()
    masses = p.a.sum() + p.b.sum()
    return float(value), float(2 * errors.sum() * largest + 20 * p.rounding * masses)


@for_all(
    usual=2,
    drawn=problems(N, N, exponents=(-1.3, 1)),
    tau=st.sampled_from([1.0, 0.9, 0.5]),
    mass=powers_of_ten(-1, 1),
)
def test_divergence(where, drawn, tau, mass):
    """Never negative, and 0 between equal measures."""
    threshold = SMALL_ERROR[where.dtype]
    p = pose(where, drawn, taus=(tau, tau), threshold=threshold)
    p = p.but(b=p.b * (mass if tau < 1 else 1.0))
    value, off = divergence(p)
    assert value >= -off
    value, off = divergence(p.but(y=p.x, b=p.a))
    assert abs(value) <= off
