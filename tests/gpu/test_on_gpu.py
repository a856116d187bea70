"""A run on a GPU, case by case; `make gpu-check`. CONTRIBUTING.md says what comes of it."""

import pytest
from gpu_cases import CASES, Case
from gpu_run import Run


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case, run: Run) -> None:
    result = run.take(case)
    if result["status"] in ("skipped", "not run"):
        pytest.skip(result["reason"])
    if result["status"] != "passed":
        pytest.fail(f"{result['status']}: {result['reason']}", pytrace=False)
