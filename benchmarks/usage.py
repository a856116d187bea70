"""How much of a machine other processes use."""

import os
import time
from pathlib import Path


class Usage:
    """Seconds of the machine's processors since it was made (Linux)."""

    def __init__(self) -> None:
        self._begin = self._now()

    def others(self) -> float:
        """Processors that other processes used, in the mean; 0 where nobody knows."""
        wall, busy, own = (now - before for now, before in zip(self._now(), self._begin, strict=True))
        return max(0.0, (busy - own) / wall)

    def _now(self) -> tuple[float, float, float]:
        """Seconds of the clock, of all processors in use, and of those that this process used."""
        times, own = Path("/proc/stat"), os.times()
        used = own.user + own.system
        if not times.exists():
            return time.monotonic(), used, used
        user, nice, system, _, _, interrupts, soft, steal = map(int, times.read_text().split()[1:9])
        ticks = user + nice + system + interrupts + soft + steal
        return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), used
