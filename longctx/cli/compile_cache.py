"""The folder where JAX keeps compiled programs from one run of a command to the next."""

import atexit
import hashlib
import os
import platform
import shutil
import stat
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jaxlib

from longctx.cli.files import CACHE_VARIABLE, cache_root

_MAX_BYTES = 1 << 30
_BROKEN = ("Error reading persistent compilation cache", "Error writing persistent compilation cache")


def enable(is_wanted: bool) -> None:
    """Let JAX keep compiled programs in the user's cache folder, or that of LONGCTX_CACHE.

    JAX stays with a folder of its own, if it has one already. A folder in which nothing can be written, or a broken
    file, costs a compilation and nothing else.
    """
    config: Any = jax.config
    if not is_wanted or config.jax_compilation_cache_dir is not None:
        return
    try:
        folder = cache_root() / "programs" / _compiler()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        if os.environ.get(CACHE_VARIABLE):
            raise ValueError(f"{CACHE_VARIABLE} must be a folder that can be written to: {error}") from None
        return
    _remove_unused(folder.parent)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # A model is loaded by dozens of programs that compile in no time.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # Else the folder's name is part of each program's key, and a copy of the folder is of no use.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    _recover_from_broken_files(folder)


def _compiler() -> str:
    """Return what programs depend on beyond JAX's own key: a CPU that lacks an instruction would crash in them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        processor = sorted({line for line in text.splitlines() if line.startswith(("flags", "Features", "model name"))})
    except OSError:
        processor = [platform.processor()]
    about = repr((jax.__version__, jaxlib.__version__, platform.machine(), processor))
    return hashlib.blake2b(about.encode(), digest_size=8).hexdigest()


def _remove_unused(folder: Path) -> None:
    """Remove the programs of all compilers beyond the limit that were not used for longest.

    JAX could limit the folder itself, but would wait 10 s for each program while another process holds its lock. Other
    commands may do the same at the same time, so that any of these files may be gone.
    """
    programs = []
    with suppress(OSError):
        for path in folder.rglob("*"):
            with suppress(OSError):
                about = path.stat()
                if stat.S_ISREG(about.st_mode):
                    programs.append((max(about.st_atime, about.st_mtime), about.st_size, path))
    size = 0
    for _, num_bytes, path in sorted(programs, reverse=True):
        size += num_bytes
        if size > _MAX_BYTES:
            with suppress(OSError):
                path.unlink()


def _recover_from_broken_files(folder: Path) -> None:
    """Hide JAX's warnings of files that it can't read, and empty the folder at the end, as JAX never replaces them."""
    show = warnings.showwarning

    def watch(message: Any, category: type[Warning], *rest: Any, **more: Any) -> None:
        if str(message).startswith(_BROKEN):
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        else:
            show(message, category, *rest, **more)

    warnings.showwarning = watch
