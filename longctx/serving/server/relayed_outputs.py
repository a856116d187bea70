"""`RelayedOutputs`: the outputs of a request that another server computes, whose events a client here gets once."""

import dataclasses
from collections.abc import Sequence

from longctx.serving.request.handoff import Handoff
from longctx.serving.request.output import Event, FinishReason, Metrics, Output
from longctx.serving.request.request import PreparedRequest
from longctx.serving.server.event_lines import EventLine


class RelayBroken(RuntimeError):
    """The other server refuses a request, or does not go on with it."""


class RelayedOutputs:
    """Collects what a client has had, and leaves that out when it comes again from whoever goes on.

    Args:
      outputs: of all completions so far.
      open_: the completions that have not ended.

    Attributes:
      open: of them, those that have not ended.
      cached_tokens: of the prompt, for the outputs' metrics; None: what they say already.
    """

    def __init__(self, outputs: Sequence[Output], open_: set[int]) -> None:
        self._outputs = {output.index: _copied(output) for output in outputs}
        self.open = open_
        self.cached_tokens: int | None = None
        self._repeated: dict[int, int] = {}
        self.expect_again()

    @classmethod
    def of_none(cls, prepared: PreparedRequest, request_id: str, arrival: float, seed: int) -> "RelayedOutputs":
        """Of a request of which nothing is computed yet."""
        sampling = prepared.request.sampling
        outputs = [
            Output(
                request_id,
                index,
                [],
                "",
                "moved",
                Metrics(arrival, len(prepared.tokens)),
                logprobs=None if sampling.logprobs is None else [],
                prompt_logprobs=[] if sampling.prompt_logprobs is not None and index == 0 else None,
                seed=seed,
            )
            for index in range(sampling.n)
        ]
        return cls(outputs, set(range(sampling.n)))

    @property
    def outputs(self) -> list[Output]:
        """Of all completions, as far as they are there."""
        return list(self._outputs.values())

    @property
    def num_tokens(self) -> int:
        """That the client has had."""
        return sum(len(output.token_ids) for output in self._outputs.values())

    def num_tokens_of(self, index: int) -> int:
        """Those of one completion; 0 if there is none."""
        output = self._outputs.get(index)
        return 0 if output is None else len(output.token_ids)

    def repeats(self, index: int) -> bool:
        """Whether the next token of a completion is one that the client has had."""
        return bool(self._repeated.get(index))

    def expect_again(self) -> None:
        """What the client has had comes again, from whoever goes on with the request."""
        self._repeated = {index: len(output.token_ids) for index, output in self._outputs.items()}

    def handoff(self) -> Handoff:
        """By which whoever goes on computes what is missing; no lease has any pages."""
        handoff = Handoff.of(self.outputs)
        return handoff._replace(completions=tuple(each._replace(lease=None) for each in handoff.completions))

    def read(self, entry: EventLine, now: float) -> Event | None:
        """The client's event of one of the other server's; None: the client has had it.

        Raises:
          RelayBroken: it can't be right, or the other server has failed.
        """
        index, tokens = entry.index, entry.token_ids
        if index not in self._repeated or len(tokens) > 1:
            raise RelayBroken("its events are not of this request")
        if self._repeated[index] and tokens:
            if tokens[0] != self._outputs[index].token_ids[-self._repeated[index]]:
                raise RelayBroken("it does not repeat the tokens that it was given")
            self._repeated[index] -= 1
            if entry.end is None or self._repeated[index] or index not in self.open:
                return None
            # Whoever sent the last token has not said that it was the last.
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
        if output.logprobs is not None:
            output.logprobs.extend(entry.logprobs)
        if end is not None:
            if output.prompt_logprobs is not None and end.prompt_logprobs is not None:
                output.prompt_logprobs[:] = end.prompt_logprobs
            return dataclasses.replace(
                self.end(index, end.reason, now, tokens=tokens, text=entry.text), logprobs=entry.logprobs
            )
        if tokens:
            output.metrics.note_token(now)
        self._outputs[index] = dataclasses.replace(output, text=output.text + entry.text)
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
        """The last event of a completion."""
        output = self._outputs[index]
        metrics = output.metrics
        if tokens:
            metrics.note_token(now)
        metrics = dataclasses.replace(metrics, output_tokens=len(output.token_ids), finished=now)
        if self.cached_tokens is not None:
            metrics.cached_tokens = self.cached_tokens
        output = dataclasses.replace(
            output, text=output.text + text, finish_reason=reason, error=error, metrics=metrics, lease=None
        )
        self._outputs[index] = output
        self.open.discard(index)
        return Event(output.request_id, index, tokens, text, (), output)


def _copied(output: Output) -> Output:
    """An output whose lists and metrics change by themselves."""
    return dataclasses.replace(
        output,
        token_ids=[*output.token_ids],
        metrics=dataclasses.replace(output.metrics),
        logprobs=None if output.logprobs is None else [*output.logprobs],
        prompt_logprobs=None if output.prompt_logprobs is None else [*output.prompt_logprobs],
    )
