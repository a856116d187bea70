"""Wrong command lines: exit status 2 and a line of error that names the flag, before weights are loaded."""

import json

import pytest
from small_checkpoint import save_small_checkpoint

from longctx.cli import main

TRACE = [
    {"timestamp": 0, "input_length": 1030, "output_length": 40, "hash_ids": [0, 1, 2]},
    {"timestamp": 200, "input_length": 1600, "output_length": 80, "hash_ids": [0, 1, 3, 4]},
    {"timestamp": 100, "input_length": 4096, "output_length": 80, "hash_ids": [0, 5, 6, 7, 8, 9, 10, 11]},
]
# By the beginning of the command line: its end, in words or as a list, and what the error says.
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
    "bench": [
        ("--requests 99999999999", "--requests must be an integer of 1 to 1000000, got 99999999999"),
        ("--prompt-tokens 9999999", "longer than the model's context of 131072 tokens"),
        ("--prompt-tokens 999999999999999999999999999999", "--prompt-tokens must be at most"),
        ("--shared-prefix 999999999999999999999999999999", "--shared-prefix must be an integer of 0 to 2147483647"),
        ("--rate 1e-300", "--rate must be at least 1e-06"),
        ("--workload /", "--workload: / is a directory"),
        ("--workload /proc/none", "--workload: no such file: /proc/none"),
        ("--profile /", "--profile: / is a directory"),
    ],
    "generate --max-tokens 2 --prompt": [
        ("the --temperature 1 --n 100000", "--n must be at most --max-running=64, got 100000"),
        ("the --max-tokens 0", "--max-tokens must be an integer of 1 to"),
        ("the --top-p 2", "--top-p must be finite and 1e-06 to 1"),
        ("the --n 2", "--n=2 contradicts --temperature=0"),
        ("the --seed -1", "--seed must be an integer of 0 to"),
        (["caf\udce9"], "--prompt must be valid Unicode, got 'caf\\udce9'"),
        (["the", "--stop", "\udce9"], "--stop must be valid Unicode, got '\\udce9'"),
    ],
    "demo": [
        ("--tokens 99999999999", "--tokens must be at most 131,0"),
        ("--tokens 10", "--tokens must be at least 2"),
        ("--questions 999", "--questions must be at most 2"),
        ("--seed -1", "--seed must be an integer of at least 0, got -1"),
        ("--tokens 512 --chunk-size 99999999999", "lower --chunk-size"),
        ("--question What?", "--document and --question go together"),
        ("--document nowhere.txt --question What?", "nowhere.txt"),
        (["--document", "{here}", "--question", ""], "--question is empty"),
        (["--document", "{here}", "--question", " \n"], "--question is empty"),
        ("--questions 0", "--questions must be an integer of at least 1, got 0"),
        ("--tokens 1000000", "--tokens must be at most 131,0"),
        ("--chunk-size 0 --tokens 512", "--chunk-size must be an integer of at least 1, got 0"),
    ],
    "profile": [
        ("/", "FILE must be a file, and / is a directory"),
        ("/proc/profile.json", "FILE: /proc/profile.json can't be written"),
    ],
    "generate": [
        (["--prompt", ""], "--prompt is empty"),
        (["--prompt", " \n"], "--prompt is empty"),
        ("--prompt the --chunk-size 0", "--chunk-size must be an integer of at least 1"),
        ("--prompt the --chat", "no chat template"),
        ("--prompt-file nowhere.txt", "nowhere.txt"),
        ("--prompt the --model nowhere", "no such directory: nowhere"),
        ("--prompt the --max-tokens 200000", "are more than the model's context of 131072"),
    ],
    "bench --model {checkpoint}": [
        ("--workload nowhere.jsonl", "nowhere.jsonl"),
        ("--limit 3", "--limit needs --workload"),
        ("--workload {trace} --requests 3", "--requests contradicts --workload"),
        ("--workload {trace}", "3 of 3 requests are longer than the model's context of 128 tokens"),
        ("--workload {trace} --max-length 20", "--max-length 20 leaves no request"),
        ("--workload {trace} --scale-lengths 0", "--scale-lengths must be above 0"),
        ("--max-length 129", "--max-length must be at most the model's context of 128"),
        ("--requests 0", "--requests must be an integer of 1 to 1000000, got 0"),
        ("--prompt-tokens 9:3", "--prompt-tokens must have 1 <= LOW <= HIGH"),
        ("--output-tokens many", "--output-tokens must be N, LOW:HIGH or LOW:HIGH:log, got 'many'"),
        ("--rate -1", "--rate must be at least 1e-06"),
        ("--prompt-tokens 9 --page-size 0", "--page-size must be an integer of at least 1"),
        ("--prompt-tokens 9 --max-running 600", "--token-budget must have a row for each of --max-running"),
        ("--prompt-tokens 9 --output-tokens 9 --page-size 4 --num-pages 2", "--num-pages must"),
        ("--plot figure.pdf", "--plot must end in .png or .svg"),
        ("--json nowhere/results.json", "--json: no such directory"),
        ("--policy random", "--policy must be one of fcfs, edf, srpf, lrs, lrs_relative, ilrs, got 'random'"),
        ("--chunking static:many", '--chunking must be "static", "static:N" or "adaptive"'),
        ("--max-share 2", "--max-share must be finite and 0 to 1"),
        ("--tpot 0", "--tpot must be above 0"),
        ("--profile nowhere.json", "--profile: no such file: nowhere.json"),
        ("--buckets 8;16", "--buckets must be integers with commas between them"),
    ],
    "chat": [
        ("--chunk-size 0", "--chunk-size must be an integer of at least 1, got 0"),
        ("--max-length 1", "--max-length must be an integer of at least 2, got 1"),
        ("--max-length 999999", "--max-length must be at most the model's context of 131072, got 999999"),
        (["--system", " "], "--system is empty"),
        (["--system", "\udce9"], "--system must be valid Unicode"),
        ("--max-tokens 0", "--max-tokens must be an integer of 1 to"),
        ("--top-k 3", "--top-k, --top-p and --min-p contradict --temperature=0"),
        ("--model nowhere", "no such directory: nowhere"),
        ("--stage 5", "--stage must be at most the model's 4 layers, got 5"),
    ],
    "plan --gpus 4 --context 128K --ttft 10 --tpot 0.05": [
        ("--gpus 0", "--gpus must be an integer of 1 to 65536"),
        ("--gpus 1000000000", "--gpus must be an integer of 1 to 65536"),
        ("--context many", "--context must be tokens such as"),
        ("--context 100M", "--context must be at most"),
        ("--ttft 0", "--ttft must be above 0"),
        ("--tpot nan", "--tpot must be above 0"),
        ("--model gpt-5", "--model must be one of"),
        ("--hardware abacus", "--topology must be one of"),
        ("--qps 2", "--qps needs --workload"),
        ("--workload absent.csv", "--workload: no such file"),
        ("--output-tokens 0", "--output-tokens must be"),
    ],
    "simulate": [
        ("--model gpt-5", "--model must be one of llama-3-8b"),
        ("--model llama-3-405b", "plan needs 812.0 GB on each device"),
        ("--topology abacus", "--topology must be one of"),
        ("--policy luck", "--policy must be"),
        ("--plan stage", "--plan must be NAME=VALUE"),
        ("--plan stage=two", "--plan must have an integer for stage"),
        ("--plan tensor=3", "--plan's tensor must divide"),
        ("--qps -1", "--rate must be at least"),
        ("--instances 0", "--instances must be an integer of at least 1"),
        ("--instances 1000000000", "--instances and --plan must have at most 65,536 devices together"),
        ("--plan context=1000000000", "--instances and --plan must have at most 65,536 devices together"),
        ("--mix coffee", "--mix must be one of sharegpt4"),
        ("--mix sharegpt4 --workload x.csv", "--workload contradicts --mix"),
        ("--baseline orca", "--baseline must be one of medha"),
        ("--baseline vllm --instances 2", "--baseline has instances of its own"),
        ("--baseline vllm --trace t.json", "--trace contradicts --baseline"),
        ("--baseline vllm --kv-dtype float8_e4m3fn", "--kv-dtype must be None with a --baseline"),
        ("--users 2 --qps 1", "--users contradicts --rate"),
        ("--window nan", "--window must be above 0"),
        ("--window 0", "--window must be above 0"),
        ("--capacity fast", "--capacity must be ttft_p90=SECONDS"),
        ("--capacity in_time=2", "--capacity must have positive seconds, and a share of at most 1"),
        ("--capacity ttft_p90=1 --qps 2", "--capacity contradicts --rate"),
        ("--sweep speed=1", "--sweep must name model"),
        ("--sweep qps=fast", "--sweep has 'fast' for qps"),
        ("--sweep policy=luck", "--sweep: no point can be simulated; the first: --policy must be"),
        ("--sweep qps=1 --trace t.json", "--trace contradicts --sweep"),
        ("--out {lengths}", "--out must be a folder"),
        ("--out {lengths}/report", "--out: no folder can be made at"),
        ("--workload {lengths}", "num_prefill_tokens"),
        ("--num-pages 1", "requests[0]"),
    ],
}
ROWS = [
    (base.split(), end.split() if isinstance(end, str) else end, message)
    for base, rows in WRONG.items()
    for end, message in rows
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("places")
    trace, lengths = folder / "trace.jsonl", folder / "lengths.csv"
    trace.write_text("".join(json.dumps(row) + "\n" for row in TRACE))
    lengths.write_text("arrived_at,num_decode_tokens\n0,5\n")
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    save_small_checkpoint(checkpoint)
    found = {"trace": trace, "lengths": lengths, "checkpoint": checkpoint, "here": __file__}
    return {name: str(path) for name, path in found.items()}


@pytest.mark.parametrize(("base", "end", "message"), ROWS, ids=[" ".join([*row[0], *row[1]])[:80] for row in ROWS])
def test_what_is_wrong_is_one_line(
    base: list[str],
    end: list[str],
    message: str,
    places: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for module in ("engine", "profile"):
        monkeypatch.setattr(f"longctx.cli.{module}.load_checkpoint", lambda *given: pytest.fail("weights are loaded"))
    assert main([word.format(**places) for word in (*base, *end)]) == 2
    out, err = capsys.readouterr()
    assert out == "" or "--sweep" in end  # whose table says why a point can't be
    assert err.splitlines()[-1].startswith("longctx: ")
    assert message in err.splitlines()[-1]
    assert "num_facts" not in err
    assert "num_bytes" not in err
