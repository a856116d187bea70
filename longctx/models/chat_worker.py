"""The process that renders chat templates for `longctx.models.chat_template`, in jinja2's sandbox.

It reads jobs from its standard input, a line of JSON each: `[[seconds, characters, bytes], [template, values]]`, and
answers each with a line `[text, null]` or `["", error]`. The system ends it when a job takes more than its seconds,
which no Python code could do while a call into C is busy; it ends itself when memory is short.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import signal
import sys
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from longctx.models.chat_template import OUT_OF_MEMORY

_ERROR_LENGTH = 500


def main() -> None:
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    for line in sys.stdin.buffer:
        (seconds, characters, memory), (template, values) = json.loads(line)
        _limit(seconds, memory)
        try:
            answer = json.dumps([_render(template, values, characters), None])
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except Exception as error:
            answer = json.dumps(["", _message(error)])
        _limit(0.0, None)
        sys.stdout.buffer.write(answer.encode() + b"\n")
        sys.stdout.buffer.flush()


def _limit(seconds: float, memory: int | None) -> None:
    """Limit the CPU time from now on, and the time to ten times that (0: no limit), and the address space."""
    signal.setitimer(signal.ITIMER_PROF, seconds)  # signals that end the process
    signal.setitimer(signal.ITIMER_REAL, 10 * seconds)
    if sys.platform == "linux":  # other systems do not limit address space
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_AS)
        low = most if memory is None else memory if most == resource.RLIM_INFINITY else min(memory, most)
        resource.setrlimit(resource.RLIMIT_AS, (low, most))


def _render(template: str, values: dict[str, Any], characters: int) -> str:
    text = _compile(template).render(values)
    if len(text) > characters:
        raise ValueError(f"it gives {len(text)} characters, the most is {characters}")
    return text


def _message(error: Exception) -> str:
    text = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
    return text[:_ERROR_LENGTH]


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    """A template of the environment that transformers gives chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return environment.from_string(template)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here its contents are kept as they are."""

    tags = {"generation"}  # noqa: RUF012 (how jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """A `tojson` that, unlike jinja2's own, does not escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    main()
