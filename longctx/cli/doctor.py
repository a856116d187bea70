"""`longctx doctor`: check this machine, or the files of a checkpoint."""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import longctx
from longctx import extras
from longctx.cli.files import CACHE_VARIABLE, cache_root
from longctx.cli.terminal import FAILED, Console

_MAX_CHARACTERS = 300  # of what others say
_REPORT_IT = "report it, with --json"
# Of NVIDIA's packages, those that decide what runs.
_CUDA = ("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cuda-nvcc", "nvidia-cudnn", "nvidia-nccl")
_LEAST_DISK = 1 << 30
_TOKENS = 131_072  # of the prompt that an exchange is chosen for
_HEADS, _KV_HEADS, _HEAD_SIZE = 32, 8, 128  # those of Llama-3 8B
_PAGE_SIZE = 64
_CHECK = "check JAX_PLATFORMS, the driver (nvidia-smi) and that jax, jaxlib and the plugin have one version"


def run(options: argparse.Namespace) -> int:
    """Print what was found; the exit status is 1 if there is a problem."""
    if options.model is not None:
        return _check_checkpoint(options)
    report, console = Report(), Console(options.quiet)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # others may use the GPUs
    examine(report)
    console.note("asking JAX for its devices")
    ask_jax(report)
    report.look("extras", examine_extras)  # last of what is found, as it is long
    _print(json.dumps(asdict(report), indent=2) if options.json else report.to_text())
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


@dataclass
class Finding:
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

    def look(self, what: str, find: "Callable[[Report], object]") -> None:
        """Let a function add what it finds."""
        with self.asking(what):
            find(self)

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
    installed = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    for name in ("jax", "jaxlib", *sorted(name for name in installed if name and name.startswith(_CUDA))):
        report.note("versions", name, installed.get(name, "not installed"))


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
        report.hint(f"the user has no folder for caches: {error}", f"name one by {CACHE_VARIABLE}")
        return
    root = shown(programs.parent)
    report.note("compile cache", "folder", f"{root}, {f'by {CACHE_VARIABLE}' if named else 'the default'}")
    try:
        folder = next(each for each in (programs, *programs.parents) if each.exists())
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        text = f"compiled programs can't be kept in {root}: {error.strerror}"
        if named:  # commands refuse it
            report.problem(text, f"unset {CACHE_VARIABLE}, or name a folder that can be written to")
        else:
            report.hint(text, f"name another folder by {CACHE_VARIABLE}; commands compile anew each time")
        return
    sizes = [path.stat().st_size for path in programs.rglob("*-cache") if path.is_file()]
    report.note("compile cache", "size", f"{sum(sizes) / 2**20:,.1f} MiB, {len(sizes):,} programs")
    _disk(report, "compiled programs", folder)


def _disk(report: Report, name: str, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    report.note("memory", f"disk of {name}", f"{free / 2**30:,.1f} GiB free in {shown(folder)}")
    if free < _LEAST_DISK:
        report.hint(f"the disk of {name} has less than 1 GiB free", f"make room in {shown(folder)}")


def ask_jax(report: Report) -> None:
    """Add what JAX has here, and what longctx would pick and why, or the problem that prevents it."""
    with report.asking("JAX", "pip install --force-reinstall jax jaxlib"):
        import jax

        platforms = os.environ.get("JAX_PLATFORMS", "")
        devices: list[Any] = []
        with report.asking(f"the devices of JAX_PLATFORMS={platforms}" if platforms else "JAX's devices", _CHECK):
            devices += jax.devices()
        if not devices:
            return
        for what, look in (
            ("the devices' kinds", _describe),
            ("the ptxas that assembles kernels", _ptxas),
            ("the host's memory", _memory),
            ("the links between devices", _links),
            ("what would be picked", _choices),
            ("XLA's flags", _xla_flags),
        ):
            with report.asking(what):
                look(report, devices)


def _describe(report: Report, devices: list[Any]) -> None:
    import jax

    platform = devices[0].client.platform_version
    report.note("versions", "platform", first_line(str(platform)) or "unknown")
    report.note("devices", "backend", jax.default_backend())
    for kind in sorted({device.device_kind for device in devices}):
        same = [device for device in devices if device.device_kind == kind]
        report.note("devices", kind, f"{len(same)}{_memory_of(same)}")
    if jax.process_count() > 1:
        report.note("devices", "processes", jax.process_count())


def _ptxas(report: Report, devices: list[Any]) -> None:
    from longctx.kernels.mosaic_gpu.ptxas import ptxas_in_use

    report.note("versions", "ptxas", ptxas_in_use())


def _memory_of(devices: list[Any]) -> str:
    """The memory that JAX may take of the smallest of some devices, if it is known."""
    statistics = [device.memory_stats() for device in devices if device.platform != "cpu"]
    limits = [each["bytes_limit"] for each in statistics if each and "bytes_limit" in each]
    return f", {min(limits) / 2**30:,.1f} GiB each for JAX" if limits else ""


def _memory(report: Report, devices: list[Any]) -> None:

    from longctx.serving.engine.memory import available_bytes
    from longctx.serving.runner.device_memory import in_units

    available = available_bytes()
    if available is not None:
        report.note("memory", "host", f"{in_units(available)} available")


def _links(report: Report, devices: list[Any]) -> None:
    from longctx.parallel import find_topology, make_mesh

    topology = find_topology(make_mesh(context=len(devices)) if len(devices) > 1 else None)
    report.note("links", "device", f"{topology.device.name}, as costs are predicted")
    for axis, link in topology.links.items():
        report.note("links", axis, f"{link.name}, {link.bandwidth / 1e9:,.0f} GB/s one way")


def _choices(report: Report, devices: list[Any]) -> None:
    import jax
    import jax.numpy as jnp

    from longctx.kernels import explain

    for paged in (False, True):
        name = "paged_attention" if paged else "attention"
        lead = (16, _PAGE_SIZE) if paged else (1024,)
        for dtype in (jnp.bfloat16, jnp.float32):
            q: Any = jax.ShapeDtypeStruct((1024, _HEADS, _HEAD_SIZE), dtype)
            k: Any = jax.ShapeDtypeStruct((*lead, _KV_HEADS, _HEAD_SIZE), dtype)
            found = explain(q, k, paged)
            reasons = [f"{other} {why}" for other, why in found.refused.items() if other != "reference"]
            report.note("picked", f"{name}, {jnp.dtype(dtype).name}", f"{found.taken}: {'; '.join(reasons)}")
            if found.ptxas and found.taken != "mosaic_gpu" and dtype == jnp.bfloat16:
                remedy = "docs/mosaic_gpu.md says which ptxas it takes"
                report.hint(f"{name} does without the kernels for this GPU: {found.refused['mosaic_gpu']}", remedy)
    _exchange(report, len(devices))


def _exchange(report: Report, num_devices: int) -> None:
    """Report what `choose_ring` answers for a long prompt, and for a token after it."""
    if num_devices == 1:
        report.note("picked", "exchange", "none: there is one device")
        return
    from longctx.parallel import choose_ring, find_topology, make_mesh
    from longctx.parallel.cost import ModelShape

    topology, model = find_topology(make_mesh(context=num_devices)), ModelShape(_HEADS, _KV_HEADS, _HEAD_SIZE)
    for name, new, cached in (("exchange, prefill", _TOKENS, 0), ("exchange, decode", 1, _TOKENS)):
        choice = choose_ring(new, cached, num_devices, model, topology)
        times = ", ".join(f"{method} {1e6 * each.total:,.0f}" for method, each in choice.times.items())
        report.note("picked", name, f"{choice.method} over {num_devices}; predicted us of a layer: {times}")


def _xla_flags(report: Report, devices: list[Any]) -> None:
    flags = os.environ.get("XLA_FLAGS", "").strip()
    report.note("picked", "XLA_FLAGS", flags or "none")
    if devices[0].platform in ("gpu", "cuda") and "xla_gpu_enable_command_buffer" not in flags:
        remedy = "docs/command_buffers.md has the flags"
        report.hint("no flags for CUDA graphs are set, as this version of jaxlib is not one that we know", remedy)
