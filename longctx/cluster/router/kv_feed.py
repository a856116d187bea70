"""`KvFeed`: the KV events of all members, into the index of who has which blocks."""

from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.cluster.router.instance_client import ServerInfo


class KvFeed:
    """Follows events."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def open(self, name: str, info: ServerInfo, url: str) -> None:
        """An instance has joined: follow its events from the first one that it can repeat."""

    def close(self, name: str) -> None:
        """It is not a member any more."""

    def stop(self) -> None:
        """Follow nobody."""
