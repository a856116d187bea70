"""Texts that are encoded by pieces have the ids that the library gives them as a whole."""

import pickle
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from longctx.models import text_pieces
from longctx.models.text_pieces import PieceEncoder, can_cut, of_owner, pieces
from longctx.models.tokenizer import HFTokenizer

LIKE_LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
WORDS = [
    "It's",
    "we'LL",
    " the",
    "The",
    "  ",
    "\n",
    "\n\n",
    " \n x",
    "42",
    " 1234567",
    "--",
    " ==",
    "é",
    "日本",
    "🦙",
    ".",
    "<|a|>",
    "\t",
]
TEXTS = st.lists(
    st.one_of(st.sampled_from(WORDS), st.sampled_from([" a", " B", "c", "D"]), st.text(max_size=3)), max_size=80
)


def split(*regexes: str) -> Any:
    parts = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in regexes]
    return pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def made(splitter: Any, *added: AddedToken) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = splitter
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>", "</s>", "<|a|>"],
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(
        ["".join(WORDS) * 3, "the The cat that's that\n\n  of 1234 == --\n  \n", " ".join(WORDS)], trainer
    )
    backend.add_tokens(list(added))
    ends = [("<s>", backend.token_to_id("<s>")), ("</s>", backend.token_to_id("</s>"))]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return backend


LIKE_GPT2 = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
LIKE_GPT4 = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
LIKE_DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s+(?!\S)|\s+",
)
BACKENDS = [
    made(LIKE_GPT2),
    made(split(LIKE_LLAMA)),
    made(split(r"[\r\n]", LIKE_LLAMA), AddedToken("  "), AddedToken("<|b|>", rstrip=True)),
    made(split(LIKE_GPT4)),
    made(split(*LIKE_DEEPSEEK)),
]


@pytest.fixture(scope="module", autouse=True)
def short_pieces() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_pieces, "PIECE", 5)
        yield


@given(TEXTS.map("".join), st.booleans(), st.sampled_from(range(len(BACKENDS))))
def test_pieces_have_the_ids_of_the_whole_text(text: str, add_special_tokens: bool, number: int) -> None:
    backend = BACKENDS[number]
    assert can_cut(backend)
    assert "".join(pieces(text)) == text
    expected = backend.encode(text, add_special_tokens=add_special_tokens).ids
    assert PieceEncoder(backend).encode(text, add_special_tokens).tolist() == expected


class Counting:
    """A tokenizer that counts the characters which it has encoded."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend, self.count = backend, 0

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        self.count += len(text)
        return self.backend.encode(text, add_special_tokens=add_special_tokens)


def test_what_texts_begin_with_is_encoded_once() -> None:
    backend = Counting(BACKENDS[0])
    encoder = PieceEncoder(backend)  # type: ignore[arg-type]
    text = "one two three four five six seven eight nine ten " * 20
    encoder.encode(text, False)
    backend.count = 0
    assert encoder.encode(text + "eleven twelve", True).tolist() == BACKENDS[0].encode(text + "eleven twelve").ids
    assert 0 < backend.count < 40
    long = "x" * 10**5  # no word ends: it is not remembered
    for times in (1, 2):
        assert encoder.encode(long, False).tolist() == BACKENDS[0].encode(long, add_special_tokens=False).ids
        assert backend.count > times * len(long)


def test_an_owner_finds_nothing_of_what_others_have_encoded() -> None:
    backend = Counting(BACKENDS[0])
    encoder = PieceEncoder(backend)  # type: ignore[arg-type]
    text = " ".join(a + b for a in ascii_lowercase for b in ascii_lowercase)  # no two pieces are equal

    def encoded(*owner: str) -> int:
        backend.count = 0
        with of_owner(*owner):
            encoder.encode(text, False)
        return backend.count

    assert encoded("ann", "") == len(text)
    assert encoded("ann", "") == 0
    assert encoded("ben", "") == encoded("ann", "salt") == len(text)
    with of_owner("ann"), pytest.raises(ZeroDivisionError), of_owner("x"):
        1 / 0  # noqa: B018
    assert encoded("ann", "salt") == 0


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_pieces, "MOST_BYTES", 20_000)
    backend = Counting(BACKENDS[0])
    encoder = PieceEncoder(backend)  # type: ignore[arg-type]
    words = [a + b for a in ascii_lowercase for b in ascii_lowercase]
    kept, long = " ".join(words[:10]), " ".join(words)
    for _ in range(3):
        encoder.encode(long, False)
        encoder.encode(kept, False)
    backend.count = 0
    encoder.encode(kept, False)
    assert backend.count == 0  # it was used last
    assert encoder.encode(long, False).tolist() == BACKENDS[0].encode(long, add_special_tokens=False).ids
    assert backend.count > len(long) // 2  # the rest had to go


@pytest.mark.parametrize(
    "backend",
    [
        made(pre_tokenizers.Metaspace()),
        made(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        made(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
        made(split(r"\p{L}+ \p{L}+")),
        made(split(r"(?<=q) \p{L}+", LIKE_LLAMA)),
        made(split(r"New York", LIKE_LLAMA)),
        made(split(r'"[^"]*"| ?\w+|\s+|.')),
        made(split(r"#[^\n]*\n?| ?\w+|\s+|.")),
        made(split(r"\d+ ?[a-z]+ [a-z]+| ?[a-z]+|.")),
        made(split(r"[\D]+|\d", LIKE_LLAMA)),
        made(split(r"(?:\p{L}| )+x", LIKE_LLAMA)),
        made(split(r"[ -~]{9}", LIKE_LLAMA)),
        made(pre_tokenizers.Sequence([pre_tokenizers.Split("ing ", "isolated"), LIKE_GPT2])),
        made(LIKE_GPT2, AddedToken("foo ")),
        made(LIKE_GPT2, AddedToken(" foo", single_word=True)),
        made(LIKE_GPT2, AddedToken("foo", rstrip=True)),
        made(split(r"^ ", LIKE_LLAMA)),
        made(split(r"\p{L}(?= \p{L})", LIKE_LLAMA)),
        made(LIKE_GPT2, AddedToken("New York")),
        made(LIKE_GPT2, AddedToken("<end>", lstrip=True)),
    ],
)
def test_tokenizers_that_see_across_words_are_not_cut(backend: Tokenizer) -> None:
    assert not can_cut(backend)


def test_normalizers_and_other_models_are_not_cut() -> None:
    backend = made(LIKE_GPT2)
    backend.normalizer = normalizers.NFC()
    assert not can_cut(backend)
    words = Tokenizer(models.WordLevel({"a": 0}, "a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    assert not can_cut(words)


def test_a_tokenizer_with_pieces_can_be_pickled() -> None:
    tokenizer = HFTokenizer(Path("file"), made(LIKE_GPT2), (1,), {}, None)
    text = "of all the words " * 1000
    ids = tokenizer.encode(text)
    assert ids == tokenizer.backend.encode(text).ids
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode(text) == ids
