"""`longctx chat`: a conversation with a model over one session of an engine; messages and commands in, answers out."""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
from jax.sharding import Mesh

from longctx.cli.conversation import Conversation, Document, Prompt
from longctx.cli.engine import LOWER, check_memory, decode_rate, load_engine, plan_mesh, show_compiling, steps
from longctx.cli.files import check_prompt, read_document
from longctx.cli.flags import read
from longctx.cli.line_reader import LineReader, open_reader
from longctx.cli.settings import parallel_plan
from longctx.cli.terminal import FAILED, Console, interrupts, noting_interrupts, report_error
from longctx.models import Llama, load_tokenizer, resolve_model
from longctx.models.checkpoint import read_model
from longctx.serving import Engine, EngineConfig, Output, ParallelPlan, Request, SamplingParams
from longctx.serving.validation import check_text

PAGE_SIZE = 64
_SHORT_TURN = 64  # rows of a step for a message of a sentence or two
HELP = """\
/file PATH  read a text file into the context; the next message may ask about it
/stats      what the conversation and the engine hold
/new        begin a new conversation (/clear likewise)
/help       this list
/exit       leave, as Ctrl-D does
Anything else is a message, also what begins with a space. Ctrl-C stops an answer. On a terminal Enter sends,
Alt+Enter begins a new line, and the up arrow brings earlier messages back."""
_NO_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_MOST_BYTES_A_TOKEN = 64  # of a file, before its tokens are counted
_LOWER = LOWER | {"pages": "lower --max-length", "steps": "lower --chunk-size"}


def run(options: argparse.Namespace) -> int:
    system = None if options.system is None else check_prompt("--system", options.system)
    sampling, plan = read(SamplingParams, options), parallel_plan(options)
    console = Console(options.quiet)
    options.model = resolve_model(options.model, options.quiet)
    tokenizer = load_tokenizer(options.model)
    model, dtype = read_model(options.model, options.dtype)
    conversation = Conversation(tokenizer, frozenset((*tokenizer.eos_ids, *model.config.eos_ids)), system)
    conversation.ask("?")  # so that a template that refuses the system message does so now
    mesh = plan_mesh(plan)
    config = _config(options, console, model, plan, mesh, dtype)
    engine = load_engine(options, options.model, config, mesh, dtype, console, tokenizer=tokenizer)
    show_compiling(engine.compile, console, engine)

    history = None if options.no_history else _history_file()
    loop = ChatLoop(engine, conversation, sampling, console, open_reader(COMMANDS, history))
    interrupts.leave_to_python()
    return loop.run()


def _history_file() -> Path | None:
    """Return the file of the messages of earlier runs; None: there is none, as the user has no home."""
    try:
        return platformdirs.user_state_path("longctx") / "chat_history"
    except RuntimeError:
        return None


def _config(
    options: argparse.Namespace,
    console: Console,
    model: Llama,
    plan: ParallelPlan,
    mesh: Mesh | None,
    dtype: np.dtype[Any],
) -> EngineConfig:
    """Steps of three sizes, for decodes, short messages and files, and pages for one conversation.

    Of two over several context ranks, where every combination is a program.
    """
    context, wanted = model.config.max_positions, options.max_length
    if wanted is not None and wanted > context:
        raise ValueError(f"--max-length must be at most the model's context of {context}, got {wanted}")
    short = [_SHORT_TURN] if plan.context == 1 and options.chunk_size > _SHORT_TURN else []
    config = EngineConfig(
        page_size=PAGE_SIZE,
        num_pages=None if wanted is None else -(-wanted // PAGE_SIZE),
        max_running=1,
        max_length=wanted or context,
        token_budget=options.chunk_size,
        buckets=tuple({1, options.chunk_size, *short}),
        max_logprobs=0,
        kv_dtype=options.kv_dtype,
    )
    num_pages = check_memory(console, model, config, plan, mesh, dtype, _LOWER)
    longest = min(wanted or context, num_pages * PAGE_SIZE * plan.context)
    if wanted is None and longest < context:
        console.note(f"context  {longest:,} tokens of the model's {context:,}: --max-length takes memory for more")
    return dataclasses.replace(config, num_pages=num_pages, max_length=longest)


class ChatLoop:
    """Reads until the end, and prints answers on standard output, everything else on standard error."""

    def __init__(
        self,
        engine: Engine,
        conversation: Conversation,
        sampling: SamplingParams,
        console: Console,
        reader: LineReader,
    ) -> None:
        stop = tuple(dict.fromkeys((*sampling.stop, *conversation.stop)))
        self._engine, self._sampling = engine, dataclasses.replace(sampling, stop=stop)
        self._conversation, self._console, self._reader = conversation, console, reader
        self._number = 0  # of the conversation
        self._status = 0

    def run(self) -> int:
        """The exit status: 1 if an answer failed."""
        if not self._conversation.has_template:
            self._console.note('This model has no chat template: it gets "Q: MESSAGE" and "A: ", each on a line.')
        if self._reader.is_terminal:
            self._console.note("/help lists the commands.")
        while True:
            try:
                line = self._reader.read()
                if line is None or not self._take(line):
                    return self._status
            except KeyboardInterrupt:
                if not self._reader.is_terminal:
                    raise
                _say("(/exit or Ctrl-D leaves)")
            except ValueError as error:
                report_error(str(error), 0)

    def _take(self, line: str) -> bool:
        """Act on a line; False: it was the last."""
        interrupts.begin_anew()
        if not line.strip():
            return True
        if line.startswith("/"):
            name, _, argument = line.partition(" ")
            if name.strip() in ("/exit", "/quit"):
                return False
            if name.strip() not in _COMMANDS:
                raise ValueError(f"no such command: {name.strip()} (/help lists them)")
            _COMMANDS[name.strip()](self, argument.strip())
        else:
            self._answer(check_text("the message", line.strip()))
        return True

    # Messages.

    def _answer(self, question: str) -> None:
        prompt = self._conversation.ask(question)
        room = self._engine.max_length - len(prompt.tokens)
        if room < 1:
            most = f"{len(prompt.tokens):,} tokens, and the context {self._engine.max_length:,}"
            if not self._conversation.turns and not self._conversation.documents:
                raise ValueError(f"this message has {most}: shorten it, or raise --max-length")
            raise ValueError(f"the conversation and this message have {most}: /new begins a new conversation")
        if room < self._sampling.max_tokens:
            self._console.note(f"({room:,} tokens of the context are left: /new begins a new conversation)")
        if prompt.is_rewritten:
            self._console.note("(the chat template changed earlier messages, which are read again from there)")
        output = self._run(prompt, min(room, self._sampling.max_tokens), self._show)
        is_full = output.finish_reason == "length" and room < self._sampling.max_tokens
        print(flush=True)
        if output.finish_reason == "error":
            self._status = report_error(f"failed: {output.error}", FAILED)
        elif output.token_ids:
            self._conversation.accept(prompt, output)
            self._console.note(_figures(output, end="the context is full" if is_full else "cut off at --max-tokens"))
        else:
            self._console.note("(stopped before the answer began: the message is forgotten)")

    def _run(self, prompt: Prompt, max_tokens: int, show: Callable[[str], object]) -> Output:
        """Run a request to its end, or until the end of a step in which Ctrl-C was pressed."""
        sampling = dataclasses.replace(self._sampling, max_tokens=max_tokens)
        request = Request(prompt.tokens, sampling, session_id=f"chat {self._number}")
        is_long = len(prompt.tokens) - len(self._conversation.tokens) > 2 * self._engine.config.token_budget
        console = self._console if is_long else Console(is_quiet=True)
        output: Output | None = None
        with noting_interrupts() as noted:
            request_id = self._engine.submit(request)
            for events in steps(self._engine, request_id, console):
                for event in events:
                    output = event.output
                    show(event.text)
                if noted:
                    break
            self._engine.cancel(request_id)  # if it has not ended
            while self._engine.has_work:
                for event in self._engine.step():
                    output = event.output
                    show(event.text)
        interrupts.begin_anew()
        assert output is not None
        return output

    def _show(self, text: str) -> None:
        """Print a piece of an answer. A terminal would obey control characters, which are not trusted."""
        sys.stdout.write(text.translate(_NO_CONTROLS) if self._reader.is_terminal else text)
        sys.stdout.flush()

    # Commands.

    def _read_file(self, argument: str) -> None:
        if len(argument) > 1 and argument[0] == argument[-1] and argument[0] in "'\"":
            argument = argument[1:-1]
        if not argument.strip():
            raise ValueError("/file needs the path of a file")
        path = _path(argument)
        most = self._engine.max_length
        text = read_document("/file", path, most * _MOST_BYTES_A_TOKEN)
        prompt = self._conversation.attach(Document(path.name, text.rstrip()))
        room = most - min(_MOST_BYTES_A_TOKEN, most // 4)  # for a question and the beginning of an answer
        if len(prompt.tokens) > room:
            raise ValueError(
                f"/file: with {path} the conversation would have {len(prompt.tokens):,} tokens, and the context of "
                f"{most:,} leaves room for {room:,} before a question"
            )
        # The one token that is drawn is of no interest.
        output = self._run(prompt, 1, lambda text: None)
        if output.finish_reason == "error":
            self._status = report_error(f"failed: {output.error}", FAILED)
        elif not output.token_ids:
            self._console.note(f"(stopped: {path.name} is not in the context)")
        else:
            self._conversation.accept(prompt)
            self._console.note(_figures(output, f"{path.name} read: "))

    def _show_stats(self, argument: str) -> None:
        conversation, stats = self._conversation, self._engine.stats()
        files = sum(len(turn.documents) for turn in conversation.turns) + len(conversation.documents)
        _say(
            f"turns         {len(conversation.turns)}\n"
            f"files         {files}\n"
            f"context       {len(conversation.tokens):,} of {self._engine.max_length:,} tokens\n"
            f"all together  {stats.prompt_tokens:,} tokens read, {stats.cached_tokens:,} found in the cache, "
            f"{stats.output_tokens:,} generated\n"
            f"pages         {stats.pages_cached:,} of {self._engine.num_pages:,} cached"
        )

    def _begin_anew(self, argument: str) -> None:
        self._number += 1
        self._conversation.clear()
        self._console.note("(a new conversation)")

    def _show_help(self, argument: str) -> None:
        _say(HELP)


_COMMANDS: dict[str, Callable[[ChatLoop, str], None]] = {
    "/file": ChatLoop._read_file,
    "/stats": ChatLoop._show_stats,
    "/new": ChatLoop._begin_anew,
    "/clear": ChatLoop._begin_anew,
    "/help": ChatLoop._show_help,
}
COMMANDS = (*_COMMANDS, "/exit")
"""Their names, for completion."""


def _path(text: str) -> Path:
    try:
        return Path(check_text("/file", text)).expanduser()
    except RuntimeError as error:  # there is no such user
        raise ValueError(f"/file: {error}") from None


def _figures(output: Output, before: str = "", end: str = "") -> str:
    """Describe what an answer took, in a line; `end` says why one with the finish reason "length" was cut off."""
    metrics = output.metrics
    parts = [
        f"{metrics.cached_tokens:,} of {metrics.prompt_tokens:,} tokens from the cache",
        f"TTFT {metrics.ttft or 0:.2f} s",
    ]
    if not before:
        parts.append(f"{metrics.output_tokens:,} tokens at {decode_rate([output])}")
    if output.finish_reason == "cancelled":
        parts.append("stopped")
    if output.finish_reason == "length" and end:
        parts.append(end)
    return f"[{before}{', '.join(parts)}]"


def _say(text: str) -> None:
    """Print what was asked for, `--quiet` or not."""
    print(text, file=sys.stderr, flush=True)
