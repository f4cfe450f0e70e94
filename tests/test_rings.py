"""The house: three rings that import only inward, short files, nothing half-done."""

import ast
import re
import sys

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "src" / "alltokens"
RINGS = {"core": 1} | dict.fromkeys(("follow", "labels", "models", "data", "supervision"), 2)
RINGS |= dict.fromkeys(("engine", "evaluate", "explain", "report", "study", "bench", "cli"), 3)
FILES = sorted(PACKAGE.rglob("*.py"))
CORE_NEEDS = {"torch", "numpy", "triton", "alltokens"}


def modules(tree: ast.AST) -> set[str]:
    """What a file imports, anywhere in it."""
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    return names | {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}


def imported(tree: ast.AST) -> set[str]:
    """The parts of this package that a file imports."""
    return {name.split(".")[1] for name in modules(tree) if name.startswith("alltokens.")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_inward_and_files_are_short_and_whole(path):
    text = path.read_text()
    tree = ast.parse(text)
    part = path.relative_to(PACKAGE).parts[0]
    if part in RINGS:
        outward = {name for name in imported(tree) if RINGS.get(name, 0) > RINGS[part]}
        assert not outward, f"{part} (ring {RINGS[part]}) imports {outward}"
    if part == "core":
        foreign = {name.split(".")[0] for name in modules(tree)} - CORE_NEEDS - sys.stdlib_module_names
        assert not foreign, f"core imports {foreign}"
    assert len(text.splitlines()) <= 350
    assert ast.get_docstring(tree) is not None, "a file says what it is for"
    assert not re.search(r"TODO|FIXME|XXX|raise NotImplementedError", text)


def test_every_folder_lies_in_a_ring_and_says_what_lives_there():
    folders = {path.parent for path in FILES} - {PACKAGE}
    assert {folder.relative_to(PACKAGE).parts[0] for folder in folders} == RINGS.keys()
    for folder in folders:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder


def test_the_page_on_architecture_knows_every_folder():
    rows = re.findall(r"^\| (\d) \| `(\w+)` \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert {folder: int(ring) for ring, folder in rows} == RINGS
