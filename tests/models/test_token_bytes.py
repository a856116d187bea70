"""The bytes of tokens join to those of a text, of every kind of tokenizer, where characters are spread over tokens."""

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from longctx.models import ByteTokenizer
from longctx.models.tokenizer import HFTokenizer, TokenBytes

TEXT = 'plain text, "quoted" \\ and\ttabs; caf\u00e9, \u4f60\u597d, \U0001f680!\n'


def byte_level() -> HFTokenizer:
    """Of few merges, so that most characters are several tokens."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"]
    )
    made.train_from_iterator([TEXT], trainer)
    return HFTokenizer(Path("byte_level"), made, (0,), {"eos_token": "<|end|>"}, None)


def byte_fallback() -> HFTokenizer:
    """As SentencePiece's: what the vocabulary doesn't have is bytes by name."""
    letters = sorted(set("plain text quoted and tabs"))
    tokens = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *(x for x in letters if x != " ")]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<s>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<s>"])
    return HFTokenizer(Path("byte_fallback"), made, (), {"bos_token": "<s>"}, None)


@pytest.mark.parametrize("make", [ByteTokenizer, byte_level, byte_fallback])
def test_bytes_of_tokens_join_to_the_text(make: type) -> None:
    tokenizer = make()
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    pieces = [TokenBytes(tokenizer).of(id) for id in ids]
    assert b"".join(pieces) == TEXT.encode()
    assert any(piece[0] >= 0x80 and len(piece) == 1 for piece in pieces)  # a part of a character


def test_special_tokens_have_their_names() -> None:
    assert TokenBytes(byte_level()).of(0) == b"<|end|>"
    assert TokenBytes(byte_fallback()).of(0) == b"<s>"
    assert TokenBytes(ByteTokenizer()).of(257) == b""


def test_ids_that_no_token_has_are_empty() -> None:
    assert TokenBytes(byte_level()).of(10**6) == b""
