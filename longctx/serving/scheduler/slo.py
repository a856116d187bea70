"""Service-level objectives of requests that have none of their own: `Slo`."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from longctx.serving.validation import AboveZero, Range, check_fields

TpotScope = Literal["token", "batch"]


@dataclass(frozen=True)
class Slo:
    """Default service-level objectives; a request's own come before them.

    Attributes:
      ttft_factor: TTFT target: at least X times the predicted seconds of the prompt read alone.
      ttft_least: TTFT target: at least X seconds. A short prompt waits for a step or two in any case.
      tpot: TPOT target: X seconds between tokens, at most. None: no target.
      tpot_factor: TPOT target: not less than X times the predicted seconds of a token decoded alone. So a slow machine
        has a target that it can keep while it reads prompts.
      step_seconds: predicted seconds of a step with adaptive chunks while no decode has a target. None: any. Requests
        that come meanwhile wait for the step; a chunk of 90 % of the best one's speed may take longer.
      tpot_scope: what the TPOT target and the seconds of a step bound: a token, or a batch in each stage. `"token"`: a
        step through all stages; `"batch"`: a batch in one stage, so that a token may take them once in each stage.
        Targets of requests are a token's in any case.

    Raises:
      TypeError, ValueError: one is not a positive, finite number, a factor is below 1, or the scope is another.

    Source:
      Medha, 4.2: deadlines are a multiple of the time that a prompt takes alone.

    Examples:
      >>> from longctx.serving import Slo
      >>> slo = Slo(ttft_factor=5.0, ttft_least=1.0)
      >>> slo.ttft(0.01), slo.ttft(60.0)  # a short prompt, and one that takes a minute to read
      (1.0, 300.0)
      >>> slo.tpot_target(0.01), slo.tpot_target(1.5)  # a fast machine, and one that decodes a token in 1.5 s
      (0.2, 3.0)
    """

    ttft_factor: Annotated[float, Range(1)] = 5.0
    ttft_least: AboveZero = 1.0
    tpot: AboveZero | None = 0.2
    tpot_factor: Annotated[float, Range(1)] = 2.0
    step_seconds: AboveZero | None = 0.1
    tpot_scope: TpotScope = "token"

    def __post_init__(self) -> None:
        check_fields(self)

    def per_token(self, stages: int) -> "Slo":
        """Return the same objectives with targets of a token: `self`, or those of as many batches as it has stages.

        Examples:
          >>> Slo(tpot=0.03, step_seconds=None, tpot_scope="batch").per_token(4).tpot
          0.12
        """
        if self.tpot_scope == "token":
            return self
        tpot, step = (None if each is None else stages * each for each in (self.tpot, self.step_seconds))
        return replace(self, tpot=tpot, step_seconds=step, tpot_scope="token")

    def ttft(self, prefill_seconds: float) -> float:
        """Seconds from arrival within which the first token of a prompt is due, whose prefill takes so long alone."""
        return max(self.ttft_least, self.ttft_factor * prefill_seconds)

    def tpot_target(self, decode_seconds: float) -> float | None:
        """Seconds between the tokens of a request whose tokens take so long alone, in all stages; None: no target.

        A relative target has two digits, as what is derived from targets is remembered for each.
        """
        relative = float(f"{self.tpot_factor * decode_seconds:.2g}")
        return None if self.tpot is None else max(self.tpot, relative)
