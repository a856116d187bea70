"""Events of a request that another server computes: as lines of JSON between servers, and what its client has had.

A line has the events of a step. Events that the client has had come again when another engine goes on with a request:
they are compared and left out.
"""

import dataclasses
from collections.abc import Sequence

import msgspec

from longctx.serving.request.handoff import Handoff
from longctx.serving.request.output import Event, FinishReason, Logprobs, Metrics, Output, TokenLogprob
from longctx.serving.request.request import PreparedRequest

_MOST_LINE = 2**28  # bytes: log probabilities of a long prompt are one line


class End(msgspec.Struct, array_like=True, frozen=True):
    """End of a completion, with what its events don't say. `cached_tokens`: of its prompt, found or loaded."""

    reason: FinishReason
    error: str | None
    prompt_logprobs: list[TokenLogprob] | None
    cached_tokens: int = 0
    embedding: tuple[float, ...] | None = None


class EventLine(msgspec.Struct, array_like=True, frozen=True):
    """Event on a line, see `longctx.serving.request.output.Event`."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    end: End | None

    @classmethod
    def of(cls, event: Event) -> "EventLine":
        """Return the entry of an event."""
        output = event.output
        end = None
        if output is not None:
            of_prompt = None if output.prompt_logprobs is None else list(output.prompt_logprobs)
            embedding = None if output.embedding is None else tuple(output.embedding)
            end = End(output.finish_reason, output.error, of_prompt, output.metrics.cached_tokens, embedding)
        return cls(event.index, event.token_ids, event.text, event.logprobs, end)


_decoder = msgspec.json.Decoder(list[EventLine])


def encode_events(events: Sequence[Event]) -> bytes:
    """Return a line, with its end."""
    return msgspec.json.encode(list(map(EventLine.of, events))) + b"\n"


def encode_ends(count: int, reason: FinishReason) -> bytes:
    """Return a line with the ends of `count` completions."""
    end = End(reason, None, None)
    return msgspec.json.encode([EventLine(index, (), "", (), end) for index in range(count)]) + b"\n"


def decode_events(line: str | bytes) -> list[EventLine]:
    """Return the events of a line; raise ValueError if it has none."""
    return _decoder.decode(line)


class LineSplitter:
    """Splitter of what comes in parts into lines. Only a line feed ends one: texts have other ends of lines within."""

    def __init__(self) -> None:
        self._begun = bytearray()

    def push(self, part: bytes) -> list[bytes]:
        """Return the lines that a part ends and that are not empty. RelayBroken: one is too long."""
        *ended, rest = part.split(b"\n")
        if ended and self._begun:
            ended[0] = bytes(self._begun) + ended[0]
            self._begun.clear()
        self._begun += rest
        if len(self._begun) > _MOST_LINE:
            raise RelayBroken("a line of its events is too long")
        return [line for line in ended if line]


class RelayBroken(RuntimeError):
    """The other server refuses a request, or does not go on with it."""


class RelayedOutputs:
    """Outputs of a request that another server computes, as far as the client has had them.

    Attributes:
      open: the completions that have not ended.
      cached_tokens: of the prompt, for the outputs' metrics; None: what they say already.
    """

    def __init__(self, prepared: PreparedRequest, request_id: str, arrival: float, seed: int) -> None:
        sampling = prepared.request.sampling
        self._outputs = {
            index: Output(
                request_id,
                index,
                [],
                "",
                "moved",
                Metrics(arrival, len(prepared.tokens)),
                logprobs=None if sampling.logprobs is None else Logprobs(),
                prompt_logprobs=Logprobs() if sampling.prompt_logprobs is not None and index == 0 else None,
                seed=seed,
            )
            for index in range(sampling.n)
        }
        self._texts: dict[int, list[str]] = {index: [] for index in self._outputs}
        self.open = set(self._outputs)
        self.cached_tokens: int | None = None
        self._repeated: dict[int, int] = {}
        self.expect_again()

    @property
    def outputs(self) -> list[Output]:
        """Outputs of all completions, as far as they are there."""
        return list(self._outputs.values())

    @property
    def num_tokens(self) -> int:
        """Tokens that the client has had."""
        return sum(len(output.token_ids) for output in self._outputs.values())

    def num_tokens_of(self, index: int) -> int:
        """Return the number of tokens of one completion; 0 if there is none."""
        output = self._outputs.get(index)
        return 0 if output is None else len(output.token_ids)

    def repeats(self, index: int) -> bool:
        """Return whether the next token of a completion is one that the client has had."""
        return bool(self._repeated.get(index))

    def expect_again(self) -> None:
        """Expect all that the client has had again, from another server that goes on with the request."""
        self._repeated = {index: len(output.token_ids) for index, output in self._outputs.items()}

    def handoff(self) -> Handoff:
        """Return the handoff to a server that computes what is missing; no lease has any pages."""
        handoff = Handoff.of(self.outputs)
        completions = tuple(dataclasses.replace(each, lease=None) for each in handoff.completions)
        return dataclasses.replace(handoff, completions=completions)

    def read(self, entry: EventLine, now: float) -> Event | None:
        """Return the client's event of one of the other server's; None: the client has had it."""
        index, tokens = entry.index, entry.token_ids
        if index not in self._repeated or len(tokens) > 1:
            raise RelayBroken("its events are not of this request")
        if self._repeated[index] and tokens:
            if tokens[0] != self._outputs[index].token_ids[-self._repeated[index]]:
                raise RelayBroken("it does not repeat the tokens that it was given")
            self._repeated[index] -= 1
            if entry.end is None or self._repeated[index] or index not in self.open:
                return None
            # The server that sent the last token has not said that it was the last.
            entry, tokens = EventLine(index, (), "", (), entry.end), ()
        if index not in self.open:
            return None
        end = entry.end
        if end is not None and end.reason not in ("stop", "length"):
            raise RelayBroken(end.error or f"it ended the request: {end.reason}")
        if end is not None and self._repeated[index]:
            raise RelayBroken("it ends before it has repeated the tokens that it was given")
        output = self._outputs[index]
        output.token_ids.extend(tokens)
        if isinstance(output.logprobs, Logprobs):
            output.logprobs.extend(entry.logprobs)
        if end is not None:
            if isinstance(output.prompt_logprobs, Logprobs):
                output.prompt_logprobs.extend((end.prompt_logprobs or [])[len(output.prompt_logprobs) :])
            self._outputs[index] = output = dataclasses.replace(output, embedding=end.embedding)
            return dataclasses.replace(
                self.end(index, end.reason, now, tokens=tokens, text=entry.text), logprobs=entry.logprobs
            )
        if tokens:
            output.metrics.note_token(now)
        self._texts[index].append(entry.text)
        return Event(output.request_id, index, tokens, entry.text, entry.logprobs)

    def end(
        self,
        index: int,
        reason: FinishReason,
        now: float,
        error: str | None = None,
        tokens: tuple[int, ...] = (),
        text: str = "",
    ) -> Event:
        """Return the last event of a completion."""
        output = self._outputs[index]
        metrics = output.metrics
        if tokens:
            metrics.note_token(now)
        metrics = dataclasses.replace(metrics, output_tokens=len(output.token_ids), finished=now)
        if self.cached_tokens is not None:
            metrics.cached_tokens = self.cached_tokens
        output = dataclasses.replace(
            output,
            text="".join(self._texts[index]) + text,
            finish_reason=reason,
            error=error,
            metrics=metrics,
            lease=None,
        )
        self._outputs[index] = output
        self.open.discard(index)
        return Event(output.request_id, index, tokens, text, (), output)
