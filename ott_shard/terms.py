"""Terms that are summed over the plan by :func:`ott_shard.tile.local_sum`.

Each is per unit of a_i b_j: with densities D_ij = P_ij / (a_i b_j) = exp(e_ij).
"""

import jax
import jax.numpy as jnp

from ott_shard.pairwise import capped


def cost(precision, shared, x, y, exponents, density) -> jax.Array:
    """D_ij C_ij, for shared = (cost, centre, scale) and any points x and y."""
    cost, centre, scale = shared
    costs = cost.pairwise(x - centre, y - centre, precision)
    # A forbidden pair has infinite cost and no mass; it adds nothing.
    return density * jnp.where(density > 0, costs, 0.0) / scale


def log_density(precision, shared, x, y, exponents, density) -> jax.Array:
    """D_ij log D_ij."""
    return density * jnp.where(density > 0, exponents, 0.0)


def divergence(precision, shared, rows, cols, exponents, density) -> jax.Array:
    """F log(F / D) - F + D, for F_ij = D_ij exp(u_i + v_j) + s_i t_j.

    With rows = (u, s) and cols = (v, t). Infinite where F has mass and D none.
    """
    (u, s), (v, t) = rows, cols
    scaling, extra = u[:, None] + v, s[:, None] * t
    other = jnp.exp(capped(exponents + scaling)) + extra
    ratio = jnp.logaddexp(scaling, jnp.log(extra) - exponents)
    return jnp.where(other > 0, other * ratio, 0.0) - other + density
