"""`longctx simulate --cluster`: what it prints and writes, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli_simulate import HAS_MATPLOTLIB

from longctx.cli import main

FILE = """
[cluster]
policy = "kvcache_centric"
admission = "early_rejection"
ttft = 5.0
tpot = 0.1
[[instances]]
role = "prefill"
count = 2
[[instances]]
role = "decode"
name = "answers"
[simulation]
model = "llama-3-8b"
topology = "medha-a100"
tensor = 2
page_size = 256
host_bytes = 100_000_000_000
[[simulation.changes]]
at = 3
instance = "prefill-0"
action = "kill"
"""
SMALL = ["--requests", "40", "--prompt-tokens", "1000:20000", "--output-tokens", "5:50", "--rate", "8"]


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(FILE)
    return path


def test_a_cluster_is_simulated_without_jax(cluster: Path, tmp_path: Path) -> None:
    arguments = ["simulate", "--quiet", "--cluster", str(cluster), *SMALL, "--json", str(tmp_path / "all.json")]
    if HAS_MATPLOTLIB:
        arguments += ["--plot", str(tmp_path / "all.svg")]
    program = f"import sys; from longctx.cli import main; print(main({arguments}), 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"
    for name in ("TTFT", "TBT", "goodput", "rejected", "load", "moved pages", "reassigned"):
        assert name in done.stdout
    contents = json.loads((tmp_path / "all.json").read_text())
    summary = contents["summary"]
    assert summary["requests"] + summary["rejected"]["requests"] == 40
    assert summary["goodput"]["requests"] <= summary["requests"] == len(contents["requests"])
    assert {each["assignment"]["decode"] for each in contents["requests"]} == {"answers"}
    late = {each["assignment"]["prefill"] for each in contents["requests"] if each["due"] > 3}
    assert late == {"prefill-1"}
    assert len(contents["loads"]) >= 10
    assert contents["cluster"]["plan"]["tensor"] == 2
    assert contents["model"] == "llama-3-8b"
    if HAS_MATPLOTLIB:
        assert "Load of the pools" in (tmp_path / "all.svg").read_text()


def test_the_folder_of_a_cluster(cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "report"
    assert main(["simulate", "--quiet", "--cluster", str(cluster), *SMALL, "--out", str(folder)]) == 0
    *printed, last = capsys.readouterr().out.splitlines()
    assert last == f"written to {folder / 'report.html'}"
    page = (folder / "report.html").read_text()
    assert all(line in page for line in printed)  # the same summary
    assert ("Load of the pools" in page) == HAS_MATPLOTLIB
    for name in ("drawing.svg", "drawing.png"):
        assert (folder / name).is_file() == HAS_MATPLOTLIB
    summary = json.loads((folder / "summary.json").read_text())["summary"]
    assert len((folder / "request_metrics.csv").read_text().splitlines()) == 1 + summary["requests"]


def test_flags_say_what_the_file_leaves_open(cluster: Path, tmp_path: Path) -> None:
    cluster.write_text(FILE.replace("tensor = 2\n", "").replace('model = "llama-3-8b"\n', ""))
    out = tmp_path / "all.json"
    more = ["--tensor", "4", "--model", "llama-2-70b", "--window", "2"]
    assert main(["simulate", "--quiet", "--cluster", str(cluster), *SMALL, *more, "--json", str(out)]) == 0
    contents = json.loads(out.read_text())
    assert contents["cluster"]["plan"]["tensor"] == 4
    assert contents["model"] == "llama-2-70b"
    assert contents["summary"]["open"] == len(contents["open"]) > 0


@pytest.mark.parametrize(
    ("old", "new", "flags", "message"),
    [
        ("", "", ["--instances", "2"], "--instances contradicts --cluster"),
        ("", "", ["--token-budget", "64"], "--token-budget contradicts --cluster"),
        ("", "", ["--sweep", "qps=1,2"], "--sweep contradicts --cluster"),
        ('role = "decode"', 'role = "decoder"', [], "role must be one of"),
        ('"llama-3-8b"', '"llama-9"', [], "must be one of llama-3-8b"),
        ("host_bytes", "host_byte", [], "unknown key 'host_byte'"),
        ('instance = "prefill-0"', 'instance = "prefill-7"', [], "changes must name instances"),
        ('action = "kill"', 'action = "explode"', [], "action must be one of"),
        ('action = "kill"', "", [], "changes must have action"),
        ("tensor = 2", "tensor = 3", [], "tensor"),
        ("page_size = 256", "page_size = 0", [], "page_size"),
        ("page_size = 256", "page_size = 1.5", [], "[simulation] page_size must be"),
        ("page_size = 256", 'bandwidth = "much"', [], "[simulation] bandwidth must be"),
        ("page_size = 256", "prefix_cache = 1", [], "[simulation] prefix_cache must be"),
        ('"llama-3-8b"', "3", [], "[simulation] model must be a string"),
        ('action = "kill"', 'action = "kill"\nwhen = 1', [], "changes: unknown key 'when'"),
        ("page_size = 256", 'kv_dtype = "int4"', [], "[simulation] kv_dtype must be None"),
        ("page_size = 256", "kv_dtype = 8", [], "[simulation] kv_dtype must be None"),
        ("", "", ["--kv-dtype", "float8_e4m3fn"], "--kv-dtype contradicts --cluster"),
    ],
)
def test_what_is_wrong_is_one_line(
    cluster: Path, old: str, new: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.write_text(FILE.replace(old, new) if old else FILE)
    assert main(["simulate", "--quiet", "--cluster", str(cluster), *SMALL, *flags]) != 0
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
