"""Run the notebooks of this folder and store them with their outputs: `python examples/notebooks/build.py [NAME ...]`.

The text (`NAME.py`, jupytext's percent format) is the source; `NAME.ipynb` is made from it, in a fresh kernel of this
Python, on CPU devices. What is stored is the same in every run: a notebook whose outputs hold noise is refused. Cells
with the tag `varies` show what differs between runs, such as seconds; their outputs are not stored.
"""

import argparse
import asyncio
import difflib
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("[0-9]*.py")))
VARIES = "varies"
_FORMATS = "ipynb,py:percent"
_METADATA = {
    "jupytext": {"formats": _FORMATS},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
# What must not be in a stored output: it differs between runs or machines, or is none of the reader's business.
_NOISE = {
    "a memory address": re.compile(r"\b0x[0-9a-f]{6,}"),
    "a path of this machine": re.compile(r"(?<![\w.:/])/(?:home|Users|root|tmp|work|usr|opt|var)/\w|site-packages"),
    "a warning": re.compile(r"\b\w*Warning\b"),
    "a traceback": re.compile(r"Traceback \(most recent"),
}
# Numbers of a drawing, and ids that are digests of its shapes: both may differ in the last digit on other processors.
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
_DIGEST = re.compile(r"\b[mpC][0-9a-f]{10,}\b|\bC\d+_\d+_[0-9a-f]{10}\b")


def source_of(name: str, folder: Path = FOLDER) -> Any:
    """The notebook that a text is: no outputs, ids that follow from the order of the cells."""
    notebook = jupytext.read(folder / f"{name}.py", fmt="py:percent")
    notebook.metadata = nbformat.from_dict(_METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells):
        tags = cell.metadata.get("tags", [])
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        cell.id = f"cell-{number}"
    return notebook


class _ThisPython(AsyncKernelManager):
    """Starts a kernel of the Python that runs this, whatever kernels are installed on the machine."""

    @property
    def kernel_spec(self) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="Python 3", language="python")


async def _execute(client: NotebookClient, manager: AsyncKernelManager, environment: dict[str, str]) -> None:
    try:
        await client.async_execute(env=environment)
    finally:
        await manager.shutdown_kernel(now=True)


def run(notebook: Any, folder: Path = FOLDER, timeout: int = 600) -> Any:
    """Run a notebook in a fresh kernel and return it with its outputs, without those that vary and without counts.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raises.
      nbclient.exceptions.CellTimeoutError: a cell takes longer than `timeout` seconds.
    """
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(FOLDER.parent.parent), os.environ.get("PYTHONPATH")])),
        "PYTHONWARNINGS": "default",  # all are shown, so that they are found
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # the debugger that ipykernel loads warns of Python's frozen modules
    }
    with tempfile.TemporaryDirectory() as sockets:
        # Sockets in files, which others on the machine can't listen to; Windows has none.
        manager = _ThisPython() if os.name == "nt" else _ThisPython(transport="ipc", ip=f"{sockets}/kernel")
        client = NotebookClient(
            notebook,
            km=manager,
            timeout=timeout,
            record_timing=False,
            store_widget_state=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(folder)}},
        )
        asyncio.run(_execute(client, manager, environment))
    notebook.metadata = nbformat.from_dict(_METADATA)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.execution_count = None
            if VARIES in cell.metadata.get("tags", []):
                cell.outputs = []
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = None
    return notebook


def noise_of(notebook: Any) -> list[str]:
    """What is wrong with the stored outputs of a notebook, in words; of a good one nothing."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        if cell.execution_count is not None:
            found.append(f"{cell.id}: it has an execution count")
        if VARIES in cell.metadata.get("tags", []) and cell.outputs:
            found.append(f"{cell.id}: outputs of a cell that varies are stored")
        for output in cell.outputs:
            if output.get("name") == "stderr" or output.output_type == "error":
                found.append(f"{cell.id}: it writes to stderr or raises: {text_of(output)[:200]}")
            if output.get("execution_count") is not None:
                found.append(f"{cell.id}: an output has an execution count")
            for kind, pattern in _NOISE.items():
                if match := pattern.search(text_of(output)):
                    found.append(f"{cell.id}: {kind} in an output: {match.group()}")
    return found


def text_of(output: Any) -> str:
    """All that an output shows, as text."""
    return "\n".join([output.get("text", ""), *map(str, output.get("data", {}).values())])


def differences(stored: Any, made: Any, points: float = 1.0) -> list[str]:
    """How a notebook differs from the stored one: cells, printed text, and drawings by more than some points.

    Args:
      points: by which numbers of an SVG may differ (72 to an inch), as processors round differently.
    """
    found = []
    if [cell.id for cell in stored.cells] != [cell.id for cell in made.cells]:
        return [f"it has {len(stored.cells)} cells, its source {len(made.cells)}"]
    for old, new in zip(stored.cells, made.cells, strict=True):
        for what in ("cell_type", "source", "metadata"):
            if old[what] != new[what]:
                found.append(f"{old.id}: the {what} differs from the source's")
        old_outputs, new_outputs = old.get("outputs", []), new.get("outputs", [])
        if len(old_outputs) != len(new_outputs):
            found.append(f"{old.id}: {len(old_outputs)} outputs are stored, {len(new_outputs)} were made")
            continue
        for a, b in zip(old_outputs, new_outputs, strict=True):
            svg = "image/svg+xml" in a.get("data", {})
            before, after = text_of(a), text_of(b)
            if before != after and not (svg and _same_drawing(before, after, points)):
                lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
                found.append(f"{old.id}: its output differs\n" + "\n".join(list(lines)[:12]))
    return found


def _same_drawing(before: str, after: str, points: float) -> bool:
    """Whether two SVG files are alike but for digests, and for numbers that differ by some points at most."""
    before, after = _DIGEST.sub("id", before), _DIGEST.sub("id", after)
    if _NUMBER.sub("", before) != _NUMBER.sub("", after):
        return False
    pairs = zip(_NUMBER.findall(before), _NUMBER.findall(after), strict=True)
    return all(abs(float(a) - float(b)) <= points for a, b in pairs)


def write(notebook: Any, path: Path) -> None:
    """Store a notebook; ValueError if it is not valid or its outputs hold noise."""
    nbformat.validate(notebook)
    if noise := noise_of(notebook):
        raise ValueError(f"{path.name} holds noise:\n" + "\n".join(noise))
    path.write_text(nbformat.writes(notebook).rstrip("\n") + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the notebooks and store them with their outputs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; none: all")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="DIR", help="where they are stored (here)")
    arguments = parser.parse_args()
    names = [Path(name).stem for name in arguments.names] or NAMES
    if unknown := set(names) - set(NAMES):
        parser.error(f"there is no notebook {min(unknown)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in names:
        start = time.monotonic()
        notebook = run(source_of(name))
        seconds = time.monotonic() - start
        write(notebook, arguments.out / f"{name}.ipynb")
        print(f"{name}: {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
