"""Pictures of a finished run, as PNG; matplotlib is imported where they are drawn."""

import io
import math
from typing import Any

import numpy as np

import ott_shard as otts

from . import saved
from .config import Report
from .tasks import TERMS

_SEGMENTS = 300  # so many points of x show where they go
_SHOWN = 2000  # the most points of a cloud that are drawn
_COLOURS = "tab:blue", "tab:orange"
_INCHES = 7.0, 5.0


def draw(use: Report, plan: otts.Plan, _: None) -> tuple[bytes, bytes]:
    """(convergence, clouds): the errors of the run, and where its plan sends points."""
    record = saved.read_record(use.run)
    return convergence(record), clouds(plan)


def convergence(record: dict[str, Any]) -> bytes:
    """The marginal error of each term at its checks, from the record of a run."""

    def fill(figure: Any) -> None:
        axes = figure.add_subplot()
        for term, iterations, errors in histories(record):
            axes.plot(iterations, errors, marker=".", label=term)
        threshold = record["threshold"]
        axes.axhline(threshold, color="grey", linestyle="--", label="threshold")
        axes.set(
            yscale="log",
            xlabel="iteration",
            ylabel="marginal error (L1)",
            title=f"{record['task']}: {record['status'].lower().replace('_', ' ')}",
        )
        axes.legend()

    return _png(fill)


def histories(record: dict[str, Any]) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """(term, iterations, errors) of each term; NaN for what a logarithm has not."""
    if "terms" in record:
        terms = record["terms"], record["n_iters"], record["errors"]
    else:
        terms = TERMS[:1], [record["n_iters"]], [record["errors"]]
    found = []
    for term, last, errors in zip(*terms, strict=True):
        checks = len(errors)
        # An older record does not say; the last check may be an early one.
        between = record.get("inner_iterations") or math.ceil(last / max(1, checks))
        iterations = np.minimum(between * np.arange(1, checks + 1), last)
        values = np.asarray(errors, float)  # null is NaN
        found.append((term, iterations, np.where(values > 0, values, np.nan)))
    return found


def clouds(plan: otts.Plan) -> bytes:
    """Both clouds, and segments from points of x to where the plan sends them.

    That is the mean of their matches, of at most 300 points that have weight. More than
    two dimensions are brought down to the two of the most variance.
    """
    geom, rng = plan.geom, np.random.default_rng(0)
    x, y = (
        np.asarray(points[_some(rng, np.asarray(weights)[: len(points)], _SHOWN)])
        for points, weights in ((geom.x, plan.problem.a), (geom.y, plan.problem.b))
    )
    starts = x[:_SEGMENTS]
    ends = np.asarray(plan.to_dual_potentials().transport(starts))
    starts, ends = (z[np.isfinite(ends).all(axis=1)] for z in (starts, ends))
    (x, starts), (y, ends), labels = flat((x, starts), (y, ends))
    return _png(lambda figure: _fill_clouds(figure, (x, y), (starts, ends), labels))


def _fill_clouds(figure: Any, points: Any, ends: Any, labels: tuple[str, str]) -> None:
    from matplotlib.collections import (  # pyright: ignore[reportMissingImports] (optional)
        LineCollection,
    )

    axes = figure.add_subplot()
    segments = np.stack(ends, axis=1)
    axes.add_collection(LineCollection(list(segments), colors="0.6", linewidths=0.7))
    for name, cloud, colour in zip("xy", points, _COLOURS, strict=True):
        axes.scatter(*cloud.T, s=6, color=colour, linewidths=0, label=name, zorder=2)
    title = f"where the plan sends {len(segments)} points of x"
    axes.set(xlabel=labels[0], ylabel=labels[1], title=title)
    if labels[1] != "cloud":
        axes.set_aspect("equal", adjustable="datalim")
    axes.legend()


def _some(rng: np.random.Generator, weights: np.ndarray, most: int) -> np.ndarray:
    """At most so many indices of points that have weight, in random order."""
    return rng.permutation(np.flatnonzero(weights > 0))[:most]


def flat(*clouds: Any) -> Any:
    """Both clouds, each with points that belong to it, in the plane; and its axes.

    Points on a line are drawn on two lines. Of more than two dimensions the principal
    ones are those of all points of both clouds together.
    """
    d = clouds[0][0].shape[1]
    if d == 1:
        lifted = (
            [np.column_stack([z[:, 0], np.full(len(z), height)]) for z in cloud]
            for height, cloud in enumerate(clouds)
        )
        return *lifted, ("coordinate", "cloud")
    if d == 2:
        return *clouds, ("coordinate 1", "coordinate 2")
    together = np.concatenate([cloud[0][:_SEGMENTS] for cloud in clouds]).astype(float)
    centre = together.mean(axis=0)
    _, scales, axes = np.linalg.svd(together - centre, full_matrices=False)
    axes = axes[:2]
    # The sign of a component is arbitrary: its largest entry is positive.
    largest = np.abs(axes).argmax(axis=1)
    axes *= np.sign(axes[np.arange(len(axes)), largest])[:, None]
    shares = scales**2 / max(np.sum(scales**2), np.finfo(float).tiny)
    labels = (f"component {k + 1} ({shares[k]:.0%} of variance)" for k in range(2))
    return *([(z - centre) @ axes.T for z in c] for c in clouds), tuple(labels)


def _png(fill: Any) -> bytes:
    """What `fill` draws into a figure, by no other rules than matplotlib's own.

    Without pyplot: no window, and nothing that would have to be closed.
    """
    from matplotlib import style  # pyright: ignore[reportMissingImports] (optional)
    from matplotlib.figure import (  # pyright: ignore[reportMissingImports] (optional)
        Figure,
    )

    file = io.BytesIO()
    with style.context("default"):
        figure = Figure(figsize=_INCHES, layout="constrained")
        fill(figure)
        # The version of matplotlib is no part of a picture.
        figure.savefig(file, format="png", dpi=150, metadata={"Software": None})
    return file.getvalue()
