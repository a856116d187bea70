"""Flags for XLA: what they are, who sets them, and that they do no harm without a GPU."""

import importlib.util
import os
import subprocess
import sys

import jax
import pytest

import longctx
from longctx.cli import main
from longctx.gpu_flags import (
    MEMORY_VARIABLES,
    OVERLAPS,
    memory_fraction,
    reserved_multiprocessors,
    set_memory_fraction,
    set_xla_flags,
    xla_knows,
)
from longctx.kernels.attention.operands import check_kernel
from longctx.models.builtin import TINY

COMMANDS, UNROLL = "--xla_gpu_enable_command_buffer=+WHILE", "--xla_gpu_command_buffer_unroll_loops=true"
CHANNELS, COPIES = "--xla_gpu_nccl_p2p_max_nchannels=4", "--xla_gpu_use_memcpy_local_p2p=true"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")  # which it has again after the test, whatever the test sets
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    for name in MEMORY_VARIABLES:
        monkeypatch.setenv(name, "")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA plugin is installed."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "jax_cuda12_plugin" or find_spec(name))


def test_flags_are_text_for_the_environment() -> None:
    assert longctx.xla_flags() == f"{COMMANDS} {UNROLL}"
    assert longctx.xla_flags(overlap="copy_engines") == f"{COMMANDS} {UNROLL} {COPIES}"
    assert longctx.xla_flags(collectives=True) == f"{COMMANDS},+COLLECTIVES,-CONDITIONAL {UNROLL}"
    assert longctx.xla_flags(overlap="multiprocessors") == f"{COMMANDS} {UNROLL} {CHANNELS}"
    assert longctx.xla_flags(overlap=None) == f"{COMMANDS} {UNROLL}"
    with pytest.raises(ValueError, match="overlap must be one of 'multiprocessors', 'copy_engines', None, got 'sms'"):
        longctx.xla_flags(overlap="sms")


def test_the_installed_jax_knows_the_flags_of_every_choice() -> None:
    for overlap in OVERLAPS:
        for flag in longctx.xla_flags(overlap=overlap).split():
            assert xla_knows(flag.partition("=")[0].lstrip("-"))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (longctx.xla_flags(overlap="multiprocessors"), 4),
        (longctx.xla_flags(), 0),
        (longctx.xla_flags(overlap=None), 0),
        (f"{CHANNELS} {COPIES}", 0),
        (f"{CHANNELS} --xla_gpu_use_memcpy_local_p2p=false", 4),
        (f"{CHANNELS} --xla_gpu_nccl_p2p_max_nchannels=2", 2),
        ("--xla_gpu_nccl_p2p_max_nchannels=0", 0),
        ("/etc/flags.txt", 0),
    ],
)
def test_kernels_beside_hops_leave_multiprocessors_as_the_flags_say(
    flags: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    kernel = check_kernel(jax.ShapeDtypeStruct((1, 1, 64), "float32"), True, None, None)
    assert reserved_multiprocessors() == kernel.beside_hops(8).reserved_multiprocessors == expected
    assert kernel.beside_hops(1) == kernel


def test_flags_do_no_harm_on_a_cpu() -> None:
    """XLA would end a process whose flags it doesn't know."""
    environment = os.environ | {
        "XLA_FLAGS": longctx.xla_flags(collectives=True, overlap="multiprocessors"),
        "JAX_PLATFORMS": "cpu",
    }
    program = "import jax; print(jax.jit(lambda x: x + 1)(1))"
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert result.stdout == "2\n", result.stderr


@pytest.mark.usefixtures("cuda")
def test_the_command_line_sets_them_where_jax_has_a_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(TINY)]) == 0
    assert os.environ["XLA_FLAGS"] == longctx.xla_flags()
    assert memory_fraction() == 0.9


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("--xla_gpu_autotune_level=0", f"{COMMANDS} {UNROLL} --xla_gpu_autotune_level=0"),
        ("--xla_gpu_enable_command_buffer=", f"{UNROLL} --xla_gpu_enable_command_buffer="),
        ("--xla_gpu_command_buffer_unroll_loops", f"{COMMANDS} --xla_gpu_command_buffer_unroll_loops"),
        (f"{UNROLL} {COMMANDS}", f"{UNROLL} {COMMANDS}"),
        ("/etc/flags.txt", "/etc/flags.txt"),
    ],
)
def test_ones_own_flags_win(own: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", own)
    set_xla_flags()
    assert os.environ["XLA_FLAGS"] == expected


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(("platforms", "is_set"), [("", True), ("cuda,cpu", True), ("cpu", False), ("tpu,cpu", False)])
def test_they_are_for_gpus(platforms: str, is_set: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    set_xla_flags()
    assert bool(os.environ["XLA_FLAGS"]) == is_set


def test_without_a_cuda_plugin_they_are_not_set() -> None:
    set_xla_flags()
    assert os.environ["XLA_FLAGS"] == ""


@pytest.mark.usefixtures("cuda")
def test_a_jaxlib_that_does_not_know_them_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longctx.gpu_flags.xla_knows", lambda flag: flag != "xla_gpu_command_buffer_unroll_loops")
    set_xla_flags()
    assert os.environ["XLA_FLAGS"] == ""


@pytest.mark.parametrize(
    "flag",
    [
        "xla_gpu_enable_command_buffer",
        "xla_gpu_command_buffer_unroll_loop",  # with an s it would be one
    ],
)
def test_a_flag_is_known_if_and_only_if_jax_starts_with_it(flag: str) -> None:
    value = "" if flag.endswith("buffer") else "true"
    environment = os.environ | {"XLA_FLAGS": f"--{flag}={value}", "JAX_PLATFORMS": "cpu"}
    program = "from jaxlib import xla_client; xla_client.make_cpu_client()"
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert xla_knows(flag) == (result.returncode == 0), result.stderr
    assert result.returncode == 0 or "Unknown flag" in result.stderr


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("name", MEMORY_VARIABLES)
def test_ones_own_share_of_memory_wins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX refuses to start where both of its variables are set."""
    monkeypatch.setenv(name, ".5")
    set_memory_fraction()
    assert [os.environ[other] for other in MEMORY_VARIABLES if other != name] == [""]
    assert memory_fraction() == 0.5


def test_jax_takes_its_own_share_of_memory_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    set_memory_fraction()
    assert not any(map(os.environ.get, MEMORY_VARIABLES))
    assert memory_fraction() == 0.75
