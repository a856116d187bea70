"""`longctx chat`: a conversation with a model over one session of an engine; messages and commands in, answers out."""

import argparse
import contextlib
import dataclasses
import glob
import io
import os
import readline
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from longctx.cli.conversation import NO_TEMPLATE, Conversation, Document, Prompt
from longctx.cli.engine import EngineLoader, decode_rate, show_compiling, steps
from longctx.cli.files import check_prompt, read_text
from longctx.cli.flags import read
from longctx.cli.terminal import FAILED, Console, interrupts, report_error
from longctx.models import load_tokenizer
from longctx.serving import Engine, EngineConfig, Output, Request, SamplingParams
from longctx.serving.runner.device_memory import ADVICE
from longctx.serving.validation import check_text

PAGE_SIZE = 64
_SHORT_TURN = 64  # rows of a step for a message of a sentence or two
HELP = """\
/file PATH  put a text file before the next message, which may ask about it
/new        begin a new conversation
/help       this list
/exit       leave, as Ctrl-D does
Anything else is a message, also what begins with a space. Ctrl-C stops an answer."""
COMMANDS = ("/exit", "/file", "/help", "/new")
_NO_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_MOST_BYTES_A_TOKEN = 64  # of a file, before its tokens are counted
_MOST_HISTORY = 1000  # messages
_ADVICE = ADVICE | {"pages": "lower --max-length", "steps": "lower --chunk-size"}


def run(options: argparse.Namespace) -> int:
    """Talk until the end of input."""
    system = None if options.system is None else check_prompt("--system", options.system)
    sampling = read(SamplingParams, options)
    loader = EngineLoader(options)
    tokenizer = load_tokenizer(loader.path)
    conversation = Conversation(tokenizer, frozenset((*tokenizer.eos_ids, *loader.model.config.eos_ids)), system)
    conversation.ask("?")  # so that a template that refuses the system message does so now
    config = _config(options, loader)
    engine = loader.load(config, tokenizer=tokenizer)
    show_compiling(engine.compile, loader.console, engine)

    history = None
    if not options.no_history:
        with contextlib.suppress(RuntimeError):  # the user has no home
            history = platformdirs.user_state_path("longctx") / "chat_history"
    loop = ChatLoop(engine, conversation, sampling, loader.console, LineReader(history))
    interrupts.leave_to_python()
    return loop.run()


def _config(options: argparse.Namespace, loader: EngineLoader) -> EngineConfig:
    """Steps of three sizes, for decodes, short messages and files, and pages for one conversation.

    Of two over several context ranks, where every combination is a program.
    """
    context, wanted = loader.model.config.max_positions, options.max_length
    if wanted is not None and wanted > context:
        raise ValueError(f"--max-length must be at most the model's context of {context}, got {wanted}")
    short = [_SHORT_TURN] if loader.plan.context == 1 and options.chunk_size > _SHORT_TURN else []
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
    num_pages = loader.check_memory(config, _ADVICE)
    longest = min(wanted or context, num_pages * PAGE_SIZE * loader.plan.context)
    if wanted is None and longest < context:
        loader.console.note(
            f"context  {longest:,} tokens of the model's {context:,}: --max-length takes memory for more"
        )
    return dataclasses.replace(config, num_pages=num_pages, max_length=longest)


class LineReader:
    """Messages from standard input: by a line editor on a terminal, else each line is one.

    Attributes:
      is_terminal: whether a person waits.
    """

    def __init__(self, history: Path | None = None) -> None:
        # What Python prints goes to another descriptor than libraries', and an editor's prompt to that of libraries.
        self.is_terminal = all(each is not None and each.isatty() for each in (sys.stdin, sys.stdout, sys.stderr))
        self._history = history
        if self.is_terminal:
            readline.set_completer_delims("")
            readline.set_completer(complete)
            readline.parse_and_bind("tab: complete")
            readline.set_history_length(_MOST_HISTORY)
            if history is not None:
                with contextlib.suppress(OSError):
                    readline.read_history_file(history)
        elif isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # a wrong byte is one message's error

    def read(self) -> str | None:
        """Return the next message; None at the end. KeyboardInterrupt: Ctrl-C."""
        if not self.is_terminal:
            line = "" if sys.stdin is None else sys.stdin.readline()
            return line.removesuffix("\n") if line else None
        try:
            with contextlib.redirect_stdout(sys.__stdout__):  # else `input` does without the editor
                line = input("> ")
        except EOFError:
            return None
        if self._history is not None:
            with contextlib.suppress(OSError):
                self._history.parent.mkdir(parents=True, exist_ok=True)
                readline.write_history_file(self._history)  # which its owner alone can read
        return line


def complete(line: str, number: int) -> str | None:
    """Return the n-th completion of a line: a command, or the path after `/file`."""
    if line.startswith("/file "):
        path = os.path.expanduser(line.removeprefix("/file "))
        found = [f"/file {each}" for each in sorted(glob.glob(f"{glob.escape(path)}*"))]
    else:
        found = [name for name in COMMANDS if line and name.startswith(line)]
    return found[number] if number < len(found) else None


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
        """Talk until the end; the exit status, which is 1 if an answer failed."""
        if not self._conversation.has_template:
            self._console.note(NO_TEMPLATE)
        if self._reader.is_terminal:
            self._console.note("/help lists the commands.")
        while True:
            try:
                line = self._reader.read()
                if line is None or line.split(maxsplit=1)[:1] == ["/exit"]:
                    return self._status
                interrupts.begin_anew()
                if line.strip():
                    self._take(line)
            except KeyboardInterrupt:
                if not self._reader.is_terminal:
                    raise
                interrupts.begin_anew()
                _say("(/exit or Ctrl-D leaves)")
            except ValueError as error:
                report_error(str(error), 0)

    def _take(self, line: str) -> None:
        """Act on a message or a command."""
        name, _, argument = line.strip().partition(" ")
        if not line.startswith("/"):
            self._answer(check_text("the message", line.strip()))
        elif name == "/file":
            self._read_file(argument.strip())
        elif name == "/new":
            self._number += 1
            self._conversation.clear()
            self._console.note("(a new conversation)")
        elif name == "/help":
            _say(HELP)
        else:
            raise ValueError(f"no such command: {name} (/help lists them)")

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
        output = self._run(prompt, min(room, self._sampling.max_tokens))
        print(flush=True)
        if output.finish_reason == "error":
            self._status = report_error(f"failed: {output.error}", FAILED)
        elif output.token_ids:
            self._conversation.accept(prompt, output)
            is_full = room < self._sampling.max_tokens
            self._console.note(_figures(output, end="the context is full" if is_full else "cut off at --max-tokens"))
        else:
            self._console.note("(stopped before the answer began: the message is forgotten)")

    def _run(self, prompt: Prompt, max_tokens: int) -> Output:
        """Run a request to its end, or until the end of a step in which Ctrl-C was pressed."""
        sampling = dataclasses.replace(self._sampling, max_tokens=max_tokens)
        request = Request(prompt.tokens, sampling, session_id=f"chat {self._number}")
        is_long = len(prompt.tokens) - len(self._conversation.tokens) > 2 * self._engine.config.token_budget
        console = self._console if is_long else Console(is_quiet=True)
        output: Output | None = None
        with _noting_interrupts() as noted:
            request_id = self._engine.submit(request)
            for events in steps(self._engine, request_id, console):
                for event in events:
                    output = event.output
                    self._show(event.text)
                if noted:
                    self._engine.cancel(request_id)  # which `steps` sees to its end
        interrupts.begin_anew()
        assert output is not None
        return output

    def _show(self, text: str) -> None:
        """Print a piece of an answer. A terminal would obey control characters, which are not trusted."""
        sys.stdout.write(text.translate(_NO_CONTROLS) if self._reader.is_terminal else text)
        sys.stdout.flush()

    def _read_file(self, argument: str) -> None:
        if len(argument) > 1 and argument[0] == argument[-1] and argument[0] in "'\"":
            argument = argument[1:-1]
        if not argument.strip():
            raise ValueError("/file needs the path of a file")
        try:
            path = Path(check_text("/file", argument)).expanduser()
        except RuntimeError as error:  # there is no such user
            raise ValueError(f"/file: {error}") from None
        most = self._engine.max_length
        text = read_text("/file", path, most * _MOST_BYTES_A_TOKEN)
        self._conversation.attach(Document(path.name, text.rstrip()))
        count = len(self._conversation.ask("").tokens)
        room = most - min(_MOST_BYTES_A_TOKEN, most // 4)  # for a question and the beginning of an answer
        if count > room:
            self._conversation.documents.pop()
            raise ValueError(
                f"/file: with {path} the conversation would have {count:,} tokens, and the context of {most:,} leaves "
                f"room for {room:,} before a question"
            )
        self._console.note(f"({path.name} comes before the next message)")


def _figures(output: Output, end: str) -> str:
    """Describe what an answer took, in a line; `end` says why one with the finish reason "length" was cut off."""
    metrics = output.metrics
    parts = [
        f"{metrics.cached_tokens:,} of {metrics.prompt_tokens:,} tokens from the cache",
        f"TTFT {metrics.ttft or 0:.2f} s",
        f"{metrics.output_tokens:,} tokens at {decode_rate([output])}",
    ]
    if output.finish_reason in ("cancelled", "length"):
        parts.append("stopped" if output.finish_reason == "cancelled" else end)
    return f"[{', '.join(parts)}]"


def _say(text: str) -> None:
    """Print what was asked for, `--quiet` or not."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _noting_interrupts() -> Iterator[list[int]]:
    """Within it, Ctrl-C raises nothing, but appends to a list; for the main thread."""
    noted: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # as in the background of a shell script
        signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
