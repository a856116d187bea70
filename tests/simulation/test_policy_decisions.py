"""Policies decide as they did: what they decide on three small traces is stored, and a change has to say so."""

import copy
import json

import pytest
from policy_decisions import CASES, REWRITE, STORED, decide, difference

from longctx.serving.scheduler.policy import POLICIES

STORED_DECISIONS = json.loads(STORED.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", CASES)
def test_policies_decide_as_stored(name: str) -> None:
    stored = STORED_DECISIONS[name]
    assert stored.keys() == POLICIES.keys(), f"policies were added or removed; {REWRITE}"
    for policy in POLICIES:
        changed = difference(stored[policy], decide(name, policy))
        if changed is not None:
            pytest.fail(
                f"{policy} decides otherwise on {name}; the first difference:\n{changed}\n"
                f"If that is meant, rewrite {STORED.name} ({REWRITE}) and say in the commit why.",
                pytrace=False,
            )


def test_traces_have_what_policies_differ_in() -> None:
    """Policies decide differently, some preempt, prefixes are shared, and prompts grow over ranks."""
    for name, policies in STORED_DECISIONS.items():
        assert len({str(result["decisions"]) for result in policies.values()}) >= 4, name
    tight = [result["figures"] for result in STORED_DECISIONS["shared_prefixes"].values()]
    assert all(figures["cached_tokens"] for figures in tight)
    assert any(figures["preemptions"] for figures in tight)
    assert any("@0,1" in line for line in STORED_DECISIONS["long_and_short"]["ilrs"]["decisions"])


def test_the_first_difference_is_shown() -> None:
    stored = STORED_DECISIONS["short_mixed"]["fcfs"]
    assert difference(stored, stored) is None
    found = copy.deepcopy(stored)
    line = found["decisions"][3]
    found["decisions"][3] = line.replace("decode 0-2", "decode 0-1")
    found["decisions"][5:] = []
    text = difference(stored, found)
    assert text is not None
    assert text.splitlines() == [
        f"  after   {stored['decisions'][2]}",
        f"  stored  {line}",
        f"  now     {found['decisions'][3]}",
    ]
    found = copy.deepcopy(stored)
    found["decisions"][3] = "0000" + line[4:]
    text = difference(stored, found)
    assert text is not None
    assert "slots, pages, ranks" in text
    found = copy.deepcopy(stored)
    found["figures"]["ttft_mean"] *= 2
    text = difference(stored, found)
    assert text is not None
    assert "ttft_mean: stored" in text
