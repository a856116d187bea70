"""Training batches of the built-in model: short documents that state pass keys, and questions about them.

A batch depends on the number of its step only, so that a resumed training gives the same weights.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from longctx.models import passkey

BOS, EOS = 256, 257
TOKENS_PER_BATCH = 3840
TEXT_WEIGHT, FIRST_DIGIT_WEIGHT = 0.03, 3.0  # weights in the loss, where every other byte of an answer has weight 1
SEED = 77


@dataclass(frozen=True)
class Difficulty:
    """How hard the sequences of a step are."""

    tokens: int  # of a sequence
    document_tokens: int  # at most; questions take the rest
    key_digits: int
    filler_per_statement: float  # on average; a sequence draws its own between 0 and twice that
    short_wording: float  # probability of "lemon is 48213. ... Q: lemon?"
    jump_bits: float  # a jump is up to 2**jump_bits positions
    jump_probability: float  # at a sentence; a sequence draws its own up to this
    multiplicity_bits: float

    @staticmethod
    def at(step: int) -> "Difficulty":
        def ramp(start: int, stop: int, first: float, last: float) -> float:
            return first + (last - first) * min(1.0, max(0.0, (step - start) / (stop - start)))

        return Difficulty(
            tokens=384 if step < 500 else 768,
            document_tokens=int(ramp(100, 350, 100, 208)) if step < 500 else 560,
            key_digits=int(ramp(75, 175, 1, passkey.KEY_DIGITS)),
            filler_per_statement=ramp(100, 400, 0.05, 0.6) if step < 500 else 2.0,
            short_wording=ramp(100, 300, 1.0, 0.15),
            jump_bits=17,
            jump_probability=ramp(50, 250, 0.0, 0.7),
            multiplicity_bits=ramp(100, 500, 0, 10),
        )


class Batch(NamedTuple):
    """Arrays `[B, T]`, and `log_multiplicity` `[B]`. `segments`: 0 the document, j its j-th question, -1 padding."""

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    is_filler: np.ndarray
    weights: np.ndarray
    log_multiplicity: np.ndarray


@functools.cache
def filler_pool() -> list[np.ndarray]:
    return [encode(passkey.filler_sentence(np.random.default_rng(1234 + i)) + " ") for i in range(8000)]


def encode(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def random_name(rng: np.random.Generator) -> str:
    """Mostly a listed name, else random syllables, so that the model generalizes to other names."""
    if rng.random() < 0.7:
        return passkey.NAMES[rng.integers(len(passkey.NAMES))]
    consonants, vowels = "bcdfghjklmnprstvwz", "aeiou"
    syllables = rng.integers(1, 4)
    name = ""
    for _ in range(syllables):
        name += consonants[rng.integers(len(consonants))] + vowels[rng.integers(len(vowels))]
    if syllables == 1 or rng.random() < 0.5:
        name += consonants[rng.integers(len(consonants))]
    return name


def make_sequence(rng: np.random.Generator, difficulty: Difficulty) -> tuple[np.ndarray, ...]:
    """Make a document and questions about it: one row of each array of a `Batch`."""
    short = rng.random() < difficulty.short_wording
    filler_per_statement = difficulty.filler_per_statement * rng.random() * 2

    keys: dict[str, str] = {}
    sentences: list[tuple[np.ndarray, bool]] = []
    room = difficulty.document_tokens - 1
    while True:
        is_filler = rng.random() >= 1 / (1 + filler_per_statement)
        if is_filler:
            sentence = filler_pool()[rng.integers(len(filler_pool()))]
        else:
            while (name := random_name(rng)) in keys:
                pass
            key = passkey.random_key(rng)[: difficulty.key_digits]
            sentence = encode((f"{name} is {key}." if short else passkey.statement(name, key)) + " ")
        room -= len(sentence)
        if room < 0:
            break
        sentences.append((sentence, is_filler))
        if not is_filler:
            keys[name] = key
    if not keys:
        return make_sequence(rng, difficulty)
    if filler_per_statement > 0.3:
        rng.shuffle(sentences)

    tokens, positions, weights = np.zeros((3, difficulty.tokens))
    segments, is_filler_token = np.full(difficulty.tokens, -1), np.zeros(difficulty.tokens, bool)
    tokens[0], segments[0] = BOS, 0
    end, position = 1, 1
    jump_probability = rng.random() * difficulty.jump_probability

    def jump() -> int:
        jumps = jump_probability and rng.random() < jump_probability
        return int(2 ** rng.uniform(0, difficulty.jump_bits)) if jumps else 0

    for sentence, is_filler in sentences:
        position += jump()
        span = slice(end, end + len(sentence))
        tokens[span], segments[span], is_filler_token[span] = sentence, 0, is_filler
        positions[span] = position + np.arange(len(sentence))
        end, position = span.stop, position + len(sentence)
    position += jump()
    weights[:end] = TEXT_WEIGHT

    order = rng.permutation(len(keys))
    for number in range(difficulty.tokens):
        name, key = list(keys.items())[order[number % len(order)]]
        asked = name + "?" if short else passkey.question(name)
        question = encode(passkey.prompt("", asked))
        text = np.concatenate([question, encode(key), [EOS]])
        span, answer = slice(end, end + len(text)), end + len(question) - 1
        if span.stop > difficulty.tokens:
            break
        tokens[span], segments[span] = text, number + 1
        positions[span] = position + np.arange(len(text))
        weights[end:answer], weights[answer : span.stop - 1] = TEXT_WEIGHT, 1.0
        weights[answer] = FIRST_DIGIT_WEIGHT
        end = span.stop
    return tokens, positions, segments, is_filler_token, weights


def make_batch(step: int) -> Batch:
    """Make the batch of a step, which is the same in every run."""
    rng, difficulty = np.random.default_rng([SEED, step]), Difficulty.at(step)
    rows = [make_sequence(rng, difficulty) for _ in range(TOKENS_PER_BATCH // difficulty.tokens)]
    tokens, positions, segments, is_filler, weights = (np.stack(arrays) for arrays in zip(*rows, strict=True))
    tokens = tokens.astype(np.int32)
    return Batch(
        tokens=tokens,
        targets=np.pad(tokens[:, 1:], ((0, 0), (0, 1))),
        positions=positions.astype(np.int32),
        segments=segments,
        is_filler=is_filler,
        weights=weights.astype(np.float32),
        log_multiplicity=(rng.random(len(rows)) * difficulty.multiplicity_bits * np.log(2)).astype(np.float32),
    )
