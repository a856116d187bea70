"""How transfers ended, and how much they moved."""

import threading
from collections import Counter
from typing import Literal

Outcome = Literal["complete", "dropped", "ended", "refused", "lost", "late", "corrupt", "malformed", "failed"]
"""How a transfer ended.

`complete`: all pages came. `dropped`: the receiver's engine closed it before. `ended`: the sender's engine has no more.
`refused`: the sender did not begin it. `lost`: the connection or a message was lost. `late`: the other side was silent
for too long, or the deadline passed. `corrupt`: a checksum was wrong. `malformed`: the other side broke the protocol.
`failed`: an error of one's own, which is logged.
"""
OUTCOMES: tuple[Outcome, ...] = (
    "complete", "dropped", "ended", "refused", "lost", "late", "corrupt", "malformed", "failed",
)  # fmt: skip


class TransferStats:
    """Counts of one side, for metrics; any thread may read or add.

    Attributes:
      bytes, blocks: of pages that were sent or received.
      strangers: connections and messages of who does not know the secret or speaks another protocol.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcomes: Counter[Outcome] = Counter()
        self.bytes, self.blocks, self.strangers = 0, 0, 0

    def add_block(self, num_bytes: int) -> None:
        with self._lock:
            self.bytes += num_bytes
            self.blocks += 1

    def add_outcome(self, outcome: Outcome) -> None:
        with self._lock:
            self._outcomes[outcome] += 1

    @property
    def outcomes(self) -> dict[Outcome, int]:
        """How many transfers ended in each way."""
        with self._lock:
            return {outcome: self._outcomes[outcome] for outcome in OUTCOMES}
