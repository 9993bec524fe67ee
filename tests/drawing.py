"""Drawn problems: what is drawn, where it is solved, and the one program for that.

Points are multiples of 1/64, so that moving, turning and doubling them is exact in
float32 too: only the solver rounds.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest
import reference as ref
from hypothesis import example, given, settings, strategies as st
from hypothesis.extra import numpy as hnp

import ott_shard as otts

N, M, D = 11, 7, 3
COSTS = {"SqEuclidean": otts.costs.SqEuclidean(), "Euclidean": otts.costs.Euclidean()}
POWER = {"SqEuclidean": 2, "Euclidean": 1}  # of the unit of length, in a cost
FIELDS = (
    *("f", "g", "reg_ot_cost", "matrix", "marginal_error", "error_floor"),
    *("code", "n_iters"),
)
ANY_ERROR = 1e6  # a threshold that ends the iteration after min_iterations
SMALL_ERROR = {"float32": 1e-5, "float64": 1e-11}
LIMITS = {"min_iterations": 20, "max_iterations": 400}


# ------------------------------------------------------------------ what is drawn


def integers(*shape, most):
    # Without `nothing` most entries would be one and the same.
    elements = st.integers(-most, most)
    return hnp.arrays(np.int64, shape, elements=elements, fill=st.nothing())


@st.composite
def clouds(draw, size):
    """Points anywhere, in clusters, on a line, or copies of a few."""
    kind = draw(st.sampled_from(["anywhere", "clusters", "line", "copies"]))
    if kind == "anywhere":
        return draw(integers(size, D, most=64)) / 64
    if kind == "line":
        return draw(integers(size, 1, most=8)) * draw(integers(1, D, most=8)) / 64
    points = draw(integers(3, D, most=64))[abs(draw(integers(size, most=2)))]
    if kind == "clusters":
        points = points + draw(integers(size, D, most=2))
    return points / 64


@st.composite
def weights(draw, size):
    """Of mass 1: equal, or zeros and all magnitudes down to 1e-30."""
    if draw(st.booleans()):
        return np.full(size, 1 / size)
    exponents = st.sampled_from([0.0, 0.2, 0.5, 1.0, 3.0, 8.0, 30.0, np.inf])
    w = 10.0 ** -np.asarray(draw(st.lists(exponents, min_size=size, max_size=size)))
    w[draw(st.integers(0, size - 1))] = 1
    return w / w.sum()


class Drawn(NamedTuple):
    """A problem before it is cast; epsilon in units of the largest cost."""

    x: np.ndarray
    y: np.ndarray
    a: np.ndarray
    b: np.ndarray
    epsilon: float


def problems(n=N, m=M, exponents=(-3, 1)):
    return st.builds(
        lambda x, y, shift, a, b, k: Drawn(x, y + shift, a, b, 10.0**k),
        clouds(n),
        clouds(m),
        st.sampled_from([0, 0, 1, 3]),
        weights(n),
        weights(m),
        st.floats(*exponents),
    )


def powers_of_ten(low, high):
    return st.floats(low, high).map(lambda k: 10.0**k)


# ------------------------------------------------------------- where it is solved


class Where(NamedTuple):
    """A cost, a mesh and a dtype."""

    name: str
    shape: tuple[int, int]
    dtype: str


ALL = [
    Where("SqEuclidean", (1, 1), "float32"),
    Where("Euclidean", (4, 2), "float64"),
    Where("Euclidean", (1, 1), "float32"),
    Where("SqEuclidean", (4, 2), "float64"),
]
FEW, MANY = 25, 150


def for_all(*examples, usual=3, **strategies):
    """Test of a property, check(where, **drawn): few draws by default, many if slow.

    By default in the first `usual` places of `ALL`: what needs a program of its own
    takes its time for that.
    """
    cases = [pytest.param(w, FEW, id=f"{w.name}-{w.dtype}") for w in ALL[:usual]]
    for w in ALL:
        label = f"{w.name}-{w.dtype}-many"
        cases.append(pytest.param(w, MANY, id=label, marks=pytest.mark.slow))

    def decorate(check):
        def test(w, draws):
            def run(**drawn):
                with jax.enable_x64(w.dtype == "float64"):
                    check(w, **drawn)

            run.__name__ = check.__name__  # what is drawn depends on it
            for one in examples:
                run = example(**one)(run)
            settings(
                max_examples=draws, deadline=None, derandomize=True, database=None
            )(given(**strategies)(run))()

        test.__doc__ = check.__doc__
        return pytest.mark.parametrize(("w", "draws"), cases)(test)

    return decorate


@functools.partial(jax.jit, static_argnums=(0, 1))
def solved(name, mesh, points, weights, epsilon, taus, scale, threshold):
    """Compiled once for a cost, mesh, dtype and shape."""
    geom = otts.PointCloud(
        *points, cost_fn=COSTS[name], epsilon=epsilon, scale_cost=scale, mesh=mesh
    )
    out = otts.solve(
        geom, *weights, tau_a=taus[0], tau_b=taus[1], threshold=threshold, **LIMITS
    )
    return {field: getattr(out, field) for field in FIELDS}


@dataclasses.dataclass(frozen=True)
class Posed:
    """A problem, of numbers that its dtype represents; they are kept in float64."""

    where: Where
    x: np.ndarray
    y: np.ndarray
    a: np.ndarray
    b: np.ndarray
    epsilon: float
    taus: tuple[float, float] = (1.0, 1.0)
    scale: float = 1.0
    threshold: float = ANY_ERROR

    def __post_init__(self):
        for field in dataclasses.fields(self)[1:]:
            rounded = np.asarray(getattr(self, field.name), self.where.dtype)
            object.__setattr__(self, field.name, rounded.astype(np.float64))

    def but(self, **changes):
        return dataclasses.replace(self, **changes)

    @property
    def cost(self):
        return ref.COSTS[self.where.name](self.x, self.y) / self.scale

    @property
    def rounding(self):
        """Of one number of the size of those in the problem."""
        size = self.cost.max() + self.epsilon
        return float(np.finfo(self.where.dtype).eps) / 2 * size

    def cast(self, *names):
        return [np.asarray(getattr(self, name), self.where.dtype) for name in names]

    def solve(self):
        got = solved(
            self.where.name,
            otts.make_mesh(*self.where.shape),
            *(self.cast("x", "y"), self.cast("a", "b")),
            *self.cast("epsilon", "taus", "scale", "threshold"),
        )
        got = jax.device_get(got)
        assert got["f"].dtype == self.where.dtype
        return {k: np.array(v, np.float64) for k, v in got.items()}


def pose(where, drawn, **others):
    largest = ref.COSTS[where.name](drawn.x, drawn.y).max()
    epsilon = drawn.epsilon * (largest or 1.0)
    return Posed(where, *drawn[:4], epsilon=epsilon, **others)
