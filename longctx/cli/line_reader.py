"""Readers of the messages of a chat: a line editor on a terminal, else the lines of standard input."""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, TextIO, runtime_checkable

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output

MAX_LINE = 2**24  # characters


@runtime_checkable
class LineReader(Protocol):
    """`read` returns the next message, None at the end. `is_terminal` says whether a person waits for it."""

    is_terminal: bool

    def read(self) -> str | None: ...


class PipeReader:
    """Each line is a message."""

    is_terminal = False

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def read(self) -> str | None:
        """The next line, without its end.

        Raises:
          ValueError: it is too long; there is no way to go on.
        """
        if self._stream is None:  # standard input is closed
            return None
        line = self._stream.readline(MAX_LINE + 1)
        text = line.removesuffix("\n")
        if len(text) > MAX_LINE:
            raise ValueError(f"standard input has a line of more than {MAX_LINE:,} characters")
        return text if line else None


class TerminalReader:
    """A line editor with history: Enter sends, Alt+Enter begins a new line, Tab completes commands and paths.

    Args:
      commands: names of commands; of `/file`, paths are completed.
      history: file of earlier messages; None: of this run's only.
      keys, screen: for tests; by default the terminal.
    """

    is_terminal = True

    def __init__(
        self,
        commands: Sequence[str],
        history: Path | None,
        keys: Input | None = None,
        screen: Output | None = None,
    ) -> None:
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_key_bindings(),
            completer=_Completer(commands),
            complete_while_typing=False,
            history=_open_history(history),
            input=keys,
            output=screen,
        )

    def read(self) -> str | None:
        """Return what was entered.

        Raises:
          KeyboardInterrupt: Ctrl-C.
        """
        try:
            return self._session.prompt()
        except EOFError:
            return None


class _Completer(Completer):
    """Completes commands, and the path after `/file`."""

    def __init__(self, commands: Sequence[str]) -> None:
        self._commands, self._paths = commands, PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        text = document.text_before_cursor
        if text.startswith("/file "):
            yield from self._paths.get_completions(Document(text.removeprefix("/file ")), complete_event)
        elif text.startswith("/"):
            yield from (Completion(name, -len(text)) for name in self._commands if name.startswith(text))


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def _open_history(path: Path | None) -> History:
    """The file's history, which only its owner can read, or one in memory where it can't be written."""
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


def open_reader(commands: Sequence[str], history: Path | None) -> LineReader:
    """The reader of this process's standard input."""
    stdin, stdout = sys.stdin, sys.stdout
    if stdin is not None and stdin.isatty() and stdout.isatty():
        return TerminalReader(commands, history)
    if hasattr(stdin, "reconfigure"):
        stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # so that a wrong byte is one message's error
    return PipeReader(stdin)
