"""Tests of servers on several hosts, which are network namespaces of this machine, and of hostile clients."""

import pytest
from network import missing


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", type=float, default=60.0, metavar="SECONDS", help="how long the soak of a cluster takes")


@pytest.fixture(scope="session")
def hosts() -> None:
    """Skip tests where no hosts can be made, and say what is missing."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
