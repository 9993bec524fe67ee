"""Guesses of potentials for ``solve(..., init=)``, from the clouds alone."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from ott_shard import _checks, implicit, lbfgs, mesh as meshes, sampling, sinkhorn
from ott_shard.costs import SqEuclidean
from ott_shard.initial import Data, Initializer, at_points
from ott_shard.operators import Pairs
from ott_shard.pairwise import dot, inner
from ott_shard.potentials import DualPotentials
from ott_shard.state import Limits, Settings


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Gaussian(Initializer):
    """The potential between the Gaussians with the moments of the clouds.

    For the squared Euclidean cost, at the epsilon of the problem; as if it were
    balanced. O((n + m) d^2) time over the devices, and d^3 time and d^2 memory on
    each; no pass over the pairs.

    Raises:
        ValueError: from ``solve``, for any other cost.

    References:
        Janati et al., Entropic optimal transport between unbalanced Gaussian measures
        has a closed form, 2020; Thornton and Cuturi, Rethinking initialization of the
        Sinkhorn algorithm, 2022.

    Example:
        >>> import jax, ott_shard as otts
        >>> x = jax.random.normal(jax.random.key(0), (300, 2))
        >>> y = 3 * jax.random.normal(jax.random.key(1), (300, 2)) + 1
        >>> geom = otts.PointCloud(x, y, epsilon=0.5)
        >>> start = otts.initializers.Gaussian()
        >>> counts = [otts.solve(geom, init=z).n_iters for z in (None, start)]
        >>> bool(counts[1] <= counts[0])
        True
    """

    def __call__(self, data: Data) -> jax.Array:
        """See :class:`ott_shard.initial.Initializer`."""
        geom, a, b, *_ = data
        if not isinstance(geom.cost_fn, SqEuclidean):
            raise ValueError(
                f"init=Gaussian() must be for SqEuclidean costs, got {geom.cost_fn}: "
                "use Subsample"
            )
        return _between_gaussians(geom.pairs, a, b, geom.epsilon)


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Subsample(Initializer):
    """The potential of a smaller problem, extended by its c-transform.

    Points of each cloud are drawn by their weights. Cost: its passes over size^2 pairs,
    and one over n size pairs.

    Attributes:
        size: points that are drawn of each cloud.
        seed: of the draw.
        threshold: on the marginal error of the smaller problem.
        max_iterations: of the smaller problem.

    Raises:
        ValueError, TypeError: if one is out of range.

    References:
        Thornton and Cuturi, Rethinking initialization of the Sinkhorn algorithm, 2022.

    Example:
        >>> import jax, ott_shard as otts
        >>> x = jax.random.normal(jax.random.key(0), (300, 2))
        >>> geom = otts.PointCloud(x, 3 * x[::-1] + 1, epsilon=0.5)
        >>> start = otts.initializers.Subsample(100)
        >>> bool(otts.solve(geom, init=start).converged)
        True
    """

    size: int = dataclasses.field(metadata=dict(static=True))
    seed: int = dataclasses.field(default=0, metadata=dict(static=True))
    threshold: float = dataclasses.field(default=1e-2, metadata=dict(static=True))
    max_iterations: int = dataclasses.field(default=1000, metadata=dict(static=True))

    def __post_init__(self):
        _checks.integer("size", self.size)
        _checks.integer("seed", self.seed, at_least=0)
        _checks.integer("max_iterations", self.max_iterations)
        _checks.positive("threshold", self.threshold)

    def __call__(self, data: Data) -> jax.Array:
        """See :class:`ott_shard.initial.Initializer`."""
        geom, a, b, tau_a, tau_b = data
        pairs, mesh = geom.pairs, geom.mesh
        keys = jax.random.split(jax.random.key(self.seed))
        x, of_x = _drawn(keys[0], pairs.x, a, self.size)
        y, of_y = _drawn(keys[1], pairs.y, b, self.size)
        pairs = dataclasses.replace(
            pairs,
            x=meshes.place(x, mesh, pairs.row_axes),
            y=meshes.place(y, mesh, pairs.col_axes),
        )
        fewer = geom.resolved(pairs, geom.schedule, self.size, self.size)
        weights = fewer.weights(of_x, 0), fewer.weights(of_y, 1)
        out = sinkhorn.run(
            (fewer, *weights, tau_a, tau_b),
            Settings(Limits(self.max_iterations), implicit.DEFAULT, lbfgs.DEFAULT),
            threshold=jnp.asarray(self.threshold, geom.dtype),
        )
        known = DualPotentials(out.problem, out.found.phi, out.found.psi)
        return at_points(known, geom)


@functools.partial(jax.jit, static_argnums=3)
def _drawn(key, points, weights, size: int) -> tuple[jax.Array, jax.Array]:
    """`size` points, each as often as its weight demands, and their equal weights."""
    chosen = points[sampling.systematic(key, weights, size)]
    return chosen, jnp.full(size, weights.sum() / size)


@jax.jit
def _between_gaussians(pairs: Pairs, a, b, epsilon) -> jax.Array:
    """phi at x, [n padded]: |x|^2 - x^T U x + 2 x^T (mean_x - mean_y), x centred.

    With s = eps / 2 and the covariances A and B, U = (V + s B^-1)^-1 and V = (U + s
    A^-1)^-1: the c-transform of a quadratic potential under a Gaussian is one. Solved
    by U = B^(1/2) h(B^(1/2) A B^(1/2)) B^(1/2) with h(t) = 2 / (s + sqrt(s^2 + 4 t)),
    which for s = 0 is the linear map from A to B.
    """
    (x, shift_x, a_cov), (y, shift_y, b_cov) = (
        _centred_moments(z - pairs.centre, w) for z, w in ((pairs.x, a), (pairs.y, b))
    )
    s = epsilon * pairs.scale / 2
    root = _of_symmetric(b_cov, jnp.sqrt)
    middle = _of_symmetric(
        _product(root, a_cov, root), lambda t: 2 / (s + jnp.sqrt(s**2 + 4 * t))
    )
    map_of_x = inner(x, _product(root, middle, root), "highest")
    own = jnp.sum(x * (x - map_of_x + 2 * (shift_x - shift_y)), axis=1)
    return own / pairs.scale


def _centred_moments(x: jax.Array, w: jax.Array):
    """(x less its mean, the mean, the covariance), of weights w."""
    mean = dot(w, x) / w.sum()
    x -= mean
    return x, mean, inner((w[:, None] * x).T, x.T, "highest") / w.sum()


def _product(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """a b c, of symmetric matrices."""
    return inner(inner(a, b, "highest"), c, "highest")


def _of_symmetric(matrix: jax.Array, function: Callable) -> jax.Array:
    """A function of the eigenvalues, which rounding must not make negative."""
    values, vectors = jnp.linalg.eigh(matrix)
    return inner(vectors * function(jnp.maximum(values, 0.0)), vectors, "highest")
