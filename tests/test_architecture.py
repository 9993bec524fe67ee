"""The rooms of the code, and what may stand in which (BUILD_NOTES section 1)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = [
    ["collectives", "_checks", "forward", "loops", "status"],
    ["pairwise", "mesh", "epsilon"],
    ["costs", "terms", "lbfgs", "linear_solve"],
    ["tile", "transposed"],
    ["moments", "entries"],
    ["operators"],
    ["units"],
    ["geometry"],
    ["problem"],
    ["implicit", "potentials"],
    ["objective", "state"],
    ["plan_sums", "sampling"],
    ["matching"],
    ["plan"],
    ["solution", "initial", "iteration"],
    ["sinkhorn"],
    ["divergence", "initializers"],
    ["__init__"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MODULES = sorted((ROOT / "ott_shard").glob("*.py"))
FILES = MODULES + sorted((ROOT / "launch").glob("*.py"))
COLLECTIVES = {
    "psum",
    "pmax",
    "pmin",
    "pmean",
    "all_gather",
    "all_to_all",
    "ppermute",
    "psum_scatter",
    "axis_index",
    "pcast",
}


def by_name(path):
    return path.stem


def tree_of(path):
    return ast.parse(path.read_text())


def imported_modules(path):
    """Modules of ott_shard that a module of it imports."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            head, _, rest = node.module.partition(".")
            if head == "ott_shard":
                yield from [rest] if rest else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("ott_shard."):
                    yield alias.name.split(".")[1]


@pytest.mark.parametrize("path", MODULES, ids=by_name)
def test_a_module_imports_only_from_lower_layers(path):
    assert path.stem in LEVEL, f"give {path.name} a layer"
    for name in imported_modules(path):
        assert LEVEL[name] < LEVEL[path.stem], f"{path.stem} imports {name}"


def attributes(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id


@pytest.mark.parametrize("path", FILES, ids=by_name)
def test_one_home_per_concern(path):
    used = set(attributes(path))
    if path.stem != "operators":
        assert "shard_map" not in used
    if path.stem != "collectives":
        assert not used & COLLECTIVES
    text = path.read_text()
    assert "jax._src" not in text
    assert "check_vma" not in text
    if path.parent.name == "ott_shard":
        assert not used & {"environ", "getenv"}
        assert "absl" not in text
        assert "launch" not in set(imported_modules(path))


@pytest.mark.parametrize("path", FILES, ids=by_name)
def test_files_and_functions_are_small(path):
    assert len(path.read_text().splitlines()) <= 420
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # The docstring is for the user, not part of the work.
            body = node.body[1:] if ast.get_docstring(node) else node.body
            length = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            assert length <= 60, f"{path.name}: {node.name} has {length} lines"


def test_import_touches_no_device():
    code = (
        "import jax, ott_shard\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"  # refused once a backend is up
        "assert jax.device_count() == 3\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
