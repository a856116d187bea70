"""Models by name, from a small hub on the loopback interface and from the cache of its client."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from loopback_hub import TOKEN, LoopbackHub, Model

from longctx.models import resolve_model
from longctx.models.builtin import TINY

# The client reads its settings when it is imported, so it has a process of its own, which runs several commands.
CHILD = """
import contextlib, io, json, sys
from longctx.models import resolve_model


def resolve(model):
    try:
        print(resolve_model(model))
        return 0
    except (FileNotFoundError, ValueError) as error:
        print(f"longctx: {error}", file=sys.stderr)
        return 2


for command, *arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        if command == "resolve":
            status = resolve(*arguments)
        else:
            from longctx.cli import main

            status = main([command, *arguments])
    print(json.dumps([status, out.getvalue(), err.getvalue()]))
"""
WEIGHTS = (TINY / "model.safetensors").read_bytes()
FILES = {
    "config.json": (TINY / "config.json").read_bytes(),
    "tokenizer_config.json": (TINY / "tokenizer_config.json").read_bytes(),
}
OTHERS = {"README.md": b"#", "pytorch_model.bin": b"x" * 100, "onnx/model.onnx": b"x", "model.Q4_K.gguf": b"x"}
WHOLE = Model({**FILES, **OTHERS, "model.safetensors": WEIGHTS})
INDEX = "model.safetensors.index.json"
SHARDS = ["model-1.safetensors", "model-2.safetensors"]


def sharded() -> Model:
    """The tiny model in two files, whose names its index has, beside a file of the same weights in another format."""
    length = int.from_bytes(WEIGHTS[:8], "little")
    header = json.loads(WEIGHTS[8 : 8 + length])
    data, metadata = WEIGHTS[8 + length :], header.pop("__metadata__", {})
    names = sorted(header, key=lambda name: header[name]["data_offsets"])
    files = {}
    for file, part in zip(SHARDS, (names[:5], names[5:]), strict=True):
        begin, end = header[part[0]]["data_offsets"][0], header[part[-1]]["data_offsets"][1]
        own = {
            name: header[name] | {"data_offsets": [place - begin for place in header[name]["data_offsets"]]}
            for name in part
        }
        text = json.dumps(own | {"__metadata__": metadata}).encode()
        files[file] = len(text).to_bytes(8, "little") + text + data[begin:end]
    places = {name: SHARDS[i >= 5] for i, name in enumerate(names)}
    index = json.dumps({"weight_map": places}).encode()
    return Model({**FILES, **files, INDEX: index, "consolidated.safetensors": b"x"})


class Result(NamedTuple):
    status: int
    out: str
    err: str


def run(home: Path, endpoint: str, commands: Sequence[Sequence[str]], **variables: str) -> list[Result]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "JAX_PLATFORMS": "cpu"}
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables,
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=home,
    )
    assert child.returncode == 0, child.stderr
    return [Result(*json.loads(line)) for line in child.stdout.splitlines()]


def resolve(*models: str) -> list[list[str]]:
    return [["resolve", model] for model in models]


def assert_has(result: Result, *files: str) -> None:
    """The model was resolved to a directory with these files, and no others."""
    assert result.status == 0, result.err
    assert sorted(path.name for path in Path(result.out.strip()).iterdir()) == sorted([*FILES, *files])


def assert_refused(result: Result, words: str) -> None:
    """In one sentence."""
    assert (result.status, result.out) == (2, "")
    lines = [line for line in result.err.splitlines() if line.startswith("longctx: ")]
    assert len(lines) == 1, result.err
    assert words in lines[0]
    assert "Traceback" not in result.err


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    models = {
        "owner/whole": WHOLE,
        "owner/sharded": sharded(),
        "owner/gated": Model(WHOLE.files, is_gated=True),
        "owner/private": Model(WHOLE.files, is_private=True),
        "owner/pickled": Model({**FILES, **OTHERS}),
    }
    with LoopbackHub(models) as hub:
        yield hub


def test_only_needed_files_are_fetched_and_offline_they_are_there(hub: LoopbackHub, tmp_path: Path) -> None:
    names = ("owner/whole", "owner/whole@main", f"owner/whole@{WHOLE.commit}", "owner/sharded")
    missing = ("owner/gated", "owner/whole@v2")
    fetched = run(tmp_path, hub.endpoint, resolve(*names))
    expected = [*FILES, "model.safetensors", *FILES, INDEX, *SHARDS]
    assert sorted(path for path, _ in hub.downloads) == sorted(expected)
    check = ["doctor", "-q", "--model", "owner/sharded"]
    *cached, gated, revision, checked = run(
        tmp_path, hub.endpoint, [*resolve(*names, *missing), check], HF_HUB_OFFLINE="1"
    )
    for *wholes, shards in (fetched, cached):
        for result in wholes:
            assert_has(result, "model.safetensors")
        assert_has(shards, INDEX, *SHARDS)
    assert_refused(gated, "the hub's model owner/gated cannot be downloaded: ")
    assert_refused(revision, "the hub's model owner/whole@v2 cannot be downloaded: ")
    assert (checked.status, checked.out) == (0, "")
    assert len(hub.downloads) == len(expected)


def test_names_in_an_index_are_no_patterns(tmp_path: Path) -> None:
    """Nor paths: a model can't have more downloaded than the files that it names, beside its index."""
    odd = {"model-[1-2].safetensors": b"x", "model-1.safetensors": b"x", "other.safetensors": b"x", "secrets.txt": b"x"}
    maps = {"literal": ["model-[1-2].safetensors"], "pattern": ["*"], "path": ["../config.json"]}
    models = {
        f"owner/{name}": Model({**FILES, **odd, INDEX: json.dumps({"weight_map": {"a": file}}).encode()})
        for name, (file,) in maps.items()
    }
    with LoopbackHub(models) as hub:
        literal, pattern, path = run(tmp_path, hub.endpoint, resolve(*models))
        assert_has(literal, INDEX, "model-[1-2].safetensors")
        assert_has(pattern, INDEX)
        assert_refused(path, "which is not the name of a file beside it")
        fetched = {path for path, _ in hub.downloads}
    assert fetched == {*FILES, INDEX, "model-[1-2].safetensors"}


def test_what_the_hub_refuses_is_said_in_a_sentence(hub: LoopbackHub, tmp_path: Path) -> None:
    expected = {
        "none": "40[14] .* private or gated repo, make sure you are authenticated",
        "private": "40[14] .* private or gated repo, make sure you are authenticated",
        "whole@v2": "404 .* Revision Not Found",
        "gated": "40[13] .* Cannot access gated repo",
        "pickled": "has neither model.safetensors nor model.safetensors.index",
    }
    results = run(tmp_path, hub.endpoint, resolve(*(f"owner/{name}" for name in expected)))
    for (name, words), result in zip(expected.items(), results, strict=True):
        assert_refused(result, f"the hub's model owner/{name} {'has' if name == 'pickled' else 'cannot be downloaded'}")
        assert re.search(words, result.err), result.err
    for result in run(tmp_path, hub.endpoint, resolve("owner/gated", "owner/private"), HF_TOKEN=TOKEN):
        assert_has(result, "model.safetensors")


@pytest.mark.slow
def test_a_broken_connection_is_resumed_where_it_broke(tmp_path: Path) -> None:
    """To the 10 MiB that the client takes at a time."""
    weights = bytes(range(256)) * (21 * 2**12)
    with LoopbackHub({"owner/large": Model({**FILES, "model.safetensors": weights})}) as hub:
        hub.breaks["model.safetensors"] = 15 * 2**20
        (result,) = run(tmp_path, hub.endpoint, resolve("owner/large"))
        assert_has(result, "model.safetensors")
        assert Path(result.out.strip(), "model.safetensors").read_bytes() == weights
        asked = [asked for path, asked in hub.downloads if path == "model.safetensors"]
        assert asked == [None, f"bytes={10 * 2**20}-"]


def test_the_next_command_fetches_what_is_missing(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.fails.add(SHARDS[1])
    failed, whole = run(tmp_path, hub.endpoint, resolve("owner/sharded", "owner/sharded"))
    assert_refused(failed, "the hub's model owner/sharded")
    assert "500" in failed.err
    assert_has(whole, INDEX, *SHARDS)
    fetched = [path for path, _ in hub.downloads]
    assert all(fetched.count(file) == 1 for file in (*FILES, INDEX))


def test_every_command_says_that_there_is_no_network(tmp_path: Path) -> None:
    commands = [
        ["doctor"],
        ["generate", "--prompt", "Hi"],
        ["bench", "--requests", "1"],
        ["profile", str(tmp_path / "profile.json")],
    ]
    port = "http://127.0.0.1:9"
    named = [*([*command, "--model", "owner/name"] for command in commands), ["quantize", "owner/name", "out"]]
    for result in run(tmp_path, port, named):
        assert_refused(result, "the hub's model owner/name cannot be downloaded: ")


def test_what_is_here_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TINY, tmp_path / "owner" / "name")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert resolve_model("owner/name") == Path("owner/name")
    assert resolve_model(tmp_path / "model.gguf") == tmp_path / "model.gguf"


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        ("nowhere", FileNotFoundError, "no such directory: nowhere"),
        ("./a/b", FileNotFoundError, "no such directory: a/b"),
        ("/a/b", FileNotFoundError, "no such directory: /a/b"),
        ("a/b/c", FileNotFoundError, "no such directory: a/b/c"),
        ("../a", FileNotFoundError, "no such directory: ../a"),
        ("a/model.gguf", FileNotFoundError, "no such file: a/model.gguf"),
        ("", ValueError, "no model is named"),
        ("a\0b", FileNotFoundError, "no such directory: a"),
        ("a" * 5000, ValueError, "cannot be read: File name too long"),
        ("file.bin", ValueError, "file.bin is a file, but no .gguf"),
        ("pipe.gguf", FileNotFoundError, "no such file: pipe.gguf"),
        ("a/b@", FileNotFoundError, "no such directory: a/b@"),
    ],
)
def test_what_is_not_here_and_no_name_of_the_hub(
    model: str, error: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.bin").touch()
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(error) as raised:
        resolve_model(model)
    assert words in str(raised.value)


def test_the_package_is_named_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    words = (
        r"no such directory: owner/name; a model of the Hugging Face hub needs huggingface_hub: pip install .*\[hub\]"
    )
    with pytest.raises(ValueError, match=words):
        resolve_model("owner/name")
