"""Flags for XLA on GPUs, with which a step is captured in command buffers (CUDA graphs).

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
# A collective inside a conditional node can't be instantiated (github.com/NVIDIA/nccl, issue 1986), and the sampler's
# branches have collectives. So the branch is outside, and what is in it is captured.
_COLLECTIVES = "+COLLECTIVES,-CONDITIONAL"
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
# The shared libraries that read XLA_FLAGS, by package: jaxlib's own, and those of CUDA plugins.
_LIBRARIES = {
    "jaxlib": "libjax_common.so",
    "jax_plugins.xla_cuda12": "xla_cuda_plugin.so",
    "jax_plugins.xla_cuda13": "xla_cuda_plugin.so",
}


def xla_flags(collectives: bool = False) -> str:
    """Flags for the environment variable `XLA_FLAGS`, to be set before JAX starts.

    With them a step on one GPU is one command buffer; on a mesh, what lies between two collectives is. They have no
    effect on CPUs. `xla_knows` says whether the installed JAX has them: with an unknown flag, it aborts.

    A shell sets them by `export XLA_FLAGS="$(python -c 'import longctx; print(longctx.xla_flags())')"`.

    Args:
      collectives: capture collectives too, which XLA does not by default: hangs and slower steps have been reported
        (docs/command_buffers.md).

    Returns:
      Flags, with spaces between them.

    Source:
      Context parallelism paper, 4.3, and Mnemosyne, 5, which run decodes and mixed batches as CUDA graphs.

    Examples:
      >>> import longctx
      >>> for flag in longctx.xla_flags().split():
      ...     print(flag)
      --xla_gpu_enable_command_buffer=+WHILE
      --xla_gpu_command_buffer_unroll_loops=true
    """
    flags = dict(_FLAGS)
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
    platforms = os.environ.get("JAX_PLATFORMS", "").lower().split(",")
    if platforms != [""] and not {"cuda", "gpu"} & {*platforms}:
        return
    if not any(map(importlib.util.find_spec, _PLUGINS)) or not all(map(xla_knows, _FLAGS)):
        return
    own = {flag.partition("=")[0].lstrip("-") for flag in given.split()}
    missing = _text({name: value for name, value in _FLAGS.items() if name not in own})
    os.environ["XLA_FLAGS"] = f"{missing} {given}".strip()


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
