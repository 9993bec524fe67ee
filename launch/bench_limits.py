"""What the machine can do at most: exponentials, products and copies alone."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .bench_options import Case
from .bench_timing import Program, program

_TILE = 1024


def of_tiles(case: Case, mesh: Mesh) -> dict[str, Program]:
    """Exponentials, and products, of the tiles of a case, by scans like ott_shard's."""
    rows, cols = _tiles(case, mesh)
    u, v, cols_t = rows[..., 0], cols[..., 0], cols.swapaxes(1, 2)
    pairs = u.size * v.size
    return {
        "exp_sum": program(_scanned(_exponentials), u, v, pairs=pairs),
        "dot": program(_scanned(_products), rows, cols_t, pairs=pairs),
    }


def of_device(n: int) -> dict[str, Program]:
    """A copy, a product of matrices and a sum of exponentials that fill one device.

    What `pairs` counts is bytes read and written, floating-point operations (full
    float32, two for each multiplication) and exponentials: of 4,096 n, 2 k^3 with k at
    most 8,192, and n^2, which are fused with their sums and not stored.
    """
    rng, float32 = np.random.default_rng(0), np.float32
    k = min(n, 8192)
    matrix = jnp.asarray(rng.standard_normal((k, k), float32))
    vector = jnp.asarray(rng.standard_normal(n, float32))
    many = jnp.zeros((n, 512), float32)

    def exponentials(u, v):
        return _exponentials(u, v).sum(axis=1)

    return {
        "copy": program(jax.jit(jnp.copy), many, pairs=2 * many.nbytes),
        "matmul": program(jax.jit(_products), matrix, matrix, pairs=2 * k**3),
        "exp": program(jax.jit(exponentials), vector, vector, pairs=n * n),
    }


def _tiles(case: Case, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """About n points, [blocks, devices, rows, d], and about m, [blocks, cols, d]."""
    rows = min(_TILE, max(case.n // mesh.size, 1))
    cols = min(_TILE, case.m)
    blocks = max(case.n // (rows * mesh.size), 1), case.m // cols
    rng, float32 = np.random.default_rng(0), np.float32
    x = rng.standard_normal((blocks[0], mesh.size, rows, case.d), float32)
    y = rng.standard_normal((blocks[1], cols, case.d), float32)
    specs = PartitionSpec(None, mesh.axis_names), PartitionSpec()
    return jax.device_put((x, y), tuple(NamedSharding(mesh, spec) for spec in specs))


def _scanned(tile: Callable[[jax.Array, jax.Array], jax.Array]) -> Any:
    """Sums over j of all tiles, by two scans like those of ott_shard."""
    on_devices = jax.vmap(lambda rows, cols: tile(rows, cols).sum(axis=1), (0, None))

    def over_rows(cols, rows):
        def over_cols(total, cols):
            return total + on_devices(rows, cols), None

        return cols, jax.lax.scan(over_cols, jnp.zeros(rows.shape[:2]), cols)[0]

    return jax.jit(lambda rows, cols: jax.lax.scan(over_rows, cols, rows)[1])


def _exponentials(u: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.exp(u[:, None] + v[None, :])


def _products(x: jax.Array, y_t: jax.Array) -> jax.Array:
    return jnp.matmul(x, y_t, precision="highest")
