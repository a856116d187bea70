"""`RouterStats`: what a router has done, for its metrics. Written in the event loop, read by scrapes."""

from collections import Counter

from longctx.cluster.conductor.request import Assignment, ClusterRequest, Rejection
from longctx.serving.request.output import FinishReason, Output
from longctx.serving.request.request import Request
from longctx.serving.server import series
from longctx.serving.server.series import Histogram, one_two_five

_RATIO = (0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 4, 10, 100)
_REASONS: dict[FinishReason, str] = {
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "error": "error",
    "moved": "moved",
}


class RouterStats:
    """Counts.

    Attributes:
      assignments: by (prefill instance, decode instance).
      transfers: prefixes that were sent, by (source, prefill instance).
      prompt_tokens, cached_tokens: of what was assigned: of prompts, and of those what is in a cache, by prediction.
      rejections: by (bound, stage).
      failures: by (instance, why): `"refused"`, `"broken"`, `"nonsense"`.
      refusals: answers to clients, by reason.
      retries: requests that went on elsewhere.
      ends: completions, by reason.
      ended_prompt_tokens, output_tokens: of completions; those that clients have had.
      histograms: of durations as clients see them, by the names of their metrics.
      ttft_ratio: time to first token over that predicted.
    """

    def __init__(self, max_length: int) -> None:
        self.assignments: Counter[tuple[str, str]] = Counter()
        self.transfers: Counter[tuple[str, str]] = Counter()
        self.rejections: Counter[tuple[str, str]] = Counter()
        self.failures: Counter[tuple[str, str]] = Counter()
        self.refusals: Counter[str] = Counter()
        self.ends = Counter(dict.fromkeys(_REASONS.values(), 0))
        self.prompt_tokens = self.cached_tokens = self.ended_prompt_tokens = self.output_tokens = 0
        self.retries = self.role_changes = self.swapped_blocks = 0
        lengths = one_two_five(max_length)
        self.histograms = {
            "time_to_first_token_seconds": Histogram("Seconds from arrival to the first token.", series.TTFT),
            "inter_token_latency_seconds": Histogram("Seconds from a token to the next one.", series.GAP),
            "request_time_per_output_token_seconds": Histogram("Mean seconds of a request's later tokens.", series.GAP),
            "e2e_request_latency_seconds": Histogram("Seconds from arrival to the end.", series.DURATION),
            "request_prompt_tokens": Histogram("Tokens of a request's prompt.", lengths),
            "request_generation_tokens": Histogram("Tokens of a completion.", lengths),
        }
        self.ttft_ratio = Histogram("Time to the first token over that predicted.", _RATIO)

    def note_assignment(self, assignment: Assignment, request: ClusterRequest, is_again: bool) -> None:
        """A request was placed; `is_again`: not for the first time."""
        self.assignments[assignment.prefill, assignment.decode] += 1
        if assignment.transfer is not None:
            self.transfers[assignment.transfer.source, assignment.prefill] += 1
        if not is_again:
            self.prompt_tokens += request.prompt_tokens
            self.cached_tokens += assignment.cached

    def note_rejection(self, rejection: Rejection) -> None:
        """A client is told so."""
        self.rejections[rejection.bound, rejection.stage] += 1

    def note_failure(self, name: str, why: str) -> None:
        """An instance did not bring a request to its end."""
        self.failures[name, why] += 1

    def note_first(self, seconds: float, predicted: float | None) -> None:
        """A first token has come; `predicted`: when it was to, None if the request was placed several times."""
        self.histograms["time_to_first_token_seconds"].observe(seconds)
        if predicted:
            self.ttft_ratio.observe(seconds / predicted)

    def note_gap(self, seconds: float) -> None:
        """So much later than the last token of its completion came another one."""
        self.histograms["inter_token_latency_seconds"].observe(seconds)

    def note_end(self, output: Output, request: Request) -> None:
        """A completion has ended."""
        metrics, seen = output.metrics, self.histograms
        self.ends[_REASONS[output.finish_reason]] += 1
        self.ended_prompt_tokens += metrics.prompt_tokens
        seen["request_prompt_tokens"].observe(metrics.prompt_tokens)
        seen["request_generation_tokens"].observe(metrics.output_tokens)
        if metrics.finished is not None:
            seen["e2e_request_latency_seconds"].observe(metrics.finished - metrics.arrival)
        if metrics.first_token is not None and metrics.last_token is not None and metrics.output_tokens > 1:
            mean = (metrics.last_token - metrics.first_token) / (metrics.output_tokens - 1)
            seen["request_time_per_output_token_seconds"].observe(mean)
