"""Tiers whose files, memory and disk go wrong under traffic: no wrong answer, nothing lost, nothing left behind."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tier_soak import PLANS, check_nothing_is_left, check_traffic, open_engine, soak

HERE = Path(__file__).parent


def test_no_fault_of_tiers_makes_a_wrong_answer(tmp_path: Path) -> None:
    soak(tmp_path, 4.0, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_faults_for_minutes(tmp_path: Path, seed: int) -> None:
    soak(tmp_path, 200.0, seed)


@pytest.mark.slow
def test_engines_that_are_killed_again_and_again(tmp_path: Path) -> None:
    """At any moment of writing; the next one finds what is there, and answers rightly."""
    paths = os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parent.parent)])
    generator = random.Random(0)
    loaded = 0
    for seed in range(12):
        process = subprocess.Popen(
            [sys.executable, str(HERE / "tier_soak.py"), str(tmp_path), str(seed)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": paths},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(generator.uniform(0.5, 3.0))
        assert process.poll() is None, "it has ended by itself: an answer was wrong"
        process.send_signal(signal.SIGKILL)
        lines = process.stdout.read().splitlines()
        process.wait(20)
        process.stdout.close()
        loaded += sum(int(line.split()[1]) for line in lines)
    assert loaded > 0
    engine = open_engine(tmp_path, PLANS[0])
    assert check_traffic(engine, random.Random(1), 10) > 0
    check_nothing_is_left(engine)
    engine.pages.close()
