"""Every cost: its values, its derivatives at awkward points, forbidden pairs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref
from jax.tree_util import Partial

import ott_shard as otts
from ott_shard import costs

EPSILON = 0.3
DISTANCES = {
    "SqEuclidean": costs.SqEuclidean(),
    "Euclidean": costs.Euclidean(),
    "PNormP(1)": costs.PNormP(1),
    "PNormP(1.5)": costs.PNormP(1.5),
    "PNormP(2)": costs.PNormP(2),
    "PNormP(3)": costs.PNormP(3),
    "SqPNorm(1)": costs.SqPNorm(1),
    "SqPNorm(1.5)": costs.SqPNorm(1.5),
    "SqPNorm(3)": costs.SqPNorm(3),
    "Elastic": costs.Elastic(l1=0.5, l2=1.0),
    "Cosine": costs.Cosine(),
    "Custom": costs.Custom(lambda x, y: jnp.linalg.norm(x - y)),
}
SIMILARITIES = {
    "NegDotProduct": costs.NegDotProduct(),
    **{f"Arccos({n})": costs.Arccos(n) for n in (0, 1, 2)},
}
COSTS = DISTANCES | SIMILARITIES


def plainly(name, x, y):
    """Each cost as its definition says, in float64."""
    z = x[:, None] - y[None]
    size = np.abs(z)
    lengths = np.outer(np.linalg.norm(x, axis=1), np.linalg.norm(y, axis=1))
    dot = x @ y.T
    angle = np.arccos(np.clip(dot / lengths, -1, 1))
    sin, cos, rest = np.sin(angle), np.cos(angle), np.pi - angle
    arccos = [rest, sin + rest * cos, 3 * sin * cos + rest * (1 + 2 * cos**2)]
    formulas = {
        "SqEuclidean": lambda: (z**2).sum(-1),
        "Euclidean": lambda: np.sqrt((z**2).sum(-1)),
        "Custom": lambda: np.sqrt((z**2).sum(-1)),
        "PNormP": lambda p: (size**p).sum(-1) / p,
        "SqPNorm": lambda p: (size**p).sum(-1) ** (2 / p) / 2,
        "Elastic": lambda: (0.5 * size + z**2 / 2).sum(-1),
        "Cosine": lambda: 1 - dot / lengths,
        "NegDotProduct": lambda: -dot,
        "Arccos": lambda n: -np.log(lengths**n * arccos[int(n)] / np.pi + 1e-8),
    }
    kind, _, parameter = name.removesuffix(")").partition("(")
    return formulas[kind](*([float(parameter)] if parameter else []))


# ------------------------------------------------------------------ of one tile


@pytest.mark.parametrize(
    "d", [3, 20, *(pytest.param(d, marks=pytest.mark.slow) for d in (1, 8, 9))]
)
@pytest.mark.parametrize("name", COSTS)
def test_values(name, d):
    """Up to 8 dimensions coordinates are summed at once, beyond in pieces."""
    rng = np.random.default_rng(d)
    x, y = (rng.normal(size=(k, d)).astype(np.float32) for k in (5, 7))
    want = plainly(name, x.astype(np.float64), y.astype(np.float64))
    got = COSTS[name].pairwise(x, y, "highest")
    assert got.dtype == np.float32
    if name.startswith("Arccos"):  # the kernel of opposite vectors is all rounding
        got, want = np.exp(-np.asarray(got)), np.exp(-want)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    if isinstance(COSTS[name], costs.BilinearCost):
        product = COSTS[name].left(x) @ COSTS[name].right(y).T
        np.testing.assert_allclose(product, want, rtol=1e-4, atol=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("name", COSTS)
def test_derivatives(name):
    """Forward and reverse mode of a weighted sum, against finite differences."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(1)
        x, y = (jnp.asarray(rng.normal(size=(k, 10))) for k in (4, 5))
        weights = jnp.asarray(rng.normal(size=(4, 5)))

        def total(x, y):
            return jnp.vdot(weights, COSTS[name].pairwise(x, y, "highest"))

        dx, dy = (jnp.asarray(rng.normal(size=z.shape)) for z in (x, y))
        _, forward = jax.jvp(total, (x, y), (dx, dy))
        slopes = jax.grad(total, (0, 1))(x, y)
        np.testing.assert_allclose(
            jnp.vdot(slopes[0], dx) + jnp.vdot(slopes[1], dy), forward, rtol=1e-10
        )
        h = 1e-6
        difference = total(x + h * dx, y + h * dy) - total(x - h * dx, y - h * dy)
        np.testing.assert_allclose(forward, difference / (2 * h), rtol=1e-6)


@pytest.mark.wide
@pytest.mark.parametrize("d", [pytest.param(3, marks=pytest.mark.slow), 12])
@pytest.mark.parametrize("name", COSTS)
def test_equal_points(name, d):
    """No NaN anywhere; a distance is 0 there, and so is its derivative."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, d)).astype(np.float32)
    x[1], x[2] = x[0], 0

    def diagonal(x, y):
        return jnp.trace(COSTS[name].pairwise(x, y, "highest"))

    value, slopes = jax.value_and_grad(diagonal, (0, 1))(x, x)
    everything = jax.grad(lambda x: COSTS[name].pairwise(x, x, "highest").sum())(x)
    assert np.all(np.isfinite(everything))
    assert np.all(np.isfinite(value)) and np.all(np.isfinite(slopes))
    if name in DISTANCES:
        assert value == 0
        if name != "Cosine":  # the chord's derivative rounds
            np.testing.assert_array_equal(slopes, np.zeros_like(slopes))
        np.testing.assert_allclose(slopes, np.zeros_like(slopes), atol=1e-6)


@pytest.mark.wide
@pytest.mark.parametrize(
    "p", [1.5, *(pytest.param(p, marks=pytest.mark.slow) for p in (1.0, 2.0, 3.0))]
)
def test_no_second_derivative_is_nan(p):
    x = jnp.asarray([[0.5, 0.0, 1.0]])
    y = jnp.asarray([[0.5, 0.0, 0.0]])  # two coordinates are equal
    for cost in (costs.PNormP(p), costs.SqPNorm(p), costs.Euclidean()):
        for ends in ((x, y), (x, x)):
            hessian = jax.hessian(lambda z, w, c=cost: c.pairwise(z, w).sum())(*ends)
            assert np.all(np.isfinite(hessian)), (cost, ends)


def test_no_two_costs_are_one_structure():
    """Else a program compiled for one may be taken for the other."""
    structures = [jax.tree.structure(cost) for cost in COSTS.values()]
    for k, one in enumerate(structures):
        assert all(one != other for other in structures[:k])
    for cost in COSTS.values():
        assert repr(jax.tree.map(lambda leaf: leaf, cost)) == repr(cost)


def test_costs_registered_by_jax_are_told_apart():
    """Two dataclasses with the same fields, alone or as a function, are not one."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Once:
        translation_invariant = True

        def pairwise(self, x, y, precision):
            return costs.SqEuclidean().pairwise(x, y, precision)

        def __call__(self, x, y):
            return jnp.sum((x - y) ** 2)

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Twice(Once):
        pass

    for make in (lambda cost: cost, costs.Custom):
        one, two = (
            jax.tree.structure(otts.PointCloud([[0.0]], [[1.0]], cost_fn=make(kind())))
            for kind in (Once, Twice)
        )
        assert one != two


def test_cosine_of_long_short_and_zero_vectors():
    """Lengths whose squares overflow or vanish in float32 do not matter."""
    x = jnp.asarray([[1e30, 0.0], [0.0, 1e-30], [0.0, 0.0]])
    got = costs.Cosine().pairwise(x, x)
    np.testing.assert_allclose(got, [[0, 1, 1], [1, 0, 1], [1, 1, 0]], atol=1e-6)
    slopes = jax.grad(lambda x: costs.Cosine().pairwise(x, x[::-1]).sum())(x)
    assert np.all(np.isfinite(slopes)) and not np.any(slopes[2])


# -------------------------------------------------------- a function of two points


def test_a_function_of_two_points():
    """Its value, and derivatives in points and in parameters, through a solution."""
    p = ref.problem(13, 21)
    x, y, a, b = p.cast(jnp.float32)
    mesh = otts.make_mesh(4, 2)

    def powered(scale, power, x, y):
        return scale * jnp.sum(jnp.abs(x - y) ** power)

    @functools.partial(jax.jit, static_argnums=0)
    @functools.partial(jax.value_and_grad, argnums=(1, 2))
    def solve(make, scale, x):
        geom = otts.PointCloud(x, y, cost_fn=make(scale), epsilon=EPSILON, mesh=mesh)
        return otts.solve(geom, a, b, min_iterations=50).reg_ot_cost

    own, mine = solve(lambda s: Partial(powered, s, 2), 2.0, x)
    known, theirs = solve(lambda s: costs.Elastic(l1=0.0, l2=2 * s), 2.0, x)
    np.testing.assert_allclose(own, known, rtol=1e-5)
    for got, want in zip(mine, theirs, strict=True):
        ref.assert_close(got, want, 1e-5)


@costs.register
@dataclasses.dataclass(frozen=True)
class Skew:
    """x^T A y, of which A is not symmetric."""

    translation_invariant = False

    def left(self, x):
        return x @ jnp.asarray([[1.0, 2.0, 0.0], [0.0, 1.0, 0.0], [-1.0, 0.0, 1.0]])

    def right(self, y):
        return y

    def pairwise(self, x, y, precision="highest"):
        return jnp.matmul(self.left(x), y.T, precision=precision)


def one_way(x, y):
    """A function in which the order counts, and forbids pairs."""
    away = jnp.sum((2 * x - y) ** 2) + jnp.maximum(x[0] - y[0], 0.0)
    return jnp.where(x[1] - 2 * y[1] < 3, away, jnp.inf)


@pytest.mark.parametrize(
    "cost",
    [pytest.param(Skew(), marks=pytest.mark.slow), one_way],
    ids=["bilinear", "function"],
)
def test_the_order_of_points_counts(cost):
    p = ref.problem(13, 21)
    with jax.enable_x64(True):
        x, y, a, b = (np.asarray(z, np.float64) for z in (p.x, p.y, p.a, p.b))
        mesh = otts.make_mesh(4, 2)

        def value(x):
            geom = otts.PointCloud(x, y, cost_fn=cost, epsilon=EPSILON, mesh=mesh)
            out = otts.solve(geom, a, b / b.sum() * a.sum(), threshold=1e-10)
            return out.reg_ot_cost, out

        (got, out), slope = jax.value_and_grad(value, has_aux=True)(x)
        dense = out.geom.cost_fn.pairwise(jnp.asarray(x), jnp.asarray(y))
        want = ref.sinkhorn(np.asarray(dense), a, b, EPSILON, iterations=2000)
        assert out.converged
        ref.assert_close(out.matrix, want.plan, 1e-7)
        np.testing.assert_allclose(got, want.reg_ot_cost, rtol=1e-7)
        ref.assert_close(out.marginal(0), b, 1e-7)
        ref.assert_close(out.marginal(1), a, 1e-7)
        v = np.random.default_rng(0).normal(size=x.shape)
        ends = [value(x + t * v)[0] for t in (1e-5, -1e-5)]
        np.testing.assert_allclose(np.sum(slope * v), (ends[0] - ends[1]) / 2e-5, 1e-4)
        divergence = otts.sinkhorn_divergence(x, x, cost_fn=cost, epsilon=EPSILON)[0]
        np.testing.assert_allclose(divergence, 0, atol=1e-3)


def test_a_kink_of_a_function_is_mended_only_where_it_is_one():
    """sqrt at 0 has no slope: 0 is taken. A dot product has one: it is kept."""
    x = jnp.asarray([[1.0, 2.0], [3.0, 4.0]])
    norm = costs.Custom(lambda x, y: jnp.sqrt(jnp.sum((x - y) ** 2)))
    dot = costs.Custom(lambda x, y: -x @ y)
    for cost, want in ((norm, np.zeros((2, 2))), (dot, -np.asarray(x))):
        slope = jax.grad(lambda z, c=cost: jnp.trace(c.pairwise(z, x)))(x)
        np.testing.assert_allclose(slope, want, rtol=1e-6)


@pytest.mark.wide
@pytest.mark.parametrize("taus", [(1.0, 1.0), (0.9, 0.8)])
def test_forbidden_pairs(taus):
    """An infinite cost takes its pair out of plan, value, statistics and gradients."""
    kinds = np.arange(8) % 2
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 8, 3)).astype(np.float32)
    x[:, 0], y[:, 0] = kinds, kinds

    def within_kind(x, y):
        return jnp.where(x[0] == y[0], jnp.sum((x - y) ** 2), jnp.inf)

    geom = otts.PointCloud(
        x, y, cost_fn=within_kind, epsilon=EPSILON, mesh=otts.make_mesh(2, 2)
    )
    out = otts.solve(geom, tau_a=taus[0], tau_b=taus[1], threshold=1e-5)
    assert bool(out.converged)
    same = kinds[:, None] == kinds[None]
    cost = ref.sqeuclidean(x.astype(np.float64), y.astype(np.float64))
    w = np.full(8, 1 / 8)
    np.testing.assert_allclose(
        geom.cost_statistics(),
        (cost[same].mean(), cost[same].std(), cost[same].max()),
        rtol=1e-5,
    )
    with np.errstate(invalid="ignore"):
        want = ref.sinkhorn(
            np.where(same, cost, 1e3),  # far enough: exp(-1000 / 0.3) = 0
            *(w, w, EPSILON),
            iterations=500,
            tau_a=taus[0],
            tau_b=taus[1],
        )
    ref.assert_close(out.matrix, want.plan, 1e-4)
    assert not np.any(np.asarray(out.matrix)[~same])
    for field in ("reg_ot_cost", "primal_cost"):
        ref.assert_close(getattr(out, field), getattr(want, field), 1e-4, field)

    @functools.partial(jax.grad, argnums=(0, 1, 2))
    def gradient(x, epsilon, a):
        geom = otts.PointCloud(x, y, cost_fn=within_kind, epsilon=epsilon)
        out = otts.solve(geom, a, tau_a=taus[0], tau_b=taus[1])
        return out.reg_ot_cost

    for slope in gradient(jnp.asarray(x), EPSILON, jnp.asarray(w, jnp.float32)):
        assert np.all(np.isfinite(slope))


def test_a_point_that_may_go_nowhere():
    """Balanced, no plan exists: said, not converged."""
    geom = otts.PointCloud(
        jnp.asarray([[0.0], [1.0]]),
        jnp.asarray([[0.0], [2.0]]),
        cost_fn=lambda x, y: jnp.where(x[0] == 1, jnp.inf, jnp.abs(x[0] - y[0])),
        epsilon=EPSILON,
        mesh=otts.make_mesh(2, 2),
    )
    out = otts.solve(geom)
    assert not bool(out.converged)
    with pytest.raises(RuntimeError, match="forbidden.*Not finite: the potentials"):
        out.raise_if_failed()
