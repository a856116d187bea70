"""`KvFeed`: the KV events of all members, by which the index knows who has which blocks."""

import logging
from urllib.parse import urlsplit

from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.cluster.prefix_index.reader import KvEventReader, PublisherState
from longctx.cluster.router.instance_client import NotUnderstood, ServerInfo

logger = logging.getLogger(__name__)

_ANY = ("*", "0.0.0.0", "[::]")  # hosts at which whoever publishes listens on all addresses


class KvFeed:
    """Follows the events of instances that say where they are; of the others no cached block is known."""

    def __init__(self, index: PrefixIndex) -> None:
        self._reader = KvEventReader(index)

    def open(self, name: str, info: ServerInfo, url: str) -> None:
        """An instance has joined: follow its events, from the first one that it can repeat.

        Raises:
          NotUnderstood: it says what is no endpoint.
        """
        found = info.kv_events
        if found is None:
            logger.warning("longctx: %s publishes no KV events (--kv-events): what it has cached is not known", name)
            return
        host = urlsplit(url).hostname or ""
        host = f"[{host}]" if ":" in host else host
        replay = None if found.replay is None else reachable(found.replay, host)
        try:
            self._reader.add(name, reachable(found.endpoint, host), replay, found.topic)
        except (TypeError, ValueError) as error:
            raise NotUnderstood(f"its KV events can't be read: {error}") from None

    def close(self, name: str) -> None:
        """It is not a member any more: forget what it has."""
        self._reader.remove(name)

    @property
    def publishers(self) -> dict[str, PublisherState]:
        """By instance, where there are some."""
        return self._reader.publishers

    def stop(self) -> None:
        """Follow nobody."""
        self._reader.close()


def reachable(endpoint: str, host: str) -> str:
    """An endpoint by the host at which its instance is reached, where it says that it listens on all."""
    kind, separator, address = endpoint.partition("://")
    own, colon, port = address.rpartition(":")
    return f"{kind}{separator}{host}{colon}{port}" if kind == "tcp" and own in _ANY else endpoint
