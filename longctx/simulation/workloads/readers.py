"""Reads workloads from files: lengths, and the traces that are public."""

import csv
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TextIO

from longctx.serving.validation import check_integer
from longctx.simulation.workloads.csv_traces import read_csv
from longctx.simulation.workloads.json_traces import read_json_lines
from longctx.simulation.workloads.request import WorkloadRequest
from longctx.simulation.workloads.rows import BadRowError


def read_workload(path: Path, limit: int | None = None) -> list[WorkloadRequest]:
    """Read the first `limit` requests of a file, and sort them by arrival.

    A `.csv` file is known by its columns; others are ignored:

    - `num_prefill_tokens`, `num_decode_tokens`, and optionally `arrived_at` (seconds);
    - Azure's traces of LLM inference: `TIMESTAMP` (a date, or seconds), `ContextTokens`, `GeneratedTokens`; time begins
      with the first request;
    - BurstGPT: `Timestamp` (seconds), `Request tokens`, `Response tokens`; requests without a response had failed, and
      are left out.

    Any other file has a JSON object on each line, with `input_length`, `output_length` and optionally `hash_ids`
    (Mooncake: one for each 512 tokens, and for a last part), or with `prompt` (text or token ids) and `max_tokens`;
    both optionally with `timestamp` (milliseconds). A request without a time arrives at 0.

    Lines with `session_id` are turns of a conversation (AIPerf), in their order. Their `input_length` counts new
    tokens: the prompt is all prompts and answers before, and these. A turn comes `delay` milliseconds after the end of
    the one before, or at its `timestamp` if it has one and no `delay`. A first turn's `delay` means nothing.

    Args:
      path: `.csv`, or JSON lines with any other suffix.
      limit: the most requests to read; None: all.

    Returns:
      The requests, numbered in the file's order from 0.

    Raises:
      OSError: the file can't be read.
      ValueError: a row has another form, and the message names file, line and column; or the file has no requests.

    Source:
      Mooncake's open traces (1.2, and their repository), Azure's LLM inference traces, BurstGPT, AIPerf.

    Examples:
      >>> import pathlib, tempfile
      >>> from longctx.simulation.workloads import read_workload
      >>> line = '{"timestamp": 3000, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}'
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "trace.jsonl")
      ...     _ = path.write_text(line)
      ...     [request] = read_workload(path)
      >>> request.arrival, request.prompt_tokens, request.blocks
      (3.0, 6955, (46, 47, 48))
    """
    if limit is not None:
        check_integer("limit", limit, 1)
    requests: list[WorkloadRequest] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = _Lines(file)
        rows = read_csv(lines) if path.suffix.lower() == ".csv" else read_json_lines(lines)
        try:
            requests.extend(islice(rows, limit))
        except BadRowError as error:
            raise ValueError(f"{path}:{error.line}: {error}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}:{lines.number + 1}: it is not UTF-8: {error.reason}") from None
        except csv.Error as error:
            raise ValueError(f"{path}:{lines.number}: {error}") from None
    if not requests:
        raise ValueError(f"{path}: it has no requests")
    return sorted(requests, key=lambda request: request.arrival)


class _Lines:
    """The lines of a file, counted."""

    def __init__(self, file: TextIO) -> None:
        self._file, self.number = file, 0

    def __iter__(self) -> Iterator[str]:
        for line in self._file:
            self.number += 1
            yield line
