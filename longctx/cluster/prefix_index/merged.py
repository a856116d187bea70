"""`MergedKvEvents`: one stream out of the KV events of many instances, for routers above this one."""

import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import msgspec

from longctx.cluster.prefix_index.events import Batch
from longctx.serving.server.kv_events import AllBlocksCleared, EventBatch
from longctx.serving.validation import check_text


@runtime_checkable
class _Publisher(Protocol):
    def publish(self, encode: Callable[[], bytes], topic: bytes | None = None) -> None: ...


class MergedKvEvents:
    """A listener that publishes what it hears, each batch as it came, under the topic `kv@INSTANCE@MODEL` (llm-d's).

    The numbers of the stream have no gaps, over all its topics: subscribe to all of them. Where nothing is known of an
    instance any more, that is a batch of its own. Unlike an instance's own stream it has no snapshot: whoever comes
    more than 10,000 messages late reads the instances themselves.

    Args:
      publisher: a `KvPublisher`; it is not closed by this object.

    Raises:
      ValueError: the model's name has an "@".
    """

    def __init__(self, publisher: _Publisher, model: str) -> None:
        if "@" in check_text("model", model):
            raise ValueError(f'model must have no "@", which separates the parts of a topic, got {model[:80]!r}')
        self._publisher, self._model = publisher, model

    def take(self, instance: str, batch: Batch, payload: bytes) -> None:
        self._publisher.publish(lambda: payload, self._topic(instance))

    def clear(self, instance: str) -> None:
        payload = msgspec.msgpack.encode(EventBatch(time.time(), [AllBlocksCleared()], 0))
        self._publisher.publish(lambda: payload, self._topic(instance))

    def _topic(self, instance: str) -> bytes:
        return f"kv@{instance.replace('@', '_')}@{self._model}".encode()
