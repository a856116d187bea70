"""Servers that tests share."""

from collections.abc import Iterator

import pytest
from served import Served, fake_engine, served


@pytest.fixture(scope="module")
def letters() -> Iterator[Served]:
    """A server of fake devices, whose tests leave nothing running."""
    with served(fake_engine(max_logprobs=5)) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test with the shared server, it is idle, and all pages are back."""
    yield
    if "letters" in request.fixturenames:
        request.getfixturevalue("letters").wait_idle()
