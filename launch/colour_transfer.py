"""Example: give one photograph the colours of another, through files and the command.

    pip install '.[examples]'
    python -m launch.colour_transfer points DIR
    ott-shard solve --x=DIR/x.npy --y=DIR/y.npy --grad --out=DIR
    python -m launch.colour_transfer picture DIR

The pixels of the two photographs that scikit-learn ships are clouds in the cube of
colours. Every pixel moves to the mean of what the plan sends it to, which for squared
distances is where one step down the gradient leads: x - grad / (2 a).
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

_STRIDE = 2  # every second pixel of every second row: 214 x 320
_USAGE = "python -m launch.colour_transfer points|picture DIR"


def photographs() -> tuple[np.ndarray, np.ndarray]:
    """A temple and a flower, each [214, 320, 3] in 0..1."""
    from sklearn.datasets import (  # pyright: ignore[reportMissingImports] (optional)
        load_sample_images,
    )

    temple, flower = load_sample_images().images
    pick = np.s_[::_STRIDE, ::_STRIDE]
    return tuple((p[pick] / 255).astype(np.float32) for p in (temple, flower))


def write_points(folder: Path) -> None:
    """x.npy and y.npy, [68480, 3] each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, photograph in zip("xy", photographs(), strict=True):
        np.save(folder / f"{name}.npy", photograph.reshape(-1, 3))


def write_picture(folder: Path) -> None:
    """picture.png: the temple, the flower, and the temple in colours of the flower."""
    from PIL import Image  # pyright: ignore[reportMissingImports] (optional)

    temple, flower = photographs()
    gradient = np.load(folder / "grad_x.npy")
    moved = moved_points(temple.reshape(-1, 3), gradient).reshape(temple.shape)
    row = np.concatenate([temple, flower, moved], axis=1)
    Image.fromarray(np.uint8(255 * row.clip(0, 1))).save(folder / "picture.png")


def moved_points(x: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """Barycentric images of points [n, d] of weight 1 / n, by the gradient [n, d]."""
    return x - gradient * len(x) / 2


def main(argv: Sequence[str]) -> int:
    """Do one of the two steps; the exit code is 0, or 2 for bad arguments."""
    steps = {"points": write_points, "picture": write_picture}
    if len(argv) != 2 or argv[0] not in steps:
        print(f"usage: {_USAGE}", file=sys.stderr)
        return 2
    steps[argv[0]](Path(argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
