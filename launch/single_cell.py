"""Example: cells of two time points, coupled, in Python or by the command.

    python -m launch.single_cell cells DIR [N]
    python -m launch.single_cell couple DIR

or, instead of the second line,

    ott-shard solve --x=DIR/before.npy --y=DIR/after.npy --epsilon=0.05 \
        --epsilon_unit=mean --tau_a=0.8 --out=DIR/run
    ott-shard apply --run=DIR/run --v=DIR/types_after.npy --axis=1 --out=DIR/fates
    ott-shard apply --run=DIR/run --v=DIR/genes.npy --axis=0 --out=DIR/genes
    ott-shard match --run=DIR/run --k=10 --axis=0 --out=DIR/ancestors
    ott-shard sample --run=DIR/run --num_pairs=1000 --out=DIR/pairs
    ott-shard transport --run=DIR/run --points=DIR/before.npy --out=DIR/moved

The cells are made up: types at the first time point move, split and grow at different
rates into types at the second. tau_a below 1 lets a cell have more or fewer descendants
than its share; what the plan says of types is compared with what was made up.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

import ott_shard as otts

DIMENSION, GENES = 30, 500
# To which types of the second time point the cells of each type of the first go, and
# how many descendants a cell has.
FATES = np.asarray(
    [
        [1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        [0.0, 0.7, 0.3, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 1.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, 0.4, 0.6],
    ]
)
GROWTH = np.asarray([0.5, 1.0, 1.0, 2.0])
_USAGE = "python -m launch.single_cell cells DIR [N] | couple DIR"


class Cells(NamedTuple):
    """Two time points.

    Attributes:
        before: [n, 30] cells of the first.
        after: [n, 30] of the second.
        types_before: [n, 4], a 1 for the type of each cell.
        types_after: [n, 6].
        genes: [n, 500], how much of each gene the cells of the first express.
    """

    before: np.ndarray
    after: np.ndarray
    types_before: np.ndarray
    types_after: np.ndarray
    genes: np.ndarray


class Coupling(NamedTuple):
    """What a plan says of the cells.

    Attributes:
        fates: [4, 6], the share of the descendants of a type that are of a type.
        growth: [4], descendants of a cell of each type, 1 on average over all cells.
        genes: [n, 500], expression in the ancestors of each cell of the second.
        ancestors: [n, 10], the likeliest of each cell of the second.
    """

    fates: np.ndarray
    growth: np.ndarray
    genes: np.ndarray
    ancestors: np.ndarray


def make_cells(n: int, seed: int = 0) -> Cells:
    """`n` cells at each time point."""
    rng = np.random.default_rng(seed)
    kinds, fates = FATES.shape
    old = rng.normal(0, 3, (kinds, DIMENSION))
    # A type stands near the one it comes from.
    new = old[FATES.argmax(0)] + rng.normal(0, 1.0, (fates, DIMENSION))
    of_before = rng.integers(kinds, size=n)
    likely = GROWTH[of_before] / GROWTH[of_before].sum()
    ancestors = rng.choice(n, size=n, p=likely)
    before = old[of_before] + rng.normal(size=(n, DIMENSION))
    levels = FATES.cumsum(1)[of_before[ancestors]]
    of_after = (rng.uniform(size=n)[:, None] > levels).sum(1)
    inherited = (before - old[of_before])[ancestors]
    after = new[of_after] + 0.8 * inherited + rng.normal(0, 0.6, (n, DIMENSION))
    genes = np.log1p(np.exp(before @ rng.normal(0, 0.3, (DIMENSION, GENES))))
    types = np.eye(kinds)[of_before], np.eye(fates)[of_after]
    return Cells(*(z.astype(np.float32) for z in (before, after, *types, genes)))


def couple(cells: Cells) -> Coupling:
    """Solve, and use the plan, which for 20,000 cells would have 4e8 entries.

    Raises:
        RuntimeError: if the solver did not converge.
    """
    geom = otts.PointCloud(
        cells.before, cells.after, epsilon=0.05, relative_epsilon="mean"
    )
    out = otts.solve(geom, tau_a=0.8)
    out.raise_if_failed()
    to_types = np.asarray(out.apply(cells.types_after, axis=1))
    genes = np.asarray(out.apply(cells.genes, axis=0))
    indices, _ = out.top_k(10, axis=0)
    return told(cells, to_types, genes, np.asarray(indices))


def told(
    cells: Cells, to_types: np.ndarray, genes: np.ndarray, ancestors: np.ndarray
) -> Coupling:
    """What P times the types after, P^T times genes, and the largest entries say."""
    between = cells.types_before.T @ to_types
    sizes = cells.types_before.mean(0)
    return Coupling(
        fates=between / between.sum(1, keepdims=True),
        growth=between.sum(1) / sizes,
        genes=genes * len(genes),  # columns of the plan have mass 1 / n
        ancestors=ancestors,
    )


def report(cells: Cells, coupling: Coupling) -> str:
    """What was found beside what was made up, in words."""
    made = GROWTH / (cells.types_before.mean(0) @ GROWTH)
    lines = ["type  descendants (made up)   fates (made up)"]
    for k, (found, truth) in enumerate(zip(coupling.fates, FATES, strict=True)):
        shares = zip(found, truth, strict=True)
        pairs = "  ".join(f"{f:.2f} ({t:.2f})" for f, t in shares)
        lines.append(f"{k:4d}{coupling.growth[k]:10.2f} ({made[k]:.2f})       {pairs}")
    own = cells.types_before.argmax(1)[coupling.ancestors]
    kind = FATES[own, cells.types_after.argmax(1)[:, None]] > 0
    lines.append(f"{kind.mean():.1%} of the 10 likeliest ancestors are of a right type")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Do one of the two steps; the exit code is 0, or 2 for bad arguments."""
    step, *rest = argv or [""]
    fits = {"cells": (1, 2), "couple": (1,)}.get(step, ())
    if len(rest) not in fits or not all(size.isdecimal() for size in rest[1:]):
        print(f"usage: {_USAGE}", file=sys.stderr)
        return 2
    folder = Path(rest[0])
    if step == "cells":
        folder.mkdir(parents=True, exist_ok=True)
        cells = make_cells(int(rest[1]) if len(rest) > 1 else 20_000)
        for name, array in cells._asdict().items():
            np.save(folder / f"{name}.npy", array)
        return 0
    cells = Cells(*(np.load(folder / f"{name}.npy") for name in Cells._fields))
    print(report(cells, couple(cells)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
