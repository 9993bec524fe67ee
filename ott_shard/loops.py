"""Control of the flow: a loop that reverse mode can pass, one condition for a batch."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def repeat(
    body: Callable[[jax.Array, Any], Any], carry: Any, count: Any, most: int
) -> Any:
    """``fori_loop(0, count, body, carry)`` for count <= most, differentiable.

    Reverse mode keeps 2 sqrt(most) carries, and what `body` keeps of sqrt(most) calls,
    for one more forward computation: blocks of steps are recomputed from where they
    start (Griewank and Walther, Evaluating derivatives, 2008, section 12).
    """
    size = max(1, math.isqrt(most))

    def one(carry, k):
        return lax.cond(k < count, body, lambda _, c: c, k, carry), None

    @jax.checkpoint
    def block(carry, start):
        return lax.scan(one, carry, start + jnp.arange(size, dtype=jnp.int32))[0], None

    starts = size * jnp.arange(-(-most // size), dtype=jnp.int32)
    return lax.scan(block, carry, starts)[0]


@jax.custom_batching.custom_vmap
def for_all(conditions: jax.Array) -> jax.Array:
    """Whether all are true, under ``vmap`` in the whole batch.

    So ``lax.cond`` of it takes one branch; of a batch of conditions it takes both.
    """
    return jnp.all(conditions)


@for_all.def_vmap
def _for_all_of_batch(size, batched, conditions):
    return for_all(conditions), False
