"""Eight CPU devices for every test, asked for before anything touches a backend."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402 (the platform comes first)
import numpy as np  # noqa: E402 (likewise)
import pytest  # noqa: E402 (likewise)

jax.config.update("jax_num_cpu_devices", 8)

import ott_shard as otts  # noqa: E402 (the device count comes first)

MESH_SHAPES = [(1, 1), (8, 1), (1, 8), (4, 2), (2, 4)]


@pytest.fixture(params=MESH_SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def mesh(request):
    return otts.make_mesh(*request.param)


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield np.dtype(request.param)


# What is compiled is what the time of the suite is made of: one program for each pair.
DEFAULT, WIDE = [((4, 2), "float64")], [((1, 8), "float32")]


def pytest_collection_modifyitems(items):
    """Of meshes and dtypes one pair is the default, one wide, the others slow."""
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if "mesh" in parameters:
            shape, dtype = parameters["mesh"], parameters.get("dtype")

            def among(pairs, shape=shape, dtype=dtype):
                return any(shape == s and dtype in (None, d) for s, d in pairs)

            if not among(DEFAULT):
                item.add_marker("wide" if among(WIDE) else "slow")


@pytest.fixture(scope="module", autouse=True)
def clear_compiled_code():
    """Compiled programs pile up; few are shared between modules."""
    yield
    jax.clear_caches()
