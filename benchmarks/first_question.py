"""A chat that comes while a long prompt is read: `python -m benchmarks.first_question --model FILE.gguf`.

The first thing that a new user tries: a prompt of 4,328 tokens, and 2 s later a chat with an answer of 8 tokens, once
for each chunking, with defaults otherwise. Beside seconds it counts what doesn't depend on the machine: steps from the
chat's arrival to its last token, and rows of the long prompt in steps that decode it. CPU seconds are of this process,
from the arrival of the long prompt to its first token.
"""

import argparse
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from longctx.models import Llama, load_checkpoint
from longctx.models.params import Params
from longctx.serving import Engine, EngineConfig, Request, SamplingParams
from longctx.serving.engine.metrics import StepMetrics

PROMPT, QUESTION, ANSWER, LATER = 4328, 40, 8, 2.0


class Answered(NamedTuple):
    """One run of the pair.

    Attributes:
      tokens: of the answer.
      first, last: seconds from the chat's arrival to its first and last token.
      steps: that ended from its arrival to its last token.
      beside: rows of the long prompt in each step that decoded the chat.
      long, cpu: seconds and CPU seconds from the long prompt's arrival to its first token.
    """

    chunking: str
    tokens: list[int]
    first: float
    last: float
    steps: int
    beside: list[int]
    long: float
    cpu: float


def run_pair(model: Llama, params: Params, chunking: str, prompt: int = PROMPT, later: float = LATER) -> Answered:
    """Serve both, after all programs have run once."""
    steps: list[StepMetrics] = []
    config = EngineConfig(chunking=chunking, num_pages=-(-2 * prompt // 64))
    engine = Engine(model, params, config, monitor=steps.append)
    engine.warm_up()
    rng = np.random.default_rng(0)
    vocab = model.config.vocab_size
    # Each program once, as the first run of one takes longer: chunks of prompts that nobody waits for.
    for rows in config.row_buckets:
        engine.generate([rng.integers(vocab, size=rows).tolist()], SamplingParams(max_tokens=1))
    tokens = rng.integers(vocab, size=prompt).tolist()
    begun, cpu = time.monotonic(), time.process_time()
    long = engine.submit(Request(tokens, sampling=SamplingParams(max_tokens=1)))
    chat, before, outputs, used = "", 0, {}, 0.0
    while engine.has_work:
        if not chat and time.monotonic() - begun >= later:
            sampling = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
            chat = engine.submit(Request(rng.integers(vocab, size=QUESTION).tolist(), sampling=sampling))
            before = len(steps)
        for event in engine.step():
            if event.output is not None:
                outputs[event.request_id] = event.output
                used = time.process_time() - cpu if event.request_id == long else used
    if chat not in outputs:
        raise ValueError(f"prompt must take more than {later:g} s, its {prompt:,} tokens took less")
    last = max(number for number, step in enumerate(steps) if any(row[0] == chat for row in step.rows))
    beside = [
        sum(rows for name, rows, _ in step.rows if name == long)
        for step in steps
        if any(name == chat and decodes for name, _, decodes in step.rows)
    ]
    answer, ttft = outputs[chat], outputs[long].metrics.ttft
    first, finished = answer.metrics.ttft, answer.metrics.finished
    assert first is not None
    assert finished is not None
    assert ttft is not None
    return Answered(
        chunking,
        answer.token_ids,
        first,
        finished - answer.metrics.arrival,
        last + 1 - before,
        beside,
        ttft,
        used,
    )


def compare(runs: Sequence[Answered]) -> str:
    """A table of runs."""
    lines = [
        "| chunking | first token | whole answer | steps for it | rows beside it | long prompt | CPU |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        rows = f"{min(run.beside, default=0)} to {max(run.beside, default=0)}"
        times = [f"{seconds:.1f} s" for seconds in (run.first, run.last, run.long, run.cpu)]
        lines.append(f"| {run.chunking} | {times[0]} | {times[1]} | {run.steps} | {rows} | {times[2]} | {times[3]} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint, such as SmolLM2-135M as a .gguf file")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of the long prompt")
    parser.add_argument("--rounds", type=int, default=1, help="times that each chunking takes its turn")
    options = parser.parse_args()
    model, params = load_checkpoint(options.model)
    turns = ["static", "adaptive"] * options.rounds
    runs = [run_pair(model, params, chunking, options.prompt) for chunking in turns]
    print(compare(runs))


if __name__ == "__main__":
    main()
