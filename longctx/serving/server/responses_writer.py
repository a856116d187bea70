"""Writer of `/v1/responses`: the items of a response and the events of its stream, from the parts of one completion."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from longctx.models.tokenizer import TokenBytes
from longctx.serving.request.output import Event, Output
from longctx.serving.server.answer_parts import Part
from longctx.serving.server.calls import ParsedCall
from longctx.serving.server.errors import ApiError
from longctx.serving.server.response_writer import ResponseWriter, chat_logprobs
from longctx.serving.server.responses_body import ResponsesBody, describe, response_id

_Event = dict[str, Any]
_STATUSES = {"stop": "completed", "length": "incomplete", "cancelled": "cancelled", "moved": "cancelled"}


class OutputItems:
    """Items of an output, in order, each open until another one begins.

    Log probabilities are those of all tokens, and stand in the message that follows them.

    Attributes:
      items: as clients see them. That of the open item is not complete.
    """

    def __init__(self, response_id: str) -> None:
        self._id = response_id.partition("_")[2]
        self.items: list[dict[str, Any]] = []
        self._kind: str | None = None
        self._number = 0
        self._texts: list[str] = []
        self._space = ""  # between other items and a message, which it alone does not begin
        self._logprobs: list[Any] = []  # of the open message
        self._pending: list[Any] = []

    @property
    def num_reasoning_bytes(self) -> int:
        """Bytes of all texts of reasoning."""
        found = [item for item in self.items if item["type"] == "reasoning"]
        return sum(len(part["text"].encode()) for item in found for part in item["content"])

    def add_logprobs(self, logprobs: Sequence[Any]) -> None:
        """Add the log probabilities of tokens whose parts come next."""
        self._pending += logprobs

    def add(self, part: Part) -> Iterator[_Event]:
        """Add a part, and yield its events without their numbers in the stream."""
        if part.kind != self._kind or (part.kind == "tool_call" and part.number != self._number):
            text = self._space + part.text
            if part.kind == "text" and self.items and not text.strip():
                self._space = text
                return
            yield from self.close()
            self._space = ""
            yield from self._open(part)
            part = part._replace(text=text if part.kind == "text" else part.text)
        if part.text:
            self._texts.append(part.text)
            yield self._event("delta", delta=part.text, **self._taken_logprobs())

    def close(self, status: str = "completed") -> Iterator[_Event]:
        """Close the open item with its status, and yield the events."""
        if self._kind is None:
            return
        item, text = self.items[-1], "".join(self._texts)
        more = self._taken_logprobs()
        if self._kind == "tool_call":
            item["arguments"] = text
            yield self._event("done", arguments=text, name=item["name"])
        else:
            part = {**self._part(text), **({"logprobs": self._logprobs} if more else {})}
            item["content"] = [part]
            yield self._event("done", text=text, **(more | {"logprobs": self._logprobs} if more else {}))
            yield self._of_part("done", part)
        item["status"] = status
        self._kind, self._texts, self._logprobs = None, [], []
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _open(self, part: Part) -> Iterator[_Event]:
        self._kind, self._number = part.kind, part.number
        prefix = {"text": "msg", "reasoning": "rs", "tool_call": "fc"}[part.kind]
        item: dict[str, Any] = {"id": f"{prefix}_{self._id}_{len(self.items)}", "status": "in_progress"}
        if part.kind == "tool_call":
            item |= {"type": "function_call", "call_id": part.call_id, "name": part.name, "arguments": ""}
        elif part.kind == "text":
            item |= {"type": "message", "role": "assistant", "content": []}
        else:
            item |= {"type": "reasoning", "summary": [], "content": []}
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}
        if part.kind != "tool_call":
            yield self._of_part("added", self._part(""))

    def _part(self, text: str) -> dict[str, Any]:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _taken_logprobs(self) -> dict[str, Any]:
        """Return the field of a message's events with what has not been in one."""
        if self._kind != "text":
            return {}
        taken, self._pending = self._pending, []
        self._logprobs += taken
        return {"logprobs": taken}

    def _event(self, name: str, /, **fields: Any) -> _Event:
        kind = {"text": "output_text", "reasoning": "reasoning_text", "tool_call": "function_call_arguments"}
        type_ = f"response.{kind[str(self._kind)]}.{name}"
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": type_, **place, **({} if self._kind == "tool_call" else {"content_index": 0}), **fields}

    def _of_part(self, name: str, part: dict[str, Any]) -> _Event:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, "content_index": 0}
        return {"type": f"response.content_part.{name}", **place, "part": part}


class ResponsesWriter(ResponseWriter):
    """Writer of a response, whose call has one completion.

    Attributes:
      answer: the whole response once it has ended; None: it has not.
    """

    prefix = "resp_"

    def __init__(self, call: ParsedCall, call_id: str, model: str, token_bytes: TokenBytes) -> None:
        super().__init__(call, call_id, model, token_bytes)
        self.id = response_id(call_id)
        assert isinstance(call.source, ResponsesBody)
        self._source = call.source
        self._reader, self._items = call.new_reader(), OutputItems(self.id)
        self._output: Output | None = None
        self._num_events = 0
        self.answer: dict[str, Any] | None = None

    def whole(self, outputs: Mapping[tuple[int, int], Output]) -> dict[str, Any]:
        """Return the response."""
        output = outputs[0, 0]
        self._count(0, output.token_ids, output)
        if self._source.has_logprobs:
            self._items.add_logprobs(chat_logprobs(self._bytes, output.token_ids, output.logprobs or ()).content)
        for _ in self._read(output.text, output):
            pass
        return self._ended(output)

    def begin(self) -> Iterator[_Event]:
        for name in ("created", "in_progress"):
            yield self._numbered({"type": f"response.{name}", "response": self._response("in_progress")})

    def pieces(self, number: int, events: Sequence[Event]) -> Iterator[_Event]:
        for event in events:
            self._count(number, event.token_ids, event.output)
            if self._source.has_logprobs:
                self._items.add_logprobs(chat_logprobs(self._bytes, event.token_ids, event.logprobs).content)
            yield from map(self._numbered, self._read(event.text, event.output))

    def end(self) -> Iterator[_Event]:
        assert self._output is not None, "a stream ends after its last event"
        answer = self._ended(self._output)
        name = answer["status"] if answer["status"] != "cancelled" else "failed"
        yield self._numbered({"type": f"response.{name}", "response": answer})

    def failed(self, error: ApiError) -> Iterator[_Event]:
        fields = error.body["error"]
        yield self._numbered({"type": "error"} | {name: fields[name] for name in ("code", "message", "param")})
        shown = {"code": "server_error", "message": error.message}
        yield self._numbered({"type": "response.failed", "response": self._response("failed", error=shown)})

    def _read(self, text: str, output: Output | None) -> Iterator[_Event]:
        """Yield the events of a piece of text, and of the end of all items with the output."""
        parts = self._reader.push(text)
        if output is not None:
            parts += self._reader.finish()
        for part in parts:
            yield from self._items.add(part)
        if output is not None:
            if not self._items.items:
                yield from self._items.add(Part("text", ""))
            yield from self._items.close("completed" if output.finish_reason == "stop" else "incomplete")
            self._output = output

    def _ended(self, output: Output) -> dict[str, Any]:
        status = _STATUSES[output.finish_reason]
        more: dict[str, Any] = {"incomplete_details": {"reason": "max_output_tokens"}} if status == "incomplete" else {}
        if status == "completed":
            more["completed_at"] = int(time.time())
        usage = {
            "input_tokens": self._num_prompt,
            "input_tokens_details": {"cached_tokens": sum(self._num_cached), "cache_write_tokens": 0},
            "output_tokens": self._num_output,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning(output.token_ids)},
            "total_tokens": self._num_prompt + self._num_output,
        }
        self.answer = self._response(status, output=self._items.items, usage=usage, **more)
        return self.answer

    def _num_reasoning(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens, from the first on, whose bytes the texts of reasoning have."""
        left, count = self._items.num_reasoning_bytes, 0
        while left > 0 and count < len(tokens):
            left -= len(self._bytes.of(tokens[count]))
            count += 1
        return count

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        sampling = self._call.requests[0].request.sampling
        own = {"id": self.id, "object": "response", "created_at": self.created, "status": status, "output": []}
        source = self._source
        drawn = {
            "temperature": sampling.temperature if source.temperature is None else source.temperature,
            "top_p": sampling.top_p if source.top_p is None else source.top_p,
        }
        return describe(source, {"model": self._model, **own, **drawn, **fields})

    def _numbered(self, event: _Event) -> _Event:
        event["sequence_number"] = self._num_events
        self._num_events += 1
        return event
