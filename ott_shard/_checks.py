"""Checks of arguments, and their wording: the argument, the value, the way out."""

import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def concrete(x: Any) -> Any:
    """The array behind `x` if its values are known now, else None."""
    if isinstance(x, jax.core.Tracer):
        value = x.to_concrete_value()
        return value if np.shape(value) == x.shape else None
    return x


def positive_int(name: str, value: Any) -> int:
    """`value` as an int, at least 1."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r}") from None
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number


def choice(name: str, value: Any, allowed: Iterable[Any]) -> Any:
    """`value`, which must be one of `allowed`."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
    return value


def scalar(
    name: str,
    value: Any,
    *,
    above: float = 0.0,
    up_to: float = float("inf"),
    dtype: Any = None,
) -> jax.Array:
    """`value` as a floating scalar in (above, up_to]; traced values pass."""
    if np.shape(value) != ():
        raise ValueError(f"{name} must be a scalar, got shape {np.shape(value)}")
    known = concrete(value)
    if known is not None:
        try:
            number = float(known)
        except (TypeError, ValueError):
            raise TypeError(f"{name} must be a number, got {value!r}") from None
        if not (above < number <= up_to and number < float("inf")):
            limit = "finite" if up_to == float("inf") else f"at most {up_to:g}"
            raise ValueError(
                f"{name} must be greater than {above:g} and {limit}, got {number:g}"
            )
    return jnp.asarray(value, dtype=dtype)


def points(name: str, x: Any) -> jax.Array | np.ndarray:
    """`x` as a cloud [n, d] of real numbers with at least one point.

    NumPy arrays stay on the host so that they go straight to their shards.
    """
    x = _real_array(name, x)
    if x.ndim != 2:
        raise ValueError(
            f"{name} must have shape [n, d], got {x.shape}"
            + (f": use {name}[:, None] for points on a line" if x.ndim == 1 else "")
        )
    if 0 in x.shape:
        raise ValueError(f"{name} must hold at least one point, got shape {x.shape}")
    _finite(name, x, "remove or impute those points")
    return x


def weights(name: str, w: Any, size: int, cloud: str) -> jax.Array | np.ndarray:
    """`w` as [size] non-negative, finite weights, not all zero."""
    w = _real_array(name, w)
    if w.shape != (size,):
        raise ValueError(
            f"{name} must have shape ({size},), one weight per point of {cloud}, "
            f"got {w.shape}"
        )
    _finite(name, w, "weights must be known")
    known = concrete(w)
    if known is None:
        return w
    # Values closed over by the caller's jit are known, but arithmetic on them is not.
    with jax.ensure_compile_time_eval():
        lowest, highest = float(known.min()), float(known.max())
        index = int(known.argmin())
    if lowest < 0:
        raise ValueError(
            f"{name} must not be negative, got {lowest:g} at index {index}: clip or "
            "drop those points"
        )
    if highest == 0:
        raise ValueError(f"{name} must not be all zero: there is no mass to move")
    return w


def equal_mass(a: Any, b: Any, tau_a: Any, tau_b: Any) -> None:
    """A balanced problem needs two clouds of the same mass."""
    values = [concrete(v) for v in (a, b, tau_a, tau_b)]
    if any(v is None for v in values) or min(float(values[2]), float(values[3])) < 1:
        return
    with jax.ensure_compile_time_eval():
        mass_a, mass_b = (float(v.sum()) for v in values[:2])
    # The sum of n rounded weights is off by about sqrt(n) roundings.
    slack = max(
        float(jnp.finfo(v.dtype).eps) * 4 * max(16, v.size**0.5) for v in values[:2]
    )
    if abs(mass_a - mass_b) > slack * max(mass_a, mass_b):
        raise ValueError(
            f"a and b must have the same total mass when tau_a = tau_b = 1, got "
            f"{mass_a:.9g} and {mass_b:.9g}: divide each by its sum, or set tau_a or "
            "tau_b below 1 for unbalanced transport"
        )


def _real_array(name: str, x: Any) -> jax.Array | np.ndarray:
    if not isinstance(x, jax.Array):
        try:
            x = np.asarray(x)
        except ValueError as error:
            raise TypeError(f"{name} must be an array of numbers: {error}") from None
    kind = np.dtype(bool) if x.dtype == bool else x.dtype
    if not (jnp.issubdtype(kind, jnp.floating) or jnp.issubdtype(kind, jnp.integer)):
        raise TypeError(
            f"{name} must hold real numbers, got dtype {x.dtype}: convert it first"
        )
    return x


def _finite(name: str, x: Any, way_out: str) -> None:
    known = concrete(x)
    if known is None or not jnp.issubdtype(known.dtype, jnp.floating):
        return
    xp = np if isinstance(known, np.ndarray) else jnp
    with jax.ensure_compile_time_eval():
        finite = xp.isfinite(known).reshape(known.shape[0], -1).all(axis=1)
        fine, bad = bool(finite.all()), int(finite.argmin())
    if not fine:
        raise ValueError(
            f"{name} must be finite, got NaN or inf in row {bad}: {way_out}"
        )
