"""Sinkhorn on dense arrays in plain JAX, to be differentiated by JAX."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Dense(NamedTuple):
    phi: jax.Array
    psi: jax.Array
    plan: jax.Array
    cost: jax.Array
    value: jax.Array  # for taus of 1


def sqeuclidean(x, y):
    return jnp.sum((x[:, None] - y) ** 2, -1)


def cosine(x, y):
    x, y = (z / jnp.sqrt(jnp.sum(z * z, 1, keepdims=True)) for z in (x, y))
    return 1 - x @ y.T


def weighted(scale, x, y):
    """The custom cost of the tests, with a parameter [d]."""
    return jnp.sum(jnp.abs(scale * (x - y)) ** 3)


COSTS = {
    "SqEuclidean": sqeuclidean,
    "Euclidean": lambda x, y: jnp.sqrt(sqeuclidean(x, y)),
    "Cosine": cosine,
}


def sinkhorn(cost, a, b, epsilon, taus=(1.0, 1.0), iterations=300):
    """From phi = 0, psi first. Weights stand outside of the exponential: may be 0."""

    def step(pair, _):
        phi, _ = pair
        psi = -taus[1] * epsilon * jnp.log(a @ jnp.exp((phi[:, None] - cost) / epsilon))
        phi = -taus[0] * epsilon * jnp.log(jnp.exp((psi - cost) / epsilon) @ b)
        return (phi, psi), None

    start = (jnp.zeros_like(a), jnp.zeros_like(b))
    (phi, psi), _ = jax.lax.scan(step, start, None, length=iterations)
    plan = a[:, None] * b * jnp.exp((phi[:, None] + psi - cost) / epsilon)
    value = a @ phi + b @ psi - epsilon * (plan.sum() - a.sum() * b.sum())
    return Dense(phi, psi, plan, cost, value)


def symmetric(cost, a, epsilon, iterations=300):
    """Of a cloud with itself, by half steps."""

    def step(phi, _):
        new = -epsilon * jnp.log(a @ jnp.exp((phi[:, None] - cost) / epsilon))
        return (phi + new) / 2, None

    phi, _ = jax.lax.scan(step, jnp.zeros_like(a), None, length=iterations)
    plan = a[:, None] * a * jnp.exp((phi[:, None] + phi - cost) / epsilon)
    value = 2 * (a @ phi) - epsilon * (plan.sum() - a.sum() ** 2)
    return Dense(phi, phi, plan, cost, value)


def divergence(x, y, a, b, epsilon):
    between = sinkhorn(sqeuclidean(x, y), a, b, epsilon).value
    own = symmetric(sqeuclidean(x, x), a, epsilon).value
    return between - (own + symmetric(sqeuclidean(y, y), b, epsilon).value) / 2


def quantity(phi, psi, image, cost):
    """A number made of all of a solution, whatever the constant of its potentials."""
    moved = jnp.sum(jnp.sin(3 * (phi - phi[0]))) + jnp.sum(jnp.cos(psi - psi[0]))
    return moved + 3 * jnp.sum(image**2) + cost
