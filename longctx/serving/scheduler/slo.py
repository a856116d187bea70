"""Service-level objectives of requests that have none of their own: `Slo`."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from longctx.serving.validation import check_real

TpotScope = Literal["token", "batch"]


@dataclass(frozen=True)
class Slo:
    """Default service-level objectives; a request's own come before them.

    Attributes:
      ttft_factor: the first token is due after this many times the predicted seconds of the prompt read alone.
      ttft_least: but not before this many seconds, since a short prompt waits for a step or two in any case.
      tpot: seconds between tokens at most; None: nothing is promised.
      tpot_factor: but not less than this many times the predicted seconds of a token decoded alone, so that a slow
        machine has a target that it can keep while it reads prompts.
      step_seconds: that a step may take with adaptive chunks where no decode has a target, by prediction, since whoever
        comes meanwhile waits for it; a chunk of 90 % of the best one's speed may take longer. None: any.
      tpot_scope: what `tpot` and `step_seconds` bound: "token", a step through all stages; "batch", a batch in one
        stage, so that a token may take them once in each stage. Targets of requests are a token's in any case.

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

    ttft_factor: float = 5.0
    ttft_least: float = 1.0
    tpot: float | None = 0.2
    tpot_factor: float = 2.0
    step_seconds: float | None = 0.1
    tpot_scope: TpotScope = "token"

    def __post_init__(self) -> None:
        for name in ("ttft_factor", "ttft_least", "tpot", "tpot_factor", "step_seconds"):
            value = getattr(self, name)
            if name not in ("tpot", "step_seconds") or value is not None:
                object.__setattr__(self, name, check_real(name, value, 0))
                if getattr(self, name) == 0:
                    raise ValueError(f"{name} must be above 0")
        for name in ("ttft_factor", "tpot_factor"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, no request being faster, got {getattr(self, name)}")
        if self.tpot_scope not in get_args(TpotScope):
            raise ValueError(f"tpot_scope must be one of {get_args(TpotScope)}, got {self.tpot_scope!r}")

    def per_token(self, stages: int) -> "Slo":
        """Return the same objectives with targets of a token.

        Args:
          stages: that a token goes through.

        Returns:
          `self`, or with `tpot_scope="batch"` targets of `stages` batches.

        Examples:
          >>> Slo(tpot=0.03, step_seconds=None, tpot_scope="batch").per_token(4).tpot
          0.12
        """
        if self.tpot_scope == "token":
            return self
        tpot, step = (None if each is None else stages * each for each in (self.tpot, self.step_seconds))
        return replace(self, tpot=tpot, step_seconds=step, tpot_scope="token")

    def ttft(self, prefill_seconds: float) -> float:
        """Seconds within which the first token of a prompt is due that takes so long alone.

        Args:
          prefill_seconds: predicted seconds of the prompt, read alone.

        Returns:
          Seconds from arrival.
        """
        return max(self.ttft_least, self.ttft_factor * prefill_seconds)

    def tpot_target(self, decode_seconds: float) -> float | None:
        """Seconds between the tokens of a request whose tokens take so long alone; None: nothing is promised.

        Args:
          decode_seconds: predicted seconds of a token decoded alone, in all stages.

        Returns:
          Seconds. A relative target has two digits, as what is derived from targets is remembered for each.
        """
        relative = float(f"{self.tpot_factor * decode_seconds:.2g}")
        return None if self.tpot is None else max(self.tpot, relative)
