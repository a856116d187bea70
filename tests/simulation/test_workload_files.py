"""Files of workloads: every public form is read, and what is wrong is told with file, line and column."""

import json
from pathlib import Path

import pytest

from longctx.simulation.workloads import read_workload

DATA = Path(__file__).parents[3] / "shared" / "data"


def write(path: Path, *lines: str | dict) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_azure_traces_begin_with_their_first_request(tmp_path: Path) -> None:
    header = "TIMESTAMP,ContextTokens,GeneratedTokens"
    rows = ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,109"]
    first, second = read_workload(write(tmp_path / "azure.csv", header, *rows))
    assert (first.arrival, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.arrival == pytest.approx(4.314579, abs=1e-6)
    zoned = ["2024-05-10 00:00:00.009930+00:00,10,1", "2024-05-10 01:00:00.009930+00:00,10,1"]
    assert [x.arrival for x in read_workload(write(tmp_path / "azure.csv", header, *zoned))] == [0, 3600]


def test_failed_requests_of_burstgpt_are_left_out(tmp_path: Path) -> None:
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    rows = [
        "5,ChatGPT,472,18,490,Conversation log",
        "45,ChatGPT,1087,0,1087,Conversation log",
        "118,GPT-4,417,276,693,API log",
    ]
    requests = read_workload(write(tmp_path / "burst.csv", header, *rows))
    assert [(x.arrival, x.prompt_tokens, x.output_tokens, x.number) for x in requests] == [
        (5, 472, 18, 0),
        (118, 417, 276, 1),
    ]


def test_turns_of_a_conversation_follow_each_other(tmp_path: Path) -> None:
    path = write(
        tmp_path / "sessions.jsonl",
        {"session_id": "a", "timestamp": 500, "input_length": 1200, "output_length": 100, "hash_ids": [7, 8, 9]},
        {"session_id": 2, "input_length": 600, "output_length": 10},
        {"session_id": "a", "delay": 250, "input_length": 40, "output_length": 20},
        {"session_id": 2, "timestamp": 9000, "input_length": 5, "output_length": 1},
    )
    other, first, second, timed = read_workload(path)
    assert (first.session, first.after, first.arrival, first.prompt_tokens) == ("a", None, 0.5, 1200)
    # Its prompt is the first one's 1,200 tokens, 100 of the answer, and 40.
    assert (second.session, second.after, second.delay, second.prompt_tokens) == ("a", first.number, 0.25, 1340)
    # Two full blocks are those of the file; the third is this conversation's, since its prompts don't end with it.
    assert second.blocks[:2] == first.blocks[:2] == (7, 8)
    assert second.blocks[:3] == first.blocks != (7, 8, 9)
    assert not {*other.blocks} & {*second.blocks}
    assert (timed.after, timed.arrival, timed.prompt_tokens) == (None, 9.0, 615)


@pytest.mark.parametrize(
    ("header", "row", "message"),
    [
        ("num_prefill_tokens,num_tokens", "1,2", "columns 'num_decode_tokens' are missing"),
        ("TIMESTAMP,ContextTokens", "1,2", "columns 'GeneratedTokens' are missing"),
        ("num_prefill_tokens,num_decode_tokens", "5", "'num_decode_tokens' is missing"),
        ("num_prefill_tokens,num_decode_tokens", "5,", "num_decode_tokens must be an integer, got ''"),
        ("num_prefill_tokens,num_decode_tokens", "5,nan", "num_decode_tokens must be an integer, got 'nan'"),
        (
            "num_prefill_tokens,num_decode_tokens",
            "5,-3",
            "num_decode_tokens must be an integer of 1 to 2147483647, got -3",
        ),
        ("num_prefill_tokens,num_decode_tokens", f"1{'0' * 99},3", "num_prefill_tokens must be an integer of 1 to"),
        ("num_prefill_tokens,num_decode_tokens", f"1{'0' * 9999},3", "num_prefill_tokens must be an integer, got"),
        ("num_prefill_tokens,num_decode_tokens,arrived_at", "5,3,nan", "arrived_at must be finite"),
        (
            "num_prefill_tokens,num_decode_tokens,arrived_at",
            "5,3,-1",
            "arrived_at must be finite and 0 to 1e+09, got -1",
        ),
        ("num_prefill_tokens,num_decode_tokens,arrived_at", "5,3,soon", "arrived_at must be a number, got 'soon'"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            "yesterday,5,3",
            "TIMESTAMP must be a date or seconds, got 'yesterday'",
        ),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            "inf,5,3",
            "TIMESTAMP, less that of the first request, must be finite",
        ),
        ("Timestamp,Request tokens,Response tokens", "5,-1,3", "Request tokens must be an integer of 0 to"),
    ],
)
def test_errors_name_file_line_and_column(tmp_path: Path, header: str, row: str, message: str) -> None:
    path = write(tmp_path / "mix.csv", header, row)
    with pytest.raises(ValueError, match=r"mix\.csv:[12]: ") as error:
        read_workload(path)
    assert message in str(error.value)
    assert f"mix.csv:{1 if message.startswith('columns') else 2}: " in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"timestamp": float("nan")}, "timestamp must be finite"),
        ({"timestamp": 1e300}, "timestamp must be finite and 0 to 1e+12"),
        ({"input_length": 2.5}, "input_length must be an integer, got 2.5"),
        ({"hash_ids": [1, -2]}, "hash_ids must be an integer of 0 to"),
        ({"hash_ids": 5}, "hash_ids must be a list of integers, got 5"),
        ({"session_id": "a", "input_length": 1 << 27}, "must have at most 67,108,864 tokens, 'a' has 134,217,728"),
        ({"session_id": [1]}, "session_id must be a string or an integer, got [1]"),
        ({"session_id": "a", "delay": -1}, "delay must be finite and 0 to 1e+12, got -1"),
        ({"session_id": "a", "prompt": [1], "max_tokens": 1}, "session_id needs input_length"),
        ({"prompt": ""}, "prompt must not be empty"),
    ],
)
def test_errors_of_json_lines_name_the_field(tmp_path: Path, fields: dict, message: str) -> None:
    good = {"input_length": 5, "output_length": 3}
    path = write(tmp_path / "trace.jsonl", good, "", good | fields)
    with pytest.raises(ValueError, match=r"trace\.jsonl:3: ") as error:
        read_workload(path)
    assert message in str(error.value)


@pytest.mark.skipif(not DATA.is_dir(), reason="there is no ../shared/data")
@pytest.mark.parametrize(
    ("name", "count", "prompt_tokens"),
    [
        ("mooncake/conversation_trace.jsonl", 12_031, 12_035),
        ("mixes/merged_df_5_percent_long_context_mixed.csv", 20_500, 24_271),
        ("mixes/splitwise_conv.csv", 19_366, 1_155),
    ],
)
def test_public_traces_are_read(name: str, count: int, prompt_tokens: int) -> None:
    requests = read_workload(DATA / name)
    assert len(requests) == count
    assert sum(x.prompt_tokens for x in requests) / count == pytest.approx(prompt_tokens, abs=1)
    assert all(-(-x.prompt_tokens // 512) == len(x.blocks) for x in requests if x.blocks)
