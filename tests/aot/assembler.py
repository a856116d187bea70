"""The ptxas that we say is used is the one that jaxlib uses, and a broken one on the path is refused."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import cuda_tools

PROGRAM = """
import jax, jax.numpy as jnp
from benchmarks.h100 import h100_mesh
from longctx.kernels import explain
from longctx.kernels.mosaic_gpu import adapter
from longctx.kernels.mosaic_gpu.ptxas import ptxas_in_use
q = jax.ShapeDtypeStruct((6, 4, 128), jnp.bfloat16)
with jax.set_mesh(h100_mesh(context=1)):
    print(explain(q, q))
"""


def explain_with(path: str) -> tuple[str, str]:
    """What `explain` says for an H100, and jaxlib's log of which ptxas it uses, with this PATH."""
    log = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "assemble_compilation_provider=3"}
    environment = os.environ | log | {"PATH": path, "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{Path.cwd()}"}
    result = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout, result.stderr


def check_same(said: str, log: str) -> str:
    """The version of what assembles; empty where jaxlib has found libnvJitLink, and takes no ptxas."""
    if "Using libnvjitlink" in log:
        assert said.splitlines()[-1].startswith("ptxas       of unknown version, for PTX up to ")
        assert said.startswith("mosaic_gpu  taken")
        return ""
    used = re.search(r"Using ptxas\(path=([^,]+), version=([\d.]+)\)", log)
    assert said.splitlines()[-1] == f"ptxas       {used[2]} ({used[1]})"
    return used[2]


def write_program(path: Path, version: str, right: Path) -> None:
    """An assembler that gives itself a version, and is the right one otherwise."""
    path.write_text(f"""#!/bin/sh
if [ "$1" = --version ]; then echo {version}; else exec {right} "$@"; fi
""")
    path.chmod(0o755)


def test_the_first_on_the_path_is_used() -> None:
    said, log = explain_with(os.environ["PATH"])
    assert check_same(said, log) in ("", cuda_tools.ptxas_version(cuda_tools.ptxas(cuda_tools.OLDEST)))
    assert said.startswith("mosaic_gpu  taken")


@pytest.mark.slow
def test_a_broken_one_on_the_path_is_refused(tmp_path: Path) -> None:
    """It gives itself the version of CUDA 12.9.0, and is the right one otherwise."""
    right, program = cuda_tools.ptxas(cuda_tools.OLDEST), tmp_path / "ptxas"
    write_program(program, "V12.9.41", right)
    said, log = explain_with(f"{tmp_path}:{os.environ['PATH']}")
    if version := check_same(said, log):
        assert version == "12.9.41"
        assert f"which miscompiles such loops: found 12.9.41 ({program})" in said


@pytest.mark.slow
def test_a_broken_one_on_the_path_gives_way_to_that_of_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin lies beside CUDA's packages here, as pip installs them; the first of the path is of CUDA 12.8."""
    right, site = cuda_tools.ptxas(cuda_tools.OLDEST), tmp_path / "site"
    installed = Path(os.environ["PYTHONPATH"])
    for folder in installed.iterdir():
        (site / folder.name).mkdir(parents=True)  # no link, since its parent has to be ours
        for path in folder.iterdir():
            (site / folder.name / path.name).symlink_to(path)
    (site / "nvidia").mkdir(exist_ok=True)
    (site / "nvidia/cuda_nvcc").symlink_to(right.parent.parent)
    write_program(tmp_path / "ptxas", "V12.8.93", right)
    monkeypatch.setenv("PYTHONPATH", str(site))
    said, log = explain_with(f"{tmp_path}:{os.defpath}")
    assert check_same(said, log) in ("", cuda_tools.ptxas_version(right))
    assert said.startswith("mosaic_gpu  taken")
