"""Options of a run, and the run that all cases share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_run import Run


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu", "a run on a GPU")
    group.addoption("--out", default="build/gpu", metavar="DIR", help="gets gpu.json and gpu.log")
    group.addoption("--minutes", type=float, default=9.6, help="of the whole run; default 9.6")
    group.addoption("--rehearse", action="store_true", help="small sizes on a CPU, with interpreted kernels")


@pytest.fixture(scope="session")
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    cases = [item.callspec.params["case"] for item in request.session.items if hasattr(item, "callspec")]
    options = request.config.option
    run = Run(Path(options.out), cases, options.minutes, options.rehearse)
    yield run
    run.close()
