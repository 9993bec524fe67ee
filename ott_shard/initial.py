"""Where the iteration starts: potentials of an earlier solution, or of a guess."""

import abc
import dataclasses
from typing import Any

import jax

from ott_shard import mesh as meshes
from ott_shard.geometry import PointCloud
from ott_shard.plan_sums import PlanSums
from ott_shard.potentials import DualPotentials
from ott_shard.state import Snapshot

# Resolved geom, padded a and b, tau_a, tau_b: what is to be solved.
Data = tuple[PointCloud, jax.Array, jax.Array, jax.Array, jax.Array]


class Initializer(abc.ABC):
    """A way to guess potentials from the clouds alone."""

    @abc.abstractmethod
    def __call__(self, data: Data) -> jax.Array:
        """The first potential of x, without weight, [n padded], split like x."""


def potential(init: Any, data: Data) -> jax.Array | Snapshot | None:
    """The first potential of x, without weight, [n padded]; None for zeros.

    A snapshot stays one, padded and placed.

    Args:
        init: None, (f, g), a plan, potentials as functions, or an initializer.
        data: the problem that is to be solved.
    """
    geom, a, b, *_ = data
    if init is None:
        return None
    if isinstance(init, Snapshot):
        return init.placed(geom)
    if isinstance(init, Initializer):
        return jax.lax.stop_gradient(init(data))
    if isinstance(init, PlanSums):
        init = DualPotentials(init.problem, init.found.phi, init.found.psi)
    if isinstance(init, DualPotentials):
        return jax.lax.stop_gradient(at_points(init, geom))
    if not (isinstance(init, tuple | list) and len(init) == 2):
        raise TypeError(
            "init must be (f, g), a SinkhornOutput, DualPotentials, a Snapshot or one "
            f"of ott_shard.initializers, got {init!r}"
        )
    f, g = init
    geom.potential("init[1]", g, b, 1)  # it follows from f, but is to be right
    return jax.lax.stop_gradient(geom.potential("init[0]", f, a, 0))


def at_points(known: DualPotentials, geom: PointCloud) -> jax.Array:
    """The c-transform of known potentials at the points x of `geom`, [n padded].

    One pass over its n points and the points of y that the potentials are of.
    """
    pairs, theirs = geom.pairs, known.problem.pairs
    d, own = pairs.x.shape[1], theirs.x.shape[1]
    if d != own:
        raise ValueError(
            f"init must be of points in {d} dimensions, like x, got {own} dimensions"
        )
    known = dataclasses.replace(known, problem=jax.lax.stop_gradient(known.problem))
    # On their mesh, and then on this one; with the padding, for to take it off x would
    # gather the cloud.
    f = meshes.place(known.f(pairs.x) * theirs.scale, geom.mesh, pairs.row_axes)
    return (f / pairs.scale).astype(geom.dtype)
