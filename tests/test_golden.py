"""Numbers of OTT-JAX 0.6.0 and POT, recorded in golden/values.json by golden/make.py.

With a tau below 1, OTT 0.6.0 returns the plan of another objective: its entropy is
-sum P (log P - 1), while its reg_ot_cost is a dual objective with KL(P | a b^T). There
the numbers under "kl" are compared with, which are those of the optimum with
KL(P | a b^T), found by OTT's iteration on a shifted cost and checked by the oracle.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref
from conftest import MESH_SHAPES

import ott_shard as otts
from ott_shard.status import Status

pytestmark = pytest.mark.wide

CASES = json.loads((Path(__file__).parent / "golden/values.json").read_text())["cases"]
COSTS = {
    "SqEuclidean": otts.costs.SqEuclidean(),
    "Euclidean": otts.costs.Euclidean(),
    "PNormP(1)": otts.costs.PNormP(1.0),
    "PNormP(1.5)": otts.costs.PNormP(1.5),
    "PNormP(3)": otts.costs.PNormP(3.0),
    "SqPNorm(1.5)": otts.costs.SqPNorm(1.5),
    "SqPNorm(3)": otts.costs.SqPNorm(3.0),
    "Cosine": otts.costs.Cosine(),
    "NegDotProduct": otts.costs.NegDotProduct(),
    "Arccos(0)": otts.costs.Arccos(0),
    "Arccos(1)": otts.costs.Arccos(1),
    "Arccos(2)": otts.costs.Arccos(2),
    "Elastic(0.5, 1)": otts.costs.Elastic(l1=0.5, l2=1.0),
}
# OTT divides by |x| |y| + 1e-8 where these divide by |x| |y|. Between points near the
# origin that is felt in the seventh digit of a cost, and an epsilon of 0.05 multiplies
# it by 20. With OTT's ridge all digits agree: see test_the_ridge_is_all_that_differs.
RIDGED = ("Cosine", "Arccos(0)", "Arccos(1)", "Arccos(2)")
DOUBLE, SINGLE = ((4, 2), "float64"), ((1, 8), "float32")
# A program is compiled for each: by default one mesh and dtype, and not all powers.
BY_DEFAULT = {(name, *SINGLE) for name in ("SqEuclidean", "PNormP(1)")} | {
    (name, *DOUBLE)
    for name in ("SqEuclidean", "Euclidean", "SqPNorm(1.5)", "Elastic(0.5, 1)")
    + ("NegDotProduct", "Cosine", "Arccos(2)")
}


def label(case):
    """Key of `COSTS`."""
    if "cost" not in case:
        return None
    numbers = ", ".join(f"{v:g}" for v in case["cost_parameters"].values())
    return case["cost"] + (f"({numbers})" if numbers else "")


def select(*kinds, **wanted):
    """Cases of these kinds that hold these values."""
    return [
        case
        for case in CASES
        if case["kind"] in kinds
        and wanted.items() <= (case | {"of": label(case)}).items()
    ]


def inputs(case, dtype=np.float64):
    """x, y, a, b as golden/make.py makes them, in float64 up to the last cast."""
    p = ref.problem(case["n"], case["m"], case["d"], zeros=case["weights"] == "zeros")
    uniform = case["weights"] == "uniform"
    a, b = (np.ones(len(w)) if uniform else w for w in (p.a, p.b))
    x, y = (np.sort(z, 0) if case.get("sorted") else z for z in (p.x, p.y))
    return [z.astype(dtype) for z in (x, y, a / a.sum(), b / b.sum() * case["mass_b"])]


def described(case):
    keys = ("kind", "weights", "mass_b", "tau_a", "tau_b", "epsilon", "scale_cost")
    return f"{label(case)} " + " ".join(f"{k}={case[k]}" for k in keys if k in case)


def on_shapes(names, by_default):
    """Names, meshes and dtypes; slow unless they are among `by_default`."""
    products = [
        (name, shape, dtype)
        for name in names
        for shape in MESH_SHAPES
        for dtype in ("float32", "float64")
    ]
    return pytest.mark.parametrize(
        ("name", "shape", "dtype"),
        [
            pytest.param(*p, marks=() if p in by_default else pytest.mark.slow)
            for p in products
        ],
        ids=[f"{name}-{n}x{m}-{dtype}" for name, (n, m), dtype in products],
    )


def compare(got, want, tol, what):
    """Every recorded number, to `tol` of its size.

    One that is a sum of both signs is of the size of what is summed.
    """
    sizes = {"grad_x_dot": "grad_x_norm", "reg_ot_cost": "primal_cost"}
    for field in got.keys() & want.keys():
        size = max(abs(want[field]), abs(want.get(sizes.get(field), 0)))
        error = abs(float(got[field]) - want[field])
        assert error <= tol * size, (
            f"{what}: {field} is {float(got[field])!r}, recorded is {want[field]!r}, "
            f"off by {error / size:.1e} of {size:.3g}"
        )


def norm_and_product(gradient):
    """What is recorded of a gradient [n, d]."""
    size = gradient.size
    direction = jnp.cos(jnp.arange(size, dtype=gradient.dtype)).reshape(gradient.shape)
    return {
        "grad_x_norm": jnp.linalg.norm(gradient),
        "grad_x_dot": jnp.vdot(gradient, direction),
    }


def tolerance(name, dtype):
    return max({"float32": 2e-5, "float64": 1e-8}[dtype], 1e-6 * (name in RIDGED))


# ------------------------------------------------------------------------- solutions


@functools.partial(jax.jit, static_argnames="mesh")
def solved(cost, points, weights, taus, epsilon, scale, threshold, mesh):
    """All that is recorded of a solution; compiled once for a cost, mesh and dtype."""
    (x, y), (a, b), (tau_a, tau_b) = points, weights, taus

    @functools.partial(jax.value_and_grad, has_aux=True)
    def run(x):
        geom = otts.PointCloud(
            x, y, cost_fn=cost, epsilon=epsilon, scale_cost=scale, mesh=mesh
        )
        limits = {"threshold": threshold, "max_iterations": 20_000}
        out = otts.solve(geom, a, b, tau_a=tau_a, tau_b=tau_b, **limits)
        return out.reg_ot_cost, out

    (value, out), gradient = run(x)
    numbers = {
        "reg_ot_cost": value,
        "primal_cost": out.primal_cost,
        "transport_mass": out.transport_mass,
        "scale": out.geom.scale_cost,
        "epsilon_used": out.epsilon,
    }
    return numbers | norm_and_product(gradient), out.code


def check(case, cost, shape, dtype, tol, scale=None, epsilon=None):
    """Solve a case and compare; scale and epsilon are given if they are relative."""
    x, y, a, b = inputs(case, dtype)
    scale = case.get("scale_cost", 1.0) if scale is None else scale
    epsilon = case["epsilon"] if epsilon is None else epsilon
    want = case | case.get("kl", {})
    threshold = 1e-12 * max(1, want["transport_mass"])  # one plan has a mass of 598
    numbers = (case["tau_a"], case["tau_b"], epsilon, scale, threshold)
    *taus, epsilon, scale, threshold = (np.asarray(v, dtype) for v in numbers)
    got, code = solved(
        *(cost, (x, y), (a, b), tuple(taus), epsilon, scale, threshold),
        mesh=otts.make_mesh(*shape),
    )
    status = Status(int(code))
    if scale < 0:  # OTT solves a problem with its sign changed
        assert status is Status.INVALID_INPUT, described(case)
        return
    # In float32 rounding keeps the error above the threshold.
    ends = {Status.CONVERGED} | ({Status.STALLED} if dtype == "float32" else set())
    assert status in ends, f"{described(case)}: {status.sentence}"
    if isinstance(case.get("scale_cost"), str):  # OTT differentiates the statistic
        got = {k: v for k, v in got.items() if "grad" not in k}
    compare(got, want, tol, described(case))


def is_relative(case):
    return isinstance(case.get("scale_cost"), str) or case["epsilon"] is None


@on_shapes(COSTS, BY_DEFAULT)
def test_solve(name, shape, dtype):
    """OTT's numbers and, for SqEuclidean, POT's."""
    with jax.enable_x64(dtype == "float64"):
        cases = [c for c in select("sinkhorn", "pot", of=name) if not is_relative(c)]
        assert len(cases) == 10 if name == "SqEuclidean" else 6
        for case in cases:
            check(case, COSTS[name], shape, dtype, tolerance(name, dtype))


@functools.partial(jax.jit, static_argnames=("settings", "mesh"))
def resolved(cost, x, y, settings, mesh):
    """(scale, epsilon) for each (scale_cost, epsilon) of `settings`."""
    clouds = [
        otts.PointCloud(x, y, cost_fn=cost, scale_cost=s, epsilon=e, mesh=mesh)
        for s, e in settings
    ]
    return [(geom.scale_cost, geom.epsilon) for geom in clouds]


@on_shapes(
    ["SqEuclidean", "Euclidean", "NegDotProduct", "Cosine"],
    {("SqEuclidean", *DOUBLE), ("NegDotProduct", *DOUBLE)},
)
def test_relative_scale_and_epsilon(name, shape, dtype):
    """The statistics, and what is solved with them."""
    cases = [c for c in select("sinkhorn", of=name) if is_relative(c)]
    tol = tolerance(name, dtype)
    with jax.enable_x64(dtype == "float64"):
        x, y, _, _ = inputs(cases[0], dtype)
        settings = tuple((case["scale_cost"], case["epsilon"]) for case in cases)
        found = resolved(COSTS[name], x, y, settings, mesh=otts.make_mesh(*shape))
        for case, (scale, epsilon) in zip(cases, found, strict=True):
            got = {"scale": scale, "epsilon_used": epsilon}
            compare(got, case, tol, described(case))
            check(case, COSTS[name], shape, dtype, tol, scale, epsilon)
    assert any(case["scale"] < 0 for case in cases) == (name == "NegDotProduct")


@pytest.mark.slow
def test_a_statistic_is_resolved_by_the_solver():
    """One that is negative, as the mean of these costs, makes the problem invalid."""
    by_scale = {
        case["scale_cost"]: case
        for case in select("sinkhorn", of="NegDotProduct", epsilon=0.1)
    }
    with jax.enable_x64(True):
        mesh, (x, y, a, b) = otts.make_mesh(4, 2), inputs(by_scale["mean"])

        def solve(scale_cost):
            geom = otts.PointCloud(
                *(x, y),
                cost_fn=COSTS["NegDotProduct"],
                epsilon=0.1,
                scale_cost=scale_cost,
                mesh=mesh,
            )
            return otts.solve(geom, a, b, threshold=1e-12)

        assert by_scale["mean"]["scale"] < 0
        assert solve("mean").status is Status.INVALID_INPUT
        out, want = solve("max_cost"), by_scale["max_cost"]
        assert out.status is Status.CONVERGED
        got = {"reg_ot_cost": out.reg_ot_cost, "scale": out.geom.scale_cost}
        compare(got, want, 1e-8, described(want))


def cosine_of_ott(x, y):
    return jnp.vdot(x, y) / (jnp.linalg.norm(x) * jnp.linalg.norm(y) + 1e-8)


def arccos_of_ott(n, x, y):
    cos = cosine_of_ott(x, y)
    t, lengths = jnp.arccos(cos), jnp.linalg.norm(x) * jnp.linalg.norm(y)
    j = [
        jnp.pi - t,
        jnp.sin(t) + (jnp.pi - t) * cos,
        3 * jnp.sin(t) * cos + (jnp.pi - t) * (1 + 2 * cos**2),
    ]
    return -jnp.log(lengths**n * j[n] / jnp.pi + 1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("name", RIDGED)
def test_the_ridge_is_all_that_differs(name):
    """Written with OTT's ridge, the cost gives OTT's numbers to the last digits."""
    fn = functools.partial(arccos_of_ott, int(name[-2])) if name != "Cosine" else None
    cost = otts.costs.Custom(fn or (lambda x, y: 1 - cosine_of_ott(x, y)))
    with jax.enable_x64(True):
        for case in select("sinkhorn", of=name):
            if not is_relative(case):
                check(case, cost, *DOUBLE, 1e-10)


# ----------------------------------------------------------------------- divergences


@functools.partial(jax.jit, static_argnames=("static_b", "mesh"))
def diverged(cost, points, weights, taus, epsilon, threshold, static_b, mesh):
    """As `solved`; with one tau in `taus`, updates are symmetric."""
    (x, y), (a, b) = points, weights

    @functools.partial(jax.value_and_grad, has_aux=True)
    def run(x):
        return otts.sinkhorn_divergence(
            *(x, y, a, b),
            cost_fn=cost,
            epsilon=epsilon,
            tau_a=taus[0],
            tau_b=taus[-1],
            static_b=static_b,
            threshold=threshold,
            mesh=mesh,
        )

    (value, out), gradient = run(x)
    codes = jnp.stack([term.code for term in out.outputs])
    return {"value": value} | norm_and_product(gradient), codes


DIVERGENCES = {
    f"{name}, {taus} taus{', static_b' * static_b}": (name, taus == "equal", static_b)
    for name in ("SqEuclidean", "Euclidean")
    for taus in ("equal", "other")
    for static_b in (False, True)
}


@on_shapes(
    DIVERGENCES,
    {
        ("SqEuclidean, equal taus", *DOUBLE),
        ("Euclidean, other taus, static_b", *DOUBLE),
    },
)
def test_divergence(name, shape, dtype):
    """Both terms of a cloud with itself have the two taus, as OTT's do."""
    cost, equal, static_b = DIVERGENCES[name]
    cases = [
        case
        for case in select("divergence", of=cost, static_b=static_b)
        if (case["tau_a"] == case["tau_b"]) == equal
    ]
    assert len(cases) == (2 if equal else 1)
    worst = Status.CONVERGED if dtype == "float64" else Status.STALLED
    with jax.enable_x64(dtype == "float64"):
        for case in cases:
            x, y, a, b = inputs(case, dtype)
            numbers = (case["epsilon"], 1e-12, case["tau_a"], case["tau_b"])
            epsilon, threshold, *taus = (np.asarray(v, dtype) for v in numbers)
            got, codes = diverged(
                *(COSTS[cost], (x, y), (a, b)),
                *(taus[:1] if equal else taus, epsilon, threshold),
                static_b=static_b,
                mesh=otts.make_mesh(*shape),
            )
            assert np.all(np.asarray(codes) <= worst), described(case)
            want = case | case.get("kl", {})
            compare(got, want, tolerance(cost, dtype), described(case))


# ------------------------------------------------------------------- no entropy, POT


@functools.partial(jax.jit, static_argnames="mesh")
def scheduled(cost, points, weights, schedule, threshold, mesh):
    geom = otts.PointCloud(*points, cost_fn=cost, epsilon=schedule, mesh=mesh)
    out = otts.solve(geom, *weights, threshold=threshold, max_iterations=20_000)
    return out.reg_ot_cost, out.primal_cost, out.epsilon, out.converged


@pytest.mark.parametrize("name", ["SqEuclidean", "Euclidean"])
@pytest.mark.parametrize(
    ("epsilon", "threshold"),
    [(1e-2, 1e-6), pytest.param(1e-3, 1e-4, marks=pytest.mark.slow)],
)
def test_without_entropy(name, epsilon, threshold):
    """The cost of POT's exact plan, come down to by a schedule.

    <C, P> + eps KL(P | a b^T) is least at our plan, and at the exact plan it is at most
    eps times the entropy of a above the exact cost. Our plan costs less than its share
    of KL above, and no less than exact, but for what its columns are off.
    """
    cases, schedule = select("pot_exact", of=name), otts.Epsilon(epsilon, 1.0, 0.95)
    assert len(cases) == 4
    with jax.enable_x64(True):
        mesh = otts.make_mesh(4, 2)
        for case in cases:
            x, y, a, b = inputs(case)
            # On a line in the plane, so that all cases are one program.
            x, y = (np.pad(z, ((0, 0), (0, 2 - case["d"]))) for z in (x, y))
            value, cost, used, converged = scheduled(
                COSTS[name], (x, y), (a, b), schedule, threshold, mesh=mesh
            )
            assert bool(converged), described(case)
            exact, off = case["exact_cost"], threshold * ref.COSTS[name](x, y).max()
            entropy = -sum(w * np.log(w) for w in a if w > 0)
            assert exact - off <= cost <= value, described(case)
            assert value <= exact + epsilon * entropy, described(case)
            assert cost <= exact + 0.5 * epsilon, described(case)  # as it turns out
            assert used == epsilon


def absolute(x, y):
    return jnp.sum(jnp.abs(x - y))


def test_two_points():
    """The reference measure of the entropy is a b^T: POT's "kl", not its "entropy"."""
    by_type = {case["reg_type"]: case for case in select("pot_two_points")}
    case = by_type["kl"]
    assert case["rho_a"] == case["rho_b"]
    tau = case["rho_a"] / (case["rho_a"] + case["epsilon"])
    with jax.enable_x64(True):
        points = np.array([[0.0], [1.0]])
        geom = otts.PointCloud(
            *(points, points),
            cost_fn=absolute,
            epsilon=case["epsilon"],
            mesh=otts.make_mesh(4, 2),
        )
        weights = np.asarray(case["a"]), np.asarray(case["b"])
        out = otts.solve(geom, *weights, tau_a=tau, tau_b=tau, threshold=1e-13)
        plan = np.asarray(out.matrix)
    np.testing.assert_allclose(plan, case["plan"], rtol=1e-10)
    np.testing.assert_allclose(plan.sum(), case["transport_mass"], rtol=1e-10)
    assert abs(plan.sum() - by_type["entropy"]["transport_mass"]) > 0.1
