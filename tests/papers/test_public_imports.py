"""The papers' figures stand on the public names of longctx alone, and longctx does not import them."""

import ast
from pathlib import Path

import pytest
from public_names import public_names

import longctx
import papers

PAPERS = sorted(Path(papers.__file__).parent.rglob("*.py"))


def imported(path: Path) -> set[tuple[str, str]]:
    """Modules and names of `from ... import ...`, and modules of `import ...` with no name."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {
        (node.module or "", alias.name) for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    return names | {(alias.name, "") for node in nodes if isinstance(node, ast.Import) for alias in node.names}


@pytest.mark.parametrize("path", PAPERS, ids=[path.stem for path in PAPERS])
def test_papers_import_public_names_alone(path: Path) -> None:
    public = public_names()
    private = [
        f"{module}.{name}"
        for module, name in imported(path)
        if module.split(".")[0] == "longctx" and name not in public.get(module, ()) and f"{module}.{name}" not in public
    ]
    assert private == []


def test_longctx_imports_no_papers() -> None:
    modules = Path(longctx.__file__).parent.rglob("*.py")
    assert [path for path in modules if any(name.split(".")[0] == "papers" for name, _ in imported(path))] == []
