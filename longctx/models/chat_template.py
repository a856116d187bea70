"""Renders a tokenizer's chat template as transformers does, in a process of its own, because it is untrusted.

A template is a program. jinja2's sandbox keeps it from files and Python objects, but bounds neither time nor memory:
loops nest, strings double, and a width or a precision of 10**10 keeps one call into C busy. A process can be bounded
from outside, whatever it does. So one process (`chat_worker`) renders the templates of all threads, one after another;
it is started with the first, and again after a template has exceeded a limit.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_SECONDS = 5.0
"""CPU time that rendering may take, compiling the template included; ten times as long may pass."""

MAX_CHARACTERS = 2**20
"""Characters that a template may give, beside `GROWTH` for each byte of the template, messages and variables."""

MAX_MEMORY = 512 * 2**20
"""Bytes of memory for the process that renders, beside `MEMORY_GROWTH` for each byte of its input."""

GROWTH, MEMORY_GROWTH = 8, 64

OUT_OF_MEMORY = 3
"""Exit status of a process whose template needs more memory than it may."""


PLAIN_STOP = ("\nQ:",)  # ends an answer of a model without a template, which would go on with the next question


def has_template(tokenizer: object) -> bool:
    return getattr(tokenizer, "chat_template", None) is not None


@dataclass(frozen=True)
class ChatTemplate:
    """The text of a chat template, in jinja2, and the file that it comes from, which errors name."""

    file: Path
    text: str

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        special_tokens: Mapping[str, str],
        **variables: Any,
    ) -> str:
        """Render the prompt for `messages`, within the limits of this module; any thread may call it.

        Raises:
          ValueError: the template is no jinja2, rejects these messages, or exceeds a limit; or messages or variables
            cannot be written as JSON.
          OSError: no process can be started.
        """
        values = {"tools": None, "documents": None, **special_tokens, **variables}
        try:
            values |= {"messages": [dict(m) for m in messages], "add_generation_prompt": add_generation_prompt}
            job = json.dumps([self.text, values])
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"messages of a chat must be objects of JSON, and variables JSON: {error}") from error
        limits = (MAX_SECONDS, MAX_CHARACTERS + GROWTH * len(job), MAX_MEMORY + MEMORY_GROWTH * len(job))
        text, error_text = _worker.run(f"[{json.dumps(limits)}, {job}]\n".encode())
        if error_text is not None:
            raise ValueError(f"{self.file}: the chat template cannot render these messages: {error_text}")
        return text


class _Worker:
    """The process that renders, started when it is needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, line: bytes) -> tuple[str, str | None]:
        """Send a job; returns the text and None, or "" and what is wrong."""
        with self._lock:
            process = self._process
            if process is None or process.poll() is not None:
                self.close()
                process = self._process = _start()
            assert process.stdin is not None
            assert process.stdout is not None
            answer = b""
            try:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(line)
                    process.stdin.flush()
                    answer = process.stdout.readline()
            except BaseException:  # an interrupt: the answer would be taken for that to the next job
                self.close()
                raise
            if not answer.endswith(b"\n"):
                return "", _reason(self.close())
        text, error = json.loads(answer)
        return text, error

    def close(self) -> int | None:
        """End the process, if there is one, and return its status."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        with contextlib.suppress(BrokenPipeError), process:  # closes its pipes, and waits
            pass
        return process.returncode


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        **module_process("longctx.models.chat_worker"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C in a terminal is for this process alone
    )


def _reason(status: int | None) -> str:
    if status in (-signal.SIGPROF, -signal.SIGALRM):
        return f"it takes more than {MAX_SECONDS:g} seconds"
    if status == OUT_OF_MEMORY:
        return f"it needs more than {MAX_MEMORY} bytes of memory"
    return f"the process that renders it ended with status {status}"


_worker = _Worker()


def _forget_worker() -> None:
    """A forked process must not talk to its parent's worker."""
    global _worker
    _worker = _Worker()


atexit.register(lambda: _worker.close())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_worker)


_PASSED_ON = ("HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "TMPDIR", "TZ", "TZDIR")


def module_process(module: str, *arguments: str) -> dict[str, Any]:
    """Command and environment of a process that runs `module` on what others have written.

    The working directory is searched for modules only if it is in our path. Of our environment it gets what Python
    needs to start, the time zone and the language: no token of a hub, and no secret of a group of processes.
    """
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    return {"args": [sys.executable, "-P", "-m", module, *arguments], "env": environment}
