"""How many blocks a receiver grants to its transfers, so that its memory stays bounded. Pure counting."""

from dataclasses import dataclass


@dataclass(eq=False)
class Credit:
    """Of one transfer.

    Attributes:
      granted: blocks that may still come. held: blocks that have come and wait for the engine.
    """

    granted: int = 0
    held: int = 0


class Credits:
    """Shares `most` blocks among transfers, at most `window` to each, first come first served.

    A grant is of whole blocks, so that no transfers wait for each other with parts of one.
    """

    def __init__(self, window: int, most: int) -> None:
        self._window, self._free = window, most
        self._open: dict[Credit, None] = {}

    def open(self) -> Credit:
        """Add a transfer."""
        credit = Credit()
        self._open[credit] = None
        return credit

    def close(self, credit: Credit) -> None:
        """A transfer gets no more blocks; those that it holds still count until they are taken."""
        if credit in self._open:
            del self._open[credit]
            self._free += credit.granted
            credit.granted = 0

    def come(self, credit: Credit) -> bool:
        """A block has come; returns whether it was granted."""
        if credit.granted == 0:
            return False
        credit.granted -= 1
        credit.held += 1
        return True

    def taken(self, credit: Credit) -> None:
        """The engine has taken a block."""
        credit.held -= 1
        self._free += 1

    def grants(self) -> list[tuple[Credit, int]]:
        """Whom to grant how many blocks more now."""
        made = []
        for credit in self._open:
            blocks = min(self._window - credit.granted - credit.held, self._free)
            if blocks > 0:
                credit.granted += blocks
                self._free -= blocks
                made.append((credit, blocks))
        return made

    @property
    def free(self) -> int:
        """Blocks that are granted to nobody."""
        return self._free
