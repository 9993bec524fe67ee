"""The model of a scan on a GPU: limits in which it must be what its parts are."""

import pytest

from launch.bench_model import H200, fused, scanned, tile_for


def test_a_large_tile_is_bound_by_memory_or_by_products():
    huge = 2**40
    moved = 4 / H200.bytes_per_second
    assert scanned(huge, 3, 4, H200) == pytest.approx(3 * moved, rel=1e-3)
    product = 2 * 4099 / H200.flops_per_second
    assert scanned(huge, 4096, 4, H200) == pytest.approx(product + 2 * moved, rel=1e-3)


def test_a_guess_saves_one_reading_and_two_kernels():
    with_guess, without = (
        scanned(2**20, 3, 4, H200, guessed=guessed) for guessed in (True, False)
    )
    saved = 4 / H200.cache_bytes_per_second + 2 * H200.launch_seconds / 2**20
    assert without - with_guess == pytest.approx(saved)


def test_a_small_tile_is_bound_by_launches():
    times = [scanned(size**2, 3, 4, H200) for size in (64, 128)]
    assert times[0] / times[1] == pytest.approx(4, rel=0.01)


def test_a_tile_in_the_cache_moves_faster():
    fits = H200.cache_bytes // 8
    quick = H200._replace(launch_seconds=0.0)
    ratio = H200.cache_bytes_per_second / H200.bytes_per_second
    times = [scanned(entries, 3, 4, quick) for entries in (fits + 1, fits)]
    assert times[0] / times[1] == pytest.approx(ratio)


@pytest.mark.parametrize("d", [2, 3, 16, 64, 512])
def test_the_tile_is_good_and_nothing_beats_the_chip(d):
    tile = tile_for(d, 4, H200)
    best = min(scanned(4**k, d, 4, H200) for k in range(9, 15))
    assert scanned(tile**2, d, 4, H200) <= 1.15 * best
    assert scanned(tile**2 // 4, d, 4, H200) > 1.15 * best
    assert fused(d, 4, H200) < best
    assert tile_for(d, 8, H200) <= tile
