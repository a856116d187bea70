"""Wrong command lines: exit status 2 and a line of error that names the flag, before weights are loaded."""

import json
import os
import socket
from collections.abc import Iterator

import jax
import pytest
from small_checkpoint import save_small_checkpoint

from longctx.cli import main

TRACE = [
    {"timestamp": 0, "input_length": 1030, "output_length": 40, "hash_ids": [0, 1, 2]},
    {"timestamp": 200, "input_length": 1600, "output_length": 80, "hash_ids": [0, 1, 3, 4]},
    {"timestamp": 100, "input_length": 4096, "output_length": 80, "hash_ids": [0, 5, 6, 7, 8, 9, 10, 11]},
]
JOIN = "--join h:1 --role both --kv-secret-file {secret}"
# By the beginning of the command line: its end, in words or as a list, and what the error says. Each kind of flag and
# each check of a command has a row; ranges are those of dataclasses, which tests/test_cli_arguments.py has.
WRONG: dict[str, list[tuple[str | list[str], str]]] = {
    "bench --requests 1 --prompt-tokens 9 --output-tokens 2": [
        ("--num-pages 999999999999", "lower --num-pages or --page-size; about"),
        ("--max-running 99999999 --token-budget 99999999", "lower --max-running or --token-budget"),
        ("--stage 0", "--stage must be an integer of at least 1, got 0"),
        ("--stage 5", "--stage must be at most the model's 4 layers, got 5"),
        ("--context 99", "--stage * --context * --tensor must be at most the number of devices, 8, got"),
        ("--context 99999999", "--stage * --context * --tensor must be at most 1024 for a process"),
        ("--json /", "--json must be a file, and / is a directory"),
        ("--json /proc/none/results.json", "--json: no such directory: /proc/none"),
        ("--json /proc/results.json", "--json: /proc/results.json can't be written"),
        ("--plot /", "--plot must be a file, and / is a directory"),
    ],
    "": [("trian", "invalid choice: 'trian'"), ("", "the following arguments are required: COMMAND")],
    "bench": [
        ("--request 3 --speed", "unrecognized arguments: --speed"),
        ("--seed x", "--seed: invalid int value: 'x'"),
        ("--requests 99999999999", "--requests must be an integer of 1 to 1000000, got 99999999999"),
        ("--prompt-tokens 9999999", "longer than the model's context of 131072 tokens"),
        ("--prompt-tokens 999999999999999999999999999999", "--prompt-tokens must be at most"),
        ("--rate 1e-300", "--rate must be at least 1e-06"),
        ("--workload {folder}", "places0: it has no sessions of agents (.json)"),
        ("--workload /proc/none", "--workload: no such file: /proc/none"),
        ("--workload {latin}", "latin:1: it is not UTF-8: "),
        ("--workload {surrogate}", "surrogate:1: prompt must be valid Unicode"),
        ("--workload {late}", "late:1: timestamp must be finite and 0 to"),
        ("--workload {unknown}", "--workload: prompt of request 1 must be of tokens 0 to 257"),
        ("--profile /", "--profile: / is a directory"),
    ],
    "bench --model {checkpoint}": [
        ("--limit 3", "--limit needs --workload"),
        ("--workload {trace} --requests 3", "--requests contradicts --workload"),
        ("--workload {trace}", "3 of 3 requests are longer than the model's context of 128 tokens"),
        ("--workload {trace} --max-length 20", "--max-length 20 leaves no request"),
        ("--workload {trace} --scale-lengths 0", "--scale-lengths must be above 0"),
        ("--workload {trace} --scale-lengths 1e308", "--scale-lengths: factor must be finite and 0 to 1e+06"),
        ("--max-length 129", "--max-length must be at most the model's context of 128"),
        ("--prompt-tokens 9:3", "--prompt-tokens must have 1 <= LOW <= HIGH"),
        ("--output-tokens many", "--output-tokens must be N, LOW:HIGH or LOW:HIGH:log, got 'many'"),
        ("--prompt-tokens 9 --max-running 600", "--token-budget must have a row for each of --max-running"),
        ("--prompt-tokens 9 --output-tokens 9 --page-size 4 --num-pages 2", "--num-pages must"),
        ("--plot figure.pdf", "--plot must end in .png or .svg"),
        ("--policy random", "--policy must be one of fcfs, edf, srpf, lrs, lrs_relative, ilrs, got 'random'"),
        ("--chunking static:many", '--chunking must be "static", "static:N" or "adaptive"'),
        ("--max-share 2", "--max-share must be finite and 0 to 1"),
        ("--tpot 0", "--tpot must be above 0"),
        ("--buckets 8;16", "--buckets: must be integers with commas between them"),
    ],
    "generate --max-tokens 2": [
        ("--prompt the --temperature 1 --n 100000", "--n must be at most --max-running=64, got 100000"),
        ("--prompt the --top-p 2", "--top-p must be finite and 1e-06 to 1"),
        ("--prompt the --n 2", "--n=2 contradicts --temperature=0"),
        (["--prompt", "caf\udce9"], "--prompt must be valid Unicode, got 'caf\\udce9'"),
        (["--prompt", "the", "--stop", "\udce9"], "--stop must be valid Unicode, got '\\udce9'"),
        (["--prompt", " \n"], "--prompt is empty"),
        ("--prompt-file nowhere.txt", "--prompt-file: no such file: nowhere.txt"),
        ("--prompt-file {latin}", "latin is not UTF-8: byte 15"),
        ("--prompt-file {empty}", "empty is empty"),
        ("--prompt the --prompt-file x", "--prompt or --prompt-file must be given, and not both"),
        ("--prompt the --chat", "no chat template"),
        ("--prompt the --model nowhere", "no such directory: nowhere"),
        ("--prompt the --max-tokens 200000", "are more than the model's context of 131072"),
        ("--prompt the --group-secret-file {short}", "--group-secret-file needs --coordinator"),
    ],
    "generate --prompt x --num-processes 2 --process-id 1 --coordinator": [
        ("127.0.0.1:9 --group-secret-file nowhere", "--group-secret-file: no such file"),
        ("127.0.0.1:9 --group-secret-file {latin}", "latin is not UTF-8"),
        ("127.0.0.1:9 --group-secret-file {short}", "at least 32 characters, got 5: make one with"),
        ("192.0.2.1:9", "make one with `longctx group-secret > FILE`"),
        ("127.0.0.1:9 --ports 80", "--ports must be LOW:HIGH, got '80'"),
    ],
    "demo": [
        ("--tokens 10", "--tokens must be at least 2"),
        ("--tokens 1", "--tokens must be an integer of 2 to 131000, got 1"),
        ("--tokens 1000000", "--tokens must be an integer of 2 to 131000"),
        ("--tokens 512 --chunk-size 99999999999", "lower --chunk-size"),
        ("--questions 999", "--questions must be an integer of 1 to 200"),
    ],
    "profile": [
        ("/", "FILE must be a file, and / is a directory"),
        ("/proc/profile.json", "FILE: /proc/profile.json can't be written"),
    ],
    "chat": [
        ("--max-length 1", "--max-length must be an integer of at least 2, got 1"),
        ("--max-length 999999", "--max-length must be at most the model's context of 131072, got 999999"),
        (["--system", " "], "--system is empty"),
        (["--system", "\udce9"], "--system must be valid Unicode"),
        ("--top-k 3", "--top-k, --top-p and --min-p contradict --temperature=0"),
        ("--stage 5", "--stage must be at most the model's 4 layers, got 5"),
    ],
    "plan --gpus 4 --context 128K --ttft 10 --tpot 0.05": [
        ("--gpus 1000000000", "--gpus must be an integer of 1 to 65536"),
        ("--context many", "--context must be tokens such as"),
        ("--context 100M", "--context must be at most"),
        ("--tpot nan", "--tpot must be above 0"),
        ("--hardware abacus", "--hardware must be one of"),
        ("--qps 2", "--qps needs --workload"),
        ("--output-tokens 0", "--output-tokens must be"),
    ],
    "simulate": [
        ("--model gpt-5", "--model must be one of llama-3-8b"),
        ("--model llama-3-405b", "plan needs 812.0 GB on each device"),
        ("--topology abacus", "--topology must be one of"),
        ("--tensor 3", "--tensor must divide"),
        ("--instances 1000000000", "--instances must have at most 65,536 devices together"),
        ("--mix coffee", "--mix must be one of sharegpt4"),
        ("--mix sharegpt4 --workload {trace}", "--workload contradicts --mix"),
        ("--baseline orca", "--baseline must be one of medha"),
        ("--baseline vllm --instances 2", "--baseline has instances of its own"),
        ("--baseline vllm --trace t.json", "--trace contradicts --baseline"),
        ("--baseline vllm --kv-dtype float8_e4m3fn", "--kv-dtype must be None with a baseline"),
        ("--users 2 --qps 1", "--rate contradicts --users"),
        ("--window nan", "--window must be above 0"),
        ("--capacity fast", "--capacity must be ttft_p90=SECONDS"),
        ("--capacity in_time=2", "--capacity must have positive seconds, and a share of at most 1"),
        ("--capacity ttft_p90=1 --qps 2", "--rate contradicts --capacity"),
        ("--sweep speed=1", "--sweep must name model"),
        ("--sweep qps=fast", "--sweep has 'fast' for qps"),
        ("--sweep policy=luck", "--sweep: no point can be simulated; the first: --policy must be"),
        ("--sweep qps=1 --trace t.json", "--trace contradicts --sweep"),
        ("--out {trace}", "--out must be a folder"),
        ("--out {trace}/report", "--out: no folder can be made or written to at"),
        ("--workload {lengths}", "num_prefill_tokens"),
        ("--num-pages 1", "requests[0]"),
        ("--cluster nowhere.toml", "nowhere.toml"),
    ],
    "serve --port 0": [
        ("--min-tpot 0", "--min-tpot must be"),
        ("--max-waiting 0", "--max-waiting must be"),
        ("--api-key short", "--api-key: the key of api-1 must be 8 to 512"),
        ("--api-key a-long-key --admin-key a-long-key", "different keys"),
        ("--api-key-file no-such-file", "--api-key-file: no such file"),
        ("--tenant-weight bob=2", "--tenant-weight is of 'bob', and no --api-key has that name"),
        ("--tenant-weight bob", "--tenant-weight: must be NAME=X, got 'bob'"),
        ("--chat-template no-such-file", "--chat-template: no such file"),
        ("--profile-dir no-such-folder", "--profile-dir"),
        (["--metrics-prefix", "a b"], "--metrics-prefix must be"),
        (
            "--host 0.0.0.0",
            "lets other hosts in, and without keys every client may use the server: give",
        ),
        ("--host no.such.host.invalid --allow-anonymous", "--host no.such.host.invalid can't be resolved"),
        ("--tls-cert {secret}", "--tls-cert and --tls-key must be given together"),
        ("--tls-ca {secret}", "--tls-ca needs --tls-cert and --tls-key"),
        ("--tls-cert {secret} --tls-key {secret}", "--tls-cert: "),
        ("--max-connections 0", "--max-connections must be"),
        ("--port {taken} --model no/such-model", "can't be listened at: Address already in use; --port 0 takes"),
        ("--model no-such-model", "no-such-model"),
        ("--token-budget 4", "--token-budget"),
        ("--launcher ray", "--launcher needs --cluster"),
        ("--instance-key-file x", "--instance-key-file needs --cluster"),
        ("--join-name x", "--join-name needs --join"),
        ("--join h:1", "--join needs --role"),
        ("--join h:1 --role decode --join-role prefill", "--join-role prefill contradicts --role decode"),
        (f"{JOIN} --join h", "--join must be HOST:PORT, got 'h'"),
        (f"{JOIN} --join-url h:1", "--join-url must be http://"),
        (f"{JOIN} --join-url http://h:1 --tls-cert {{secret}}", "--join-url must be https://"),
        (f"{JOIN} --host 0.0.0.0", "needs --join-url"),
        (f"{JOIN} --join-key-file no-such", "--join-key-file: no such file"),
        ("--kv-peer a", "--kv-peer needs --role"),
        ("--role both", "--role needs --kv-secret-file"),
        ("--role both --kv-secret-file {secret} --kv-peer a:0", "--kv-peer must be HOST or HOST:PORT, got 'a:0'"),
        ("--role both --kv-secret-file {secret} --no-prefix-cache", "--role contradicts --no-prefix-cache"),
        ("--role both --kv-secret-file {secret} --record {folder}", "--role contradicts --record"),
        ("--role both --kv-secret-file {secret} --kv-host 0.0.0.0", "--kv-host 0.0.0.0 needs --kv-advertise"),
        ("--role both --kv-secret-file nowhere", "--kv-secret-file"),
        ("--kv-secret-file {short}", "--kv-secret-file: "),
        ("--kv-secret-file {open}", "--kv-secret-file: others than its owner have access to"),
        ("--kv-disk {folder}/kv", "--kv-disk needs --kv-host-bytes"),
        ("--kv-host-bytes 1 --kv-disk {folder}/kv", "--kv-disk and --kv-disk-bytes must be given together"),
        ("--kv-host-bytes 0", "--kv-host-bytes must be at least"),
        ("--kv-host-bytes 1GiB --kv-store mooncake://localhost:1", "--kv-store needs --kv-secret-file"),
        *((["--kv-host-bytes", size], "--kv-host-bytes: must be a number of bytes") for size in ("8G", "1e9", "nan")),
    ],
}
ROWS = [
    (base.split(), end.split() if isinstance(end, str) else end, message)
    for base, rows in WRONG.items()
    for end, message in rows
]
FILES = {
    "trace": "".join(json.dumps(row) + "\n" for row in TRACE).encode(),
    "lengths": b"arrived_at,num_decode_tokens\n0,5\n",
    "latin": b'{"prompt": "caf\xe9", "max_tokens": 1}\n',
    "surrogate": b'{"prompt": "\\ud800", "max_tokens": 1}\n',
    "late": b'{"prompt": [1], "max_tokens": 1, "timestamp": 1e300}\n',
    "unknown": b'{"prompt": [1, 258], "max_tokens": 1}\n',
    "empty": b" \n",
    "short": b"short\n",
    "secret": b"s" * 40,
    "open": b"s" * 40,
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("places")
    for name, contents in FILES.items():
        suffix = ".csv" if name == "lengths" else ""
        (folder / f"{name}{suffix}").write_bytes(contents)
        os.chmod(folder / f"{name}{suffix}", 0o644 if name == "open" else 0o600)
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    save_small_checkpoint(checkpoint)
    found = {name: folder / name for name in FILES} | {"lengths": folder / "lengths.csv"}
    return {name: str(path) for name, path in (found | {"checkpoint": checkpoint, "folder": folder}).items()}


@pytest.fixture
def taken() -> Iterator[str]:
    """A port that another program listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


@pytest.mark.parametrize(("base", "end", "message"), ROWS, ids=[" ".join([*row[0], *row[1]])[:80] for row in ROWS])
def test_an_error_is_one_line(
    base: list[str],
    end: list[str],
    message: str,
    places: dict[str, str],
    taken: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("LONGCTX_GROUP_SECRET", raising=False)
    monkeypatch.setattr("longctx.cli.engine.load_checkpoint", lambda *given: pytest.fail("weights are loaded"))
    assert main([word.format(**places, taken=taken) for word in (*base, *end)]) == 2
    out, err = capsys.readouterr()
    assert out == "" or "--sweep" in end  # whose table says why a point can't be
    assert err.splitlines()[-1].startswith("longctx: ")
    assert message in err.splitlines()[-1]
    assert "num_facts" not in err
    assert "num_bytes" not in err


@pytest.mark.parametrize("error", [MemoryError("5 GiB"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: full\nmore")])
def test_memory_that_runs_out_is_exit_status_1(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("longctx.cli.engine.load_checkpoint", fail)
    assert main(["generate", "--prompt", "the"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("longctx: failed: ")
    assert str(error).splitlines()[0] in last
