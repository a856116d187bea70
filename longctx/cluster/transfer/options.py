"""Limits and timeouts of transfers."""

from dataclasses import dataclass, fields

from longctx.models.validation import check_integer, check_real
from longctx.serving.kv_cache.page_layout import PageLayout


@dataclass(frozen=True)
class TransferOptions:
    """Limits and timeouts of one side of transfers.

    Attributes:
      block_bytes: the most bytes of one message, at least those of one layer of a page.
      read_bytes: how much a sender reads from the devices at once, in bytes; one page at least.
      window_blocks: how many blocks a receiver grants to one transfer ahead of what it has taken.
      max_blocks: how many blocks it grants to all, one to each apart. With `block_bytes` this bounds its memory.
      queue_bytes: bytes that a sender has on their way to one receiver, at most, whatever that one grants.
      max_queue_bytes: bytes that it has on their way to all of them; one block to each is always let through.
      max_streams: how many transfers a sender serves at a time; it refuses more.
      max_peers: how many connections to senders a receiver has at a time; further transfers wait for them.
      silence_timeout: seconds after which either side gives a transfer up when it hears nothing of the other.
      deadline: seconds after which a transfer ends however far it is.

    Raises:
      TypeError, ValueError: a value is of the wrong type or out of range.

    Examples:
      >>> from longctx.cluster.transfer import TransferOptions
      >>> options = TransferOptions(block_bytes=1 << 20, max_blocks=16)
      >>> options.max_blocks * options.block_bytes  # the most bytes that a receiver's memory is asked for
      16777216
      >>> TransferOptions(block_bytes=0)
      Traceback (most recent call last):
          ...
      ValueError: block_bytes must be an integer of 1 to 1099511627776, got 0
    """

    block_bytes: int = 4 << 20
    read_bytes: int = 32 << 20
    window_blocks: int = 8
    max_blocks: int = 64
    queue_bytes: int = 32 << 20
    max_queue_bytes: int = 256 << 20
    max_streams: int = 64
    max_peers: int = 64
    silence_timeout: float = 5.0
    deadline: float = 300.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type in (int, "int"):
                check_integer(field.name, getattr(self, field.name), 1, 1 << 40)
            else:
                check_real(field.name, getattr(self, field.name), 0.01, 1e9)
        if self.max_blocks < self.window_blocks:
            raise ValueError(f"max_blocks must be at least window_blocks={self.window_blocks}, got {self.max_blocks}")

    def check_fits(self, layout: PageLayout) -> None:
        """Check that a block has room for one layer of a page.

        Args:
          layout: of the pages.

        Raises:
          ValueError: it has not.
        """
        least = layout.page_bytes // layout.num_layers
        if self.block_bytes < least:
            raise ValueError(f"block_bytes must hold a layer of a page, {least} bytes, got {self.block_bytes}")
