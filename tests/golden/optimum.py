"""The optimum with KL(P | a b^T) by OTT-JAX, checked by the reference; costs.

OTT 0.6.0 iterates f = tau_a (epsilon log a - lse): with a tau below 1 the plan is that
of the entropy -sum P (log P - 1), not of KL(P | a b^T). On the cost
C - epsilon log(a b^T) the two are one problem, and the potentials that OTT returns are
those of the reference, phi and psi.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import reference as ref
from ott.geometry import costs, geometry, regularizers
from ott.problems.linear import linear_problem
from ott.solvers.linear import sinkhorn

COSTS = [
    ("SqEuclidean", {}),
    ("Euclidean", {}),
    *(("PNormP", {"p": p}) for p in (1.0, 1.5, 3.0)),
    *(("SqPNorm", {"p": p}) for p in (1.5, 3.0)),
    ("Cosine", {}),
    ("NegDotProduct", {}),
    *(("Arccos", {"n": n}) for n in (0, 1, 2)),
    ("Elastic", {"l1": 0.5, "l2": 1.0}),
]


def same(one, other, tol=1e-10):
    np.testing.assert_allclose(one, other, rtol=tol, atol=tol)


def cost_fn(name, p):
    """The cost of OTT."""
    if name == "Elastic":
        return costs.RegTICost(regularizers.L1(), lam=p["l1"], rho=p["l2"])
    return getattr(costs, name)(**p)


def cost_matrix(name, p, x, y):
    """The same cost by its formula, to check what is recorded."""
    z = np.abs(x[:, None] - y[None])
    dot, norms = x @ y.T, np.outer(*(np.sqrt((v**2).sum(-1)) for v in (x, y)))
    if name == "Arccos":
        t, n = np.arccos(dot / (norms + 1e-8)), p["n"]
        j = [
            np.pi - t,
            np.sin(t) + (np.pi - t) * np.cos(t),
            1.5 * np.sin(2 * t) + (np.pi - t) * (1 + 2 * np.cos(t) ** 2),
        ][n]
        return -np.log(norms**n * j / np.pi + 1e-8)
    return {
        "SqEuclidean": lambda: (z**2).sum(-1),
        "Euclidean": lambda: np.sqrt((z**2).sum(-1)),
        "PNormP": lambda p: (z**p).sum(-1) / p,
        "SqPNorm": lambda p: (z**p).sum(-1) ** (2 / p) / 2,
        "Cosine": lambda: 1 - dot / (norms + 1e-8),
        "NegDotProduct": lambda: -dot,
        "Elastic": lambda l1, l2: (l1 * z + l2 / 2 * z**2).sum(-1),
    }[name](**p)


@partial(jax.jit, static_argnames=("tau_a", "tau_b"))
def ott_potentials(cost, a, b, epsilon, threshold, tau_a, tau_b):
    geom = geometry.Geometry(cost, epsilon=epsilon)
    prob = linear_problem.LinearProblem(geom, a, b, tau_a, tau_b)
    out = sinkhorn.Sinkhorn(threshold=threshold, max_iterations=20_000)(prob)
    return out.f, out.g, out.converged, out.n_iters


def solution(cost, a, b, epsilon, tau, threshold=1e-12):
    """OTT's solution where weights are positive, filled up with zeros."""
    rows, columns = a > 0, b > 0
    here = np.ix_(rows, columns)
    reference_measure = epsilon * np.log(np.outer(a[rows], b[columns]))
    f, g, converged, n_iters = ott_potentials(
        cost[here] - reference_measure,
        *(a[rows], b[columns], epsilon, threshold),
        *tau,
    )
    assert converged
    phi, psi = np.zeros(len(a)), np.zeros(len(b))
    phi[rows], psi[columns] = f, g
    mine = ref.Solution(cost, a, b, epsilon, *tau, phi, psi, np.zeros(0))
    again = ref.sinkhorn(
        cost, a, b, epsilon, iterations=2 * int(n_iters), tau_a=tau[0], tau_b=tau[1]
    )
    for other in (mine.primal_objective, again.reg_ot_cost, again.primal_objective):
        same(mine.reg_ot_cost, other)
    same(mine.plan, again.plan)
    return mine


def gradient(fn, plan, x, y):
    """d <C(x, y), P> / dx; y None is x itself."""

    def linear(x):
        return jnp.vdot(plan, fn.all_pairs(x, x if y is None else y))

    return jax.grad(linear)(x)


def divergence(name, x, y, a, b, epsilon, taus, static_b):
    """The debiased divergence and its gradient; taus for its terms xy, xx and yy."""
    sides = ((x, y, (a, b)), (x, x, (a, a)), (y, y, (b, b)))
    xy, xx, yy = (
        solution(cost_matrix(name, {}, *points), *weights, epsilon, tau)
        for (*points, weights), tau in zip(sides, taus, strict=True)
    )
    fn, whole = cost_fn(name, {}), ref.Divergence(xy, xx, yy)
    grad = gradient(fn, xy.plan, x, y) - gradient(fn, xx.plan, x, None) / 2
    same(grad, whole.grad_x(name, x, y))
    return whole.value + (yy.reg_ot_cost / 2 if static_b else 0), grad
