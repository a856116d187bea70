"""Writer of `/v1/responses`: one response, or its events."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from longctx.models.tokenizer import TokenBytes
from longctx.serving.request.output import Event, Output
from longctx.serving.server.answer_parts import AnswerFormat, AnswerReader, Part
from longctx.serving.server.errors import ApiError
from longctx.serving.server.request_parser import ParsedCall
from longctx.serving.server.response_writer import Writer, encode, sse

_PREFIXES = {"text": "msg", "reasoning": "rs", "tool_call": "fc"}


class ResponsesWriter(Writer):
    """Writer of OpenAI's responses: items of reasoning, messages and calls of functions.

    Attributes:
      keep: is called with the whole response when it is there.
    """

    done = b""

    def __init__(self, call: ParsedCall, call_id: str, model: str, token_bytes: TokenBytes) -> None:
        self._call, self._call_id = call, call_id
        self._reader = AnswerReader(call.answer or AnswerFormat())
        self._num_prompt = len(call.requests[0].tokens)
        self._items: list[dict[str, Any]] = []
        self._open = False  # whether the last item is still written
        self._number = 0  # of the next event
        self.transfer_params = None
        self.keep: Callable[[dict[str, Any]], object] = lambda response: None
        self._response: dict[str, Any] = {
            "id": f"resp_{call_id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "usage": None,
        } | (call.echo or {})

    def whole(self, outputs: Mapping[tuple[int, int], Output]) -> dict[str, Any]:
        output = outputs[0, 0]
        for _ in self._read([*self._reader.push(output.text), *self._reader.finish()]):
            pass
        return self._finished(output)

    def begin(self) -> Iterator[Any]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=dict(self._response))

    def pieces(self, number: int, events: Sequence[Event]) -> Iterator[Any]:
        for event in events:
            parts = self._reader.push(event.text)
            if event.output is not None:
                parts += self._reader.finish()
            yield from self._read(parts)
            if event.output is not None:
                yield from self._close()
                response = self._finished(event.output)
                yield self._event(f"response.{response['status']}", response=response)

    def end(self) -> Iterator[Any]:
        return iter(())

    def event(self, chunk: Any) -> bytes:
        return sse(encode(chunk), chunk["type"])

    def error(self, error: ApiError) -> bytes:
        said = {"code": error.code or "server_error", "message": error.message}
        failed = self._response | {"status": "failed", "error": said}
        events = self._event("error", **said, param=error.param), self._event("response.failed", response=failed)
        return b"".join(map(self.event, events))

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1} | fields

    def _read(self, parts: Iterable[Part]) -> Iterator[dict[str, Any]]:
        """Add parts to the items; yield their events."""
        for part in parts:
            item = self._items[-1] if self._open else None
            if item is None or part.name is not None or item["id"].partition("_")[0] != _PREFIXES[part.kind]:
                yield from self._close()
                item = self._new_item(part)
                self._items.append(item)
                self._open = True
                yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=_copy(item))
                if part.kind == "text":
                    yield self._of_item("response.content_part.added", content_index=0, part=dict(item["content"][0]))
            if not part.text:
                continue
            if part.kind == "tool_call":
                item["arguments"] += part.text
                yield self._of_item("response.function_call_arguments.delta", delta=part.text)
            else:
                item["content"][0]["text"] += part.text
                kind, more = "reasoning_text", dict[str, Any]()
                if part.kind == "text":
                    kind, more = "output_text", {"logprobs": []}
                yield self._of_item(f"response.{kind}.delta", content_index=0, delta=part.text, **more)

    def _close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """End the item that is written."""
        if not self._open:
            return
        item, self._open = self._items[-1], False
        item["status"] = status
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._of_item("response.function_call_arguments.done", **done)
        elif item["type"] == "reasoning":
            yield self._of_item("response.reasoning_text.done", content_index=0, text=item["content"][0]["text"])
        else:
            text = item["content"][0]["text"]
            yield self._of_item("response.output_text.done", content_index=0, text=text, logprobs=[])
            yield self._of_item("response.content_part.done", content_index=0, part=dict(item["content"][0]))
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=_copy(item))

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event of the last item."""
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _new_item(self, part: Part) -> dict[str, Any]:
        item: dict[str, Any] = {"id": f"{_PREFIXES[part.kind]}_{self._call_id}_{len(self._items)}"}
        if part.kind == "tool_call":
            return item | {
                "type": "function_call",
                "call_id": part.call_id,
                "name": part.name,
                "arguments": "",
                "status": "in_progress",
            }
        if part.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": ""}]
            return item | {"type": "reasoning", "summary": [], "content": content, "status": "in_progress"}
        text: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return item | {"type": "message", "role": "assistant", "status": "in_progress", "content": [text]}

    def _finished(self, output: Output) -> dict[str, Any]:
        is_whole = output.finish_reason == "stop"
        for _ in self._close("completed" if is_whole else "incomplete"):
            pass
        metrics = output.metrics
        response = self._response | {
            "status": "completed" if is_whole else "incomplete",
            "output": self._items,
            "usage": {
                "input_tokens": self._num_prompt,
                "input_tokens_details": {"cached_tokens": min(metrics.cached_tokens, self._num_prompt)},
                "output_tokens": metrics.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self._num_prompt + metrics.output_tokens,
            },
        }
        if not is_whole:
            reason = "max_output_tokens" if output.finish_reason == "length" else output.finish_reason
            response["incomplete_details"] = {"reason": reason}
        self.keep(response)
        return response


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item that does not change any more."""
    return item | {"content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)
