"""Passes and solutions by other libraries: the worker that answers for them.

Run as a script by the Python of another environment, it imports neither ott_shard nor
anything beside it: that environment has versions of its own. A request and its answer
are one line of JSON each. The worker waits for a line while it has none, so that it
takes no time from what is measured between two requests.
"""

import functools
import importlib.metadata
import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
# It computes the values of a request, by name.
Job = Callable[[], Arrays]
_DECAY = 0.9


def _ott_pass(data: Arrays, cost: str, batch: int) -> Job:
    """log sum_j exp(h_j - C_ij / epsilon) by OTT-JAX in online mode."""
    import jax
    import jax.numpy as jnp
    from ott.geometry import (  # pyright: ignore[reportMissingImports] (optional)
        costs,
        pointcloud,
    )

    cost_fn = {"sqeuclidean": costs.SqEuclidean, "euclidean": costs.Euclidean}[cost]()

    @jax.jit
    def lse(x, y, f, g, epsilon):
        geom = pointcloud.PointCloud(
            x, y, cost_fn=cost_fn, epsilon=epsilon, batch_size=batch
        )
        return geom.apply_lse_kernel(f, g, epsilon, axis=1)[0]

    epsilon = data["epsilon"]
    f, g = np.zeros_like(data["x"][:, 0]), data["h"] * epsilon
    operands = [jnp.asarray(array) for array in (data["x"], data["y"], f, g, epsilon)]

    def run():
        # Full float32 products, as in ott_shard; on CPU they always are.
        with jax.default_matmul_precision("highest"):
            return {"values": np.asarray(lse(*operands)) / epsilon}

    return run


def _keops_pass(data: Arrays, cost: str) -> Job:
    """KeOps; epsilon goes into the points, which saves it one operation per pair."""
    from pykeops.numpy import LazyTensor  # pyright: ignore[reportMissingImports] (optional)

    square = cost == "sqeuclidean"
    unit = np.sqrt(data["epsilon"]) if square else data["epsilon"]
    x, y, h = data["x"] / unit, data["y"] / unit, data["h"]

    def run():
        x_i, y_j = LazyTensor(x[:, None, :]), LazyTensor(y[None, :, :])
        costs = x_i.sqdist(y_j) if square else x_i.sqdist(y_j).sqrt()
        h_j = LazyTensor(h[None, :, None])
        return {"values": (h_j - costs).logsumexp(dim=1)[:, 0]}

    return run


def _ott_solve(
    data: Arrays, variant: str, threshold: float, max_iterations: int
) -> Job:
    """A solution by OTT-JAX, all costs in memory, in the dtype of the points.

    The cost is the squared distance. Variants are its default and its options for fewer
    iterations: Lehmann's momentum, Anderson's acceleration, an epsilon that comes down
    from "unit" (which is not to end before it is down), and that with momentum.
    """
    import jax
    import jax.numpy as jnp
    from ott.geometry import (  # pyright: ignore[reportMissingImports] (optional)
        epsilon_scheduler,
        pointcloud,
    )
    from ott.problems.linear import (  # pyright: ignore[reportMissingImports] (optional)
        linear_problem,
    )
    from ott.solvers.linear import (  # pyright: ignore[reportMissingImports] (optional)
        acceleration,
        sinkhorn,
    )

    start = max(1.0, float(data["unit"] / data["epsilon"]))
    falls = variant in ("decay", "decay_momentum")
    options: dict[str, Any] = {
        "default": {},
        "momentum": {"momentum": acceleration.Momentum(start=100)},
        "anderson": {"anderson": acceleration.AndersonAcceleration(memory=5)},
        "decay": {},
        "decay_momentum": {"momentum": acceleration.Momentum(start=100)},
    }[variant]
    fewest = math.ceil(math.log(start) / -math.log(_DECAY)) if falls else 0
    solver = sinkhorn.Sinkhorn(
        threshold=threshold,
        min_iterations=fewest,
        max_iterations=max_iterations,
        **options,
    )

    @jax.jit
    def solve(x, y, epsilon):
        if falls:
            epsilon = epsilon_scheduler.Epsilon(epsilon, init=start, decay=_DECAY)
        geom = pointcloud.PointCloud(x, y, epsilon=epsilon)
        out = solver(linear_problem.LinearProblem(geom))
        found = {"f": out.f, "g": out.g, "n_iters": out.n_iters}
        return found | {"value": out.reg_ot_cost, "converged": out.converged}

    def run():
        wide = jax.enable_x64(data["x"].dtype == np.float64)
        with wide, jax.default_matmul_precision("highest"):
            operands = (jnp.asarray(data[name]) for name in ("x", "y", "epsilon"))
            return {k: np.asarray(v) for k, v in solve(*operands).items()}

    return run


# How to do a task, and the distribution that does it.
_JOBS = {
    ("pass", "ott"): _ott_pass,
    ("pass", "keops"): _keops_pass,
    ("solve", "ott"): _ott_solve,
}
PEERS = {"ott": "ott-jax", "keops": "pykeops"}
OTT_VARIANTS = "default", "momentum", "anderson", "decay", "decay_momentum"


@functools.cache
def _job(task: str, peer: str, data: str, options: tuple[tuple[str, Any], ...]) -> Job:
    with np.load(data) as archive:
        arrays = dict(archive)
    return _JOBS[task, peer](arrays, **dict(options))


def answer(
    op: str, task: str, peer: str, data: str, out: str | None = None, **options: Any
) -> dict[str, Any]:
    """Do a task once, which compiles at the first time.

    Args:
        op: "values", which are written, or "time".
        task: "pass" or "solve".
        peer: one of PEERS.
        data: an .npz file: x [n, d], y [m, d], epsilon and, for a pass, h [m], for a
            solution "unit".
        out: where "values" go, an .npz file.
        options: of the task.
    """
    run = _job(task, peer, data, tuple(sorted(options.items())))
    begun = time.perf_counter()
    values = run()
    seconds = time.perf_counter() - begun
    if op == "values":
        assert out is not None
        np.savez(out, allow_pickle=False, **values)
    return {"seconds": seconds, "version": importlib.metadata.version(PEERS[peer])}


def _serve() -> None:
    # Compilers and libraries print; only answers may go where answers go.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            found = answer(**json.loads(line))
        except (Exception, SystemExit) as error:
            sentence = " ".join(str(error).split())[:300]
            found = {"error": f"{type(error).__name__}: {sentence}"}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
