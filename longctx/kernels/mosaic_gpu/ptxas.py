"""The ptxas that assembles our kernels, and whether it is known to miscompile them.

jaxlib runs ptxas as a program. For XLA's own kernels it takes the one of the CUDA packages beside JAX, but for those of
Mosaic the first that it finds: in `./cuda_sdk_lib`, on PATH, in `/usr/local/cuda` and `/opt/cuda`, and only then beside
JAX. So an older toolkit on PATH assembles our kernels, whatever version the platform and its packages have. Where it
would miscompile them and the one beside JAX would not, `ptxas_in_use` puts the latter first on this process's PATH. (A
jaxlib built with libnvptxcompiler or libnvJitLink assembles within the process; of that only the PTX version is known.)

Sources: XLA's `assemble_compilation_provider.cc`, `subprocess_compilation.cc` and `cuda_root_path.cc`, Mosaic's
`custom_call.cc`; the same in jaxlib 0.10 and 0.12.
"""

import functools
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

# XLA passes over assemblers that are older than the first, and over the second.
_OLDEST, _SKIPPED = (11, 8, 0), (12, 3, 103)
# JAX's own causal kernel says that the ptxas of CUDA 12.8.0 to below 12.9.1 miscompiles it, and ours has the same
# loops. ptxas calls itself 12.9.41 in CUDA 12.9.0 and 12.9.86 in 12.9.1.
_BROKEN_FROM, _RIGHT_FROM = (12, 8), (12, 9, 86)


class Ptxas(NamedTuple):
    """An assembler of PTX. Of one that is part of jaxlib neither path nor version is known."""

    ptx_version: int | None = None  # newest PTX that it reads, 88 for 8.8; None if nothing assembles here
    version: tuple[int, int, int] | None = None
    path: str = ""

    @property
    def broken(self) -> bool | None:
        """Whether it miscompiles our loops; None if it is not known."""
        if self.version is not None:
            return _BROKEN_FROM <= self.version < _RIGHT_FROM
        release = _release_of(self.ptx_version or 0)
        if self.ptx_version is None or release == _RIGHT_FROM[:2]:
            return None
        return release == _BROKEN_FROM

    def __str__(self) -> str:
        if self.version is not None:
            return f"{'.'.join(map(str, self.version))} ({self.path})"
        if self.ptx_version is None:
            return "not found"
        return f"of unknown version, for PTX up to {self.ptx_version / 10}"


@functools.cache
def ptxas_in_use() -> Ptxas:
    """The ptxas that Mosaic uses in this process. The first call takes some hundredths of a second.

    It may change PATH (see above), so it has to come before the first kernel is compiled.
    """
    library = mosaic_library()
    if library is None:
        return Ptxas()
    packaged = [root / "bin/ptxas" for root in _packages(library)]
    first, beside = _first_usable(_candidates(packaged)), _first_usable(packaged)
    if first is not None and first.broken and beside is not None and not beside.broken:
        os.environ["PATH"] = os.pathsep.join([str(Path(beside.path).parent), os.environ.get("PATH", "")])
        first = _first_usable(_candidates(packaged))
    ptx_version = newest_ptx()
    if ptx_version is None:
        return Ptxas()
    release = _release_of(ptx_version)
    # Another PTX version than this one's: something else assembles.
    if first is None or first.version is None or (release is not None and first.version[:2] != release):
        return Ptxas(ptx_version)
    return first._replace(ptx_version=ptx_version)


def mosaic_library() -> Path | None:
    """The file of jaxlib's extension module for Mosaic; None without a CUDA plugin."""
    try:
        from jax._src.lib import mosaic_gpu as private

        return Path(private._mosaic_gpu_ext.__file__)
    except (ImportError, AttributeError):  # no CUDA plugin, or another version of it
        return None


def newest_ptx() -> int | None:
    """The newest PTX that Mosaic's assembler reads, 88 for 8.8; None if there is none."""
    try:
        from jax._src.lib import mosaic_gpu as private

        return private._mosaic_gpu_ext._get_ptxas_isa_version()
    except (ImportError, AttributeError, RuntimeError):  # no CUDA plugin, another version of it, or no ptxas
        return None


def _release_of(ptx_version: int) -> tuple[int, int] | None:
    """The release of CUDA whose newest PTX this is, from CUDA 12.8 on; None for older ones."""
    if ptx_version >= 90:
        return 13, ptx_version - 90
    return {87: (12, 8), 88: (12, 9)}.get(ptx_version)


def _packages(library: Path) -> Iterator[Path]:
    """Return the folders of CUDA's packages beside JAX; `library` is its extension module for Mosaic."""
    for beside in (library.parent / "..", library.parent / "../.."):
        yield beside / "nvidia/cuda_nvcc"
        yield beside / "nvidia/cu13"
    yield library.parent / "cuda"


def _candidates(packaged: Iterable[Path]) -> Iterator[Path]:
    """Yield the places where jaxlib looks for ptxas, in its order: in the CUDA packages beside JAX at last."""
    yield Path("cuda_sdk_lib/bin/ptxas")
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        yield Path(folder, "ptxas")
    yield Path("/usr/local/cuda/bin/ptxas")
    yield Path("/opt/cuda/bin/ptxas")
    yield from packaged


def _first_usable(paths: Iterable[Path]) -> Ptxas | None:
    """The first that XLA would not pass over."""
    for path in paths:
        version = _version_of(path)
        if version is not None and version >= _OLDEST and version != _SKIPPED:
            return Ptxas(None, version, str(path))
    return None


def _version_of(path: Path) -> tuple[int, int, int] | None:
    if not path.is_file():
        return None
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    number = re.search(r"\bV(\d+)\.(\d+)\.(\d+)\b", said)
    return None if number is None else (int(number[1]), int(number[2]), int(number[3]))
