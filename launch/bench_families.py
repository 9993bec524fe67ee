"""Five families of pairs of clouds, on which iterations are counted."""

import importlib.util

import numpy as np

from .colour_transfer import photographs
from .data import discs

Clouds = tuple[np.ndarray, np.ndarray]


def gaussians(n: int) -> Clouds:
    """Two in the plane, of different spread, a unit apart in both directions."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, n, 2))
    return x, y * (1.5, 0.5) + 1.0


def two_discs(n: int) -> Clouds:
    """Of radius 5 and 10, from the same random numbers: the demo of the command."""
    x, y = discs(n)
    return np.asarray(x), np.asarray(y)


def moved_mixture(n: int) -> Clouds:
    """Five narrow Gaussians on a circle, of which some give mass to others."""
    rng = np.random.default_rng(1)
    angles = 2 * np.pi * np.arange(5) / 5
    centres = 3 * np.stack([np.cos(angles), np.sin(angles)], axis=1)

    def draw(shares):
        return centres[rng.choice(5, n, p=shares)] + 0.3 * rng.standard_normal((n, 2))

    before, after = [0.4, 0.3, 0.1, 0.1, 0.1], [0.1, 0.1, 0.2, 0.2, 0.4]
    return draw(before), draw(after)


def cells(n: int) -> Clouds:
    """Like principal components of cells at two times: 50, of falling variance.

    Ten types, which move a little, grow and shrink.
    """
    rng = np.random.default_rng(2)
    scales = 10 / np.arange(1, 51) ** 0.8
    types = rng.standard_normal((10, 50))
    moved = types + 0.3 * rng.standard_normal((10, 50))

    def draw(centres, shares):
        own = 0.5 * rng.standard_normal((n, 50))
        return scales * (centres[rng.choice(10, n, p=shares)] + own)

    return draw(types, np.full(10, 0.1)), draw(moved, rng.dirichlet(np.full(10, 5.0)))


def colours(n: int) -> Clouds:
    """Pixels of the two photographs that scikit-learn ships, as far as it has them."""
    rng = np.random.default_rng(3)
    pixels = (photograph.reshape(-1, 3) for photograph in photographs())
    x, y = (rng.permutation(cloud)[:n] for cloud in pixels)
    return x, y


FAMILIES = {
    "gaussians": gaussians,
    "discs": two_discs,
    "moved_mixture": moved_mixture,
    "cells": cells,
    "colours": colours,
}


def missing(family: str) -> str | None:
    """Why there are no clouds of this family here, if so."""
    if family != "colours" or importlib.util.find_spec("sklearn"):
        return None
    return "its photographs are scikit-learn's: pip install 'ott_shard[examples]'"
