"""Extras: whoever needs a package that is not there names the extra in one line; what needs none works without any."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from longctx import extras

# Hides packages from a fresh process, as if they were not installed; then runs what stands below it.
HIDING = """
import contextlib, io, sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        is_hidden = any(f"{name}.".startswith(f"{module}.") for module in HIDDEN)
        return None if is_hidden else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)

def command(*arguments):
    from longctx.cli import main
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code
    return status, err.getvalue(), out.getvalue()
"""
# Modules that are for one extra, and import its packages when they are loaded.
ROOMS_OF_EXTRAS = (
    "longctx.cli.serve_cluster",
    "longctx.cluster.engine_messenger",
    "longctx.cluster.engine_transfers",
    "longctx.cluster.http_stream",
    "longctx.cluster.join",
    "longctx.cluster.prefill",
    "longctx.cluster.prefix_index.reader",
    "longctx.cluster.router",
    "longctx.cluster.transfer",
    "longctx.nnx",
    "longctx.serving.distributed",
    "longctx.serving.server",
)


def run(hidden: list[str], program: str) -> str:
    program = f"HIDDEN = {hidden}\n{HIDING}\n{program}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def own_modules(*names: str) -> list[str]:
    return [module for name in names for module in extras.EXTRAS[name].packages]


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef" * 4)
    path.chmod(0o600)
    return str(path)


def test_commands_name_the_extra_that_they_lack(tmp_path: Path, secret: str) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "cluster.toml").write_text('[[instances]]\nrole = "both"\n')
    workload = ["--requests", "1", "--prompt-tokens", "8", "--output-tokens", "1", "--plot", "drawing.svg"]
    cases: dict[str, list[list[str]]] = {
        "serve": [["serve"], ["serve", "--cluster", str(tmp_path / "cluster.toml")]],
        "cluster": [["serve", "--cluster", str(tmp_path / "cluster.toml"), "--launcher", "ray", "--port", "0"]],
        "otlp": [["serve", "--otlp", "http://127.0.0.1:4318/v1/traces"]],
        "mooncake": [["serve", "--role", "both", "--kv-messenger", "mooncake-tcp", "--kv-secret-file", secret]],
        "gguf": [["generate", "--model", str(tmp_path / "model.gguf"), "--prompt", "x"]],
        "hub": [["generate", "--model", "owner/name", "--prompt", "x"], ["doctor", "--model", "owner/name"]],
        "plot": [["bench", *workload], ["simulate", "--model", "llama-3-8b", *workload]],
    }
    wrong = []
    others = [name for name in cases if name not in ("serve", "gguf")]
    for names in (["serve"], ["gguf"], others):  # the others' commands get as far as theirs; serve includes gguf
        commands = [(name, arguments) for name in names for arguments in cases[name]]
        program = f"import json; print(json.dumps([command(*arguments) for _, arguments in {commands}]))"
        outcomes = json.loads(run(own_modules(*names), program))
        for (name, arguments), (status, err, _) in zip(commands, outcomes, strict=True):
            is_one_line = err.count("\n") == 1 and err.startswith("longctx: ")
            if status != 2 or not is_one_line or not err.endswith(f": {extras.pip_line(name)}\n"):
                wrong.append((name, arguments, status, err))
    assert wrong == []


CALLS = [
    ("distributed", "from longctx.serving.distributed import initialize; initialize('127.0.0.1:1234', 2, 0)"),
    ("transfer", "from longctx.cluster.transfer import PageSender"),
    ("mooncake", "from longctx.cluster.transfer.mooncake import make_engine; make_engine('127.0.0.1')"),
    ("mooncake", "from longctx.cluster.transfer.mooncake import open_store; open_store('mooncake://127.0.0.1:1')"),
    ("cluster", "from longctx.cluster.launcher.ray_launcher import RayLauncher; RayLauncher([], None)"),
    ("otlp", "from longctx.serving.server.tracing import otlp_exporter; otlp_exporter('http://127.0.0.1:1')"),
    ("plot", "from longctx import plotting; plotting.style().__enter__()"),
    ("plot", "from longctx import plotting; plotting.drawing()"),
    ("train", "import longctx.nnx; longctx.nnx.attention_fn"),
]


def test_calls_name_the_extra_that_they_lack() -> None:
    program = f"""
for extra, call in {CALLS}:
    try:
        exec(call)
        print("nothing is missing")
    except ImportError as error:
        print(isinstance(error, ValueError), error)
"""
    hidden = {*own_modules(*(extra for extra, _ in CALLS))} - {"xxhash"}
    for (extra, _), line in zip(CALLS, run(sorted(hidden), program).splitlines(), strict=True):
        assert line.startswith("True ")
        assert line.endswith(f": {extras.pip_line(extra)}")


def test_without_any_extra_all_other_modules_load_and_commands_plan_and_simulate(tmp_path: Path) -> None:
    hidden = {module for extra in extras.EXTRAS for module in extras.packages(extra)} - {"xxhash"} | {"starlette"}
    program = f"""
import importlib, pkgutil
import longctx
for module in pkgutil.walk_packages(longctx.__path__, "longctx.", onerror=lambda name: None):
    if not module.name.startswith({ROOMS_OF_EXTRAS}) and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(command("--help")[0])
print(command("plan", *"--gpus 8 --context 100K --ttft 60 --tpot 1 --no-check".split())[0])
print(command("simulate", *"--requests 2 --prompt-tokens 64 --output-tokens 2".split())[0])
print(command("doctor", "--quiet")[0])
print(command("simulate", *"--requests 2 --prompt-tokens 64 --output-tokens 2 --out".split(), {str(tmp_path)!r})[2])
"""
    lines = run(sorted(hidden), program).splitlines()
    assert lines[:4] == ["0", "0", "0", "0"]
    assert f"written to {tmp_path / 'report.html'}, without drawings: {extras.pip_line('plot')}" in lines


def test_an_error_within_a_needed_module_of_ours_is_shown_as_it_is() -> None:
    with pytest.raises(ModuleNotFoundError) as raised, extras.needed("serve", "longctx serve"):
        raise ModuleNotFoundError("No module named 'longctx.nothing'", name="longctx.nothing")
    assert not isinstance(raised.value, extras.MissingExtra)


def test_a_dependency_of_a_package_of_an_extra_counts_as_the_extra() -> None:
    with (
        pytest.raises(extras.MissingExtra, match=r"longctx serve needs anyio: pip install 'longctx-jax\[serve\]'"),
        extras.needed("serve", "longctx serve"),
    ):
        raise ModuleNotFoundError("No module named 'anyio'", name="anyio")


def test_packages_of_an_extra_are_also_those_of_the_extras_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"ray": "ray", "zmq": "pyzmq", "fastapi": "fastapi"}.items() <= extras.packages("cluster").items()
    monkeypatch.setitem(sys.modules, "zmq", None)
    assert extras.missing("distributed") == ["pyzmq"]
    assert not extras.is_installed("mooncake")
    with pytest.raises(extras.MissingExtra, match="--coordinator needs pyzmq"):
        extras.check("distributed", "--coordinator")
