"""Where the iteration starts: potentials of an earlier solution, or of a guess."""

import abc
from typing import Any

import jax
import jax.numpy as jnp

from ott_shard import _checks, mesh as meshes
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

    A snapshot stays one, padded and placed. Constant to differentiation.

    Args:
        init: None, (f, g), a plan, potentials as functions, or an initializer.
        data: the problem that is to be solved.
    """
    return jax.lax.stop_gradient(_potential(init, jax.lax.stop_gradient(data)))


def _potential(init: Any, data: Data) -> jax.Array | Snapshot | None:
    geom, a, *_ = data
    if init is None:
        return None
    if isinstance(init, Snapshot):
        return init.placed(geom)
    if isinstance(init, Initializer):
        return init(data)
    if isinstance(init, PlanSums):
        init = DualPotentials(init.problem, init.found.phi, init.found.psi)
    if isinstance(init, DualPotentials):
        return at_points(init, geom)
    if not (isinstance(init, tuple | list) and len(init) == 2):
        raise TypeError(
            "init must be (f, g), a SinkhornOutput, DualPotentials, a Snapshot or one "
            f"of ott_shard.initializers, got {init!r}"
        )
    f, g = init
    geom.check_potential("init[1]", g, 1)  # it follows from f, but is to be right
    return geom.potential("init[0]", f, a, 0)


def at_points(known: DualPotentials, geom: PointCloud) -> jax.Array:
    """The c-transform of known potentials at the points x of `geom`, [n padded].

    One pass over its n points and the points of y that the potentials are of. 0 where
    it is not finite (all pairs forbidden, or potentials of a solution that failed): a
    start need not be right.
    """
    pairs, theirs = geom.pairs, known.problem.pairs
    d, own = pairs.x.shape[1], theirs.x.shape[1]
    if d != own:
        raise ValueError(
            f"init must be of points in {d} dimensions, like x, got {own} dimensions"
        )
    if theirs.mesh != geom.mesh and _checks.concrete(known.psi) is None:
        raise ValueError(
            f"init must be of the same mesh inside jit, {geom.mesh}, got {theirs.mesh}"
        )
    # On their mesh, and then on this one; with the padding, for to take it off x would
    # gather the cloud.
    f = meshes.place(known.f(pairs.x) * theirs.scale, geom.mesh, pairs.row_axes)
    f = (f / pairs.scale).astype(geom.dtype)
    return jnp.where(jnp.isfinite(f), f, 0.0)
