"""Checks of `longctx doctor` without JAX: versions, the cache of compiled programs, disks, extras."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import longctx
from longctx import extras
from longctx.cli.doctor_report import Report, first_line, shown
from longctx.cli.files import CACHE_VARIABLE, cache_root

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(\[[\w,.-]*\])?\s*(>=\s*(?P<least>[\d.]+))?\s*(;\s*(?P<marker>.*))?")
# Of NVIDIA's packages, those that decide what runs.
_CUDA = ("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cuda-nvcc", "nvidia-cudnn", "nvidia-nccl")
_LEAST_DISK = 1 << 30


def examine(report: Report) -> None:
    """Versions, what is installed too old or not at all, the driver, the cache, disks."""
    report.note("versions", "longctx", f"{longctx.__version__}, in {shown(Path(longctx.__file__).parent)}")
    report.note("versions", "python", f"{platform.python_implementation()} {platform.python_version()}")
    report.note("versions", "system", f"{platform.system()} {platform.release()} {platform.machine()}")
    for what, look in (
        ("installed packages", _versions),
        ("the GPUs' driver", _driver),
        ("the cache of compiled programs", _compile_cache),
        ("disk space", _disks),
    ):
        with report.asking(what, "report it, with --json"):
            look(report)


def examine_extras(report: Report) -> None:
    """Report what each extra is for, and whether it is installed."""
    with report.asking("extras", "report it, with --json"):
        for name, extra in extras.EXTRAS.items():
            lacking = extras.missing(name)
            if not lacking:
                have = ", ".join(f"{each} {_version(each)}" for each in extra.packages.values())
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
    for line in required:
        match = _REQUIREMENT.fullmatch(line.strip())
        if match is None:
            continue
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


def _driver(report: Report) -> None:
    """The NVIDIA driver and the memory of its GPUs, where there is one."""
    kernel = Path("/proc/driver/nvidia/version")
    has_driver = kernel.exists()
    if has_driver:
        report.note("versions", "NVIDIA driver", first_line(kernel.read_text(encoding="utf-8", errors="replace")))
    has_plugin = any(extras.is_installed(name) for name in ("cuda12", "cuda13"))
    if has_driver and not has_plugin:
        report.hint("a GPU's driver is here, and JAX has no CUDA plugin", extras.pip_line("cuda13"))
    if has_plugin and not has_driver and not shutil.which("nvidia-smi"):
        remedy = "install NVIDIA's driver, or uninstall the plugin"
        report.hint("JAX has a CUDA plugin, and there is no driver of GPUs", remedy)
    if shutil.which("nvidia-smi") is None:
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
        root = cache_root()
    except RuntimeError as error:
        report.note("compile cache", "folder", "none")
        report.hint(f"the user has no folder for caches: {error}", f"name one by {CACHE_VARIABLE}")
        return
    report.note("compile cache", "folder", f"{shown(root)}, {f'by {CACHE_VARIABLE}' if named else 'the default'}")
    reason = _why_not_written(root / "programs")
    report.note("compile cache", "usable", "yes" if reason is None else f"no: {reason}")
    if reason is not None:
        text = f"compiled programs can't be kept in {shown(root)}: {reason}"
        if named:  # commands refuse it
            report.problem(text, f"unset {CACHE_VARIABLE}, or name a folder that can be written to")
        else:
            report.hint(text, f"name another folder by {CACHE_VARIABLE}; commands compile anew each time")
        return
    sizes = [path.stat().st_size for path in (root / "programs").rglob("*-cache") if path.is_file()]
    report.note("compile cache", "size", f"{sum(sizes) / 2**20:,.1f} MiB, {len(sizes):,} programs")


def _why_not_written(folder: Path) -> str | None:
    """Why a folder can't be written to, or made; None if it can. Nothing is left behind."""
    try:
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            return f"{shown(folder)} is no folder"
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _disks(report: Report) -> None:
    """Free space where compiled programs and temporary files go."""
    folders = {"temporary files": Path(tempfile.gettempdir())}
    try:
        root = cache_root()
        if _why_not_written(root / "programs") is None:
            while not root.exists():
                root = root.parent
            folders["compiled programs"] = root
    except (OSError, RuntimeError):
        pass  # told already
    for name, folder in folders.items():
        free = shutil.disk_usage(folder).free
        report.note("memory", f"disk of {name}", f"{free / 2**30:,.1f} GiB free in {shown(folder)}")
        if free < _LEAST_DISK:
            report.hint(f"the disk of {name} has less than 1 GiB free", f"make room in {shown(folder)}")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, without trailing zeros."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
