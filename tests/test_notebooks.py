"""examples/notebooks: texts and stored notebooks are pairs, outputs hold no noise, and running them gives the same."""

import copy
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


def test_texts_and_notebooks_are_pairs_that_the_readme_lists() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == list(build.NAMES)
    assert [name for name in build.NAMES if f"({name}.ipynb)" not in readme] == []
    assert [name[:2] for name in build.NAMES] == ["01", "02", "03", "04", "05", "06"]


@pytest.mark.parametrize("name", build.NAMES)
def test_the_stored_notebook_is_made_of_its_text_and_holds_no_noise(name: str) -> None:
    notebook, source = stored(name), build.source_of(name)
    nbformat.validate(notebook)
    assert [cell.id for cell in notebook.cells] == [cell.id for cell in source.cells]
    for cell, of_text in zip(notebook.cells, source.cells, strict=True):
        assert (cell.cell_type, cell.source, cell.metadata) == (of_text.cell_type, of_text.source, of_text.metadata)
    assert notebook.metadata == source.metadata
    assert build.noise_of(notebook) == []
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/svg+xml" in output.get("data", {}) for output in outputs) >= 2
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 600_000


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        ({"name": "stderr", "text": "hello"}, "stderr"),
        ({"name": "stdout", "text": "<Engine object at 0x7f00aa11bb22>"}, "address"),
        ({"name": "stdout", "text": "Traceback (most recent call last):"}, "traceback"),
    ],
)
def test_noise_is_found(output: dict[str, str], kind: str) -> None:
    cell = nbformat.v4.new_code_cell("1", id="a", outputs=[nbformat.v4.new_output("stream", **output)])
    assert kind in " ".join(build.noise_of(nbformat.v4.new_notebook(cells=[cell])))


def test_counts_and_what_varies_are_noise() -> None:
    output = nbformat.v4.new_output("stream", name="stdout", text="1.3 s")
    varies = nbformat.v4.new_code_cell("1", id="a", outputs=[output], metadata={"tags": [build.VARIES]})
    counted = nbformat.v4.new_code_cell("1", id="b", execution_count=3)
    assert len(build.noise_of(nbformat.v4.new_notebook(cells=[varies, counted]))) == 2


def test_drawings_are_equal_within_a_point() -> None:
    svg = '<svg><path id="m0123456789" d="M 1.5 20\nL 30.25 4"/><text x="3">seconds</text></svg>'
    output = nbformat.v4.new_output("display_data", data={"image/svg+xml": svg})
    cell = nbformat.v4.new_code_cell("1", id="a", outputs=[output], metadata={})
    old = nbformat.v4.new_notebook(cells=[cell])

    def differs(before: str, after: str) -> bool:
        new = copy.deepcopy(old)
        new.cells[0].outputs[0].data["image/svg+xml"] = svg.replace(before, after)
        return bool(build.differences(old, new))

    assert not differs("m0123456789", "mabcdefabcd")
    assert not differs("30.25", "30.7")
    assert differs("30.25", "32")
    assert differs("seconds", "hours")
    assert differs("L 30.25 4", "L 30.25 4\nL 40 4")


@pytest.mark.slow
def test_a_notebook_runs_in_this_python_and_is_stored_alike_each_time(tmp_path: Path) -> None:
    text = f"""# %% [markdown]
# # A title
# %%
import os
import sys
from longctx.plotting import shown
assert sys.prefix == {sys.prefix!r}
assert os.getcwd() == {str(tmp_path)!r}
with shown() as (figure, (axes,)):
    axes.plot([1, 2, 3])
"the last value"
# %% tags=["varies"]
import time
print(time.time())
"""
    (tmp_path / "tiny.py").write_text(text)
    for number in (1, 2):
        command = f"build.write(build.run(build.source_of('tiny', Path('.')), Path('.')), Path('{number}.ipynb'))"
        result = run_python("-c", f"import build\nfrom pathlib import Path\n{command}", directory=tmp_path)
        assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "1.ipynb").read_bytes() == (tmp_path / "2.ipynb").read_bytes()
    cells = nbformat.read(tmp_path / "1.ipynb", as_version=4).cells
    assert [output.output_type for output in cells[1].outputs] == ["display_data", "execute_result"]
    assert cells[2].outputs == []


@pytest.mark.slow
@pytest.mark.parametrize("name", build.NAMES)
def test_running_the_text_gives_what_is_stored(name: str, tmp_path: Path) -> None:
    result = run_python(str(TOOL), name, "--out", str(tmp_path), directory=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    print(result.stdout)  # how many seconds it took
    assert build.differences(stored(name), nbformat.read(tmp_path / f"{name}.ipynb", as_version=4)) == []


def run_python(*arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """A fresh Python, without the settings that tests have for compiling quickly."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(FOLDER.parent.parent), str(FOLDER)])}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=1200)
