"""PointCloud: statistics, epsilon, layout."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference as ref
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import ott_shard as otts
from ott_shard import geometry

COSTS = {"SqEuclidean": otts.costs.SqEuclidean(), "Euclidean": otts.costs.Euclidean()}
# As the oracle iterates.
FIXED = dict(threshold=1e-30, max_iterations=30, min_iterations=30, acceleration=None)
TOLERANCE = {np.float32: 1e-5, np.float64: 1e-12}


def tolerance(dtype):
    return TOLERANCE[np.dtype(dtype).type]


# ---------------------------------------------------------------------- statistics


def test_statistics_match_dense(mesh, dtype):
    name = {"float32": "SqEuclidean", "float64": "Euclidean"}[np.dtype(dtype).name]
    p = ref.problem(13, 21, dtype=dtype)
    x, y, a, b = p.cast(dtype)
    # Tiles of 2 x 3 pairs: every device folds several of them.
    geom = otts.PointCloud(x, y, cost_fn=COSTS[name], batch_size=(2, 3), mesh=mesh)
    cost = ref.COSTS[name](p.x, p.y)
    uniform = ref.statistics(cost, np.ones(13), np.ones(21))
    np.testing.assert_allclose(
        geom.cost_statistics(), uniform, rtol=tolerance(dtype), err_msg="uniform"
    )
    np.testing.assert_allclose(
        geom.cost_statistics(a, b),
        ref.statistics(cost, p.a, p.b),
        rtol=tolerance(dtype),
        err_msg="weighted",
    )
    np.testing.assert_allclose(geom.mean_cost, uniform[0], rtol=tolerance(dtype))
    np.testing.assert_allclose(geom.std_cost, uniform[1], rtol=tolerance(dtype))
    np.testing.assert_allclose(geom.max_cost, uniform[2], rtol=tolerance(dtype))


def test_a_point_of_weight_zero_does_not_count():
    x = jnp.asarray([[0.0], [1.0], [1e3]])
    stats = otts.PointCloud(x, x, mesh=otts.make_mesh(4, 2)).cost_statistics(
        jnp.asarray([0.5, 0.5, 0.0]), jnp.asarray([0.5, 0.5, 0.0])
    )
    np.testing.assert_allclose(stats, (0.5, 0.5, 1.0), rtol=1e-6)


def test_statistics_do_not_depend_on_the_total_mass():
    p = ref.problem(13, 21)
    x, y, a, b = p.cast(jnp.float32)
    geom = otts.PointCloud(x, y, mesh=otts.make_mesh(2, 2))
    np.testing.assert_allclose(
        geom.cost_statistics(7 * a, 0.1 * b), geom.cost_statistics(a, b), rtol=1e-5
    )


@pytest.mark.parametrize("size", [(1, 5), (7, 6)])
def test_fewer_points_than_devices(mesh, size):
    p = ref.problem(*size)
    geom = otts.PointCloud(p.x, p.y, epsilon=0.5, mesh=mesh)
    cost = ref.sqeuclidean(p.x, p.y)
    want = ref.statistics(cost, np.ones(size[0]), np.ones(size[1]))
    np.testing.assert_allclose(geom.cost_statistics(), want, rtol=1e-5, atol=1e-6)
    assert geom.shape == size
    assert geom.x.shape == p.x.shape and geom.y.shape == p.y.shape
    np.testing.assert_array_equal(geom.x, p.x.astype(np.float32))
    np.testing.assert_array_equal(geom.y, p.y.astype(np.float32))


def test_spread_of_close_costs_far_from_zero():
    # All costs near 1e4 with a spread of about 20: no mean of squares minus square.
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 2)).astype(np.float32) * 0.1
    y = x + np.float32(70.0)
    geom = otts.PointCloud(x, y, batch_size=16, mesh=otts.make_mesh(1, 1))
    want = ref.sqeuclidean(x.astype(np.float64), y.astype(np.float64)).std()
    np.testing.assert_allclose(geom.std_cost, want, rtol=1e-3)


# ------------------------------------------------------------------------- epsilon


@pytest.mark.parametrize(
    ("arguments", "statistic"),
    [
        ({}, "0.05 std"),
        ({"epsilon": 0.2}, "0.2"),
        ({"relative_epsilon": "std"}, "0.05 std"),
        ({"relative_epsilon": "mean"}, "0.05 mean"),
        ({"epsilon": 0.3, "relative_epsilon": "mean"}, "0.3 mean"),
        ({"epsilon": 0.3, "relative_epsilon": "std"}, "0.3 std"),
    ],
)
def test_epsilon(arguments, statistic):
    p = ref.problem(13, 21)
    geom = otts.PointCloud(p.x, p.y, mesh=otts.make_mesh(4, 2), **arguments)
    cost = ref.sqeuclidean(p.x, p.y)
    factor, _, unit = statistic.partition(" ")
    want = float(factor) * {"": 1.0, "mean": cost.mean(), "std": cost.std()}[unit]
    np.testing.assert_allclose(geom.epsilon, want, rtol=1e-5)


def test_default_epsilon_of_a_solution_is_weighted():
    p = ref.problem(13, 21)
    x, y, a, b = p.cast(jnp.float32)
    out = otts.solve(otts.PointCloud(x, y, mesh=otts.make_mesh(4, 2)), a, b)
    _, std, _ = ref.statistics(ref.sqeuclidean(p.x, p.y), p.a, p.b)
    np.testing.assert_allclose(out.epsilon, 0.05 * std, rtol=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("points", [np.zeros((1, 2)), np.full((5, 3), 0.3)])
@pytest.mark.parametrize("name", COSTS)
def test_default_epsilon_is_positive_without_spread(points, name):
    geom = otts.PointCloud(points, points, cost_fn=COSTS[name])
    out = otts.solve(geom)
    assert float(geom.epsilon) > 0
    assert bool(out.converged)
    np.testing.assert_allclose(out.reg_ot_cost, 0, atol=1e-6)
    np.testing.assert_allclose(out.matrix.sum(), 1, rtol=1e-5)


@pytest.mark.wide
def test_scale_cost_divides_every_cost():
    p = ref.problem(13, 21)
    mesh = otts.make_mesh(4, 2)
    plain = otts.PointCloud(p.x, p.y, mesh=mesh, epsilon=0.3)
    scaled = otts.PointCloud(p.x, p.y, mesh=mesh, scale_cost=4.0, epsilon=0.3 / 4)
    np.testing.assert_allclose(scaled.mean_cost * 4, plain.mean_cost, rtol=1e-6)
    np.testing.assert_allclose(scaled.std_cost * 4, plain.std_cost, rtol=1e-6)
    np.testing.assert_allclose(scaled.max_cost * 4, plain.max_cost, rtol=1e-6)
    one, four = otts.solve(plain), otts.solve(scaled)
    assert int(one.n_iters) == int(four.n_iters)
    for field in ("f", "g", "reg_ot_cost", "primal_cost", "ent_reg_cost"):
        ref.assert_close(4 * getattr(four, field), getattr(one, field), 1e-5, field)
    ref.assert_close(four.matrix, one.matrix, 1e-5)


# ------------------------------------------------------------------- tiles, layout


@pytest.mark.wide
@pytest.mark.parametrize(
    "name", [pytest.param("SqEuclidean", marks=pytest.mark.slow), "Euclidean"]
)
def test_batch_size_changes_nothing(name):
    p = ref.problem(40, 24)
    x, y, a, b = p.cast(jnp.float32)

    def solve(batch_size):
        geom = otts.PointCloud(
            x,
            y,
            cost_fn=COSTS[name],
            epsilon=0.3,
            batch_size=batch_size,
            mesh=otts.make_mesh(2, 1),
        )
        out = otts.solve(geom, a, b, threshold=1e-5)
        return out.f, out.g, out.reg_ot_cost, *geom.cost_statistics(a, b)

    whole = solve(None)
    for batch_size in (7, (3, 10)):
        for mine, want in zip(solve(batch_size), whole, strict=True):
            ref.assert_close(mine, want, 2e-6, f"batch_size={batch_size}")


@pytest.mark.wide
@pytest.mark.parametrize("d", [2, 12])
@pytest.mark.parametrize("name", COSTS)
def test_translation_invariance(name, d):
    # Multiples of 1/64 stay exact at an offset of 1000, so that only the solver rounds.
    rng = np.random.default_rng(d)
    x = (rng.integers(-64, 64, (40, d)) / 64).astype(np.float32)
    y = (rng.integers(-64, 96, (24, d)) / 64).astype(np.float32)

    def solve(offset):
        geom = otts.PointCloud(
            x + np.float32(offset),
            y + np.float32(offset),
            cost_fn=COSTS[name],
            epsilon=0.1 * d,
            mesh=otts.make_mesh(2, 2),
        )
        return otts.solve(geom, threshold=1e-4)

    here, there = solve(0.0), solve(1000.0)
    assert bool(there.converged)
    ref.assert_close(there.f, here.f, 3e-5)
    ref.assert_close(there.g, here.g, 3e-5)
    np.testing.assert_allclose(there.reg_ot_cost, here.reg_ot_cost, rtol=3e-5)


def _callers_mesh(kind):
    devices = np.array(jax.devices())
    return {
        "1-D": lambda: Mesh(devices, ("points",)),
        "3-D": lambda: Mesh(devices.reshape(2, 2, 2), ("i", "j", "k")),
        "sub-mesh": lambda: Mesh(devices[[1, 3, 6]], ("three",)),
        "explicit": lambda: jax.make_mesh(
            (4, 2), ("u", "v"), axis_types=(AxisType.Explicit,) * 2
        ),
        "named": lambda: Mesh(devices.reshape(2, 4), ("cols", "rows")),
    }[kind]()


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["1-D", "3-D", "sub-mesh", "explicit", "named"])
def test_on_the_callers_mesh(kind):
    p = ref.problem(24, 48)
    x, y, a, b = p.cast(jnp.float32)
    mesh = _callers_mesh(kind)
    want = ref.sinkhorn(ref.sqeuclidean(p.x, p.y), p.a, p.b, 0.3, iterations=30)

    def solve(x, mesh):
        geom = otts.PointCloud(x, y, epsilon=0.3, mesh=mesh)
        assert geom.mesh.devices.tolist() == _callers_mesh(kind).devices.tolist()
        return otts.solve(geom, a, b, **FIXED)

    out = solve(x, mesh)
    ref.assert_close(out.f, want.f, 1e-5)
    ref.assert_close(out.g, want.g, 1e-5)
    # mesh=None: the one on which x lies.
    first = mesh.axis_names[0]
    placed = jax.device_put(x, NamedSharding(mesh, P(first)))
    np.testing.assert_array_equal(solve(placed, None).f, out.f)


@pytest.mark.wide
def test_explicit_axes():
    """Arrays typed with their sharding work, and so does a function of theirs."""
    x, y, *_ = ref.problem(24, 48).cast(jnp.float32)
    mesh = _callers_mesh("explicit")

    def value(x):
        return otts.solve(otts.PointCloud(x, y, epsilon=0.3, mesh=mesh)).reg_ot_cost

    want = jax.grad(value)(x)
    placed = jax.device_put(x, NamedSharding(mesh, P("u")))
    got = jax.grad(value)(placed)
    np.testing.assert_array_equal(got, want)
    assert got.sharding == placed.sharding
    with pytest.raises(ValueError, match="auto_axes"):
        jax.jit(value)(placed)
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match="auto_axes"):
            value(y)
        automatic = jax.sharding.auto_axes(value, out_sharding=P())
        got = jax.jit(jax.grad(automatic))(placed)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_make_mesh_shapes():
    shapes = {
        (): (4, 2),
        (8,): (8, 1),
        (2,): (2, 4),
        (2, 2): (2, 2),
        (1, 1): (1, 1),
    }
    for arguments, shape in shapes.items():
        mesh = otts.make_mesh(*arguments)
        assert mesh.axis_names == ("rows", "cols")
        assert mesh.devices.shape == shape
    assert otts.make_mesh(devices=jax.devices()[:6]).devices.shape == (3, 2)
    assert otts.make_mesh(cols=8).devices.shape == (1, 8)
    some = otts.make_mesh(2, devices=jax.devices()[4:8])
    assert [d.id for d in some.devices.flat] == [4, 5, 6, 7]


def test_inside_the_callers_jit():
    p = ref.problem(13, 21)
    x, y, a, b = p.cast(jnp.float32)
    mesh = otts.make_mesh(4, 2)
    traces = []

    @jax.jit
    def inside(x, y, a, b, epsilon):
        traces.append(1)
        geom = otts.PointCloud(x, y, epsilon=epsilon, mesh=mesh)
        out = otts.solve(geom, a, b)
        return out.f, out.reg_ot_cost, out.converged, geom.std_cost, geom.epsilon

    geom = otts.PointCloud(x, y, epsilon=0.3, mesh=mesh)
    out = otts.solve(geom, a, b)
    want = (out.f, out.reg_ot_cost, out.converged, geom.std_cost, geom.epsilon)
    for mine, other in zip(inside(x, y, a, b, 0.3), want, strict=True):
        ref.assert_close(mine, other, 1e-6)
    inside(x, y, a, b, 0.4)
    assert len(traces) == 1, "a new epsilon must not compile again"


def test_a_geometry_is_a_pytree():
    p = ref.problem(13, 21)
    geom = otts.PointCloud(p.x, p.y, epsilon=0.3, mesh=otts.make_mesh(4, 2))
    solve = jax.jit(lambda geom: otts.solve(geom).reg_ot_cost)
    np.testing.assert_allclose(solve(geom), otts.solve(geom).reg_ot_cost, rtol=1e-6)
    again = jax.tree.map(lambda leaf: leaf, geom)
    assert again.shape == geom.shape and again.mesh == geom.mesh


# -------------------------------------------------------------------- odd inputs


@pytest.mark.wide
def test_integers_and_low_precision_are_computed_in_float32():
    x = np.arange(12).reshape(4, 3)
    want = otts.solve(otts.PointCloud(x.astype(np.float32), x + 1.5, epsilon=5.0))
    out = otts.solve(otts.PointCloud(x, x + 1.5, epsilon=5.0))
    assert out.f.dtype == np.float32
    np.testing.assert_array_equal(out.f, want.f)
    for dtype in (jnp.bfloat16, jnp.float16, jnp.int16):
        low = jnp.asarray(x, dtype)  # these small integers are exact in all of them
        out = otts.solve(otts.PointCloud(low, x + 1.5, epsilon=5.0))
        assert out.f.dtype == np.float32 and bool(out.converged)
        np.testing.assert_array_equal(out.f, want.f)


@pytest.mark.wide
def test_lists_are_arrays():
    out = otts.solve(otts.PointCloud([[0.0], [1.0]], [[0.5]], epsilon=1.0))
    np.testing.assert_allclose(out.primal_cost, 0.25, rtol=1e-6)


class Elsewhere:
    """Of a mesh no more is asked than the kind of its devices."""

    def __init__(self, platform):
        self.devices = np.asarray([SimpleNamespace(platform=platform)])


@pytest.mark.parametrize(("platform", "side"), [("cpu", 1024), ("gpu", 4096)])
def test_a_tile_is_for_the_kind_of_device(platform, side):
    mesh = Elsewhere(platform)
    plain = geometry._block(None, "highest", otts.costs.SqEuclidean(), 64, mesh)
    assert (plain.rows, plain.cols) == (side, side)
    # A function may make [rows, cols, d].
    custom = otts.costs.Custom(lambda x, y: jnp.sum(abs(x - y)))
    assert geometry._block(None, "highest", custom, 64, mesh).rows == 128
    given = geometry._block((7, 9), "highest", custom, 64, mesh)
    assert (given.rows, given.cols) == (7, 9)
