"""`Follower` between a publisher that restarts and a network that loses messages: in the end it knows what there is."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.cluster.prefix_index.events import MalformedMessage
from longctx.cluster.prefix_index.follower import Follower

KEPT = 6


class Publisher:
    """Holds a set of blocks, and keeps the last messages; a message is "+block", "-block" or "=all blocks"."""

    def __init__(self, life: int, has_snapshot: bool) -> None:
        self.life, self.has_snapshot = life, has_snapshot
        self.blocks: set[str] = set()
        self.folded: set[str] = set()
        self.number = 0
        self.kept: deque[tuple[int, bytes]] = deque()

    def publish(self, block: int) -> tuple[int, bytes]:
        name = f"{self.life}.{block}"
        message = self.number, f"{'-' if name in self.blocks else '+'}{name}".encode()
        apply(self.blocks, message[1])
        self.number += 1
        self.kept.append(message)
        if len(self.kept) > KEPT:
            apply(self.folded, self.kept.popleft()[1])
        return message

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        oldest = self.kept[0][0] if self.kept else 0
        snapshot = [(oldest - 1, f"={','.join(sorted(self.folded))}".encode())]
        return [
            *(snapshot if first < oldest and self.has_snapshot else []),
            *(message for message in self.kept if message[0] >= first),
        ]


def apply(blocks: set[str], payload: bytes) -> bool:
    text = payload.decode()
    if text[0] == "=":
        blocks.clear()
        blocks.update(filter(None, text[1:].split(",")))
    elif text[0] == "+":
        blocks.add(text[1:])
    else:
        blocks.discard(text[1:])
    return text[0] == "="


STEP = st.one_of(
    st.integers(0, 8).map(lambda block: ("publish", block)),
    st.integers(0, 8).map(lambda block: ("publish", block)),
    st.sampled_from(["lose", "deliver", "answer", "restart", "reconnect", "fail"]).map(lambda name: (name, 0)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(STEP, max_size=60), st.booleans(), st.booleans())
def test_whatever_is_lost_the_end_is_what_there_is(steps: list, has_replay: bool, has_snapshot: bool) -> None:
    known: set[str] = set()
    publisher = Publisher(0, has_snapshot)
    live: deque[tuple[int, bytes]] = deque()
    answers: deque[tuple[int, bytes] | None] = deque()

    def ask(first: int) -> None:
        answers.clear()
        answers.extend([*publisher.replay(first), None])

    def deliver() -> None:
        if live:
            follower.live(*live.popleft())

    def answer() -> None:
        if answers:
            message = answers.popleft()
            follower.replay_ended() if message is None else follower.replayed(*message)

    follower = Follower(lambda payload: apply(known, payload), known.clear, ask if has_replay else None)
    follower.start()
    for name, block in [*steps, ("restart", 0), ("publish", 1), ("publish", 2)]:
        if name == "publish":
            live.append(publisher.publish(block))
        elif name == "lose" and live:
            live.popleft()
        elif name == "deliver":
            deliver()
        elif name == "answer":
            answer()
        elif name == "restart":
            publisher = Publisher(publisher.life + 1, has_snapshot)
            live.clear()
            answers.clear()
            follower.reconnected()
        elif name == "reconnect":
            follower.reconnected()
        elif name == "fail" and answers:
            answers.clear()
            follower.replay_failed()
    while live or answers:
        answer()
        deliver()
    assert not follower.is_syncing
    if has_replay:
        assert known == publisher.blocks
        assert follower.is_whole
        assert follower.expected == publisher.number
    else:
        assert known <= publisher.blocks


@settings(max_examples=150, deadline=None)
@given(st.lists(STEP, max_size=60))
def test_what_is_whole_is_all(steps: list) -> None:
    """At any time without messages on their way, within the life of one publisher."""
    known: set[str] = set()
    publisher = Publisher(0, True)
    live: list[tuple[int, bytes]] = []
    answers: deque[tuple[int, bytes] | None] = deque()

    def ask(first: int) -> None:
        answers.clear()
        answers.extend([*publisher.replay(first), None])

    for _ in range(9):
        publisher.publish(0)
    follower = Follower(lambda payload: apply(known, payload), known.clear, ask)
    follower.start()
    lost = False
    for name, block in steps:
        if name == "publish":
            live.append(publisher.publish(block))
        elif name == "lose" and live:
            live.pop(0)
            lost = True
        elif name in ("deliver", "answer"):
            while live:
                follower.live(*live.pop(0))
                lost = False
            while answers:
                message = answers.popleft()
                follower.replay_ended() if message is None else follower.replayed(*message)
            if not lost:
                assert known == publisher.blocks
                assert follower.is_whole


def test_a_publisher_that_never_replays_what_is_missing_is_followed_from_there() -> None:
    known, asked = [], []
    follower = Follower(lambda payload: bool(known.append(payload)), known.clear, asked.append)
    follower.start()
    follower.replayed(0, b"0")
    follower.replay_ended()
    follower.live(5, b"5")
    for _ in range(3):
        if follower.is_syncing:
            follower.replayed(0, b"0")
            follower.replay_ended()
    assert known == [b"5"]
    assert (follower.expected, follower.is_whole, follower.gaps) == (6, False, 1)
    assert len(asked) == 4


def test_a_replay_that_does_not_come_is_asked_for_again_and_then_given_up() -> None:
    known, asked = [], []
    follower = Follower(lambda payload: bool(known.append(payload)), known.clear, asked.append)
    follower.start()
    follower.live(7, b"7")
    for _ in range(3):
        assert follower.is_syncing
        follower.replay_failed()
    assert asked == [0, 0, 0]
    assert known == [b"7"]
    assert not follower.is_whole
    follower.live(9, b"9")  # what is missing is asked for again
    assert asked == [0, 0, 0, 7]


def test_a_replay_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longctx.cluster.prefix_index.follower._MOST_REPLAYED", 10)
    follower = Follower(lambda payload: False, lambda: None, lambda first: None)
    follower.start()
    for number in range(10):
        follower.replayed(number, b"")
    with pytest.raises(MalformedMessage, match="more than 10"):
        follower.replayed(10, b"")


@pytest.mark.parametrize("has_snapshot", [True, False])
def test_a_late_message_that_a_replay_no_longer_has_changes_nothing(has_snapshot: bool) -> None:
    """It was folded into the snapshot, or is kept no more; nothing is asked for again and again."""
    known, asked = set[str](), []
    follower = Follower(lambda payload: apply(known, payload), known.clear, asked.append)
    follower.start()
    follower.live(3, b"+old")
    if has_snapshot:
        follower.replayed(3, b"=old")
    follower.replayed(4, b"+new")
    follower.replay_ended()
    assert known == ({"old", "new"} if has_snapshot else {"new"})
    assert (asked, follower.is_syncing, follower.restarts) == ([0], False, 0)


def test_a_publisher_that_replays_something_else_is_malformed() -> None:
    follower = Follower(lambda payload: False, lambda: None, lambda first: None)
    follower.start()
    follower.live(1, b"1")
    follower.replayed(0, b"0")
    follower.replayed(1, b"other")
    follower.replay_ended()  # it may be another publisher: once more
    assert (follower.is_syncing, follower.restarts) == (True, 1)
    follower.replayed(0, b"0")
    follower.replayed(1, b"other")
    with pytest.raises(MalformedMessage, match="not what is replayed"):
        follower.replay_ended()


def test_messages_that_wait_for_a_replay_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longctx.cluster.prefix_index.follower._MOST_WAITING", (4, 100))
    follower = Follower(lambda payload: False, lambda: None, lambda first: None)
    follower.start()
    for number in range(1000):
        follower.live(number, b"x" * 30)
    assert len(follower._waiting) <= 4
    assert follower._waiting_bytes == sum(len(payload) for _, payload in follower._waiting) <= 100
