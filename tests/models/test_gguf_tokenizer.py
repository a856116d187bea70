"""Tokenizers of GGUF files give the tokens of the original: of `tokenizers`, transformers and SentencePiece."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
import transformers
from gguf_files import write_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from longctx.models import Tokenizer, load_tokenizer

ROOT = Path(__file__).parents[2]
CORPUS = [line for path in sorted(ROOT.glob("docs/*.md")) for line in path.read_text(encoding="utf-8").splitlines()]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
CONTROLS = ["<|begin_of_text|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}{{ bos_token }}{{ message.content }}{{ eos_token }}{% endfor %}"
KINDS = ["llama-bpe", "smollm", "qwen2", "sentencepiece"]
EXAMPLES = [
    "",
    " ",
    "A long context, read once; it's not re-read. I'LL see 12345 pages in 2026, ½ of them at 10²³ and Ⅷ.",
    "  leading, trailing  \n\n\tand\r\n  inner   spaces   ",
    "Zürich, Zu\u0308rich, 東京 🦙🦙 \u200b naïve Straße e\u0301\ufb01",
    "<|im_start|>user\nWhat is <think> for?<|im_end|>\n<s></s><unk><0x41>",
    "def page(x): return x[0:16] or {'k': [1, 22, 333, 4444]}  # 0x1F",
    "unmergeable ▁▁ Ġ \x00 \x7f",
]


def trained() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a byte-level BPE, with one word that merges do not lead to."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab = model["vocab"] | {"Ġunmergeable": len(model["vocab"])}
    return vocab, [tuple(merge) for merge in model["merges"]]


def original(kind: str) -> tokenizers.Tokenizer:
    """The tokenizer as in the `tokenizer.json` of Llama 3, SmolLM2 or Qwen2."""
    vocab, merges = trained()
    if kind == "qwen2":
        tokenizer = transformers.Qwen2Tokenizer(vocab, merges).backend_tokenizer
    else:
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=kind == "llama-bpe"))
        split = pre_tokenizers.Digits(individual_digits=True)
        if kind == "llama-bpe":
            split = pre_tokenizers.Split(tokenizers.Regex(GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]), "isolated")
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "smollm")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, last])
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(CONTROLS)
    tokenizer.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    if kind == "llama-bpe":
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{CONTROLS[0]} $A", special_tokens=[(CONTROLS[0], tokenizer.token_to_id(CONTROLS[0]))]
        )
    return tokenizer


def metadata(tokenizer: tokenizers.Tokenizer, kind: str) -> dict[str, Any]:
    """What llama.cpp's converter writes of it; the vocabulary is filled up to a round number."""
    contents = json.loads(tokenizer.to_str())
    added = {token["id"]: token["special"] for token in contents["added_tokens"]}
    tokens = {id: token for token, id in tokenizer.get_vocab().items()}
    size = -(-len(tokens) // 128) * 128
    kinds = {id: CONTROL if is_special else USER_DEFINED for id, is_special in added.items()}
    types = [kinds.get(id, NORMAL) if id in tokens else UNUSED for id in range(size)]
    return {
        "ggml.model": "gpt2",
        "ggml.pre": kind,
        "ggml.tokens": [tokens.get(id, f"[PAD{id}]") for id in range(size)],
        "ggml.token_type": types,
        "ggml.merges": [" ".join(merge) for merge in contents["model"]["merges"]],
        "ggml.bos_token_id": tokenizer.token_to_id(CONTROLS[0]),
        "ggml.eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "chat_template": TEMPLATE,
    }


def trained_sentencepiece() -> sentencepiece.SentencePieceProcessor:
    """As Llama 2's: spaces are part of pieces, digits are pieces, unknown characters are bytes."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=1000,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(processor: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    ids = range(processor.get_piece_size())
    kinds = ((processor.is_unknown, UNKNOWN), (processor.is_control, CONTROL), (processor.is_byte, BYTE))
    return {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.tokens": [processor.id_to_piece(id) for id in ids],
        "ggml.scores": [float(processor.get_score(id)) for id in ids],
        "ggml.token_type": [next((type for test, type in kinds if test(id)), NORMAL) for id in ids],
        "ggml.bos_token_id": processor.bos_id(),
        "ggml.eos_token_id": processor.eos_id(),
        "ggml.unknown_token_id": processor.unk_id(),
    }


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Any]]:
    """Of each kind the tokenizer of a file, and the original."""
    found: dict[str, tuple[Tokenizer, Any]] = {}
    directory = tmp_path_factory.mktemp("tokenizers")
    for kind in KINDS[:3]:
        tokenizer = original(kind)
        found[kind] = load_tokenizer(write_tokenizer(directory / f"{kind}.gguf", metadata(tokenizer, kind))), tokenizer
    processor = trained_sentencepiece()
    path = write_tokenizer(directory / "sentencepiece.gguf", sentencepiece_metadata(processor))
    return found | {"sentencepiece": (load_tokenizer(path), processor)}


def with_examples(test: Any) -> Any:
    for text in EXAMPLES:
        test = example(text=text)(test)
    return test


@pytest.mark.parametrize("kind", KINDS[:3])
@with_examples
@settings(max_examples=200)
@given(text=st.text(st.characters(codec="utf-8"), max_size=40) | st.text("aA'st 1²\n\r\té東<|im_start|>", max_size=40))
def test_byte_level_tokens_are_those_of_the_original(pairs: dict[str, Any], kind: str, text: str) -> None:
    ours, theirs = pairs[kind]
    for add_special_tokens in (True, False):
        ids = theirs.encode(text, add_special_tokens=add_special_tokens).ids
        assert ours.encode(text, add_special_tokens) == ids
        assert ours.decode(ids) == theirs.decode(ids)


@with_examples
@settings(max_examples=200)
@given(text=st.text(st.characters(codec="utf-8"), max_size=40) | st.text("the cache pages 19\né東", max_size=40))
def test_tokens_of_sentencepiece(pairs: dict[str, Any], text: str) -> None:
    ours, theirs = pairs["sentencepiece"]
    if any(token in text for token in ("<s>", "</s>", "<unk>")):
        return  # transformers takes them for special tokens, as here; SentencePiece for text
    ids = theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False) == ids
    assert ours.encode(text) == [theirs.bos_id(), *ids]
    assert ours.decode(ids) == theirs.decode(ids)


def test_special_tokens_ends_and_template(pairs: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = pairs["smollm"]
    assert ours.bos_id == theirs.token_to_id(CONTROLS[0])
    # The end that the metadata name comes first, and the end of a turn of Llama 3 is known by its text.
    assert ours.eos_ids == (theirs.token_to_id("<|im_end|>"), theirs.token_to_id("<|eot_id|>"))
    assert ours.apply_chat_template([{"role": "user", "content": "Hi"}]) == "<|begin_of_text|>Hi<|im_end|>"
    assert ours.decode([ours.bos_id, *ours.encode("Hi"), *ours.eos_ids]) == "Hi"
    assert pairs["sentencepiece"][0].eos_ids == (2,)
    with pytest.raises(ValueError, match="has no chat template"):
        pairs["sentencepiece"][0].apply_chat_template([])


@pytest.mark.parametrize(("adds", "first", "last"), [(True, True, False), (False, False, True)])
def test_metadata_say_what_texts_begin_and_end_with(adds: bool, first: bool, last: bool, tmp_path: Path) -> None:
    tokenizer = original("qwen2")
    flags = {"ggml.add_bos_token": adds, "ggml.add_eos_token": not adds}
    ours = load_tokenizer(write_tokenizer(tmp_path / "model.gguf", metadata(tokenizer, "qwen2") | flags))
    ids, plain = ours.encode("Hi there"), tokenizer.encode("Hi there").ids
    assert ids == [ours.bos_id] * first + plain + [ours.eos_ids[0]] * last


TINY = {
    "ggml.model": "gpt2",
    "ggml.pre": "smollm",
    "ggml.tokens": ["a", "b", "ab", "<s>"],
    "ggml.token_type": [NORMAL, NORMAL, NORMAL, CONTROL],
    "ggml.merges": ["a b"],
    "ggml.bos_token_id": 3,
}
SCORED = {"ggml.model": "llama", "ggml.scores": [0.0, 0.0, 1.0, 0.0]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'; supported: gpt2, llama"),
        ({"ggml.model": None}, "tokenizer.ggml.model is None; supported: gpt2, llama"),
        ({"ggml.pre": "tekken"}, "tokenizer.ggml.pre is 'tekken', which is not supported, only llama-bpe"),
        ({"ggml.pre": None}, "tokenizer.ggml.pre is None"),
        ({"ggml.tokens": None}, "tokenizer.ggml.tokens must be a list of strings"),
        ({"ggml.tokens": [1, 2, 3, 4]}, "tokenizer.ggml.tokens must be a list of strings"),
        ({"ggml.token_type": [1, 1]}, "tokenizer.ggml.token_type must be 4 numbers, one for each token"),
        ({"ggml.merges": None}, "tokenizer.ggml.merges must be a list of strings"),
        ({"ggml.merges": ["ab"]}, "tokenizer.ggml.merges has 'ab', which is not two tokens"),
        ({"ggml.merges": ["a c"]}, "Token `c` out of vocabulary"),
        ({"ggml.bos_token_id": 4}, "tokenizer.ggml.bos_token_id must be an integer of 0 to 3, got 4"),
        ({"ggml.eos_token_id": 4}, "tokenizer.ggml.eos_token_id must be an integer of 0 to 3, got 4"),
        ({"ggml.eot_token_id": "x"}, "tokenizer.ggml.eos_token_id must be an integer, got 'x'"),
        ({"ggml.add_bos_token": 1}, "tokenizer.ggml.add_bos_token must be True or False, got 1"),
        ({"chat_template": 1}, "tokenizer.chat_template must be a string, got 1"),
        (SCORED | {"ggml.scores": [0.0]}, "tokenizer.ggml.scores must be 4 numbers"),
        (SCORED | {"ggml.tokens": ["a", "b", "a" * 257, "<s>"]}, "a piece of 257 characters, the most is 256"),
    ],
)
def test_metadata_that_are_wrong_are_named(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "model.gguf", TINY | changes)
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (below)
        load_tokenizer(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert words in str(raised.value)


def test_a_vocabulary_of_two_tokens_loads(tmp_path: Path) -> None:
    """The file that the damaged ones above begin with."""
    for changes in ({}, SCORED):
        ours = load_tokenizer(
            write_tokenizer(tmp_path / "model.gguf", TINY | changes | {"ggml.add_space_prefix": False})
        )
        assert ours.encode("ab", add_special_tokens=False) == [2]
        assert np.ptp(ours.encode("aab")) > 0
