"""What tests of several processes share."""

import pytest


@pytest.fixture
def no_exit(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """With what status processes would have exited."""
    statuses: list[int] = []
    monkeypatch.setattr("os._exit", statuses.append)
    monkeypatch.setattr("atexit.register", lambda act: None)
    return statuses
