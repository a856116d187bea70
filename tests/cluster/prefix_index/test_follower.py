"""`Follower` between a publisher that restarts and a network that loses messages: in the end it knows what is kept."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.cluster.prefix_index.events import MalformedMessage
from longctx.cluster.prefix_index.reader import Follower

KEPT = 6


class Publisher:
    """Holds a set of blocks, and keeps the last messages; a message is "+block" or "-block"."""

    def __init__(self, life: int) -> None:
        self.life = life
        self.blocks: set[str] = set()
        self.number = 0
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT)

    def publish(self, block: int) -> tuple[int, bytes]:
        name = f"{self.life}.{block}"
        message = self.number, f"{'-' if name in self.blocks else '+'}{name}".encode()
        apply(self.blocks, message[1])
        self.number += 1
        self.kept.append(message)
        return message


def apply(blocks: set[str], payload: bytes) -> None:
    text = payload.decode()
    if text[0] == "+":
        blocks.add(text[1:])
    else:
        blocks.discard(text[1:])


STEP = st.one_of(
    st.integers(0, 8).map(lambda block: ("publish", block)),
    st.integers(0, 8).map(lambda block: ("publish", block)),
    st.sampled_from(["lose", "deliver", "answer", "restart", "reconnect", "fail"]).map(lambda name: (name, 0)),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(STEP, max_size=60), st.booleans())
def test_whatever_is_lost_the_end_is_what_there_is(steps: list, has_replay: bool) -> None:
    known: set[str] = set()
    publisher = Publisher(0)
    live: deque[tuple[int, bytes]] = deque()
    answers: deque[tuple[int, bytes] | None] = deque()

    def ask() -> None:
        answers.clear()
        answers.extend([*publisher.kept, None])

    def deliver() -> None:
        if live:
            follower.live(*live.popleft())

    def answer() -> None:
        if answers:
            message = answers.popleft()
            follower.replay_ended() if message is None else follower.replayed(*message)

    follower = Follower(lambda payload: apply(known, payload), known.clear, ask if has_replay else None)
    follower.begin()
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
            publisher = Publisher(publisher.life + 1)
            live.clear()
            answers.clear()
            follower.begin()
        elif name == "reconnect":
            follower.begin()
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


@settings(max_examples=50, deadline=None)
@given(st.lists(STEP, max_size=60))
def test_what_is_whole_is_all(steps: list) -> None:
    """At any time without messages on their way, within the life of one publisher."""
    known: set[str] = set()
    publisher = Publisher(0)
    live: list[tuple[int, bytes]] = []
    answers: deque[tuple[int, bytes] | None] = deque()

    def ask() -> None:
        answers.clear()
        answers.extend([*publisher.kept, None])

    follower = Follower(lambda payload: apply(known, payload), known.clear, ask)
    follower.begin()
    lost = False
    for name, block in steps:
        if name == "publish":
            live.append(publisher.publish(block))
        elif name == "lose" and live:
            live.pop(0)
            lost = True
        elif name in ("deliver", "answer"):
            while live or answers:
                if live:
                    follower.live(*live.pop(0))
                    lost = False
                while answers:
                    message = answers.popleft()
                    follower.replay_ended() if message is None else follower.replayed(*message)
            if follower.is_whole and not lost:
                assert known == publisher.blocks


def test_a_gap_clears_what_is_known_and_asks_for_all_that_is_kept() -> None:
    known, asked = list[bytes](), list[int]()
    follower = Follower(known.append, known.clear, lambda: asked.append(1))
    follower.begin()
    follower.replayed(0, b"0")
    follower.replay_ended()
    assert (known, follower.is_whole) == ([b"0"], True)
    follower.live(2, b"2")
    assert (known, follower.is_syncing, follower.is_whole, follower.gaps) == ([], True, False, 1)
    for number in (1, 2):  # 0 is kept no more
        follower.replayed(number, b"%d" % number)
    follower.replay_ended()
    follower.live(3, b"3")
    assert (known, follower.is_whole, follower.expected, len(asked)) == ([b"1", b"2", b"3"], False, 4, 2)


def test_a_publisher_that_never_replays_what_is_missing_is_followed_from_there() -> None:
    known, asked = list[bytes](), list[int]()
    follower = Follower(known.append, known.clear, lambda: asked.append(1))
    follower.begin()
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
    known, asked = list[bytes](), list[int]()
    follower = Follower(known.append, known.clear, lambda: asked.append(1))
    follower.begin()
    follower.live(7, b"7")
    for _ in range(3):
        assert follower.is_syncing
        follower.replay_failed()
    assert (len(asked), known, follower.is_whole) == (3, [b"7"], False)
    follower.live(9, b"9")  # what is missing is asked for again
    assert len(asked) == 4


def test_numbers_that_go_back_are_of_another_publisher() -> None:
    known = list[bytes]()
    follower = Follower(known.append, known.clear, None)
    follower.begin()
    for number, payload in ((0, b"a"), (1, b"b"), (0, b"c"), (1, b"d")):
        follower.live(number, payload)
    assert (known, follower.restarts, follower.gaps) == ([b"c", b"d"], 1, 0)


def test_a_replay_without_end_or_with_a_gap_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longctx.cluster.prefix_index.reader._MOST_REPLAYED", 10)
    follower = Follower(lambda payload: None, lambda: None, lambda: None)
    follower.begin()
    for number in range(10):
        follower.replayed(number, b"")
    with pytest.raises(MalformedMessage, match="more than 10"):
        follower.replayed(10, b"")
    with pytest.raises(MalformedMessage, match="message 12 is replayed in place of 10"):
        follower.replayed(12, b"")


def test_a_late_message_that_a_replay_no_longer_has_changes_nothing() -> None:
    known, asked = list[bytes](), list[int]()
    follower = Follower(known.append, known.clear, lambda: asked.append(1))
    follower.begin()
    follower.live(3, b"old")
    follower.replayed(4, b"new")
    follower.replay_ended()
    assert known == [b"new"]
    assert (len(asked), follower.is_syncing, follower.restarts) == (1, False, 0)


def test_messages_that_wait_for_a_replay_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longctx.cluster.prefix_index.reader._MOST_WAITING", (4, 100))
    known = list[bytes]()
    follower = Follower(known.append, known.clear, lambda: None)
    follower.begin()
    for number in range(1000):
        follower.live(number, b"x" * 30)
    for _ in range(3):
        follower.replay_failed()
    assert 1 <= len(known) <= 3
