"""What a device does in a compiled program, counted in the program's text.

The text is that of XLA's optimised program of one device. A loop counts as often as the
compiler knows that it runs; of a branch it does not know whether it does.
"""

import math
import re
from collections import Counter
from typing import NamedTuple

_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_TIMES = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(
    r"(?:calls|body|to_apply|condition|\w+_computations?)=(\{[^}]*\}|[^,\s]+)"
)
_ARRAY = re.compile(r"(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
# Operations that are counted; those that only move data need no name.
_OPERATION = re.compile(
    r" = (.*?) (dot|all-reduce|all-reduce-start|while|conditional)\("
)
_COLLECTIVE = re.compile(
    r" (all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


class Work(NamedTuple):
    """Of one device.

    Attributes:
        products: entries of all results of matrix products.
        all_reduces: by (devices that take part, bytes of the result), how many.
        others: how many other collectives.
    """

    products: int
    all_reduces: Counter[tuple[int, int]]
    others: int

    @property
    def bytes_sent(self) -> float:
        """By all-reduces along rings, 2 (k - 1) / k of each result of k devices."""
        return sum(
            count * 2 * (k - 1) / k * size
            for (k, size), count in self.all_reduces.items()
        )


def count(text: str) -> Work:
    """The work in the text of a program.

    Raises:
        ValueError: if a loop of no known length, or a branch, has something to count.
    """
    computations, entry = _split(text)
    work = Work(0, Counter(), 0)

    def visit(name: str, times: int | None) -> None:
        nonlocal work
        for line in computations[name]:
            found = _OPERATION.search(line)
            what = found[2] if found else ""
            inner = times
            if what in ("while", "conditional"):
                known = _TIMES.search(line)
                inner = times * int(known[1]) if known and times else None
            others = len(_COLLECTIVE.findall(line))
            if what in ("dot", "all-reduce", "all-reduce-start") or others:
                if times is None:
                    raise ValueError(
                        f"a loop of unknown length, or a branch, has {line.strip()}"
                    )
                work = _added(work, line, found, times, others)
            called = " ".join(_CALLED.findall(line))
            for name in re.findall(r"[\w.\-]+", called):
                if name in computations:
                    visit(name, inner)

    visit(entry, 1)
    return work


def _split(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation, and which one is the program."""
    computations, entry, name = {}, "", ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name = head[2]
            computations[name] = []
            entry = name if head[1] else entry
        elif name:
            computations[name].append(line)
    return computations, entry


def _added(
    work: Work, line: str, found: re.Match | None, times: int, others: int
) -> Work:
    if found is None or others:
        return work._replace(others=work.others + times * others)
    arrays = [
        (int(bits or 8) // 8, math.prod(int(size) for size in sizes.split(",") if size))
        for bits, sizes in _ARRAY.findall(found[1])
    ]
    if found[2] == "dot":
        return work._replace(products=work.products + times * arrays[0][1])
    devices, size = _group(line), sum(bits * entries for bits, entries in arrays)
    counts = Counter({(devices, size): times} if devices > 1 else {})
    return work._replace(all_reduces=work.all_reduces + counts)


def _group(line: str) -> int:
    """How many devices take part in a collective, in each way that XLA writes it."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(listed[1].split(","))
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(counted[1])
    named = re.search(r"replica_groups=\w+\[([^\]]*)\][^{]* \{([^}]*)\}", line)
    if named is None:
        raise ValueError(f"no groups of devices in {line.strip()}")
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
    return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
