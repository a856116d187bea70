"""Counts of transfers: how they ended, and how much they moved."""

import threading
from collections import Counter
from typing import Literal, get_args

Outcome = Literal["complete", "dropped", "ended", "refused", "lost", "late", "corrupt", "malformed", "failed"]
"""How a transfer ended.

`complete`: all pages came. `dropped`: the receiver's engine closed it before. `ended`: the sender's engine has no more.
`refused`: the sender did not begin it. `lost`: the connection or a message was lost. `late`: the other side was silent
for too long, or the deadline passed. `corrupt`: a checksum was wrong. `malformed`: the other side broke the protocol.
`failed`: an error of one's own, which is logged.

Examples:
  >>> from typing import get_args
  >>> from longctx.cluster.transfer import Outcome
  >>> get_args(Outcome)[:2]
  ('complete', 'dropped')
"""


class TransferStats:
    """Counts of one side, for metrics; any thread may read or add.

    Attributes:
      bytes, blocks: of pages that were sent or received.
      strangers: rejected connections and messages: without the secret, or of another protocol.

    Examples:
      >>> from longctx.cluster.transfer import TransferStats
      >>> stats = TransferStats()
      >>> stats.add_block(4096)
      >>> stats.add_outcome("complete")
      >>> stats.bytes, stats.blocks, {name: count for name, count in stats.outcomes.items() if count}
      (4096, 1, {'complete': 1})
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcomes: Counter[Outcome] = Counter()
        self.bytes, self.blocks, self.strangers = 0, 0, 0

    def add_block(self, num_bytes: int) -> None:
        """Count a block.

        Args:
          num_bytes: of the block.
        """
        with self._lock:
            self.bytes += num_bytes
            self.blocks += 1

    def add_outcome(self, outcome: Outcome) -> None:
        """Count a transfer that has ended.

        Args:
          outcome: how it ended.
        """
        with self._lock:
            self._outcomes[outcome] += 1

    @property
    def outcomes(self) -> dict[Outcome, int]:
        """Number of transfers that ended in each way."""
        with self._lock:
            return {outcome: self._outcomes[outcome] for outcome in get_args(Outcome)}
