"""Instances that tests share."""

import contextlib
from collections.abc import Iterator

import pytest
from disaggregated import NAME, make_engine, make_transfers
from served import Served, served

from longctx.serving.server.settings import ObserverSettings, ServerSettings


@pytest.fixture(scope="session")
def three() -> Iterator[list[Served]]:
    """Three instances of one model, which publish KV events. They compile what they need when it comes."""
    settings, anywhere = ServerSettings(prepare_processes=0), "tcp://127.0.0.1:*"
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                served(
                    make_engine(),
                    settings,
                    names=(NAME,),
                    make_transfers=make_transfers,
                    warm_up=lambda engine: None,
                    observers=ObserverSettings(kv_events=anywhere, kv_events_replay=anywhere),
                )
            )
            for _ in range(3)
        ]
