"""Measurements: `python -m launch.bench` prints one line of JSON per case.

A case is two clouds and a cost, measured by :mod:`.bench_cases`. With --suite=... the
cases are those of a suite, and when all are done a table of them goes to standard error
(so that what is redirected is JSON), and with --plot a picture to a file.
"""

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

import jax
from jax.sharding import Mesh

from . import devices, flags
from .bench_cases import measure
from .bench_options import FLAGS, PROGRAM, SUITES, WITH_PEERS, Options, parse
from .bench_peers import python_with_peers
from .bench_tables import Record, Suite, check_plot, plot, table
from .errors import BadInput
from .files import not_writable

_DONE, _BAD_INPUT = 0, 2
_SUITES: dict[str, Suite] = {
    name: importlib.import_module(f".bench_{name}", __package__).SUITE
    for name in SUITES
}


def run() -> None:
    """The command."""
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Measure what the arguments, without the program's name, say.

    Returns:
        The exit code: 0 done (or help), 2 bad input.
    """
    try:
        options = parse(argv)
        if options is None:
            print("\n".join([f"{PROGRAM} [flags]", "", *flags.table_text(FLAGS)]))
            return _DONE
        devices.use_cpu(options.cpu_devices)
        with jax.enable_x64(False), _appending(options.out) as file:
            check_plot(options.plot)
            _measure(options, file)
        return _DONE
    except BadInput as error:
        print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return _BAD_INPUT


def _measure(options: Options, file: TextIO | None) -> None:
    mesh, python = devices.make_mesh(options.mesh), options.peer_python
    if python is None and options.suite in WITH_PEERS and not options.memory_only:
        python = python_with_peers()
    records = []
    for record in _records(options, mesh, python):
        line = json.dumps(record, allow_nan=False)
        print(line, flush=True)
        if file:
            print(line, file=file, flush=True)
        records.append(record)
    if options.suite is not None:
        _show(_SUITES[options.suite], records, options.plot)


def _records(options: Options, mesh: Mesh, python: str | None) -> Iterator[Record]:
    if options.suite is not None:
        yield from _SUITES[options.suite].records(options, mesh, python)
        return
    for case in options.cases:
        yield measure(case, options, mesh, python)


def _show(suite: Suite, records: list[Record], path: str | None) -> None:
    rows = [row for record in records for row in suite.rows(record)]
    print(table(suite.header, rows), file=sys.stderr)
    points = [point for record in records for point in suite.points(record)]
    if path and points:
        plot(path, suite.axes, points)
    elif path:
        print(f"{PROGRAM}: nothing to draw: no --plot={path}", file=sys.stderr)


@contextlib.contextmanager
def _appending(out: str | None) -> Iterator[TextIO | None]:
    if out is None:
        yield None
        return
    try:
        file = open(out, "a")
    except OSError as error:
        raise not_writable(f"--out={out}", error, "file") from None
    with file:
        yield file


if __name__ == "__main__":
    run()
