"""The run on a GPU (tests/gpu), rehearsed on a CPU: time limits, crashes, results as they come, and the page."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_cases import CASES, STAGES, Case
from gpu_report import render
from gpu_run import Run, Worker

ROOT = Path(__file__).resolve().parents[1]
FAKES = """
import json, os, signal, time

def right(context, value): return {"value": value, "small": context.small, "process": os.getpid()}

def flags(context): return {"flags": os.environ["XLA_FLAGS"], "process": os.getpid()}

def wrong(context): raise AssertionError("off by 3")

def refused(context):
    from gpu_worker import Unsupported
    raise Unsupported("no such heads")

def hangs(context):
    context.note({"before": 1})
    time.sleep(600)

def crashes(context):
    print("CUDA_ERROR_LAUNCH_FAILED", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)

def breaks_the_device(context):
    import jax
    raise jax.errors.JaxRuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

def reads(context, file): return json.load(open(file))["cases"]
"""


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for results; the functions of FAKES can be called by cases."""
    (tmp_path / "fakes.py").write_text(FAKES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def fake(
    name: str,
    function: str,
    stage: str = "correct",
    limit: float = 60,
    devices: int = 1,
    flags: str = "",
    **arguments: Any,
) -> Case:
    return Case(stage, name, f"fakes.{function}", arguments, limit, devices, flags)


def take_all(run: Run, cases: list[Case]) -> dict[str, dict[str, Any]]:
    try:
        return {case.name: dict(run.take(case)) for case in cases}
    finally:
        run.close()


def test_what_hangs_or_crashes_costs_its_case_alone(fakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags of XLA, and an error of the device, take a new worker too."""
    monkeypatch.setenv("XLA_FLAGS", "--own")
    cases = [
        fake("one", "right", value=1),
        fake("wrong", "wrong"),
        fake("refused", "refused"),
        fake("two", "right", value=2),
        fake("hangs", "hangs", limit=1),
        fake("three", "right", value=3),
        fake("crashes", "crashes"),
        fake("four", "right", value=4),
        fake("breaks", "breaks_the_device"),
        fake("five", "flags"),
        fake("six", "flags", flags="--other"),
        fake("seven", "flags", flags="--other"),
        fake("peers", "right", devices=2, value=5),
    ]
    got = take_all(Run(fakes, cases, minutes=10, rehearse=True), cases)
    assert {name: result["status"] for name, result in got.items()} == {
        **dict.fromkeys(("one", "two", "three", "four", "five", "six", "seven"), "passed"),
        "wrong": "failed",
        "breaks": "failed",
        "refused": "skipped",
        "hangs": "hung",
        "crashes": "crashed",
        "peers": "not run",
    }
    assert got["wrong"]["reason"] == "off by 3"
    assert got["refused"]["reason"] == "no such heads"
    assert got["hangs"]["reason"] == "no answer in 1 s"
    assert got["hangs"]["figures"] == {"before": 1}  # what it said before
    assert got["crashes"]["reason"].startswith("signal 11; ")
    assert "CUDA_ERROR_LAUNCH_FAILED" in got["crashes"]["reason"]
    assert got["peers"]["reason"] == "needs 2 GPUs, found 1"
    assert [got[name]["figures"]["value"] for name in ("one", "two", "three", "four")] == [1, 2, 3, 4]
    assert [got[name]["figures"]["flags"] for name in ("five", "six", "seven")] == ["--own", *["--own --other"] * 2]
    process = {name: result["figures"]["process"] for name, result in got.items() if result["status"] == "passed"}
    assert process["one"] == process["two"]  # one worker for case after case
    assert process["six"] == process["seven"]
    assert len(set(process.values())) == 5
    record = json.loads((fakes / "gpu.json").read_text())
    assert record["finished"]
    assert record["cases"]["correct/hangs"] == got["hangs"]


def test_a_run_that_is_cut_off_counts(fakes: Path) -> None:
    """The file is whole while a case runs, and lists what has not been run."""
    cases = [fake("reads", "reads", file=str(fakes / "gpu.json")), fake("later", "right", value=1)]
    run = Run(fakes, cases, minutes=10, rehearse=True)
    during = run.take(cases[0])["figures"]
    assert during["correct/reads"]["reason"] == "the run was cut off in it"
    assert during["correct/later"]["reason"] == "the run was cut off before it"
    run.close()
    record = json.loads((fakes / "gpu.json").read_text())
    assert not record["finished"]
    assert record["cases"]["correct/reads"]["status"] == "passed"
    page = render(record)
    assert "It was cut off before its end" in page
    assert "- the run was cut off before it: `correct/later`" in page


def test_what_a_stage_leaves_the_next_ones_have(tmp_path: Path) -> None:
    run = Run(tmp_path, CASES, minutes=9.5, rehearse=True)
    ends = [round(run.end_of(stage) - run.began) for stage in STAGES if stage != "rings"]
    assert ends == [30, 210, 360, 510, 570]
    run.record["cases"]["device/versions"]["figures"] = {"devices": 8}
    assert round(run.end_of("rings") - run.began) == 570


def test_a_worker_ends_with_its_run(fakes: Path) -> None:
    """Also in a case that never ends, as of a kernel that hangs."""
    worker = Worker(fakes / "log", rehearse=True)
    assert worker.reply(time.monotonic() + 60) == {"ready": True}
    worker.ask(fake("hangs", "hangs"))
    assert worker.reply(time.monotonic() + 60) == {"figures": {"before": 1}}
    process = worker.process
    threading.Thread(target=process.stdin.close).start()
    assert process.wait(60) == 0


def test_the_list_has_what_a_run_is_to_show() -> None:
    names = [str(case) for case in CASES]
    assert len(set(names)) == len(names)
    assert {case.stage for case in CASES} == set(STAGES)
    order = [list(STAGES).index(case.stage) for case in CASES]
    assert order == sorted(order)
    correct = [case for case in CASES if case.stage == "correct"]
    attended = [case.arguments for case in correct if case.function == "kernel_checks.attend"]
    for lengths in ("prefill-4k", "chunk-64-at-8k", "decode", "ragged-2100"):
        assert {x["head_size"] for x in attended if x["lengths"] == lengths} == {64, 128, 256}
    assert {x["group"] for x in attended} == {1, 4, 7, 8}
    pages = [case.arguments for case in correct if case.function == "kernel_checks.attend_to_pages"]
    assert {x["page_size"] for x in pages if not x["fp8"]} == {16, 64, 256}
    assert {x["head_size"] for x in pages if x["fp8"]} == {64, 128, 256}


def test_results_that_are_wrong_are_noticed() -> None:
    from kernel_checks import compare, draw

    out, lse = draw(0, (40, 2, 64), (40, 2), dtype=jnp.float32)
    lse = lse.at[3].set(-jnp.inf)
    out = out.at[3].set(0)
    exact, rough = (out, lse), (out.astype(jnp.bfloat16), lse)
    assert compare(rough, rough, exact)["error"] <= 0.02
    for wrong, why in (
        ((out.at[5, 0, 7].add(0.05), lse), "off by 5"),
        ((out, lse.at[5].add(0.01)), "result 1 is off by 1"),
        ((out.at[0, 0, 0].set(jnp.nan), lse), "NaN"),
        ((out, lse.at[4].set(-jnp.inf)), "other rows are empty"),
        ((out, lse.at[3].set(0)), "other rows are empty"),
    ):
        with pytest.raises(AssertionError, match=why):
            compare(wrong, rough, exact)


def test_tokens_may_differ_where_logits_are_equal() -> None:
    from engine_checks import _logits, compare_tokens

    from longctx.models import Llama, LlamaConfig

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_layers": 1}
    model = Llama(LlamaConfig(**sizes, num_heads=2, num_kv_heads=1, head_dim=16))
    params = model.init(jax.random.key(0), jnp.bfloat16, 0.2)
    prompt = [3, 1, 4, 1, 5]
    ranked = np.argsort(np.asarray(_logits(model, params, jnp.array(prompt), 4)))
    best, worst = int(ranked[-1]), int(ranked[0])
    assert compare_tokens(model, params, [prompt], [[best]], [[best]]) == {
        "sequences": 1,
        "equal": 1,
        "largest_gap": 0.0,
    }
    with pytest.raises(AssertionError, match="sequence 0 differs at token 0: logits"):
        compare_tokens(model, params, [prompt], [[worst]], [[best]])
    with pytest.raises(AssertionError, match="has 1 tokens instead of 2"):
        compare_tokens(model, params, [prompt], [[best]], [[best, worst]])
    head = params["lm_head"]  # [D, vocab]
    twins = params | {"lm_head": head.at[:, worst].set(head[:, best])}
    assert compare_tokens(model, twins, [prompt], [[worst]], [[best]])["equal"] == 0


PROFILE = """
planes {{
  name: "/host:CPU"
  event_metadata {{ key: 1 value {{ id: 1 name: "cuGraphLaunch" }} }}
  event_metadata {{ key: 2 value {{ id: 2 name: "cuLaunchKernelEx" }} }}
  lines {{ name: "main" {graphs} events {{ metadata_id: 2 }} }}
}}
planes {{
  name: "/device:GPU:0"
  event_metadata {{ key: 1 value {{ id: 1 name: "gemm" }} }}
  event_metadata {{ key: 2 value {{ id: 2 name: "copy" }} }}
  lines {{
    name: "Stream #1"
    events {{ metadata_id: 1 duration_ps: 6000000 }}
    events {{ metadata_id: 1 duration_ps: 2000000 }}
    events {{ metadata_id: 2 duration_ps: 1000000 }}
  }}
}}
"""


def test_a_profile_counts_launches_a_step() -> None:
    from engine_checks import read_profile

    text = PROFILE.format(graphs="events { metadata_id: 1 } " * 8)
    found = read_profile(jax.profiler.ProfileData.from_text_proto(text), 4)
    assert found["a_step"] == {"graph_launches": 2.0, "kernel_launches": 0.25, "memory_copies": 0.0}
    assert found["longest_us_a_step"] == {"gemm": 2.0, "copy": 0.2}


def a_record() -> dict[str, Any]:
    """Of a run that was cut off, with something of everything."""

    def row(contender: str, ms: float | None, reason: str = "") -> dict[str, Any]:
        sizes = {"case": "mha", "contender": contender, "flops": 1e12, "bytes": 1e9}
        return {**sizes, "ms": ms, "error": None if ms is None else 4e-3, "reason": reason}

    def case(name: str, status: str = "passed", reason: str = "", **figures: Any) -> tuple[str, dict[str, Any]]:
        stage = name.partition("/")[0]
        return name, {"stage": stage, "status": status, "reason": reason, "figures": figures, "seconds": 1.0}

    cases = [
        case("device/versions", device="NVIDIA H100", devices=2, jax="0.12", limits={"flops": 1e15, "bytes": 3e12}),
        case("correct/decode", error=1e-3, allowed=4e-3),
        case("correct/merge", "hung", "no answer in 60 s"),
        case("kernels/copy", bytes_per_second=3e12),
        case("kernels/mha", results=[row("attention", 2.0), row("cuDNN", 0.5), row("attention_mgpu", None, "no peer")]),
        case(
            "engine/decode-b1", "not run", "cut off", step_seconds=3e-3, batch=1, tokens_per_second=333.3,
            weight_bytes=4e9, cache_bytes=1e8, a_step={"graph_launches": 9.0, "kernel_launches": 2.0},
            longest_us_a_step={"dynamic_slice": 700.0},
        ),
        case("pages/transfers", bytes=2e9, read_seconds=0.1, write_seconds=0.2),
        case("pages/memory", pages=100, tokens=6400, peak_bytes=7e10, limit_bytes=8e10),
        case("rings/ring-2", ranks=2, seconds={"pass-KV": 0.2, "one device": 0.3}),
        case("rings/ring-4", "not run", "needs 4 GPUs, found 2"),
    ]  # fmt: skip
    run = {"began": "2026-01-01T10:00:00+00:00", "minutes": 9.6, "rehearsal": False, "finished": False}
    return {**run, "cases": dict(cases)}


def test_the_page_says_what_was_found_and_what_was_not_run() -> None:
    page = render(a_record())
    for line in (
        "| device | NVIDIA H100 |",
        "| date | 2026-01-01T10:00:00+00:00 |",
        "| kernels against the dense oracle | 1 | 1 | 0 |",
        "- `correct/merge` hung: no answer in 60 s",
        "- needs 4 GPUs, found 2: `rings/ring-4`",
        "- A decode of one sequence reads its weights at 46% of a copy's bandwidth, below 80%",
        "- A step of decode-b1 launches 9.0 graphs instead of one.",
        "- mha, cuDNN: 200% of what the device can do by its data sheet: that figure is not to be believed.",
        "| `correct/decode` | 1.0e-03 | 4.0e-03 | 1.0 |",
        "| `mha` | attention | 2 | 500 | 0.50 | 50% | 1.00 | 4.0e-03 |",
        "| `mha` | cuDNN | 0.5 | 2000 | 2.00 | 200% | 0.25 | 4.0e-03 |",
        "- attention_mgpu: no peer. `mha`",
        "| decode-b1 | 3.000 | 333 | 1.37 | 46% | 9.0 | 2.0 |",
        "| decode-b1 | `dynamic_slice` | 700 |",
        "- Pages to the host 20.0 GB/s, and back 10.0 GB/s.",
        "- Default pages: 100, for 6,400 tokens; 80.0 GB limit, 70.0 GB peak.",
        "| `rings/ring-2` | pass-KV | 200.00 | 75% |",
    ):
        assert line in page, line


def test_the_page_is_of_a_run_or_says_that_there_was_none(tmp_path: Path) -> None:
    page = (ROOT / "docs/results/gpu.md").read_text()
    assert page == render(None) or "| device | NVIDIA" in page

    def write(record: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        (tmp_path / "gpu.json").write_text(json.dumps(record))
        command = [sys.executable, "-S", str(ROOT / "tests/gpu/gpu_report.py"), *map(str, paths)]
        return subprocess.run(command, capture_output=True, text=True)

    paths = tmp_path / "gpu.json", tmp_path / "page.md"
    assert "must be of a run on a GPU, got a rehearsal" in write(a_record() | {"rehearsal": True}).stderr
    assert not paths[1].exists()
    assert write(a_record()).returncode == 0
    assert paths[1].read_text() == render(a_record())


def rehearse(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """A run by pytest at small sizes; it finds none of what the extra `test` installs."""
    hidden = folder / "hidden"
    hidden.mkdir(parents=True)
    for name in ("hypothesis", "chex", "flax", "optax", "torch", "transformers", "fastapi", "zmq", "matplotlib"):
        (hidden / f"{name}.py").write_text(f"raise ImportError('{name} is not on a bare machine')\n")
    # Plugins of pytest come with what is hidden.
    environment = os.environ | {"PYTHONPATH": str(hidden), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if programs := os.environ.get("LONGCTX_TEST_PROGRAMS"):
        environment |= {"JAX_COMPILATION_CACHE_DIR": programs}
    command = [sys.executable, "-m", "pytest", "tests/gpu", "--rehearse", "--out", str(folder), "-q", *arguments]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return json.loads((folder / "gpu.json").read_text()), run.stdout + run.stderr


def test_a_run_by_pytest(tmp_path: Path) -> None:
    record, said = rehearse(tmp_path, "-k", "versions or merge-0-to-132-h64")
    assert "2 passed" in said, said
    assert record["finished"]
    assert record["rehearsal"]
    assert list(record["cases"]) == ["device/versions", "correct/merge-0-to-132-h64"]
    assert record["cases"]["device/versions"]["figures"]["jax"] == jax.__version__


@pytest.mark.slow
def test_every_case_is_rehearsed(tmp_path: Path) -> None:
    record, said = rehearse(tmp_path, "--minutes", "300", "-k", "not (ring-5 or ring-6 or ring-7)")
    results = record["cases"]
    assert len(results) == len(CASES) - 9
    bad = {name: x for name, x in results.items() if x["status"] != "passed"}
    assert set(bad) == {name for name in results if "backward" in name and name.startswith("correct")}, said
    assert {x["status"] for x in bad.values()} == {"skipped"}
    for name in ("cuDNN", "attention_mgpu"):  # there is no GPU for them
        rows = [row for x in results.values() for row in x["figures"].get("results", ()) if row["contender"] == name]
        assert all(row["ms"] is None and row["reason"] for row in rows)
    page = render(record)
    assert "## Engine" in page
    assert "## Several GPUs" in page
