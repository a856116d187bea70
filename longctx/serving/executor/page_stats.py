"""`MoverStats`: how many pages an executor has moved."""

from dataclasses import dataclass


@dataclass
class MoverStats:
    """What has been moved since the beginning.

    Attributes:
      stored_pages, stored_bytes: that were read from the devices. dropped_stores: pages that the sink wanted, and for
        which there was no room, or that it failed to take.
      loads: that have ended; of these, short_loads had fewer pages than asked for, failed_loads an error, and
        late_loads no block for too long.
      loaded_pages: that loads ended with. loaded_bytes: that were written to the devices.
    """

    stored_pages: int = 0
    stored_bytes: int = 0
    dropped_stores: int = 0
    loads: int = 0
    short_loads: int = 0
    failed_loads: int = 0
    late_loads: int = 0
    loaded_pages: int = 0
    loaded_bytes: int = 0
