"""The merged stream of many instances' events: what it tells of each is what that instance tells."""

from collections.abc import Callable

import pytest
from cluster.prefix_index.publishers import ANY, Instance, held_by, keys, removed, stored, wait_for

from longctx.cluster.prefix_index.events import decode
from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.cluster.prefix_index.listeners import IndexUpdater
from longctx.cluster.prefix_index.merged import MergedKvEvents
from longctx.cluster.prefix_index.reader import KvEventReader
from longctx.serving.server.kv_publisher import KvPublisher


class ByTopic:
    """A router above: a listener whose instances are the topics of one stream."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.topics: list[bytes] = []

    def publish(self, encode: Callable[[], bytes], topic: bytes | None = None) -> None:
        assert topic is not None
        self.topics.append(topic)
        payload = encode()
        IndexUpdater(self.index).take(topic.decode(), decode(payload), payload)


def test_a_merged_stream_says_whose_blocks_are_where() -> None:
    router, above = PrefixIndex(), ByTopic()
    instances = {"a": Instance(), "b": Instance()}
    instances["a"].publish(stored(keys(0, 5)))
    reader = KvEventReader(IndexUpdater(router), MergedKvEvents(above, "model"))
    try:
        for name, instance in instances.items():
            reader.add(name, *instance.endpoints)
        instances["b"].publish(stored(keys(0, 3)), stored(keys(1, 3), None, "disk"))
        instances["a"].publish(removed(keys(0, 5)[2:]), stored(keys(2, 2)))
        for name, instance in instances.items():
            wait_for(lambda name=name, instance=instance: held_by(router, name) == instance.held)
            assert held_by(above.index, f"kv@{name}@model") == instance.held
        reader.remove("a")
        wait_for(lambda: router.instances == above_names(above))
        assert set(above.topics) == {b"kv@a@model", b"kv@b@model"}
    finally:
        reader.close()
        for instance in instances.values():
            instance.close()


def above_names(above: ByTopic) -> list[str]:
    return [name.split("@")[1] for name in above.index.instances]


def test_a_merged_stream_has_no_gaps_over_its_topics() -> None:
    publisher = KvPublisher(ANY, ANY)
    merged, index = MergedKvEvents(publisher, "m"), PrefixIndex()
    reader = KvEventReader(IndexUpdater(index))
    try:
        for i in range(20):
            merged.clear(f"pod-{i % 3}")
        reader.add("all", publisher.endpoint, publisher.replay_endpoint)
        wait_for(lambda: reader.publishers.get("all") and reader.publishers["all"].messages == 20)
        wait_for(lambda: reader.publishers["all"].is_live)
        assert reader.publishers["all"][-3:] == (0, 0, 0)
    finally:
        reader.close()
        publisher.close()


def test_names_that_would_be_read_as_others_are_refused_or_changed() -> None:
    above = ByTopic()
    with pytest.raises(ValueError, match='model must have no "@"'):
        MergedKvEvents(above, "a@b")
    MergedKvEvents(above, "m").clear("x@y")
    assert above.topics == [b"kv@x_y@m"]
