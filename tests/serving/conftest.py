"""Fixtures of tests with several processes."""

import pytest


@pytest.fixture
def no_exit(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Keep processes from exiting; the statuses with which they would have exited."""
    statuses: list[int] = []
    monkeypatch.setattr("os._exit", statuses.append)
    monkeypatch.setattr("atexit.register", lambda act: None)
    return statuses
