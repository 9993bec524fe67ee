"""`python -m launch TASK` is the installed command `ott-shard TASK`."""

from .main import run

run()
