"""The errors of the command: something the user can put right."""


class BadInput(Exception):
    """Input that is refused; the message names the flag, its value and a way out."""


class Elsewhere(BadInput):
    """Another process has said what is wrong; this one ends in silence."""
