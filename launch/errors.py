"""The one error of the command: something the user can put right."""


class BadInput(Exception):
    """Input that is refused; the message names the flag, its value and a way out."""
