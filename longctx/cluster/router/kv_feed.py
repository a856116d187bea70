"""`KvFeed`: KV events of all members, by which the index knows which blocks they have."""

import logging
from urllib.parse import urlsplit

from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.cluster.prefix_index.listeners import IndexUpdater
from longctx.cluster.prefix_index.merged import MergedKvEvents
from longctx.cluster.prefix_index.reader import KvEventReader, PublisherState
from longctx.cluster.router.instance_client import ProtocolError, ServerInfo
from longctx.serving.server.kv_publisher import KvPublisher

logger = logging.getLogger(__name__)

_ANY = ("*", "0.0.0.0", "[::]")  # hosts of endpoints that listen on all addresses


class KvFeed:
    """Reader of the events of instances that publish some; of the others no cached block is known.

    Args:
      model: its name, for the merged stream.
      publish: endpoint at which the events of all instances are published as one stream, which shows prompts; None:
        nowhere. replay: endpoint at which missed ones can be asked for.

    Raises:
      ValueError: an endpoint can't be bound.
    """

    def __init__(self, index: PrefixIndex, model: str, publish: str | None = None, replay: str | None = None) -> None:
        self._publisher = None if publish is None else KvPublisher(publish, replay)
        merged = [] if self._publisher is None else [MergedKvEvents(self._publisher, model)]
        self._reader = KvEventReader(IndexUpdater(index), *merged)

    @property
    def endpoints(self) -> dict[str, str | None] | None:
        """Endpoints of the merged stream; None: there is none."""
        publisher = self._publisher
        return None if publisher is None else {"endpoint": publisher.endpoint, "replay": publisher.replay_endpoint}

    def open(self, name: str, info: ServerInfo, url: str) -> None:
        """Follow the events of an instance that has joined, from the first one that it can repeat.

        Raises:
          ProtocolError: it says what is no endpoint.
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
            raise ProtocolError(f"its KV events can't be read: {error}") from None

    def close(self, name: str) -> None:
        """Forget the blocks of an instance that is not a member any more."""
        self._reader.remove(name)

    @property
    def publishers(self) -> dict[str, PublisherState]:
        """States of publishers, by instance."""
        return self._reader.publishers

    def stop(self) -> None:
        """Stop following all instances."""
        self._reader.close()
        if self._publisher is not None:
            self._publisher.close()


def reachable(endpoint: str, host: str) -> str:
    """Replace the host of an endpoint that listens on all addresses by that at which its instance is reached."""
    kind, separator, address = endpoint.partition("://")
    own, colon, port = address.rpartition(":")
    return f"{kind}{separator}{host}{colon}{port}" if kind == "tcp" and own in _ANY else endpoint
