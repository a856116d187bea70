"""Environment of XLA on GPUs: flags for command buffers (CUDA graphs) and hops of rings, and the share of memory.

A captured kernel costs the host nothing: it launches one graph for all of them. Source: context parallelism paper,
section 4.3, and Mnemosyne, section 5, which run decodes and mixed batches as CUDA graphs. docs/command_buffers.md has
what is captured, and what is not.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
from pathlib import Path

_COMMANDS = "xla_gpu_enable_command_buffer"
_FLAGS = {
    # Loops in a step. Unrolled, else the body would be a graph of its own, updated and launched for each round.
    _COMMANDS: "+WHILE",
    "xla_gpu_command_buffer_unroll_loops": "true",
}
# A collective inside a conditional node can't be instantiated (github.com/NVIDIA/nccl, issue 1986). So branches stay
# outside, and what is in them is captured.
_COLLECTIVES = "+COLLECTIVES,-CONDITIONAL"
MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Environment variables of the share of a GPU's memory that JAX takes, the second one deprecated."""
_MEMORY = "0.9"  # CUDA, NCCL and CUDA graphs need some beside JAX
_JAX_MEMORY = 0.75
# By the choice of `overlap`. Channels are multiprocessors: NCCL has a thread block for each. XLA's own way is the
# default until a measurement decides, although the static model favours copy engines (docs/mosaic_gpu.md).
_CHANNELS, _COPIES = "xla_gpu_nccl_p2p_max_nchannels", "xla_gpu_use_memcpy_local_p2p"
OVERLAPS: dict[str | None, dict[str, str]] = {
    "multiprocessors": {_CHANNELS: "4"},
    "copy_engines": {_COPIES: "true"},
    None: {},
}
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
# The shared libraries that read XLA_FLAGS, by package: jaxlib's own, and those of CUDA plugins.
_LIBRARIES = {
    "jaxlib": "libjax_common.so",
    "jax_plugins.xla_cuda12": "xla_cuda_plugin.so",
    "jax_plugins.xla_cuda13": "xla_cuda_plugin.so",
}


def xla_flags(collectives: bool = False, overlap: str | None = None) -> str:
    """Flags for the environment variable `XLA_FLAGS`, to be set before JAX starts.

    With them a step on one GPU is one command buffer; on a mesh, what lies between two collectives is. They have no
    effect on CPUs. `xla_knows` says whether the installed JAX has them: with an unknown flag, it aborts.

    A shell sets them by `export XLA_FLAGS="$(python -c 'import longctx; print(longctx.xla_flags())')"`.

    Args:
      collectives: capture collectives too, which XLA does not by default: hangs and slower steps have been reported
        (docs/command_buffers.md).
      overlap: what moves the keys and queries of a ring while the kernel for Hopper computes (docs/mosaic_gpu.md).
        "copy_engines": copies between the GPUs of one process; between processes it is as None.
        "multiprocessors": NCCL on 4 multiprocessors, which the kernel leaves it. None: NCCL on as many multiprocessors
        as it takes, none of which the kernel leaves it.

    Returns:
      Flags, with spaces between them.

    Raises:
      ValueError: overlap is none of these.

    Source:
      Context parallelism paper, 4.3, and Mnemosyne, 5, which run decodes and mixed batches as CUDA graphs.

    Examples:
      >>> import longctx
      >>> for flag in longctx.xla_flags().split():
      ...     print(flag)
      --xla_gpu_enable_command_buffer=+WHILE
      --xla_gpu_command_buffer_unroll_loops=true
    """
    if overlap not in OVERLAPS:
        raise ValueError(f"overlap must be one of {', '.join(map(repr, OVERLAPS))}, got {overlap!r}")
    flags = _FLAGS | OVERLAPS[overlap]
    if collectives:
        flags[_COMMANDS] += f",{_COLLECTIVES}"
    return _text(flags)


def set_xla_flags() -> None:
    """Put `xla_flags()` into the environment of this process, if JAX has a CUDA plugin and knows them.

    Flags that `XLA_FLAGS` has already stay as they are. It has no effect once JAX has made its devices.
    """
    given = os.environ.get("XLA_FLAGS", "").strip()
    if given and not given.startswith("--"):
        return  # the name of a file of flags
    if not _may_have_gpus() or not all(map(xla_knows, _FLAGS)):
        return
    own = _parse(given)
    missing = _text({name: value for name, value in _FLAGS.items() if name not in own})
    os.environ["XLA_FLAGS"] = f"{missing} {given}".strip()


def set_memory_fraction() -> None:
    """Let JAX take 90 % of a GPU's memory and not 75 %, if it has a CUDA plugin and the environment does not say.

    It has no effect once JAX has made its devices.
    """
    if _may_have_gpus() and not any(map(os.environ.get, MEMORY_VARIABLES)):
        os.environ[MEMORY_VARIABLES[0]] = _MEMORY


def memory_fraction() -> float:
    """Return the share of a GPU's memory that JAX takes, as the environment says or by default."""
    given = next(filter(None, map(os.environ.get, MEMORY_VARIABLES)), None)
    return _JAX_MEMORY if given is None else min(1.0, float(given))


def _may_have_gpus() -> bool:
    """Whether JAX has a CUDA plugin, and may use it."""
    platforms = os.environ.get("JAX_PLATFORMS", "").lower().split(",")
    if platforms != [""] and not {"cuda", "gpu"} & {*platforms}:
        return False
    return any(map(importlib.util.find_spec, _PLUGINS))


def reserved_multiprocessors() -> int:
    """Multiprocessors that a kernel leaves to NCCL while a hop travels beside it.

    They are the channels to which `XLA_FLAGS` limits hops; 0 where it does not, or where copy engines move them.
    """
    flags = _parse(os.environ.get("XLA_FLAGS", ""))
    if flags.get(_COPIES, "false").lower() not in ("false", "0"):
        return 0
    channels = flags.get(_CHANNELS, "0")
    return int(channels) if channels.isdecimal() else 0


def _parse(flags: str) -> dict[str, str]:
    """Values by name, without dashes; of a flag that is given twice, the last."""
    return {name.lstrip("-"): value for name, _, value in (flag.partition("=") for flag in flags.split())}


def xla_knows(flag: str) -> bool:
    """Return whether the installed jaxlib and its CUDA plugins, if any, have the XLA flag of this name.

    A process whose `XLA_FLAGS` hold a flag that its XLA does not know aborts when JAX makes its devices. XLA has no
    list to ask, but the names of its flags are C strings in its shared libraries.

    Args:
      flag: its name, without dashes.
    """
    libraries = _libraries()
    return bool(libraries) and all(_contents(library).find(f"\0{flag}\0".encode()) >= 0 for library in libraries)


def _libraries() -> list[Path]:
    found = []
    for package, name in _LIBRARIES.items():
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:  # no plugin of any kind
            continue
        if spec is not None:
            found += [path for folder in spec.submodule_search_locations or () if (path := Path(folder, name)).exists()]
    return found


def _contents(library: Path) -> mmap.mmap:
    with library.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _text(flags: dict[str, str]) -> str:
    return " ".join(f"--{name}={value}" for name, value in flags.items())
