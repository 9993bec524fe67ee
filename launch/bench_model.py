"""A model, not a measurement: what the scan over tiles takes on a GPU, and which tile.

On CPU a tile stays in a cache. On a GPU each step of the scan is a few kernels, and the
exponents of a tile go out to memory between them: a product writes them, the sum of
exponentials, and in a pass without a guess the maximum, reads them. BUILD_NOTES M22 has
the numbers and sources.
"""

from typing import NamedTuple

# Kernels of a step: features of rows and columns, product, sum, small updates; and for
# the maximum, with what is scaled by it.
_KERNELS, _MORE_KERNELS = 6, 2
# The exponent of a pair of squared distances is a product of so many more features.
MORE_FEATURES = 3
_TILES = tuple(2**k for k in range(9, 15))
_GOOD_ENOUGH = 1.15


class Device(NamedTuple):
    """A GPU.

    Attributes:
        bytes_per_second: of its memory.
        cache_bytes: of its last-level cache.
        cache_bytes_per_second: of that.
        flops_per_second: of float32, without TF32; float64 has half of it.
        exps_per_second: in float32, of its special function units.
        launch_seconds: from one kernel to the next.
    """

    bytes_per_second: float
    cache_bytes: int
    cache_bytes_per_second: float
    flops_per_second: float
    exps_per_second: float
    launch_seconds: float


H200 = Device(4.8e12, 50 * 2**20, 5.5e12, 67e12, 16 * 132 * 1.8e9, 3e-6)


def scanned(
    entries: int, d: int, itemsize: int, device: Device, *, guessed: bool = False
) -> float:
    """Seconds of a pair in the scan, with tiles of so many entries.

    With a guess of the result there is no maximum. Kernels run one after the other, and
    each takes what its slowest part takes.
    """
    # What was written must still be in the cache when it is read.
    cached = entries * itemsize <= device.cache_bytes / 2
    speed = device.cache_bytes_per_second if cached else device.bytes_per_second
    moved = itemsize / speed
    product = max(_product(d, itemsize, device), moved)
    exponentials = max(1 / device.exps_per_second, moved)
    kernels = _KERNELS if guessed else _KERNELS + _MORE_KERNELS
    maximum = 0.0 if guessed else moved
    launches = kernels * device.launch_seconds / entries
    return product + maximum + exponentials + launches


def fused(d: int, itemsize: int, device: Device) -> float:
    """Seconds of a pair if its exponent never left the chip, by the slower unit."""
    return max(_product(d, itemsize, device), 1 / device.exps_per_second)


def tile_for(d: int, itemsize: int, device: Device) -> int:
    """The smallest square tile that is within 15 % of the best one in the model."""
    times = {tile: scanned(tile**2, d, itemsize, device) for tile in _TILES}
    good = _GOOD_ENOUGH * min(times.values())
    return min(tile for tile, seconds in times.items() if seconds <= good)


def _product(d: int, itemsize: int, device: Device) -> float:
    return 2 * (d + MORE_FEATURES) * (itemsize / 4) / device.flops_per_second
