"""NVIDIA's assembler, of CUDA 12.9 and of 13, and its disassembler, as `make .venv/installed-ptxas` installs them."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

_ROOTS = {"12.9": Path(sys.prefix, "cuda12/nvidia/cuda_nvcc/bin"), "13.0": Path(sys.prefix, "cuda13/nvidia/cu13/bin")}
VERSIONS = tuple(_ROOTS)
OLDEST, NEWEST = VERSIONS[0], VERSIONS[-1]
# The newest PTX that all of them read.
_PTX_VERSION = "8.8"


class Assembled(NamedTuple):
    """An assembled kernel."""

    ptxas: str  # the assembler's own version, as "12.9.86"
    report: str  # what it says of registers, spills and serialised wgmma
    sass: str  # the listing, with encodings

    @property
    def registers(self) -> int:
        """Registers of a thread at launch."""
        return int(_number(r"Used (\d+) registers", self.report))

    @property
    def spilled_bytes(self) -> int:
        return sum(int(_number(rf"(\d+) bytes {kind}", self.report)) for kind in ("spill stores", "spill loads"))


def missing() -> list[str]:
    """The tools that are not installed."""
    wanted = [ptxas(version) for version in VERSIONS] + [_disassembler()]
    return [str(path) for path in wanted if not path.exists()]


def ptxas(version: str) -> Path:
    return _ROOTS[version] / "ptxas"


def _disassembler() -> Path:
    return _ROOTS[NEWEST] / "nvdisasm"


def ptxas_version(path: Path) -> str:
    """The version that an assembler gives itself, as "12.9.86"."""
    return _number(r"\bV(\d+\.\d+\.\d+)\b", _run(path, "--version"))


def assemble(ptx: str, version: str, architecture: str = "sm_90a") -> Assembled:
    """Assemble PTX that was made for any of `VERSIONS` as XLA does, and disassemble it.

    Raises:
      RuntimeError: a tool failed; the message is what it said.
    """
    ptx = re.sub(r"(?m)^\.version \S+", f".version {_PTX_VERSION}", ptx, count=1)
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        report = _run(ptxas(version), f"-arch={architecture}", "-v", "--warn-on-spills", source, "-o", cubin)
        return Assembled(ptxas_version(ptxas(version)), report, _run(_disassembler(), "-c", "-hex", cubin))


def _run(*command: str | Path) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {(result.stderr or result.stdout).strip()}")
    return result.stdout + result.stderr


def _number(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"expected {pattern!r} in: {text}")
    return found[1]
