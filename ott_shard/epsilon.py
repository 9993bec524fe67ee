"""The regularisation, and how it comes down to its target."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from ott_shard import _checks

SLOWEST_DECAY = 0.9999  # 7,000 iterations to halve


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Epsilon:
    """A geometric schedule: max(init decay^t, target) at iteration t = 0, 1, ...

    A large epsilon converges fast, and its potentials are a good start for a smaller
    one. What is returned is about the target: the iteration does not end before, and
    its last step is always made there.

    Attributes:
        target: scalar, positive, may be traced and differentiated.
        init: scalar, at least the target: the value of iteration 0, in the same unit.
        decay: scalar in (0, 0.9999].

    Raises:
        ValueError: here or by :class:`ott_shard.PointCloud` if one is out of range.

    Example:
        >>> import ott_shard as otts
        >>> [round(float(otts.Epsilon(0.1, init=1.0, decay=0.5).at(t)), 3)
        ...  for t in range(5)]
        [1.0, 0.5, 0.25, 0.125, 0.1]
    """

    target: Any
    init: Any
    decay: Any

    def __post_init__(self):
        # Arrays, and whatever else a pytree may hold for a while, are not looked at.
        values = (self.target, self.init, self.decay)
        if all(isinstance(value, int | float) for value in values):
            self.checked(None)

    def checked(self, dtype: np.dtype | type | None) -> "Epsilon":
        """The schedule in `dtype` (None: as it is), refused if out of range."""
        target = _checks.scalar("epsilon", self.target, dtype=dtype)
        init = _checks.scalar("init", self.init, dtype=dtype)
        decay = _checks.scalar("decay", self.decay, up_to=SLOWEST_DECAY, dtype=dtype)
        known = [_checks.concrete(value) for value in (init, target)]
        if all(value is not None for value in known) and known[0] < known[1]:
            raise ValueError(
                f"init must be at least the target {known[1]:g}, got {known[0]:g}: it "
                "is the epsilon of iteration 0, in the unit of the target"
            )
        return Epsilon(target, init=init, decay=decay)

    @classmethod
    def constant(cls, target: jax.Array) -> "Epsilon":
        """The target at every iteration."""
        return cls(target, init=target, decay=0.5)

    def at(self, iteration: jax.Array | int) -> jax.Array:
        """Epsilon at an iteration; never below the target."""
        return jnp.maximum(self.init * self.decay**iteration, self.target)
