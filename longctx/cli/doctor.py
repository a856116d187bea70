"""`longctx doctor`: check this machine, or the files of a checkpoint."""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import longctx
from longctx import extras
from longctx.cli.files import CACHE_VARIABLE, cache_root
from longctx.cli.terminal import FAILED, Console

SECONDS = 180.0
"""Within which JAX has to answer; eight GPUs take some 20."""
_MAX_CHARACTERS = 300  # of what others say
_REPORT_IT = "report it, with --json"
_SHOW = "see all of it by python -c 'import jax; print(jax.devices())', and install jax and its plugin anew"
_XLA_FLAGS = "correct XLA_FLAGS, or unset it; this version of jaxlib may lack a flag that another has"
_PROGRAM = "import sys; sys.path[:] = {path!r}; from longctx.cli.doctor_probe import main; main()"
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(\[[\w,.-]*\])?\s*(>=\s*(?P<least>[\d.]+))?\s*(;\s*(?P<marker>.*))?")
# Of NVIDIA's packages, those that decide what runs.
_CUDA = ("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cuda-nvcc", "nvidia-cudnn", "nvidia-nccl")
_LEAST_DISK = 1 << 30


def run(options: argparse.Namespace) -> int:
    """Print what was found; the exit status is 1 if there is a problem."""
    if options.model is not None:
        return _check_checkpoint(options)
    report = Report()
    examine(report)
    ask_jax(report, Console(options.quiet))
    report.look("extras", examine_extras)  # last of what is found, as it is long
    _print(json.dumps(report.to_dict(), indent=2) if options.json else report.to_text())
    return FAILED if report.problems else 0


def _check_checkpoint(options: argparse.Namespace) -> int:
    from longctx.models import resolve_model, verify

    console = Console(options.quiet)
    model = resolve_model(options.model, options.quiet)
    with console.progress("reading", "tensor", leave=False) as progress:
        problems = verify(model, progress)
    if options.json:
        _print(json.dumps({"model": str(model), "problems": problems}, indent=2))
    else:
        for problem in problems:
            _print(problem)
    console.note(f"{len(problems) or 'no'} problem{'s' * (len(problems) != 1)} in {model}")
    return FAILED if problems else 0


def _print(text: str) -> None:
    print(text.encode("utf-8", "backslashreplace").decode())  # names of files may hold anything


class Finding(NamedTuple):
    """A problem or a hint, and what to do about it."""

    text: str
    remedy: str


@dataclass
class Report:
    """Findings of a run.

    Attributes:
      sections: values by their names, by section.
      problems: what is broken. hints: what works, but not as well as it could.
    """

    sections: dict[str, dict[str, str]] = field(default_factory=dict)
    problems: list[Finding] = field(default_factory=list)
    hints: list[Finding] = field(default_factory=list)

    def note(self, section: str, name: str, value: object) -> None:
        """Add a value to a section."""
        self.sections.setdefault(section, {})[name] = str(value)

    def problem(self, text: str, remedy: str) -> None:
        """Add what is broken."""
        self.problems.append(Finding(text, remedy))

    def hint(self, text: str, remedy: str) -> None:
        """Add what works, but not as well as it could."""
        self.hints.append(Finding(text, remedy))

    @contextmanager
    def asking(self, what: str, remedy: str = _REPORT_IT) -> Iterator[None]:
        """Within it, whatever goes wrong is a problem, and what was found before stays."""
        try:
            yield
        except Exception as error:
            said = ": ".join(filter(None, (type(error).__name__, first_line(str(error)))))
            self.problem(f"{what} can't be found out: {said}", remedy)

    def look(self, what: str, find: "Callable[[Report], None]") -> None:
        """Let a function add what it finds."""
        with self.asking(what):
            find(self)

    def add(self, other: Mapping[str, Any]) -> None:
        """Add what another process has found, as from `to_dict`."""
        for section, values in other["sections"].items():
            for name, value in values.items():
                self.note(section, name, value)
        self.problems += [Finding(**each) for each in other["problems"]]
        self.hints += [Finding(**each) for each in other["hints"]]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        found = {"problems": self.problems, "hints": self.hints}
        return {"sections": self.sections} | {name: [each._asdict() for each in found[name]] for name in found}

    def to_text(self) -> str:
        """Return a line for each value, and for each problem and hint."""
        lines: list[str] = []
        for section, values in self.sections.items():
            width = max(map(len, values)) + 2
            lines += [section, *(f"  {name:<{width}}{value}" for name, value in values.items()), ""]
        for title, findings in (("problem", self.problems), ("hint", self.hints)):
            lines += [f"{title}: {each.text}: {each.remedy}" for each in findings]
        return "\n".join(lines if self.problems or self.hints else [*lines, "no problems"])


def first_line(text: str) -> str:
    """Return the first line that says something, or the beginning of a long one."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]}..."


def shown(path: str | Path) -> str:
    """Return a path on one line; the home folder is `~`, so that a bug report doesn't tell whose it is."""
    try:
        text = str("~" / Path(path).relative_to(Path.home()))
    except (RuntimeError, ValueError):
        text = str(path)
    return text if text.isprintable() else json.dumps(text)


def ask_jax(report: Report, console: Console, seconds: float = SECONDS) -> None:
    """Add devices, links and choices to a report, or the problem that prevents it.

    JAX is asked in a process of its own: a broken plugin may end a process, or never answer.
    """
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ  # others may use the GPUs
    program = [sys.executable, "-c", _PROGRAM.format(path=sys.path)]
    console.note("asking JAX for its devices")
    try:
        done = subprocess.run(program, capture_output=True, env=environment, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        report.problem(f"JAX does not answer within {seconds:g} s", "end other programs on the GPUs, check the driver")
        return
    try:
        report.add(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, KeyError, TypeError, ValueError):
        status = done.returncode
        how = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
        last = first_line("\n".join(reversed(done.stderr.decode("utf-8", "replace").splitlines())))
        remedy = _XLA_FLAGS if "XLA_FLAGS" in last and os.environ.get("XLA_FLAGS") else _SHOW
        report.problem(": ".join(filter(None, ("JAX can't be loaded", how, last))), remedy)


def examine(report: Report) -> None:
    """Add what can be found without JAX: versions, the driver, the cache of compiled programs, disks."""
    report.note("versions", "longctx", f"{longctx.__version__}, in {shown(Path(longctx.__file__).parent)}")
    report.note("versions", "python", f"{platform.python_implementation()} {platform.python_version()}")
    report.note("versions", "system", f"{platform.system()} {platform.release()} {platform.machine()}")
    report.look("installed packages", _versions)
    report.look("the GPUs' driver", _driver)
    report.look("the cache of compiled programs", _compile_cache)
    report.look("disk space", lambda report: _disk(report, "temporary files", Path(tempfile.gettempdir())))


def examine_extras(report: Report) -> None:
    """Add what each extra is for, and whether it is installed."""
    for name, extra in extras.EXTRAS.items():
        lacking = extras.missing(name)
        if not lacking:
            have = ", ".join(f"{each} {importlib.metadata.version(each)}" for each in extra.packages.values())
            report.note("extras", name, f"{extra.purpose}: installed, {have}")
            continue
        part = "" if len(lacking) == len(extras.packages(name)) else f", lacks {', '.join(lacking)}"
        report.note("extras", name, f"{extra.purpose}: not installed{part}: {extras.pip_line(name)}")


def _versions(report: Report) -> None:
    installed = {_normal(each.metadata["Name"] or ""): each.version for each in importlib.metadata.distributions()}
    for name in ("jax", "jaxlib", *sorted(name for name in installed if name.startswith(_CUDA))):
        report.note("versions", name, installed.get(name, "not installed"))
    try:
        required = importlib.metadata.requires(extras.DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        report.hint("longctx runs from a folder that is not installed", "pip install . in it, if packages are missing")
        return
    for match in filter(None, (_REQUIREMENT.fullmatch(line.strip()) for line in required)):
        extra = re.search(r"extra == ['\"](\w+)['\"]", match["marker"] or "")
        version = installed.get(_normal(match["name"]))
        if version is None and match["marker"] is None:
            report.problem(f"{match['name']} is not installed", f"pip install '{match['name']}>={match['least']}'")
        elif version is not None and match["least"] and _numbers(version) < _numbers(match["least"]):
            text = f"{match['name']} {version} is older than {match['least']}"
            if extra is None:
                report.problem(text, f"pip install --upgrade '{match['name']}>={match['least']}'")
            elif extra[1] in extras.EXTRAS and extras.is_installed(extra[1]):
                report.hint(f"{text}, which extra {extra[1]} needs", f"pip install --upgrade '{match['name']}'")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _numbers(version: str) -> list[int]:
    """Return the first four numbers of a version, with zeros for those that are left out."""
    release = re.match(r"[\d.]*", version)
    assert release is not None
    return [*map(int, re.findall(r"\d+", release[0])), 0, 0, 0, 0][:4]


def _driver(report: Report) -> None:
    """Add the NVIDIA driver and the memory of its GPUs, where there is one."""
    kernel = Path("/proc/driver/nvidia/version")
    has_driver, has_program = kernel.exists(), shutil.which("nvidia-smi") is not None
    if has_driver:
        report.note("versions", "NVIDIA driver", first_line(kernel.read_text(encoding="utf-8", errors="replace")))
    has_plugin = any(extras.is_installed(name) for name in ("cuda12", "cuda13"))
    if has_driver and not has_plugin:
        report.hint("a GPU's driver is here, and JAX has no CUDA plugin", extras.pip_line("cuda13"))
    if has_plugin and not (has_driver or has_program):
        remedy = "install NVIDIA's driver, or uninstall the plugin"
        report.hint("JAX has a CUDA plugin, and there is no driver of GPUs", remedy)
    if not has_program:
        return
    query = ["nvidia-smi", "--query-gpu=index,name,memory.total,memory.free", "--format=csv,noheader"]
    said = subprocess.run(query, capture_output=True, text=True, timeout=60, errors="replace", check=False)
    if said.returncode:
        report.problem(f"nvidia-smi fails: {first_line(said.stdout + said.stderr)}", "check the driver")
        return
    for line in said.stdout.splitlines():
        index, name, total, free = (part.strip() for part in line.split(",", 3))
        report.note("memory", f"GPU {index}", f"{name}: {free} of {total} free")


def _compile_cache(report: Report) -> None:
    named, own = os.environ.get(CACHE_VARIABLE), os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if own:
        report.note("compile cache", "folder", f"{shown(own)}, by JAX_COMPILATION_CACHE_DIR")
        return
    try:
        programs = cache_root() / "programs"
    except RuntimeError as error:
        report.note("compile cache", "folder", "none")
        report.hint(f"the user has no folder for caches: {error}", f"name one by {CACHE_VARIABLE}")
        return
    root = shown(programs.parent)
    report.note("compile cache", "folder", f"{root}, {f'by {CACHE_VARIABLE}' if named else 'the default'}")
    try:
        folder = programs
        while not folder.exists():
            folder = folder.parent
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = error.strerror or str(error)
        report.note("compile cache", "usable", f"no: {reason}")
        text = f"compiled programs can't be kept in {root}: {reason}"
        if named:  # commands refuse it
            report.problem(text, f"unset {CACHE_VARIABLE}, or name a folder that can be written to")
        else:
            report.hint(text, f"name another folder by {CACHE_VARIABLE}; commands compile anew each time")
        return
    report.note("compile cache", "usable", "yes")
    sizes = [path.stat().st_size for path in programs.rglob("*-cache") if path.is_file()]
    report.note("compile cache", "size", f"{sum(sizes) / 2**20:,.1f} MiB, {len(sizes):,} programs")
    _disk(report, "compiled programs", folder)


def _disk(report: Report, name: str, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    report.note("memory", f"disk of {name}", f"{free / 2**30:,.1f} GiB free in {shown(folder)}")
    if free < _LEAST_DISK:
        report.hint(f"the disk of {name} has less than 1 GiB free", f"make room in {shown(folder)}")
