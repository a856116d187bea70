"""Random use of an engine from eight threads, and kills at random moments: `benchmarks.soak`, `benchmarks.kills`."""

import subprocess
import sys

import pytest
from fake_device import EOS, VOCAB, expected_tokens, make_engine

from benchmarks.soak import Soak
from longctx.serving import ParallelPlan


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        pytest.param(ParallelPlan(), {"admission": "optimistic"}, marks=pytest.mark.slow),
        (ParallelPlan(2, 3, 1, exchange="pass_q", placement="interleave"), {"run_ahead": 3}),
    ],
    ids=["one device, optimistic", "six devices"],
)
def test_random_use_from_eight_threads(plan: ParallelPlan, options: dict) -> None:
    soak = Soak(make_engine(36, plan=plan, **options), VOCAB, seed=1, longest=80)
    soak.sampling = [x for x in soak.sampling if not x.temperature]
    soak.run(3)
    soak.check_idle()
    soak.check_answers(lambda prompt, params: [expected_tokens(prompt, params, eos=EOS)])
    assert not soak.wrong
    assert soak.counts["length"] > 50
    assert soak.counts["cancelled"] > 5
    assert soak.counts["compared"] > 50


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["1,1,1", "1,2,1", "2,1,2"])
def test_two_minutes_of_random_use_on_devices(plan: str) -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--engine", "--minutes", "2", "--plan", plan]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["2", "3"])
def test_processes_end_with_the_one_that_is_killed(processes: str) -> None:
    command = [sys.executable, "-m", "benchmarks.kills", "--processes", processes, "--kills", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
