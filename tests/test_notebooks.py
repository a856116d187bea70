"""examples/notebooks: texts and stored notebooks are pairs without noise, and running them gives the same."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest

FOLDER = Path(__file__).parent.parent / "examples" / "notebooks"
TOOL = FOLDER / "build.py"


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebooks_build", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load_tool()


def stored(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


@pytest.mark.parametrize("name", build.NAMES)
def test_the_stored_notebook_is_made_of_its_text_and_holds_no_noise(name: str) -> None:
    notebook, source = stored(name), build.source_of(name)
    nbformat.validate(notebook)
    assert [cell.id for cell in notebook.cells] == [cell.id for cell in source.cells]
    for cell, of_text in zip(notebook.cells, source.cells, strict=True):
        assert (cell.cell_type, cell.source, cell.metadata) == (of_text.cell_type, of_text.source, of_text.metadata)
    assert notebook.metadata == source.metadata
    assert build.noise_of(notebook) == []
    assert f"({name}.ipynb)" in (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", build.NAMES)
def test_running_the_text_gives_what_is_stored(name: str, tmp_path: Path) -> None:
    # Without the settings that tests have for compiling quickly.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(FOLDER.parent.parent), str(FOLDER)])}
    command = [sys.executable, str(TOOL), name, "--out", str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1200)
    assert (result.returncode, result.stderr) == (0, "")
    assert build.differences(stored(name), nbformat.read(tmp_path / f"{name}.ipynb", as_version=4)) == []
