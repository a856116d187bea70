"""`longctx demo`: prefill a long document, answer questions about a note meanwhile, then about the document."""

import argparse
import sys
import time
from dataclasses import dataclass

from tqdm import tqdm

from longctx.cli.engine import EngineLoader, decode_rate, show_compiling, steps
from longctx.cli.flags import naming
from longctx.cli.terminal import FAILED, Console, report_error
from longctx.models import Llama, Tokenizer, load_tokenizer, passkey
from longctx.models.builtin import TINY
from longctx.serving import Engine, EngineConfig, Output, Request, SamplingParams
from longctx.serving.runner.device_memory import ADVICE

MAX_ANSWER = 16  # tokens
MAX_RUNNING = 8
PAGE_SIZE = 64
NOTE_QUESTIONS = 4
_ADVICE = ADVICE | {"pages": "lower --tokens", "steps": "lower --chunk-size"}


@dataclass(frozen=True)
class Question:
    """A question about a text, the prompt of both, and the expected answer."""

    text: str
    prompt: str
    about: str  # "document" or "note"
    expected: str


def run(options: argparse.Namespace) -> int:
    """Ask, and print answers and figures."""
    loader, tokenizer = EngineLoader(options, model=TINY), load_tokenizer(TINY)
    with naming({"num_bytes": "--tokens", "num_facts": "--questions"}):
        document = passkey.make_document(options.tokens, options.questions, options.seed)
    # The note has a seed that no document has. Its questions are answered while the document is prefilled.
    note = passkey.make_document(min(1024, max(256, options.tokens // 8)), NOTE_QUESTIONS, options.seed + 2**31)
    questions, notes = _questions(document, "document"), _questions(note, "note")
    config = _config(loader.model, tokenizer, questions, notes, options.chunk_size)
    loader.check_memory(config, _ADVICE)
    print(f"A document of {len(document.text):,} bytes hides {len(questions)} pass keys,", end=" ")
    print(f"a note of {len(note.text):,} bytes {len(notes)}.", flush=True)
    engine = loader.load(config, tokenizer=tokenizer)
    compiling = show_compiling(engine.compile, loader.console, engine)
    conversation = _Conversation(engine, questions, notes, loader.console)
    conversation.run()
    total = len(questions) + len(notes)
    if failures := conversation.failures:
        return report_error(f"failed: {len(failures)} of {total} answers: {', '.join(sorted(set(failures)))}", FAILED)
    loader.console.note(f"\ncompile  {compiling:.1f} s, beforehand\n{conversation.figures()}")
    print(f"right    {conversation.num_right} of {total}")
    return 0 if conversation.num_right == total else FAILED


def _questions(document: passkey.Document, about: str) -> list[Question]:
    asked = {passkey.question(name): key for name, key in document.facts.items()}
    return [Question(text, passkey.prompt(document.text, text), about, key) for text, key in asked.items()]


def _config(
    model: Llama, tokenizer: Tokenizer, questions: list[Question], notes: list[Question], chunk_size: int
) -> EngineConfig:
    """Two step sizes, for prefill and for decodes only, and pages for one copy of both texts."""
    longest, note = (max(len(tokenizer.encode(q.prompt)) for q in asked) + MAX_ANSWER for asked in (questions, notes))
    running = min(MAX_RUNNING, chunk_size)
    max_length = min(
        model.config.max_positions, _round_up(longest, 4096)
    )  # rounded so that texts of similar sizes share compiled steps
    own = max(len(q.text.encode()) + MAX_ANSWER for q in questions) + 2 * PAGE_SIZE
    tokens = max_length + _round_up(note, 2048) + running * _round_up(own, PAGE_SIZE)
    return EngineConfig(
        page_size=PAGE_SIZE,
        num_pages=_round_up(tokens, PAGE_SIZE) // PAGE_SIZE,
        max_running=running,
        max_length=max_length,
        token_budget=chunk_size,
        buckets=tuple({running, chunk_size}),
        max_logprobs=0,
    )


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


class _Conversation:
    """Submits the questions: the first prefills the document, those about the note come meanwhile, all others after."""

    def __init__(self, engine: Engine, questions: list[Question], notes: list[Question], console: Console) -> None:
        self._engine, self._console = engine, console
        self._first, self._later, self._notes = questions[0], questions[1:], notes
        self._asked: dict[str, Question] = {}
        self._outputs: dict[str, list[Output]] = {"first": [], "later": [], "note": []}
        self._width = max(len(question.text) for question in [*questions, *notes])
        self._is_read = False
        self._prompt_tokens, self._seconds = 0, 0.0  # until the document was prefilled, notes included
        self.num_right = 0
        self.failures: list[str] = []

    def run(self) -> None:
        print(f"\n{'time':>8}  {'read':>5}  about     {'question':{self._width}}  answer      TTFT  cached tokens")
        self._start = time.monotonic()
        self._reader = self._ask(self._first)
        waiting = list(self._notes)
        for events in steps(self._engine, self._reader, self._console):
            if not self._is_read and any(event.request_id == self._reader for event in events):
                self._is_read = True
                self._seconds = time.monotonic() - self._start
                self._prompt_tokens = self._engine.stats().prompt_tokens
                for question in self._later:
                    self._ask(question)
            # Submit them at even intervals over the first three quarters of the prefill.
            while waiting and self._share() > 0.75 * (1 - len(waiting) / len(self._notes)):
                self._ask(waiting.pop(0))
            for event in events:
                if event.output is not None:
                    self._show(event.output)

    def figures(self) -> str:
        outputs = self._outputs
        ttft = {
            "to read the document": outputs["first"],
            "once it was read": outputs["later"],
            "about the note meanwhile": outputs["note"],
        }
        lines = (
            f"prefill  {self._prompt_tokens / self._seconds:,.0f} tokens/s",
            f"TTFT     {', '.join(f'{_range(some)} {what}' for what, some in ttft.items() if some)}",
            f"decode   {decode_rate(outputs['later'] or outputs['first'])}",
        )
        return "\n".join(lines)

    def _ask(self, question: Question) -> str:
        request_id = self._engine.submit(Request(question.prompt, SamplingParams(max_tokens=MAX_ANSWER)))
        self._asked[request_id] = question
        return request_id

    def _share(self) -> float:
        """Share of the document that has been prefilled."""
        if self._is_read:
            return 1.0
        done, total = self._engine.requests[self._reader].progress
        return done / total

    def _show(self, output: Output) -> None:
        question, metrics = self._asked[output.request_id], output.metrics
        kind = "note" if question.about == "note" else "first" if output.request_id == self._reader else "later"
        self._outputs[kind].append(output)
        answer = " ".join(output.text.split())
        is_right = answer == question.expected
        self.num_right += is_right
        if output.finish_reason == "error":
            self.failures.append(str(output.error))
        wrong = "" if is_right else f"  wrong: it is {question.expected}"
        tqdm.write(
            f"{time.monotonic() - self._start:6.2f} s  {self._share():5.0%}  {question.about:8}  "
            f"{question.text:{self._width}}  {answer:6}  {metrics.ttft or 0:6.2f} s  {metrics.cached_tokens:,}{wrong}"
        )
        sys.stdout.flush()


def _range(outputs: list[Output]) -> str:
    times = sorted(output.metrics.ttft or 0 for output in outputs)
    return f"{times[0]:.2f} s" if times[-1] - times[0] < 0.01 else f"{times[0]:.2f} to {times[-1]:.2f} s"
