"""Compiled programs that are kept from run to run: --compilation_cache."""

import contextlib
import platform
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from .errors import complain
from .files import check_folder, not_writable, replacing

_FOLDER = "jax_compilation_cache_dir"
_OPTIONS = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    # XLA's own caches: their path is part of what names a program.
    "jax_persistent_cache_enable_xla_caches": "none",
}


@contextlib.contextmanager
def kept(folder: str | None) -> Iterator[None]:
    """Within, programs are taken from `folder`; at the end new ones are added.

    JAX writes its cache in place: a process that reads while another writes, or after
    one was killed, finds half of a program. So each process has a folder of its own,
    with links to the programs that were there, and adds its new ones whole.

    Raises:
        BadInput: if the folder cannot be written to.
    """
    if folder is None:
        yield
        return
    check_folder(f"--compilation_cache={folder}", folder)
    shared = Path(folder) / _machine()
    before = {name: getattr(jax.config, name) for name in (*_OPTIONS, _FOLDER)}
    with tempfile.TemporaryDirectory(prefix="ott-shard-programs-") as own:
        for program in shared.glob("[!.]*"):
            (Path(own) / program.name).symlink_to(program.absolute())
        _use(_OPTIONS | {_FOLDER: own})
        try:
            yield
        finally:
            _use(before)
        _add(Path(own), shared)


def _use(options: dict) -> None:
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def _add(own: Path, shared: Path) -> None:
    """The new programs; a run that has ended well does not fail for these."""
    try:
        shared.mkdir(parents=True, exist_ok=True)
        for program in own.iterdir():
            if not program.is_symlink():
                with replacing(shared / program.name) as file:
                    file.write(program.read_bytes())
    except OSError as error:
        complain("warning", str(not_writable(f"--compilation_cache={shared}", error)))


def _machine() -> str:
    """JAX tells apart versions and kinds of GPU, but not CPUs of other instructions."""
    try:
        features = Path("/proc/cpuinfo").read_text().partition("\nflags")[2]
    except OSError:
        features = platform.processor()
    crc = zlib.crc32(features.partition("\n")[0].encode())
    return f"{platform.machine()}-{crc:08x}"
