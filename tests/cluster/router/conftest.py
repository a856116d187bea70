"""Instances that tests share."""

import contextlib
from collections.abc import Iterator

import pytest
from disaggregated import instance, make_engine
from served import Served


@pytest.fixture(scope="session")
def three() -> Iterator[list[Served]]:
    """Three instances of one model."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(instance(make_engine())) for _ in range(3)]
