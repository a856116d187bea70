"""Events of a request between two servers: a line of JSON for each step's."""

from collections.abc import Sequence

import msgspec

from longctx.serving.request.output import Event, FinishReason, TokenLogprob


class End(msgspec.Struct, array_like=True, frozen=True):
    """How a completion has ended: what its events don't say. `cached_tokens`: of its prompt, found or loaded."""

    reason: FinishReason
    error: str | None
    prompt_logprobs: list[TokenLogprob] | None
    cached_tokens: int = 0


class EventLine(msgspec.Struct, array_like=True, frozen=True):
    """An event, see `longctx.serving.request.output.Event`."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    end: End | None


def encode_events(events: Sequence[Event]) -> bytes:
    """A line, with its end."""
    return msgspec.json.encode([_line(event) for event in events]) + b"\n"


def decode_events(line: str | bytes) -> list[EventLine]:
    """The events of a line; ValueError if it has none."""
    return _decoder.decode(line)


def _line(event: Event) -> EventLine:
    output = event.output
    end = None
    if output is not None:
        end = End(output.finish_reason, output.error, output.prompt_logprobs, output.metrics.cached_tokens)
    return EventLine(event.index, event.token_ids, event.text, event.logprobs, end)


_decoder = msgspec.json.Decoder(list[EventLine])
