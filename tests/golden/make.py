"""Write values.json: numbers of OTT-JAX and POT that the tests compare with.

    python -m venv peers
    peers/bin/pip install ott-jax==0.6.0 jax==0.8.0 POT==0.9.7.post1
    peers/bin/python tests/golden/make.py

Made with Python 3.12. The tests themselves read the file and need none of these.

Inputs: points and weights are `reference.problem(n, m, d, zeros=weights == "zeros")`,
weights each divided by their sum, in float64 ("uniform": 1 / n, 1 / m), then b times
`mass_b`. Where `sorted` is true the points alone are sorted. Everything is in float64.
`epsilon` null is OTT's default, `epsilon_used` what it came to. Cosine and Arccos have
OTT's ridge of 1e-8. `grad_x_dot` is the product with cos(arange(n d)), shaped [n, d].
The cost is divided by `scale`; OTT's gradient goes through it, not through epsilon.

"sinkhorn" and "divergence" hold what OTT returns. OTT warns of NaN gradients at points
of weight zero, but those of reg_ot_cost are all finite here, zero at such points.

With a tau below 1 OTT 0.6.0 finds the plan of the entropy -sum P (log P - 1), not of
KL(P | a b^T), while reg_ot_cost is a dual objective of the latter: it lies below its
optimum, and the gradient returned need not be its derivative. There, "kl" holds the
numbers at the optimum (see optimum.py) of

    <C, P> + epsilon KL(P | a b^T) + rho_a KL(P 1 | a) + rho_b KL(P^T 1 | b),

rho = epsilon tau / (1 - tau), and `kl_gap` is the value there less OTT's. In OTT's
divergence both terms of a cloud with itself have the two taus, and in "kl" also;
"kl_own" has tau_a twice for x with itself and tau_b twice for y. A divergence with
static_b leaves out the term of y.
"""

import importlib.metadata
import json
import platform
import sys
import warnings
from functools import partial
from pathlib import Path

import jax
import numpy as np
import ot
from ott.geometry import pointcloud
from ott.problems.linear import linear_problem
from ott.solvers.linear import sinkhorn
from ott.tools import sinkhorn_divergence

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import optimum  # noqa: E402 (the path comes first)
import reference as ref  # noqa: E402 (likewise)

BALANCED, UNBALANCED, SEMI, EQUAL = (1.0, 1.0), (0.8, 0.6), (1.0, 0.7), (0.7, 0.7)


def inputs(weights, mass_b=1.0, n=13, m=21, d=3, **more):
    """The recorded description of the inputs, and the inputs: x, y, a, b."""
    p = ref.problem(n, m, d, zeros=weights == "zeros")
    uniform = weights == "uniform"
    a, b = (np.ones(len(w)) if uniform else w for w in (p.a, p.b))
    record = {"n": n, "m": m, "d": d, "weights": weights, "mass_b": mass_b, **more}
    return record, (p.x, p.y, a / a.sum(), b / b.sum() * mass_b)


def described(kind, name, p, record, tau, epsilon):
    record = {"kind": kind, "cost": name, "cost_parameters": p, **record}
    return record | {"tau_a": tau[0], "tau_b": tau[1], "epsilon": epsilon}


def gradient(g):
    g = np.asarray(g)
    assert np.isfinite(g).all()
    direction = np.cos(np.arange(g.size)).reshape(g.shape)
    return floats(grad_x_norm=np.linalg.norm(g), grad_x_dot=np.vdot(g, direction))


def floats(**numbers):
    return {name: float(number) for name, number in numbers.items()}


def outcome(reg_ot_cost, cost, plan, grad_x):
    """What is recorded of a solution."""
    values = {"primal_cost": (plan * cost).sum(), "transport_mass": plan.sum()}
    return floats(reg_ot_cost=reg_ot_cost, **values) | gradient(grad_x)


def solve(name, p, weights, tau, epsilon, mass_b=1.0, scale_cost=1.0):
    """One solution of OTT."""
    record, (x, y, a, b) = inputs(weights, mass_b)
    fn = optimum.cost_fn(name, p)
    # This cost is so negative that the plan has a mass of hundreds.
    heavy = (name, p) == ("Arccos", {"n": 2}) and tau == UNBALANCED
    threshold = 1e-9 if heavy else 1e-12

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def run(x):
        geom = pointcloud.PointCloud(
            x, y, cost_fn=fn, epsilon=epsilon, scale_cost=scale_cost
        )
        prob = linear_problem.LinearProblem(geom, a, b, *tau)
        out = sinkhorn.Sinkhorn(threshold=threshold, max_iterations=20_000)(prob)
        # out.primal_cost is wrong or fails for some scales, so it is not used.
        made = out.matrix, geom.cost_matrix, 1 / geom.inv_scale_cost, geom.epsilon
        return out.reg_ot_cost, (out.converged, *made)

    (value, (converged, plan, cost, scale, used)), grad_x = run(x)
    assert converged and not np.asarray(grad_x)[a == 0].any()
    optimum.same(cost, optimum.cost_matrix(name, p, x, y) / scale, 1e-12)
    record = described("sinkhorn", name, p, record, tau, epsilon)
    record |= {"scale_cost": scale_cost, **floats(scale=scale, epsilon_used=used)}
    record |= outcome(value, cost, plan, grad_x)
    kl = optimum.solution(np.asarray(cost), a, b, float(used), tau, threshold)
    kl_grad = optimum.gradient(fn, kl.plan, x, y) / scale
    kl_record = outcome(kl.reg_ot_cost, cost, kl.plan, kl_grad)
    if tau != BALANCED:
        gap = kl.reg_ot_cost - float(value)
        return record | {"kl_gap": gap, "kl": kl_record}
    if scale_cost != 1.0:  # the gradient through the scale is OTT's alone
        kl_record = {k: v for k, v in kl_record.items() if "grad" not in k}
    for key, number in kl_record.items():
        optimum.same(record[key], number, 1e-9)
    return record


def divergence(name, tau, static_b):
    """One debiased divergence of OTT, and what it is with KL(P | a b^T)."""
    epsilon, mass_b = 0.3, 1.5 if tau != BALANCED else 1.0
    record, (x, y, a, b) = inputs("positive", mass_b)
    fn = optimum.cost_fn(name, {})
    limits = {"threshold": 1e-12, "max_iterations": 20_000}
    solver = {"solve_kwargs": {"tau_a": tau[0], "tau_b": tau[1], **limits}}

    @jax.jit
    def run(x):
        value, out = sinkhorn_divergence.sinkdiv(
            *(x, y), a=a, b=b, cost_fn=fn, epsilon=epsilon, static_b=static_b, **solver
        )
        return value, out.converged[: 2 if static_b else 3]

    # The value that comes with the gradient is another: to differentiate a norm at 0,
    # OTT puts ones there, so that the cost of a point with itself becomes sqrt(d).
    value, converged = run(x)
    assert all(converged)
    grad_x, _ = jax.grad(run, has_aux=True)(x)
    record = described("divergence", name, {}, record, tau, epsilon)
    record |= {"static_b": static_b, "value": float(value), **gradient(grad_x)}

    def with_kl(tau_x, tau_y):
        taus = tau, tau_x, tau_y
        value, grad = optimum.divergence(name, x, y, a, b, epsilon, taus, static_b)
        return {"value": value, **gradient(grad)}

    kl = with_kl(tau, tau)
    if tau != BALANCED:
        own = with_kl((tau[0], tau[0]), (tau[1], tau[1]))
        return record | {"kl_gap": kl["value"] - float(value), "kl": kl, "kl_own": own}
    for key, number in kl.items():
        optimum.same(record[key], number, 1e-9)
    return record


def pot(tau, mass_b=1.0):
    """Plans of POT."""
    name, epsilon = "SqEuclidean", 0.3
    record, (x, y, a, b) = inputs("positive", mass_b)
    cost = optimum.cost_matrix(name, {}, x, y)
    limits = {"numItermax": 20_000, "stopThr": 1e-13}
    if tau == BALANCED:
        plan = ot.bregman.sinkhorn(a, b, cost, epsilon, "sinkhorn_log", **limits)
    else:
        rho = [ref.rho(epsilon, t) for t in tau]
        plan = ot.unbalanced.sinkhorn_unbalanced(
            a, b, cost, epsilon, rho, reg_type="kl", **limits
        )
    optimum.same(plan, optimum.solution(cost, a, b, epsilon, tau).plan)
    record = described("pot", name, {}, record, tau, epsilon)
    return record | floats(primal_cost=(plan * cost).sum(), transport_mass=plan.sum())


def pot_two_points(reg_type):
    """A plan that POT changed between releases, with its reference measure."""
    record = {"a": [0.5, 0.5], "b": [0.5, 0.5], "cost_matrix": [[0.0, 1.0], [1.0, 0.0]]}
    a, b, cost = (np.asarray(v) for v in record.values())
    record |= {"epsilon": 1.0, "rho_a": 1.0, "rho_b": 1.0, "reg_type": reg_type}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "If reg_type = entropy")
        plan = ot.unbalanced.sinkhorn_unbalanced(
            a, b, cost, 1.0, 1.0, reg_type=reg_type, stopThr=1e-15
        )
    record |= {"plan": plan.tolist(), "transport_mass": float(plan.sum())}
    return {"kind": "pot_two_points", **record}


def pot_exact(name, d, weights):
    """Optimal transport without entropy."""
    record, (x, y, a, b) = inputs(weights, n=50, m=50, d=d, sorted=d == 1)
    if d == 1:
        x, y = np.sort(x, 0), np.sort(y, 0)
    cost = optimum.cost_matrix(name, {}, x, y)
    value = ot.emd2(a, b, cost, numItermax=1_000_000)
    if d == 1:
        optimum.same(value, ot.emd2_1d(x, y, a, b, metric=name.lower()), 1e-12)
    if d == 1 and weights == "uniform":
        optimum.same(value, np.diag(cost).mean(), 1e-12)
    record = {"kind": "pot_exact", "cost": name, "cost_parameters": {}, **record}
    return record | floats(exact_cost=value)


def cases():
    for name, p in optimum.COSTS:
        epsilon = 0.05 if name in ("Cosine", "Arccos") else 0.3
        for tau in (BALANCED, UNBALANCED, SEMI):
            yield solve(name, p, "uniform", tau, epsilon)
            mass_b = 1.5 if tau == UNBALANCED else 1.0
            yield solve(name, p, "zeros", tau, epsilon, mass_b)
    # The mean of NegDotProduct is negative here, and so is its scale.
    scales = {"mean": 3, "max_cost": 3, "max_norm": 2, "max_bound": 2}
    for scale_cost, supported in scales.items():
        for name in ("SqEuclidean", "NegDotProduct", "Cosine")[:supported]:
            yield solve(name, {}, "uniform", BALANCED, 0.1, scale_cost=scale_cost)
    for name in ("SqEuclidean", "Euclidean", "Cosine", "NegDotProduct"):
        yield solve(name, {}, "uniform", BALANCED, None)
    yield solve("SqEuclidean", {}, "uniform", BALANCED, None, scale_cost="mean")
    for name in ("SqEuclidean", "Euclidean"):
        for tau in (BALANCED, UNBALANCED, EQUAL):
            yield from (divergence(name, tau, static_b) for static_b in (False, True))
    yield from (pot(tau) for tau in (BALANCED, SEMI))
    yield from (pot(tau, mass_b=1.5) for tau in (UNBALANCED, EQUAL))
    yield from (pot_two_points(reg_type) for reg_type in ("kl", "entropy"))
    for name in ("SqEuclidean", "Euclidean"):
        for d in (1, 2):
            yield from (pot_exact(name, d, weights) for weights in ("uniform", "zeros"))


def main():
    packages = ("ott-jax", "jax", "POT")
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in packages}
    jax.config.update("jax_enable_x64", True)
    lines = [json.dumps(case, allow_nan=False) for case in cases()]
    text = f'{{"versions": {json.dumps(versions)},\n"cases": [\n'
    (HERE / "values.json").write_text(text + ",\n".join(lines) + "\n]}\n")


if __name__ == "__main__":
    main()
