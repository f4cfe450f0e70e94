"""The house: three rings that import only inward, short files, nothing half-done."""

import ast
import re

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "src" / "alltokens"
RINGS = {"core": 1} | dict.fromkeys(("follow", "labels", "models", "data", "supervision"), 2)
RINGS |= dict.fromkeys(("engine", "evaluate", "explain", "report", "study", "bench", "cli"), 3)
FILES = sorted(PACKAGE.rglob("*.py"))


def imported(tree: ast.AST) -> set[str]:
    """The parts of this package that a file imports, anywhere in it."""
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("alltokens.")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_inward_and_files_are_short_and_whole(path):
    text = path.read_text()
    tree = ast.parse(text)
    part = path.relative_to(PACKAGE).parts[0]
    if part in RINGS:
        outward = {name for name in imported(tree) if RINGS.get(name, 0) > RINGS[part]}
        assert not outward, f"{part} (ring {RINGS[part]}) imports {outward}"
    assert len(text.splitlines()) <= 350
    assert ast.get_docstring(tree) is not None or not text.strip()
    assert not re.search(r"TODO|FIXME|XXX|raise NotImplementedError", text)
