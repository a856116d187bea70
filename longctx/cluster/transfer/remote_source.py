"""The pages of a lease that an engine in another process holds, as a `PageSource`."""

from collections.abc import Sequence as List
from typing import TYPE_CHECKING, Any

from longctx.serving.kv_cache.connector import PageFetch
from longctx.serving.kv_cache.page_pool import Key

if TYPE_CHECKING:
    from longctx.cluster.transfer.zmq_receiver import PageReceiver


class RemoteSource:
    """A `PageSource`: the pages of a lease of an engine in another process."""

    def __init__(
        self,
        receiver: "PageReceiver",
        addresses: list[str],
        lease_id: str,
        releases: bool,
        deadline: float,
        patience: float,
    ) -> None:
        self._receiver, self.addresses, self.lease_id = receiver, addresses, lease_id
        self.releases, self.deadline, self.patience = releases, deadline, patience

    def fetch(self, keys: List[Key], wake: Any) -> PageFetch:
        return self._receiver.fetch(self, keys, wake)

    def release(self) -> None:
        """Tell the sender that nobody will fetch the lease, if it is connected. Without it the lease expires."""
        self._receiver.release(self.addresses, self.lease_id)
