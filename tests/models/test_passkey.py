"""The retrieval documents: exact length, recoverable keys, the same for the same seed."""

import re

import numpy as np
import pytest

from longctx.models import passkey

STATEMENT = re.compile(r"The pass key of ([a-z]+) is (\d{5})\.")


@pytest.mark.parametrize("num_facts", [0, 1, 8])
@pytest.mark.parametrize("num_bytes", [320, 321, 512, 2048, 32768])
@pytest.mark.parametrize("seed", [0, 1])
def test_document_has_the_length_and_the_facts_asked_for(num_bytes: int, num_facts: int, seed: int) -> None:
    document = passkey.make_document(num_bytes, num_facts, seed)
    assert len(document.text.encode()) == num_bytes
    assert len(document.facts) == num_facts
    # In order and once each, with no other digits about.
    assert STATEMENT.findall(document.text) == list(document.facts.items())
    assert sum(c.isdigit() for c in document.text) == num_facts * passkey.KEY_DIGITS
    assert document.text.isascii()


def test_document_fits_to_the_last_byte() -> None:
    statement = passkey.make_document(100, 1, seed=3)
    shortest = len(passkey.statement(*next(iter(statement.facts.items())))) + 2
    for num_bytes in range(shortest, 200):
        document = passkey.make_document(num_bytes, 1, seed=3)
        assert len(document.text) == num_bytes
        assert document.facts == statement.facts
        assert len(STATEMENT.findall(document.text)) == 1
    with pytest.raises(ValueError, match="num_bytes must be at least 34 for num_facts=1, got 33"):
        passkey.make_document(shortest - 1, 1, seed=3)


def test_seed_decides_the_document() -> None:
    documents = [passkey.make_document(2048, 4, seed) for seed in (5, 5, 6)]
    assert documents[0] == documents[1]
    assert documents[0].text != documents[2].text
    assert documents[0].facts != documents[2].facts


def test_facts_are_spread_over_the_document() -> None:
    places = []
    for seed in range(50):
        text = passkey.make_document(4096, 4, seed).text
        places += [match.start() / len(text) for match in STATEMENT.finditer(text)]
    counts, _ = np.histogram(places, bins=4, range=(0, 1))
    assert counts.min() > 25


def test_names_are_distinct_lower_case_words() -> None:
    assert len(set(passkey.NAMES)) == len(passkey.NAMES) >= 200
    assert all(name.isalpha() and name.islower() for name in passkey.NAMES)


def test_filler_has_no_digits_and_ends_as_sentences_do() -> None:
    rng = np.random.default_rng(0)
    for _ in range(500):
        sentence = passkey.filler_sentence(rng)
        assert sentence[0].isupper()
        assert sentence.endswith(".")
        assert not re.search(r"\d|\n|  ", sentence)


def test_prompt_is_what_its_module_says() -> None:
    text = passkey.statement("lemon", "48213")
    prompt = passkey.prompt(text, passkey.question("lemon"))
    assert prompt == "The pass key of lemon is 48213.\nQ: What is the pass key of lemon?\nA: "


@pytest.mark.parametrize("num_facts", [-1, len(passkey.NAMES) + 1])
def test_number_of_facts_out_of_range(num_facts: int) -> None:
    with pytest.raises(ValueError, match="num_facts must be between 0 and"):
        passkey.make_document(2048, num_facts)
