"""Where an iteration is, and when it is to stop."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ott_shard import _checks, mesh as meshes
from ott_shard.geometry import PointCloud
from ott_shard.implicit import ImplicitDiff
from ott_shard.lbfgs import Acceleration, Memory
from ott_shard.operators import Pairs


@dataclasses.dataclass(frozen=True)
class Limits:
    """When to check the error and when to stop; static under jit."""

    max_iterations: int = 2000
    min_iterations: int = 0
    inner_iterations: int = 10

    def __post_init__(self):
        for name, low in (
            ("max_iterations", 1),
            ("min_iterations", 0),
            ("inner_iterations", 1),
        ):
            value = _checks.integer(name, getattr(self, name), at_least=low)
            object.__setattr__(self, name, value)
        if self.min_iterations > self.max_iterations:
            raise ValueError(
                f"min_iterations must be at most max_iterations = {self.max_iterations}"
                f", got {self.min_iterations}"
            )

    @property
    def checks(self) -> int:
        """The most checks of the error that there may be."""
        return -(-self.max_iterations // self.inner_iterations)


class Settings(NamedTuple):
    """What is static about a run.

    Attributes:
        limits: when to check and when to stop.
        implicit_diff: how potentials are differentiated; None: through the iteration.
        acceleration: how iterations are saved; None: all are plain ones, as they are
            where they are differentiated through.
        symmetric: both clouds, weights and taus are the same: then f = g and half steps
            towards the one fixed point converge in a few iterations (Feydy et al.,
            Interpolating between optimal transport and MMD using Sinkhorn divergences,
            2019).
    """

    limits: Limits
    implicit_diff: ImplicitDiff | None
    acceleration: Acceleration | None
    symmetric: bool = False


class Snapshot(NamedTuple):
    """A state to go on from: what ``solve(..., watch=)`` shows at every check.

    ``solve(..., init=snapshot)`` of the same problem, on any mesh, does what the
    interrupted solution would have done. A pytree; to keep one, turn its leaves into
    NumPy arrays.

    Attributes:
        phi: [n], f - epsilon log a.
        psi: [m].
        iteration: how many are done.
        epsilon: of the last of them.
        error: of the marginal, at the last check.
        errors: at all checks, -1 for those to come.
        floor: the error that rounding makes besides, about.
        lowest: the smallest error at this epsilon.
        stale: how many iterations ago that was.
        steps: [m, memory], see :class:`ott_shard.lbfgs.Memory`.
        changes: [m, memory].
        count: of steps.
        share: of the next one.
    """

    phi: jax.Array
    psi: jax.Array
    iteration: jax.Array
    epsilon: jax.Array
    error: jax.Array
    errors: jax.Array
    floor: jax.Array
    lowest: jax.Array
    stale: jax.Array
    steps: jax.Array
    changes: jax.Array
    count: jax.Array
    share: jax.Array

    @property
    def memory(self) -> Memory:
        """What the next step is made from."""
        return Memory(self.steps, self.changes, self.count, self.share)

    def unpadded(self, geom: PointCloud) -> "Snapshot":
        """The same for the points that a geometry was made of."""
        sizes = geom.n, geom.m
        return self._replace(
            **{k: meshes.unpad(getattr(self, k), sizes[i]) for k, i in CLOUD.items()}
        )

    def placed(self, geom: PointCloud) -> "Snapshot":
        """Padded and placed for a geometry.

        Raises:
            ValueError: if it is of other numbers of points.
        """
        sizes, ends = (geom.n, geom.m), {}
        memory = np.size(self.steps) // geom.m
        for name, i in CLOUD.items():
            rows = _checks.real_array(f"init.{name}", getattr(self, name))
            of_steps = name in ("steps", "changes")
            shape = (sizes[i], memory) if of_steps else (sizes[i],)
            if rows.shape != shape:
                raise ValueError(
                    f"init.{name} must have shape {shape}, got {rows.shape}: a "
                    "snapshot is of one problem; for another give its f and g"
                )
            ends[name] = rows.astype(geom.dtype)
        for name in ("epsilon", "error", "errors", "floor", "lowest", "share"):
            ends[name] = jnp.asarray(getattr(self, name), geom.dtype)
        return self._replace(**ends).split(geom.pairs)

    def split(self, pairs: Pairs) -> "Snapshot":
        """Laid out as the points are, padded with zeros: no step is one of padding."""
        axes = pairs.row_axes, pairs.col_axes
        return self._replace(
            **{
                k: meshes.place(getattr(self, k), pairs.mesh, axes[i], pad="constant")
                for k, i in CLOUD.items()
            }
        )

    def history(self, checks: int) -> jax.Array:
        """The errors for a run of so many checks."""
        known = jnp.asarray(self.errors)[:checks]
        return jnp.full(checks, -1, known.dtype).at[: len(known)].set(known)


# Fields of a snapshot that have a row for each point, of x (0) or of y (1).
CLOUD = {"phi": 0, "psi": 1, "steps": 1, "changes": 1}


class State(NamedTuple):
    """Where the iteration is.

    Attributes:
        now: all that cannot be computed again, its potentials padded.
        transform: [m padded], the c-transform of phi.
        size: of the numbers that costs are computed from.
    """

    now: Snapshot
    transform: jax.Array
    size: jax.Array
