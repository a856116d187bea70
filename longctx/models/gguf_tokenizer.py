"""The tokenizer of a GGUF file: its metadata become a tokenizer of the `tokenizers` library.

Byte-level BPE (`gpt2`), whose pre-tokenizer the metadata name, and the BPE of SentencePiece (`llama`), built as the
`tokenizer.json` of the original models is, so that a text has the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longctx.models.chat_template import ChatTemplate
from longctx.models.gguf import read_header
from longctx.models.gguf_config import end_ids
from longctx.models.validation import check_bool, check_integer, check_token_ids, shown

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Words of Llama 3 and Qwen2: `%s` is how many digits are one (tokenizer.json of these models).
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3, _SMOLLM, _QWEN2, _GPT2 = "llama-bpe", "smollm", "qwen2", "gpt-2"
# The pre-tokenizers by the names that the metadata use, some of which mean the same.
_PRE_TOKENIZERS = {
    **{_LLAMA3: _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3},
    **{_SMOLLM: _SMOLLM, _QWEN2: _QWEN2, "deepseek-r1-qwen": _QWEN2, _GPT2: _GPT2},
}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_LONGEST_PIECE = 256  # characters; SentencePiece's default is 16
_SPACE = "\u2581"
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


class _Vocabulary:
    """Checked metadata of tokens; TypeError or ValueError names the key that is missing or wrong."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.model = self._get("model")
        tokens = self._get("tokens")
        if not isinstance(tokens, list) or not tokens:
            raise ValueError("tokenizer.ggml.tokens must be a list of strings")
        self.tokens: list[str] = tokens
        types = self._get("token_type", np.ones(len(tokens), np.int32))
        self.types = self._numbers("token_type", types).tolist()

    def _get(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}", default)

    def _numbers(self, name: str, values: Any) -> np.ndarray:
        if not isinstance(values, np.ndarray) or len(values) != len(self.tokens):
            raise ValueError(f"tokenizer.ggml.{name} must be {len(self.tokens)} numbers, one for each token")
        return values

    def of_type(self, *types: int) -> dict[str, int]:
        """The tokens of these types, and their ids."""
        pairs = zip(self.tokens, self.types, strict=True)
        return {token: id for id, (token, type) in enumerate(pairs) if type in types}

    @property
    def used(self) -> dict[str, int]:
        """All tokens but those that fill up the embedding, and their ids."""
        return self.of_type(*{*self.types} - {_UNUSED})

    @property
    def scores(self) -> np.ndarray:
        return self._numbers("scores", self._get("scores"))

    @property
    def merges(self) -> list[tuple[str, str]]:
        merges = self._get("merges")
        if not isinstance(merges, list):
            raise ValueError("tokenizer.ggml.merges must be a list of strings")
        pairs = []
        for merge in merges:
            left, _, right = merge.partition(" ")
            if not left or not right:
                raise ValueError(f"tokenizer.ggml.merges has {shown(merge)}, which is not two tokens")
            pairs.append((left, right))
        return pairs

    @property
    def pre_tokenizer(self) -> str:
        name = self._get("pre")
        if not isinstance(name, str) or name not in _PRE_TOKENIZERS:
            raise ValueError(
                f"tokenizer.ggml.pre is {shown(name)}, which is not supported, only {', '.join(_PRE_TOKENIZERS)}"
            )
        return _PRE_TOKENIZERS[name]

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        check_bool(f"tokenizer.ggml.{name}", value)
        return value

    def special_tokens(self) -> dict[str, str]:
        """The texts of `bos_token` and the like."""
        texts = {}
        for name, own in _SPECIAL.items():
            id = self._get(f"{own}_token_id")
            if id is not None:
                key = f"tokenizer.ggml.{own}_token_id"
                texts[name] = self.tokens[check_integer(key, id, 0, len(self.tokens) - 1)]
        return texts


def read_gguf_tokenizer(
    path: Path,
) -> tuple[Tokenizer, tuple[int, ...], dict[str, str], ChatTemplate | None]:
    """Read the tokenizer of a GGUF file, the ids that end a generation, special tokens and the chat template.

    Raises:
      FileNotFoundError, CheckpointError: as `read_header`.
      ValueError: the tokenizer is of an unsupported kind, or contradicts itself; the message names the key.
    """
    metadata, _ = read_header(path)
    try:
        vocabulary = _Vocabulary(metadata)
        if vocabulary.model == "gpt2":
            tokenizer, adds_bos = _byte_level(vocabulary)
        elif vocabulary.model == "llama":
            tokenizer, adds_bos = _sentencepiece(vocabulary), True
        else:
            raise ValueError(f"tokenizer.ggml.model is {shown(vocabulary.model)}; supported: gpt2, llama")
        special_tokens = vocabulary.special_tokens()
        _add_special_tokens(tokenizer, vocabulary, special_tokens, adds_bos)
        eos_ids = check_token_ids("tokenizer.ggml.eos_token_id", end_ids(metadata), len(vocabulary.tokens))
        template = metadata.get("tokenizer.chat_template")
        if not isinstance(template, str | None):
            raise ValueError(f"tokenizer.chat_template must be a string, got {shown(template)}")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    return tokenizer, eos_ids, special_tokens, None if template is None else ChatTemplate(path, template)


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether it begins texts with `bos_token` by default."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    kind = vocabulary.pre_tokenizer
    # Llama 3 takes a word that is a token as it is, even where no merges lead there.
    model = models.BPE(vocabulary.used, vocabulary.merges, ignore_merges=kind == _LLAMA3)
    tokenizer = Tokenizer(model)
    if kind == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    splits: dict[str, list[Any]] = {
        _LLAMA3: [pre_tokenizers.Split(Regex(_WORDS % "{1,3}"), "isolated")],
        _QWEN2: [pre_tokenizers.Split(Regex(_WORDS % ""), "isolated")],
        _SMOLLM: [pre_tokenizers.Digits(individual_digits=True)],
        _GPT2: [],
    }
    is_split = kind in (_LLAMA3, _QWEN2)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not is_split)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits[kind], byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, kind == _LLAMA3


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = next(iter(vocabulary.of_type(_UNKNOWN)), None)
    model = models.BPE(
        vocabulary.used,
        _merges_by_score(vocabulary),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=bool(vocabulary.of_type(_BYTE)),
    )
    tokenizer = Tokenizer(model)
    has_prefix = vocabulary.flag("add_space_prefix", True)
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece has no merges: any two pieces are merged that make a third, those of the highest score first."""
    pieces = vocabulary.of_type(_NORMAL)
    scores = vocabulary.scores.tolist()
    merges = []
    for piece, id in pieces.items():
        if len(piece) > _LONGEST_PIECE:
            raise ValueError(
                f"tokenizer.ggml.tokens has a piece of {len(piece)} characters, the most is {_LONGEST_PIECE}"
            )
        for at in range(1, len(piece)):
            left, right = pieces.get(piece[:at]), pieces.get(piece[at:])
            if left is not None and right is not None:
                merges.append((-scores[id], left, right))
    merges.sort()
    tokens = vocabulary.tokens
    return [(tokens[left], tokens[right]) for _, left, right in merges]


def _add_special_tokens(
    tokenizer: Tokenizer, vocabulary: _Vocabulary, special_tokens: Mapping[str, str], adds_bos: bool
) -> None:
    from tokenizers import AddedToken, processors

    for types, is_special in (((_CONTROL, _UNKNOWN), True), ((_USER_DEFINED,), False)):
        tokens = vocabulary.of_type(*types)
        added = [AddedToken(token, normalized=False, special=is_special) for token in tokens if token]
        tokenizer.add_special_tokens(added) if is_special else tokenizer.add_tokens(added)
    ends = []
    for name, flag, default in (("bos_token", "add_bos_token", adds_bos), ("eos_token", "add_eos_token", False)):
        ends.append(special_tokens.get(name) if vocabulary.flag(flag, default) else None)
    bos, eos = ends
    if bos is not None or eos is not None:
        used = {token: tokenizer.token_to_id(token) for token in ends if token is not None}
        template = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=list(used.items()))
