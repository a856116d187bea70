"""The cache of compiled programs: found by the next run, bounded, and never a reason to fail."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import jax, jax.numpy as jnp, sys, warnings
from longctx.cli import compile_cache
{before}
compile_cache.enable({wanted})
print(jax.config.jax_compilation_cache_dir)
def f(x):
    return jnp.sort(jnp.sin(x) @ x.T)
print(float(jax.jit(f)(jnp.ones((8, 8)))[0, 0]))
"""

CATCH = """
def enable(is_wanted, enable=compile_cache.enable):
    try:
        enable(is_wanted)
    except ValueError as error:
        print(error, file=sys.stderr)

compile_cache.enable = enable
"""


def run(cache: Path | None, wanted: bool = True, before: str = "", **environment: str) -> tuple[str, str]:
    """Run a program that compiles; (folder that JAX keeps programs in, standard error)."""
    base = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "LONGCTX_"))}
    given = {} if cache is None else {"LONGCTX_CACHE": str(cache)}
    command = [sys.executable, "-c", PROGRAM.format(wanted=wanted, before=before)]
    result = subprocess.run(command, env=base | given | environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    folder, value = result.stdout.splitlines()
    assert abs(float(value) - 6.7317) < 1e-3
    return folder, result.stderr


def entries(folder: str) -> dict[Path, float]:
    return {path: path.stat().st_mtime for path in Path(folder).glob("*-cache")}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """LONGCTX_CACHE of a run that is over, and the folder in it where that kept its programs."""
    cache = tmp_path_factory.mktemp("cache")
    folder, _ = run(cache)
    assert Path(folder).is_relative_to(cache)
    return cache, str(Path(folder).relative_to(cache))


@pytest.fixture
def folder(first: tuple[Path, str], tmp_path: Path) -> str:
    """A copy of that folder, in the place that a run has it for which LONGCTX_CACHE is `tmp_path`."""
    shutil.copytree(first[0], tmp_path, dirs_exist_ok=True)
    return str(tmp_path / first[1])


def test_the_next_run_finds_what_was_compiled(first: tuple[Path, str]) -> None:
    cache, name = first
    folder = str(cache / name)
    found = entries(folder)
    assert found
    assert run(cache) == (folder, "")
    assert entries(folder) == found


def test_a_broken_file_is_a_recompilation(tmp_path: Path, folder: str) -> None:
    for number, path in enumerate(entries(folder)):
        path.write_bytes(b"garbage" if number % 2 else path.read_bytes()[:-100])
    assert run(tmp_path) == (folder, "")
    run(tmp_path)  # the folder was emptied, so this one compiles
    assert entries(folder)
    assert all(path.stat().st_size > 100 for path in entries(folder))


def test_what_was_not_used_for_longest_is_removed(tmp_path: Path, folder: str) -> None:
    """Of all compilers; a file that another command removes meanwhile is no failure."""
    other = Path(folder).parent / "other"
    other.mkdir()
    big, recent = other / "big-cache", Path(folder, "recent-cache")
    for path, seconds in ((big, 1000), (recent, 10)):
        path.write_bytes(b"x" * 600)
        os.utime(path, (time.time() - seconds,) * 2)
    (other / "gone-cache").touch()
    before = f"""
compile_cache._MAX_BYTES = {sum(path.stat().st_size for path in entries(folder)) + 599}
from pathlib import Path
def fail(path, function=Path.stat, **more):
    if path.name == "gone-cache":
        raise FileNotFoundError
    return function(path, **more)
Path.stat = fail
"""
    assert run(tmp_path, before=before) == (folder, "")
    assert recent.exists()
    assert not big.exists()


def test_the_cache_can_be_left_out_and_belongs_to_jax_if_jax_has_one(tmp_path: Path) -> None:
    assert run(tmp_path, wanted=False) == ("None", "")
    assert not any(tmp_path.iterdir())
    own = tmp_path / "own"
    assert run(tmp_path, JAX_COMPILATION_CACHE_DIR=str(own))[0] == str(own)


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder, error = run(tmp_path / "file", before=CATCH)
    assert folder == "None"
    assert error.startswith("LONGCTX_CACHE must be a folder that can be written to: ")
