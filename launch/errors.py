"""The errors of the command: something the user can put right."""

import sys


def complain(kind: str, message: str) -> None:
    """One line to people about an "error" or a "warning"."""
    line = " ".join(message.split())
    print(f"ott-shard: {kind}: {line}", file=sys.stderr, flush=True)


class BadInput(Exception):
    """Input that is refused; the message names the flag, its value and a way out."""


class Refused(Exception):
    """Input is refused, and one of several processes has said why; all end."""
