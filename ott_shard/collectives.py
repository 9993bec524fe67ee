"""Everything that talks to another device: sums, maxima and log-sum-exp over mesh axes.

These functions run inside ``shard_map``. ``axes`` is a tuple of mesh axis names and
may be empty, which means that this direction of the mesh has one device.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Axes = tuple[str, ...]


def axis_sum(x: jax.Array, axes: Axes) -> jax.Array:
    """Sum `x` over the devices along `axes` (one all-reduce)."""
    return lax.psum(x, axes) if axes else x


def axis_max(x: jax.Array, axes: Axes) -> jax.Array:
    """Maximum of `x` over the devices along `axes` (one all-reduce).

    Not differentiated: ``pmax`` has no rule, so the gradient stops at its argument.
    """
    x = lax.stop_gradient(x)
    return lax.pmax(x, axes) if axes else x


def combine_lse(maxima: jax.Array, sums: jax.Array, axes: Axes) -> jax.Array:
    """Finish a log-sum-exp from the un-normalised partials of every device.

    Args:
        maxima: [n], the largest exponent that this device has seen, -inf for none.
        sums: [n], sum of exp(exponent - maxima) on this device.
        axes: mesh axes over which the terms are split.

    Returns:
        [n], the log of the sum over all devices; -inf where there was no term at all,
        NaN where a term was NaN. Two all-reduces of n numbers.
    """
    top = axis_max(maxima, axes)
    shift = jnp.where(top == -jnp.inf, 0.0, top)
    total = axis_sum(sums * jnp.exp(maxima - shift), axes)
    empty = total == 0
    return jnp.where(empty, -jnp.inf, shift + jnp.log(jnp.where(empty, 1.0, total)))


def stack(x: jax.Array, axes: Axes) -> jax.Array:
    """[devices along `axes`, ...], `x` of each in their order (one all-reduce of all).

    Not an all-gather, whose result JAX takes to differ between devices.
    """
    if not axes:
        return x[None]
    slots = jnp.zeros((lax.axis_size(axes), *x.shape), x.dtype)
    return lax.psum(slots.at[lax.axis_index(axes)].set(x), axes)


def position(axes: Axes) -> jax.Array:
    """Which of the devices along `axes` this is, int scalar."""
    return lax.axis_index(axes) if axes else jnp.int32(0)


def match_varying(tree: Any, *operands: Any) -> Any:
    """Mark `tree` as varying over every mesh axis over which any of `operands` varies.

    A loop carry must start with the type that the loop gives it; a constant such as
    ``jnp.zeros`` has none of the axes. Outside ``shard_map`` this does nothing.
    """
    wanted = frozenset[str]().union(*(_varying(x) for x in jax.tree.leaves(operands)))

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(wanted - _varying(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def _varying(x: jax.Array) -> frozenset[str]:
    aval = jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)  # jax >= 0.10; before that: .vma
    return kind.varying if kind is not None else aval.vma
