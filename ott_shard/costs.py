"""Ground costs: the cost of one tile, from [bn, d] and [bm, d] to [bn, bm].

A cost is a frozen dataclass, registered as a pytree; its fields are parameters. If it
can be written as an inner product of per-point features it is a
:class:`BilinearCost`, and the kernel then folds epsilon and the potential into one
matrix product. An infinite cost forbids its pair.

Names and scalings are OTT-JAX's. No derivative is NaN between equal points: that of a
distance is 0 there.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.tree_util import Partial, register_pytree_node

from ott_shard import _checks
from ott_shard.pairwise import (
    angle,
    inner,
    of_pair,
    power,
    sqdist,
    sqdist_left,
    sqdist_right,
    sqnorm,
    sum_of_powers,
    unit,
)


@runtime_checkable
class CostFn(Protocol):
    """What the kernel needs; one with C(x, y) = C(y, x) may say `symmetric = True`."""

    translation_invariant: bool

    def pairwise(self, x: jax.Array, y: jax.Array, precision: str) -> jax.Array:
        """Costs of all pairs, [bn, d] and [bm, d] to [bn, bm]."""
        ...


@runtime_checkable
class BilinearCost(CostFn, Protocol):
    """A cost that is an inner product of features, C(x, y) = left(x) . right(y)."""

    def left(self, x: jax.Array) -> jax.Array:
        """Features of the rows, [n, d] to [n, k]."""
        ...

    def right(self, y: jax.Array) -> jax.Array:
        """Features of the columns, [m, d] to [m, k]."""
        ...


@runtime_checkable
class NormedCost(CostFn, Protocol):
    """A cost with a norm of points, for ``scale_cost="max_norm"`` and "max_bound"."""

    def norm(self, x: jax.Array) -> jax.Array:
        """[n, d] to [n]."""
        ...

    def bound(self, x_norm: jax.Array, y_norm: jax.Array) -> jax.Array:
        """No cost between points of at most these norms is larger in size."""
        ...


def register(cls: type) -> type:
    """Make a dataclass a pytree: fields are leaves, but those of metadata static.

    For ``jax.tree_util.register_dataclass`` two classes with the same fields are equal
    structures (jax 0.10 to 0.12), and a program compiled for one cost is now and then
    taken for the other's. Classes registered as here are told apart.
    """
    fields = dataclasses.fields(cls)
    leaves = [f.name for f in fields if not f.metadata.get("static")]
    static = [f.name for f in fields if f.metadata.get("static")]

    def flatten(cost: Any) -> tuple[list[Any], tuple[Any, ...]]:
        values = [getattr(cost, name) for name in leaves]
        return values, tuple(getattr(cost, name) for name in static)

    def unflatten(constants: tuple[Any, ...], values: Any) -> Any:
        cost = object.__new__(cls)
        for name, value in zip(leaves + static, [*values, *constants], strict=True):
            object.__setattr__(cost, name, value)
        return cost

    register_pytree_node(cls, flatten, unflatten)
    return cls


def classes_in(cost: CostFn) -> tuple[type, ...]:
    """Of all nodes of a cost, so that costs registered otherwise are told apart too."""

    def walk(structure: Any) -> list[type]:
        node = structure.node_data()
        below = [kind for child in structure.children() for kind in walk(child)]
        return [node[0], *below] if node else below

    return tuple(walk(jax.tree.structure(cost)))


@register
@dataclasses.dataclass(frozen=True)
class SqEuclidean:
    """Squared Euclidean distance, C(x, y) = |x - y|^2 (not half of it).

    >>> import jax.numpy as jnp
    >>> x, y = jnp.zeros((1, 2)), jnp.asarray([[3.0, 4.0]])
    >>> float(SqEuclidean().pairwise(x, y)[0, 0])
    25.0
    """

    translation_invariant = True
    symmetric = True

    def left(self, x: jax.Array) -> jax.Array:
        """(-2 x, |x|^2, 1)."""
        return sqdist_left(x)

    def right(self, y: jax.Array) -> jax.Array:
        """(y, 1, |y|^2)."""
        return sqdist_right(y)

    def pairwise(
        self, x: jax.Array, y: jax.Array, precision: str = "highest"
    ) -> jax.Array:
        """Costs of all pairs, [bn, d] and [bm, d] to [bn, bm]."""
        return sqdist(precision, x, y)

    def norm(self, x: jax.Array) -> jax.Array:
        """|x|^2."""
        return sqnorm(x)[:, 0]

    def bound(self, x_norm: jax.Array, y_norm: jax.Array) -> jax.Array:
        """(|x| + |y|)^2."""
        return jnp.square(jnp.sqrt(x_norm) + jnp.sqrt(y_norm))


@register
@dataclasses.dataclass(frozen=True)
class Euclidean:
    """Euclidean distance, C(x, y) = |x - y|, with derivative 0 where x = y.

    >>> import jax.numpy as jnp
    >>> x, y = jnp.zeros((1, 2)), jnp.asarray([[3.0, 4.0]])
    >>> float(Euclidean().pairwise(x, y)[0, 0])
    5.0
    """

    translation_invariant = True
    symmetric = True

    def pairwise(
        self, x: jax.Array, y: jax.Array, precision: str = "highest"
    ) -> jax.Array:
        """Costs of all pairs, [bn, d] and [bm, d] to [bn, bm]."""
        return power(sqdist(precision, x, y), 0.5)


@dataclasses.dataclass(frozen=True)
class _OfPowers:
    """A cost made of sum_k |x_k - y_k|^p.

    Attributes:
        p: from 1 up, a Python number; another one is another program.
    """

    p: float = dataclasses.field(metadata=dict(static=True))

    translation_invariant = True
    symmetric = True

    def __post_init__(self):
        if not (isinstance(self.p, int | float) and 1 <= self.p < float("inf")):
            raise ValueError(
                f"p must be a finite Python number from 1 up, got {self.p!r}"
            )


@register
class PNormP(_OfPowers):
    """The p-norm to the power p, divided by p: C(x, y) = sum_k |x_k - y_k|^p / p.

    Attributes:
        p: from 1 up, a Python number; another one is another program.

    >>> import jax.numpy as jnp
    >>> x, y = jnp.zeros((1, 2)), jnp.asarray([[3.0, -4.0]])
    >>> float(PNormP(1).pairwise(x, y)[0, 0])
    7.0
    """

    def pairwise(
        self, x: jax.Array, y: jax.Array, precision: str = "highest"
    ) -> jax.Array:
        """Costs of all pairs, [bn, d] and [bm, d] to [bn, bm]."""
        return sum_of_powers(self.p, x, y) / self.p


@register
class SqPNorm(_OfPowers):
    """Half the squared p-norm: C(x, y) = (sum_k |x_k - y_k|^p)^(2 / p) / 2.

    Attributes:
        p: from 1 up, a Python number; another one is another program.

    >>> import jax.numpy as jnp
    >>> x, y = jnp.zeros((1, 2)), jnp.asarray([[3.0, -4.0]])
    >>> float(SqPNorm(1).pairwise(x, y)[0, 0])
    24.5
    """

    def pairwise(
        self, x: jax.Array, y: jax.Array, precision: str = "highest"
    ) -> jax.Array:
        """Costs of all pairs, [bn, d] and [bm, d] to [bn, bm]."""
        return power(sum_of_powers(self.p, x, y), 2 / self.p) / 2


@register
@dataclasses.dataclass(frozen=True)
class Elastic:
    """Elastic net: C(x, y) = l1 sum_k |x_k - y_k| + l2 |x - y|^2 / 2.

    Maps for it move few coordinates (Cuturi, Klein and Ablin, Monge, Bregman and Occam,
    2023). OTT's ``RegTICost(L1(), lam, rho=rho)`` is ``Elastic(l1=lam, l2=rho)``.

    Attributes:
        l1: scalar, not negative, may be traced and differentiated.
        l2: scalar, likewise.

    >>> import jax.numpy as jnp
    >>> x, y = jnp.zeros((1, 2)), jnp.asarray([[3.0, -4.0]])
    >>> float(Elastic(l1=0.5).pairwise(x, y)[0, 0])
    16.0
    """

    l1: jax.Array | float = 1.0
    l2: jax.Array | float = 1.0

    translation_invariant = True
    symmetric = True

    def __post_init__(self):
        for name in ("l1", "l2"):
            value = getattr(self, name)
            if isinstance(value, int | float) and not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be finite and at least 0, got {value}")

    def pairwise(
        self, x: jax.Array, y: jax.Array, precision: str = "highest"
    ) -> jax.Array:
        """Costs of all pairs, [bn, d] and [bm, d] to [bn, bm]."""
        square = sqdist(precision, x, y)
        return self.l1 * sum_of_powers(1, x, y) + self.l2 / 2 * square


@register
@dataclasses.dataclass(frozen=True)
class NegDotProduct:
    """Minus the inner product, C(x, y) = -x . y; may be negative.

    Its plan is that of |x - y|^2 / 2. It depends on the origin, and loses digits when
    the clouds are far from it: SqEuclidean does not.

    >>> import jax.numpy as jnp
    >>> x, y = jnp.ones((1, 2)), jnp.asarray([[3.0, 4.0]])
    >>> float(NegDotProduct().pairwise(x, y)[0, 0])
    -7.0
    """

    translation_invariant = False
    symmetric = True

    def left(self, x: jax.Array) -> jax.Array:
        """-x."""
        return -x

    def right(self, y: jax.Array) -> jax.Array:
        """y."""
        return y

    def pairwise(
        self, x: jax.Array, y: jax.Array, precision: str = "highest"
    ) -> jax.Array:
        """Costs of all pairs, [bn, d] and [bm, d] to [bn, bm]."""
        return inner(-x, y, precision)

    def norm(self, x: jax.Array) -> jax.Array:
        """|x|^2."""
        return sqnorm(x)[:, 0]

    def bound(self, x_norm: jax.Array, y_norm: jax.Array) -> jax.Array:
        """|x| |y|."""
        return jnp.sqrt(x_norm) * jnp.sqrt(y_norm)


@register
@dataclasses.dataclass(frozen=True)
class Cosine:
    """Cosine distance, C(x, y) = 1 - x . y / (|x| |y|).

    A zero vector is at distance 1 from all others and 0 from another one; its
    derivative is 0.

    >>> import jax.numpy as jnp
    >>> x, y = jnp.asarray([[2.0, 0.0]]), jnp.asarray([[3.0, 4.0]])
    >>> round(float(Cosine().pairwise(x, y)[0, 0]), 6)
    0.4
    """

    translation_invariant = False
    symmetric = True

    def left(self, x: jax.Array) -> jax.Array:
        """(-x / |x|, 1)."""
        return jnp.concatenate([-unit(x), jnp.ones_like(x[:, :1])], axis=1)

    def right(self, y: jax.Array) -> jax.Array:
        """(y / |y|, 1)."""
        return jnp.concatenate([unit(y), jnp.ones_like(y[:, :1])], axis=1)

    def pairwise(
        self, x: jax.Array, y: jax.Array, precision: str = "highest"
    ) -> jax.Array:
        """Costs of all pairs, [bn, d] and [bm, d] to [bn, bm]."""
        # Half the squared chord, and so exactly 0 between equal directions.
        return sqdist(precision, unit(x), unit(y)) / 2


@register
@dataclasses.dataclass(frozen=True)
class Arccos:
    """Minus the log of the arc-cosine kernel of Cho and Saul (2009).

    C(x, y) = -log(|x|^n |y|^n J_n(theta) / pi + ridge) with the angle theta between x
    and y, J_0 = pi - theta, J_1 = sin theta + (pi - theta) cos theta, J_2 = 3 sin theta
    cos theta + (pi - theta) (1 + 2 cos^2 theta). May be negative for n > 0.

    Attributes:
        n: 0, 1 or 2.
        ridge: keeps the logarithm finite.

    >>> import jax.numpy as jnp
    >>> x, y = jnp.asarray([[2.0, 0.0]]), jnp.asarray([[0.0, 1.0]])
    >>> round(float(jnp.exp(-Arccos(0).pairwise(x, y)[0, 0])), 6)
    0.5
    """

    n: int = dataclasses.field(default=0, metadata=dict(static=True))
    ridge: float = dataclasses.field(default=1e-8, metadata=dict(static=True))

    translation_invariant = False
    symmetric = True

    def __post_init__(self):
        _checks.choice("n", self.n, (0, 1, 2))
        if not 0 < self.ridge < float("inf"):
            raise ValueError(f"ridge must be finite and positive, got {self.ridge}")

    def pairwise(
        self, x: jax.Array, y: jax.Array, precision: str = "highest"
    ) -> jax.Array:
        """Costs of all pairs, [bn, d] and [bm, d] to [bn, bm]."""
        theta = angle(sqdist(precision, unit(x), unit(y)))
        sin, cos, rest = jnp.sin(theta), jnp.cos(theta), jnp.pi - theta
        if self.n == 0:
            kernel = rest
        elif self.n == 1:
            kernel = sin + rest * cos
        else:
            kernel = 3 * sin * cos + rest * (1 + 2 * cos**2)
        kernel = jnp.maximum(kernel, 0.0)  # rounding of opposite vectors
        x_length, y_length = (power(sqnorm(z), 0.5) ** self.n for z in (x, y))
        return -jnp.log(x_length * y_length.T * kernel / jnp.pi + self.ridge)


@register
@dataclasses.dataclass(frozen=True)
class Custom:
    """The cost that a function of two points says, fn(x [d], y [d]) -> scalar.

    ``PointCloud(cost_fn=fn)`` makes one. The function is mapped over the pairs of a
    tile and differentiated by JAX; between equal points, where its derivative is not
    finite, it is taken to be 0. An infinite value forbids the pair.

    Attributes:
        fn: the function; one made anew is another program, so define it once. With
            parameters to be traced or differentiated, a ``jax.tree_util.Partial`` or
            any callable pytree.

    >>> import jax.numpy as jnp
    >>> x, y = jnp.zeros((1, 2)), jnp.asarray([[3.0, 4.0]])
    >>> float(Custom(lambda x, y: jnp.max(jnp.abs(x - y))).pairwise(x, y)[0, 0])
    4.0
    """

    fn: Callable

    translation_invariant = False

    def __post_init__(self):
        if callable(self.fn) and any(
            leaf is self.fn for leaf in jax.tree.leaves(self.fn)
        ):
            object.__setattr__(self, "fn", Partial(self.fn))

    def pairwise(
        self, x: jax.Array, y: jax.Array, precision: str = "highest"
    ) -> jax.Array:
        """Costs of all pairs, [bn, d] and [bm, d] to [bn, bm]."""
        over_cols = jax.vmap(of_pair, (None, None, 0))
        return jax.vmap(over_cols, (None, 0, None))(self.fn, x, y)
