"""Tokenizers: Hugging Face's `tokenizer.json`, and plain bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

BYTE_TOKENIZER_CLASS = "longctx.ByteTokenizer"
"""The `tokenizer_class` in a `tokenizer_config.json` that selects `ByteTokenizer`."""


class Tokenizer(Protocol):
    """The interface of a tokenizer that generation and serving need."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a generation; there may be several, or none."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text. Pass `add_special_tokens=False` for a rendered chat, which contains its own."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text without special tokens. Invalid UTF-8 becomes U+FFFD."""
        ...

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt for `messages`, dicts of `role` and `content`. ValueError if there is no template."""
        ...


class ByteTokenizer:
    """UTF-8 bytes are ids 0 to 255; 256 begins a sequence and 257 ends it."""

    vocab_size: int = 258
    bos_id: int | None = 256
    eos_ids: tuple[int, ...] = (257,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = list(text.encode("utf-8"))
        return [256, *ids] if add_special_tokens else ids

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(id for id in ids if id < 256).decode("utf-8", errors="replace")

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        raise ValueError("the byte tokenizer has no chat template")


class HFTokenizer:
    """A tokenizer of a `tokenizer.json`, run by the `tokenizers` library."""

    def __init__(
        self,
        path: Path,
        eos_ids: tuple[int, ...],
        special_tokens: Mapping[str, str],
        chat_template: str | None,
    ) -> None:
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"{path} is not a tokenizer that `tokenizers` reads: {error}") from error
        # Files may contain the padding and truncation settings of training.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._special_tokens = dict(special_tokens)
        self._chat_template = chat_template
        self.bos_id: int | None = self._special_id("bos_token")
        eos_id = self._special_id("eos_token")
        self.eos_ids: tuple[int, ...] = eos_ids or (() if eos_id is None else (eos_id,))

    def _special_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._tokenizer.token_to_id(token)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        from longctx.models.chat_template import render_chat

        if self._chat_template is None:
            raise ValueError("this tokenizer has no chat template")
        return render_chat(self._chat_template, messages, add_generation_prompt, self._special_tokens, **variables)


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer:
    """Load the tokenizer of a checkpoint directory.

    It reads `tokenizer.json`, and from `tokenizer_config.json` the special tokens and the chat template
    (`chat_template.jinja` takes precedence). The ids that end a generation are those of `generation_config.json`, or
    else the tokenizer's own. A directory whose `tokenizer_config.json` has the `tokenizer_class`
    `longctx.ByteTokenizer` needs no other file.

    Raises:
      FileNotFoundError: no such directory, or no `tokenizer.json` in it.
      ValueError: a file cannot be parsed.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"no such directory: {directory}")
    config = _read_json(directory / "tokenizer_config.json")
    if config.get("tokenizer_class") == BYTE_TOKENIZER_CLASS:
        return ByteTokenizer()
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no tokenizer.json (other tokenizer formats are not read)")
    eos_ids = _read_json(directory / "generation_config.json").get("eos_token_id")
    return HFTokenizer(
        path,
        eos_ids=() if eos_ids is None else (eos_ids,) if isinstance(eos_ids, int) else tuple(eos_ids),
        special_tokens=_special_tokens(config),
        chat_template=_chat_template(directory, config),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file, empty if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(contents, dict):
        raise ValueError(f"{path} holds {type(contents).__name__}, not a JSON object")
    return contents


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and the like; each is a string, or a dict with its `content`."""
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        token = config.get(name)
        if token is not None:
            tokens[name] = token["content"] if isinstance(token, dict) else token
    return tokens


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template
