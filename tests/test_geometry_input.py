"""PointCloud and make_mesh: what they refuse, and in which words."""

import jax
import numpy as np
import pytest

import ott_shard as otts

X, Y = np.zeros((3, 2)), np.ones((4, 2))
NAN = np.where(np.arange(6).reshape(3, 2) == 3, np.nan, 0.0)


# Each: what is wrong, the call, the error, what its message must say.
class Unregistered:
    """Has what a cost has, but jit cannot take it."""

    translation_invariant = True

    def pairwise(self, x, y, precision):
        return x @ y.T


BAD_GEOMETRIES = {
    "overflow": (lambda: otts.PointCloud(X + 1e39, Y), ValueError, "x must.*float32"),
    "underflow": (lambda: otts.PointCloud(X, Y, epsilon=1e-50), ValueError, "epsilon"),
    "no pytree": (
        lambda: otts.PointCloud(X, Y, cost_fn=Unregistered()),
        TypeError,
        "cost_fn must be a pytree.*costs.register",
    ),
    "masked": (
        lambda: otts.PointCloud(np.ma.masked_array(X, mask=X > 0), Y),
        TypeError,
        "x must not be a masked array",
    ),
    "text epsilon": (lambda: otts.PointCloud(X, Y, epsilon="1"), TypeError, "epsilon"),
    "bool epsilon": (lambda: otts.PointCloud(X, Y, epsilon=True), TypeError, "epsilon"),
    "complex epsilon": (
        lambda: otts.PointCloud(X, Y, epsilon=np.complex64(1)),
        TypeError,
        "epsilon must be a real number",
    ),
    "bool tile": (lambda: otts.PointCloud(X, Y, batch_size=True), TypeError, "batch"),
    "twice a device": (
        lambda: otts.make_mesh(2, 1, devices=jax.devices()[:1] * 2),
        ValueError,
        "devices must be distinct",
    ),
    "no device": (lambda: otts.make_mesh(devices=[]), ValueError, "devices must be"),
    "array precision": (
        lambda: otts.PointCloud(X, Y, precision=np.ones(2)),
        ValueError,
        "precision must be one of",
    ),
    "mesh 3": (lambda: otts.make_mesh(3), ValueError, "rows must divide the 8.*3"),
    "NaN": (lambda: otts.PointCloud(NAN, Y), ValueError, r"\bx\b.*row 1"),
    "inf": (lambda: otts.PointCloud(X, Y / 0), ValueError, r"\by\b.*inf"),
    "empty": (lambda: otts.PointCloud(X[:0], Y), ValueError, r"\bx\b.*\(0, 2\)"),
    "no dims": (lambda: otts.PointCloud(X[:, :0], Y), ValueError, r"\bx\b.*\(3, 0\)"),
    "dims": (lambda: otts.PointCloud(X, np.ones((4, 5))), ValueError, "2 and 5"),
    "1-D": (lambda: otts.PointCloud(X[:, 0], Y), ValueError, r"\bx\b.*\(3,\)"),
    "3-D": (lambda: otts.PointCloud(X, Y[None]), ValueError, r"\by\b.*\(1, 4, 2\)"),
    "complex": (lambda: otts.PointCloud(X * 1j, Y), TypeError, r"\bx\b.*complex"),
    "text": (lambda: otts.PointCloud([["a", "b"]], Y), TypeError, r"\bx\b"),
    "ragged": (lambda: otts.PointCloud([[1.0], [1.0, 2.0]], Y), TypeError, r"\bx\b"),
    "no array": (lambda: otts.PointCloud(None, Y), TypeError, r"\bx\b"),
    "epsilon 0": (lambda: otts.PointCloud(X, Y, epsilon=0.0), ValueError, "epsilon.*0"),
    "epsilon < 0": (
        lambda: otts.PointCloud(X, Y, epsilon=-0.5),
        ValueError,
        r"epsilon.*-0\.5",
    ),
    "epsilon NaN": (
        lambda: otts.PointCloud(X, Y, epsilon=float("nan")),
        ValueError,
        "epsilon.*nan",
    ),
    "epsilon inf": (
        lambda: otts.PointCloud(X, Y, epsilon=np.inf),
        ValueError,
        "epsilon.*inf",
    ),
    "epsilon [2]": (
        lambda: otts.PointCloud(X, Y, epsilon=[0.1, 0.2]),
        ValueError,
        r"epsilon.*\(2,\)",
    ),
    "epsilon text": (
        lambda: otts.PointCloud(X, Y, epsilon="small"),
        TypeError,
        "epsilon.*small",
    ),
    "unit": (
        lambda: otts.PointCloud(X, Y, relative_epsilon="median"),
        ValueError,
        "relative_epsilon.*median",
    ),
    "scale_cost": (
        lambda: otts.PointCloud(X, Y, scale_cost=-1.0),
        ValueError,
        "scale_cost.*-1",
    ),
    "scale_cost text": (
        lambda: otts.PointCloud(X, Y, scale_cost="largest"),
        ValueError,
        "scale_cost must be one of.*max_bound.*largest",
    ),
    "scale_cost median": (
        lambda: otts.PointCloud(X, Y, scale_cost="median"),
        ValueError,
        "scale_cost must not be 'median'.*subsample",
    ),
    "scale_cost without norm": (
        lambda: otts.PointCloud(
            X, Y, cost_fn=otts.costs.Euclidean(), scale_cost="max_norm"
        ),
        ValueError,
        "scale_cost must be a number or one of.*Euclidean.*max_norm",
    ),
    "cost of a vector": (
        lambda: otts.PointCloud(X, Y, cost_fn=lambda x, y: x - y),
        TypeError,
        r"cost_fn must give one number of float32.*\(1, 1, 2\)",
    ),
    "cost of one point": (
        lambda: otts.PointCloud(X, Y, cost_fn=lambda x: x.sum()),
        TypeError,
        r"cost_fn must take two points of shape \[2\]",
    ),
    "cost of ints": (
        lambda: otts.PointCloud(X, Y, cost_fn=lambda x, y: 1),
        TypeError,
        "cost_fn must give one number of float32.*int32",
    ),
    "power below 1": (lambda: otts.costs.PNormP(0.5), ValueError, "p must be.*0.5"),
    "power inf": (lambda: otts.costs.SqPNorm(np.inf), ValueError, "p must be.*inf"),
    "power text": (lambda: otts.costs.PNormP("2"), ValueError, "p must be.*'2'"),
    "elastic": (lambda: otts.costs.Elastic(l1=-1.0), ValueError, "l1 must be.*-1"),
    "arccos": (lambda: otts.costs.Arccos(3), ValueError, r"n must be one of.*3"),
    "ridge": (lambda: otts.costs.Arccos(1, 0.0), ValueError, "ridge must be.*0"),
    "schedule up": (
        lambda: otts.Epsilon(1.0, init=0.5, decay=0.9),
        ValueError,
        "init must be at least the target 1, got 0.5",
    ),
    "schedule without end": (
        lambda: otts.Epsilon(0.1, init=1.0, decay=1.0),
        ValueError,
        "decay must be greater than 0 and at most 0.9999, got 1",
    ),
    "schedule target": (
        lambda: otts.Epsilon(0.0, init=1.0, decay=0.5),
        ValueError,
        "epsilon must be greater than 0.*got 0",
    ),
    "schedule of arrays": (
        lambda: otts.PointCloud(
            X, Y, epsilon=otts.Epsilon(np.ones(2), init=1.0, decay=0.5)
        ),
        ValueError,
        r"epsilon must be a scalar, got shape \(2,\)",
    ),
    "schedule in an array": (
        lambda: otts.PointCloud(
            X, Y, epsilon=otts.Epsilon(np.float32(1), init=np.float32(0.5), decay=0.9)
        ),
        ValueError,
        "init must be at least the target 1, got 0.5",
    ),
    "batch_size 0": (
        lambda: otts.PointCloud(X, Y, batch_size=0),
        ValueError,
        "batch_size.*0",
    ),
    "batch_size float": (
        lambda: otts.PointCloud(X, Y, batch_size=2.5),
        TypeError,
        r"batch_size.*2\.5",
    ),
    "batch_size triple": (
        lambda: otts.PointCloud(X, Y, batch_size=(1, 2, 3)),
        ValueError,
        r"batch_size.*\(1, 2, 3\)",
    ),
    "batch_size pair": (
        lambda: otts.PointCloud(X, Y, batch_size=(4, -1)),
        ValueError,
        "batch_size.*-1",
    ),
    "precision": (
        lambda: otts.PointCloud(X, Y, precision="tf32"),
        ValueError,
        "precision.*tf32",
    ),
    "cost": (lambda: otts.PointCloud(X, Y, cost_fn="l2"), TypeError, "cost_fn.*l2"),
    "cost class": (
        lambda: otts.PointCloud(X, Y, cost_fn=otts.costs.Euclidean),
        TypeError,
        "cost_fn.*Euclidean",
    ),
    "mesh": (lambda: otts.PointCloud(X, Y, mesh=(4, 2)), TypeError, "mesh.*tuple"),
    "devices": (lambda: otts.make_mesh(3, 3), ValueError, "3 x 3.*9.*8"),
    "rows": (lambda: otts.make_mesh(0), ValueError, "rows.*0"),
    "cols": (lambda: otts.make_mesh(cols=1.5), TypeError, r"cols.*1\.5"),
}


@pytest.mark.parametrize("case", BAD_GEOMETRIES)
def test_bad_arguments(case):
    call, error, message = BAD_GEOMETRIES[case]
    with np.errstate(all="ignore"), pytest.raises(error, match=message):
        call()
