"""Instances that tests share."""

import contextlib
from collections.abc import Iterator

import pytest
from disaggregated import instance, make_engine
from served import Served

from longctx.serving.server.settings import ObserverSettings


@pytest.fixture(scope="session")
def three() -> Iterator[list[Served]]:
    """Three instances of one model, which publish KV events. They compile what they need when it comes."""
    events = ObserverSettings(kv_events="tcp://127.0.0.1:*", kv_events_replay="tcp://127.0.0.1:*")
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(instance(make_engine(), observers=events)) for _ in range(3)]
