"""Checks of arguments, and their wording: the argument, the value, the way out."""

import functools
import operator
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding

_INT32_MAX = 2**31 - 1


def concrete(x: Any) -> Any:
    """The array behind `x` if its values are known now, else None."""
    if not isinstance(x, Tracer):
        return x
    value = x.to_concrete_value()
    return value if value is not None and np.shape(value) == x.shape else None


def integer(name: str, value: Any, *, at_least: int = 1) -> int:
    """`value` as an int, at least `at_least`, that fits into 32 bits."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r}") from None
    if number < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {number}")
    if number > _INT32_MAX:
        raise ValueError(f"{name} must be at most {_INT32_MAX}, got {number}")
    return number


def choice(name: str, value: Any, allowed: Iterable[Any]) -> Any:
    """`value`, which must be one of `allowed`."""
    allowed = tuple(allowed)
    if not (np.ndim(value) == 0 and value in allowed):
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
    return value


def optional_callable(name: str, value: Any) -> None:
    """`value`, which must be None or a function."""
    if not (value is None or callable(value)):
        raise TypeError(f"{name} must be a function or None, got {value!r}")


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
    if isinstance(value, str | bool) or jnp.iscomplexobj(value):
        raise TypeError(f"{name} must be a real number, got {value!r}")
    if known is not None:
        try:
            with np.errstate(all="ignore"):  # what does not fit is refused below
                number = float(np.asarray(known, dtype))
        except (TypeError, ValueError):
            raise TypeError(f"{name} must be a number, got {value!r}") from None
        if not (above < number <= up_to and number < float("inf")):
            limit = "finite" if up_to == float("inf") else f"at most {up_to:g}"
            raise ValueError(
                f"{name} must be greater than {above:g} and {limit}, got {number:g}"
            )
    return jnp.asarray(value, dtype=dtype)


def number(name: str, value: Any, fits: Callable[[float], bool], range_: str) -> None:
    """Refuse what is not a plain number (it is static) within a range."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not fits(value):
        raise ValueError(f"{name} must be {range_}, got {value!r}")


def positive(name: str, value: Any) -> float:
    """`value` as a plain number greater than 0, not traced."""
    if concrete(value) is None:
        raise TypeError(f"{name} must be a number known now, got {value}")
    scalar(name, value)
    return float(concrete(value))


def working_dtype(*arrays: jax.Array | np.ndarray) -> Any:
    """float64 if one of `arrays` is, and x64 is on; otherwise float32."""
    wide = any(_bytes_of_float(x) > 4 for x in arrays)
    return jnp.dtype(jnp.result_type(float) if wide else jnp.float32)


def warn_if_narrowed(dtype: Any, **given: Any) -> None:
    """Warn of arrays that came, under these names, as float64 and become float32."""
    wide = [name for name, x in given.items() if _bytes_of_float(x) > 4]
    if wide and dtype == jnp.float32:
        warnings.warn(
            f"{' and '.join(wide)} came as float64 but will be float32, for x64 is "
            "off: call jax.config.update('jax_enable_x64', True) first to compute in "
            "float64, or pass .astype(numpy.float32) to say that float32 is meant",
            stacklevel=3,
        )


def _bytes_of_float(x: Any) -> int:
    """Width of the dtype of a floating array, 0 of anything else."""
    array = isinstance(x, np.ndarray | jax.Array)
    return x.dtype.itemsize if array and jnp.issubdtype(x.dtype, jnp.floating) else 0


def points(name: str, x: Any, dtype: Any) -> jax.Array | np.ndarray:
    """`x` as a cloud [n, d] with at least one point, of `dtype` or of 16-bit floats.

    NumPy arrays stay on the host so that they go straight to their shards.
    """
    x = real_array(name, x)
    if x.ndim != 2:
        raise ValueError(
            f"{name} must have shape [n, d], got {x.shape}"
            + (f": use {name}[:, None] for points on a line" if x.ndim == 1 else "")
        )
    if 0 in x.shape:
        raise ValueError(f"{name} must hold at least one point, got shape {x.shape}")
    if _bytes_of_float(x) != 2:  # half precision is stored as it is
        x = _cast(x, dtype)
    _finite(name, x, f"remove, impute or scale those points ({x.dtype})")
    return x


def weights(
    name: str, w: Any, size: int, cloud: str, dtype: Any
) -> jax.Array | np.ndarray:
    """`w` as [size] non-negative, finite weights of `dtype`, not all zero."""
    w = real_array(name, w)
    if w.shape != (size,):
        raise ValueError(
            f"{name} must have shape ({size},), one weight per point of {cloud}, "
            f"got {w.shape}"
        )
    w = _cast(w, dtype)
    _finite(name, w, f"weights must be known, and fit {w.dtype}")
    known = concrete(w)
    if known is None:
        return w
    lowest, highest, index = _evaluate(_range, known)
    if lowest < 0:
        raise ValueError(
            f"{name} must not be negative, got {lowest:g} at index {int(index)}: "
            "clip or drop those points"
        )
    if highest == 0:
        raise ValueError(f"{name} must not be all zero: there is no mass to move")
    return w


def mass_slack(w: Any) -> float:
    """By how much, relatively, the sum of rounded weights may be off.

    That of n of them is by about sqrt(n) roundings.
    """
    return float(jnp.finfo(w.dtype).eps) * 4 * max(16, w.size**0.5)


def equal_mass(a: Any, b: Any, tau_a: Any, tau_b: Any) -> None:
    """A balanced problem needs two clouds of the same mass."""
    values = [concrete(v) for v in (a, b, tau_a, tau_b)]
    if any(v is None for v in values) or min(float(values[2]), float(values[3])) < 1:
        return
    (mass_a,), (mass_b,) = (_evaluate(_total, v) for v in values[:2])
    slack = max(mass_slack(v) for v in values[:2])
    if abs(mass_a - mass_b) > slack * max(mass_a, mass_b):
        raise ValueError(
            f"a and b must have the same total mass when tau_a = tau_b = 1, got "
            f"{mass_a:.9g} and {mass_b:.9g}: divide each by its sum (in {a.dtype}), or "
            "set tau_a or tau_b below 1 for unbalanced transport"
        )


def real_array(name: str, x: Any) -> jax.Array | np.ndarray:
    """`x` as an array of real numbers, without explicit sharding."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{name} must not be a masked array, got one: drop the masked points, or "
            "give them weight 0"
        )
    if isinstance(x, jax.Array):
        x = _automatic(name, x)
    else:
        try:
            x = np.asarray(x)
        except ValueError as error:
            raise TypeError(f"{name} must be an array of numbers: {error}") from None
    if not any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.floating, jnp.integer)):
        raise TypeError(
            f"{name} must hold real numbers, got dtype {x.dtype}: convert it first"
        )
    return x


def _automatic(name: str, x: jax.Array) -> jax.Array:
    """`x` on the same devices, without a sharding in its type.

    Arithmetic on arrays of a mesh with explicit axes needs that mesh as the context;
    the solver leaves layouts to the compiler.
    """
    if AxisType.Explicit not in jax.typeof(x).sharding.mesh.axis_types:
        return x
    known = concrete(x)
    if known is None:
        raise ValueError(
            f"{name} must not have explicit sharding inside jit, got {jax.typeof(x)}: "
            "wrap your function in jax.sharding.auto_axes"
        )
    mesh, spec = known.sharding.mesh, known.sharding.spec
    return jax.device_put(x, NamedSharding(Mesh(mesh.devices, mesh.axis_names), spec))


def _cast(x: jax.Array | np.ndarray, dtype: Any) -> jax.Array | np.ndarray:
    with np.errstate(over="ignore"):  # what overflows is refused as not finite
        return x.astype(dtype)


def _finite(name: str, x: Any, way_out: str) -> None:
    known = concrete(x)
    if known is None or not jnp.issubdtype(known.dtype, jnp.floating):
        return
    count, first = _evaluate(_not_finite, known)
    if count:
        raise ValueError(
            f"{name} must be finite, got NaN or inf in row {int(first)}: {way_out}"
        )


def _evaluate(summary: Callable, x: jax.Array | np.ndarray) -> list[float]:
    """The numbers that `summary(xp, x)` gives, on the host for an array of the host.

    Arrays that the caller's jit closes over are known, but arithmetic on them is not
    unless it is asked for.
    """
    if isinstance(x, np.ndarray):
        return [float(v) for v in summary(np, x)]
    with jax.ensure_compile_time_eval():
        return [float(v) for v in _on_devices(summary, x)]


@functools.partial(jax.jit, static_argnums=0)
def _on_devices(summary, x):
    return summary(jnp, x)


def _not_finite(xp, x):
    """How many rows hold a NaN or an infinity, and the first of them."""
    bad = ~xp.isfinite(x).reshape(x.shape[0], -1).all(axis=1)
    return bad.sum(), bad.argmax()


def _range(xp, x):
    return x.min(), x.max(), x.argmin()


def _total(xp, x):
    return (x.sum(),)
