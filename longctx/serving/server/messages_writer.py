"""Writer of `/v1/messages`: one message, or its events."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from longctx.models.tokenizer import TokenBytes
from longctx.serving.request.output import Event, Output
from longctx.serving.server.answer_parts import Kind, Part, joined_parts
from longctx.serving.server.calls import ParsedCall
from longctx.serving.server.errors import ApiError, anthropic_error
from longctx.serving.server.response_writer import ResponseWriter

_REASONS = {"stop": "end_turn", "length": "max_tokens", "cancelled": "end_turn"}


class MessagesWriter(ResponseWriter):
    """Writer of Anthropic's messages: blocks of thinking, text and uses of tools."""

    prefix = "msg_"

    def __init__(self, call: ParsedCall, call_id: str, model: str, token_bytes: TokenBytes) -> None:
        super().__init__(call, call_id, model, token_bytes)
        self._reader = call.new_reader()
        self._open: Kind | None = None  # of the block that is written
        self._num_blocks = 0  # of blocks
        stop = call.body.stop
        self._stops = [stop] if isinstance(stop, str) else list(stop or ())

    def whole(self, outputs: Mapping[tuple[int, int], Output]) -> dict[str, Any]:
        output = outputs[0, 0]
        text, stopped = self._without_stop(output.text, output)
        parts = joined_parts([*self._reader.push(text), *self._reader.finish()])
        content = [_block(part) for part in parts if part.text or part.kind == "tool_call"]
        reason = self._reason(output, stopped)
        return self._message(content) | reason | {"usage": self._usage(output)}

    def begin(self) -> Iterator[Any]:
        usage = {"input_tokens": self._num_prompt, "output_tokens": 0}
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
        yield {"type": "message_start", "message": message}

    def pieces(self, number: int, events: Sequence[Event]) -> Iterator[Any]:
        for event in events:
            output = event.output
            text, stopped = (event.text, None) if output is None else self._without_stop(event.text, output)
            parts = self._reader.push(text)
            if output is None:
                yield from self._written(parts)
                continue
            yield from self._written([*parts, *self._reader.finish()])
            yield from self._close()
            delta = self._reason(output, stopped)
            yield {"type": "message_delta", "delta": delta, "usage": self._usage(output)}
            yield {"type": "message_stop"}

    def end(self) -> Iterator[Any]:
        return iter(())

    def failed(self, error: ApiError) -> Iterator[dict[str, Any]]:
        yield anthropic_error(error)

    def _written(self, parts: Iterable[Part]) -> Iterator[dict[str, Any]]:
        for part in parts:
            if part.kind != self._open or part.name is not None:
                yield from self._close()
                self._open = part.kind
                yield {
                    "type": "content_block_start",
                    "index": self._num_blocks,
                    "content_block": _block(part, is_begun=True),
                }
            if part.text:
                kind, field = _DELTAS[part.kind]
                yield {
                    "type": "content_block_delta",
                    "index": self._num_blocks,
                    "delta": {"type": kind, field: part.text},
                }

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._num_blocks}
            self._open, self._num_blocks = None, self._num_blocks + 1

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self._model, "content": content}

    def _reason(self, output: Output, stopped: str | None) -> dict[str, Any]:
        reason = _REASONS.get(output.finish_reason, "end_turn")
        if stopped is not None:
            reason = "stop_sequence"
        elif self._reader.calls_tools and output.finish_reason == "stop":
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": stopped}

    def _without_stop(self, text: str, output: Output) -> tuple[str, str | None]:
        """Return the last text without the stop string that ends it, and that."""
        if output.finish_reason == "stop":
            found = max((stop for stop in self._stops if text.endswith(stop)), key=len, default=None)
            if found is not None:
                return text.removesuffix(found), found
        return text, None

    def _usage(self, output: Output) -> dict[str, Any]:
        cached = min(output.metrics.cached_tokens, self._num_prompt)
        marked = max((tokens for tokens, _ in self._call.requests[0].request.retain), default=0)
        created = max(0, marked - cached)
        return {
            "input_tokens": self._num_prompt - cached - created,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": created,
            "output_tokens": output.metrics.output_tokens,
        }


_DELTAS: Mapping[Kind, tuple[str, str]] = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "tool_call": ("input_json_delta", "partial_json"),
}


def _block(part: Part, is_begun: bool = False) -> dict[str, Any]:
    """Return a part as a block; one that is only begun has nothing in it."""
    text = "" if is_begun else part.text
    if part.kind == "text":
        return {"type": "text", "text": text}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    identity = (part.call_id or "").replace("call_", "toolu_")
    try:
        given = json.loads(text) if text else {}
    except ValueError:  # cut off by max_tokens
        given = {}
    return {"type": "tool_use", "id": identity, "name": part.name, "input": given}
