"""`longctx doctor` without `--model`: what it says of a sound machine, and that a hostile one doesn't stop it."""

import json
import sys
from pathlib import Path

import jax
import pytest

from longctx import extras
from longctx.cli import doctor, main
from longctx.cli.doctor import Report, first_line, shown
from longctx.cli.files import CACHE_VARIABLE as VARIABLE
from longctx.models.builtin import TINY


@pytest.fixture
def report() -> Report:
    return Report()


def test_a_sound_machine_has_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    sections = found["sections"]
    assert [*sections] == ["versions", "compile cache", "memory", "devices", "links", "picked", "extras"]
    assert sections["versions"]["jax"] == jax.__version__
    assert sections["devices"] == {"backend": "cpu", "cpu": str(jax.device_count())}
    assert sections["links"]["device"].startswith("cpu")
    assert sections["picked"]["attention, bfloat16"].startswith("xla: mosaic_gpu needs an NVIDIA GPU")
    assert sections["picked"]["exchange, prefill"].split()[0] in ("pass_kv", "pass_q", "all_gather", "kvp")
    assert sections["picked"]["exchange, decode"].startswith(f"kvp over {jax.device_count()}")
    assert sections["extras"].keys() == extras.EXTRAS.keys()
    assert not (tmp_path / "cache").exists(), "it only looks"


def test_text_has_a_line_for_each_value_and_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def examine(report: Report) -> None:
        report.note("devices", "gpu", "none \udcff")
        report.problem("the GPU is gone", "call it back")
        report.hint("it is cold", "put something on")

    monkeypatch.setattr(doctor, "ask_jax", examine)
    assert main(["doctor", "--quiet"]) == 1
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "devices\n  gpu  none \\udcff\n" in printed.out
    assert printed.out.endswith("problem: the GPU is gone: call it back\nhint: it is cold: put something on\n")


# The cache of compiled programs


@pytest.mark.parametrize("garbage", ["file/below", "x" * 300, "/proc/none"])
def test_a_cache_folder_that_commands_would_refuse_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Report, garbage: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    monkeypatch.setenv(VARIABLE, garbage)
    doctor.examine(report)
    [problem] = report.problems
    assert garbage[:100] in problem.text
    assert f"unset {VARIABLE}" in problem.remedy


def test_a_default_cache_folder_that_cant_be_written_to_is_a_hint(
    monkeypatch: pytest.MonkeyPatch, report: Report
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    doctor.examine(report)
    assert report.problems == []
    [hint] = [hint for hint in report.hints if "/proc" in hint.text]
    assert "can't be kept in /proc/none" in hint.text, "nor is its disk full"


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    def nowhere() -> Path:
        raise RuntimeError("could not determine home directory")

    monkeypatch.setattr(doctor, "cache_root", nowhere)
    doctor.examine(report)
    assert report.problems == []
    assert any("no folder for caches" in hint.text for hint in report.hints)


def test_programs_in_the_cache_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    folder = tmp_path / "programs" / "0123"
    folder.mkdir(parents=True)
    for i in range(3):
        (folder / f"jit_f-{i}-cache").write_bytes(bytes(1 << 20))
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    doctor.examine(report)
    assert report.sections["compile cache"]["size"] == "3.0 MiB, 3 programs"
    assert report.problems == []


# JAX


def test_a_jax_that_does_not_load_is_a_problem(monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    doctor.ask_jax(report)
    [problem] = report.problems
    assert problem.text.startswith("JAX can't be found out: ModuleNotFoundError")
    assert problem.remedy


def test_devices_that_jax_does_not_find_are_a_problem(monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    def refuse() -> None:
        raise RuntimeError("Unknown backend\nmore about it")

    monkeypatch.setattr(jax, "devices", refuse)
    monkeypatch.setenv("JAX_PLATFORMS", "nonsense")
    doctor.ask_jax(report)
    [problem] = report.problems
    assert problem.text == "the devices of JAX_PLATFORMS=nonsense can't be found out: RuntimeError: Unknown backend"
    assert "JAX_PLATFORMS" in problem.remedy


# Packages, and the driver


def test_extras_that_lack_packages_have_their_pip_line(monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    doctor.examine_extras(report)
    found = report.sections["extras"]
    assert found["plot"] == f"drawings: --plot, figures: not installed: {extras.pip_line('plot')}"
    assert found["serve"].endswith(f": not installed, lacks pyzmq: {extras.pip_line('serve')}")
    assert "installed, gguf " in found["gguf"]
    assert report.problems == []


@pytest.mark.parametrize(
    ("script", "memory", "problem"),
    [
        ("echo 0, NVIDIA H100, 81559 MiB, 81004 MiB", "NVIDIA H100: 81004 MiB of 81559 MiB free", None),
        ("echo has failed because >&2; exit 9", None, "nvidia-smi fails: has failed because"),
        ("echo 0", None, "the GPUs' driver can't be found out: ValueError"),
    ],
)
def test_nvidia_smi_is_asked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    report: Report,
    script: str,
    memory: str | None,
    problem: str | None,
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    doctor.examine(report)
    assert report.sections["memory"].get("GPU 0") == memory
    assert [each.text.startswith(problem or "?") for each in report.problems] == [True] * (problem is not None)


def test_a_checkpoint_is_checked_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--quiet", "--model", str(TINY)]) == 0
    assert json.loads(capsys.readouterr().out) == {"model": str(TINY), "problems": []}
    (tmp_path / "config.json").write_text("{}")
    assert main(["doctor", "--json", "--quiet", "--model", str(tmp_path)]) == 1
    assert json.loads(capsys.readouterr().out)["problems"]


def test_reports_have_short_lines_and_do_not_tell_whose_home_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert [shown(path) for path in ("/home/somebody/.cache/longctx", "/home/somebody", "/var/a b")] == [
        "~/.cache/longctx",
        "~",
        "/var/a b",
    ]
    assert shown("/tmp/a\nb\x1b[31m") == '"/tmp/a\\nb\\u001b[31m"'
    assert first_line("\n  a \nb") == "a"
    assert len(first_line("x" * 1000)) < 400
