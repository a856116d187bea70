"""`RouterStats`: what a router has done, for its metrics. Written and read in the event loop and by scrapes."""

from collections import Counter

from longctx.cluster.conductor.decision import Assignment, Rejection
from longctx.cluster.conductor.request import ClusterRequest
from longctx.serving.server.series import GAP, TTFT, Histogram

_RATIO = (0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 4, 10, 100)


class RouterStats:
    """Counts.

    Attributes:
      assignments: by (prefill instance, decode instance).
      transfers: prefixes that were sent, by (source, prefill instance).
      prompt_tokens, cached_tokens: of what was assigned: of prompts, and of those what is in a cache, by prediction.
      rejections: by (bound, stage).
      failures: by (instance, why): `"refused"`, `"broken"`, `"nonsense"`.
      retries: requests that went on elsewhere.
      ttft, gaps: seconds, as clients see them.
      ttft_ratio: time to first token over that predicted.
    """

    def __init__(self) -> None:
        self.assignments: Counter[tuple[str, str]] = Counter()
        self.transfers: Counter[tuple[str, str]] = Counter()
        self.rejections: Counter[tuple[str, str]] = Counter()
        self.failures: Counter[tuple[str, str]] = Counter()
        self.refusals: Counter[str] = Counter()
        self.prompt_tokens = self.cached_tokens = self.retries = self.output_tokens = 0
        self.ttft = Histogram("Seconds until the first token.", TTFT)
        self.gaps = Histogram("Seconds between tokens.", GAP)
        self.ttft_ratio = Histogram("Time to the first token over that predicted.", _RATIO)

    def note_assignment(self, assignment: Assignment, request: ClusterRequest, is_again: bool) -> None:
        self.assignments[assignment.prefill, assignment.decode] += 1
        if assignment.transfer is not None:
            self.transfers[assignment.transfer.source, assignment.prefill] += 1
        if not is_again:
            self.prompt_tokens += request.prompt_tokens
            self.cached_tokens += assignment.cached

    def note_rejection(self, rejection: Rejection) -> None:
        self.rejections[rejection.bound, rejection.stage] += 1

    def note_failure(self, name: str, why: str) -> None:
        self.failures[name, why] += 1
