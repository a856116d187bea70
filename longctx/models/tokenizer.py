"""Tokenizers: Hugging Face's `tokenizer.json`, those of GGUF files, and plain bytes; streams of text and bytes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from longctx.models.chat_template import ChatTemplate
from longctx.models.text_pieces import PIECE, PieceEncoder, can_cut
from longctx.models.validation import check_directory, check_token_ids, is_file, is_gguf, read_json, read_text, shown

if TYPE_CHECKING:
    import tokenizers

BYTE_TOKENIZER_CLASS = "longctx.ByteTokenizer"
"""The `longctx_class` or `tokenizer_class` in a `tokenizer_config.json` that selects `ByteTokenizer`."""

MAX_TOKENIZER_BYTES = 256 * 2**20
"""Largest `tokenizer.json` that is read; those of vocabularies of 256,000 tokens have 35 MB."""


_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_UNKNOWN = "\U0010fffd"  # a character for private use, which no vocabulary has
_TEXT = "Zürich, 東京 and 🦙 in 2026"


@runtime_checkable
class Tokenizer(Protocol):
    """The interface of a tokenizer that generation and serving need.

    Examples:
      >>> from longctx.models import Tokenizer, load_tokenizer
      >>> from longctx.models.builtin import TINY
      >>> tokenizer: Tokenizer = load_tokenizer(TINY)
      >>> ids = tokenizer.encode("Hello", add_special_tokens=False)
      >>> tokenizer.decode(ids)
      'Hello'
      >>> class Words:  # one's own, for the engine
      ...     vocab_size, bos_id, eos_ids = 3, None, (0,)
      ...     def encode(self, text, add_special_tokens=True):
      ...         return [{"yes": 1, "no": 2}[word] for word in text.split()]
      ...     def decode(self, ids):
      ...         return " ".join(["", "yes", "no"][id] for id in ids)
      ...     def apply_chat_template(self, messages, add_generation_prompt=True, **variables):
      ...         return messages[-1]["content"]
      >>> Words().decode(Words().encode("no yes"))
      'no yes'
    """

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The id that begins a text; None: there is none."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a generation; there may be several, or none."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text.

        Args:
          text: any Unicode text.
          add_special_tokens: whether ids that begin or end a text are added. Not for a rendered chat, which contains
            its own.

        Raises:
          ValueError: the text holds lone surrogates, which no Unicode text does.
        """
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text without special tokens. Invalid UTF-8 becomes U+FFFD."""
        ...

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt of a chat.

        Args:
          messages: dicts of `role` and `content`.
          add_generation_prompt: whether the prompt ends where the answer begins.
          **variables: for the template, such as `enable_thinking`.

        Raises:
          ValueError: there is no template.
        """
        ...


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes are ids 0 to 255; 256 begins a sequence and 257 ends it.

    Attributes:
      vocab_size: 258.
      bos_id: 256.
      eos_ids: (257,).
      special_tokens: names of these two by kind, for other programs; no text has them.

    Examples:
      >>> from longctx.models import ByteTokenizer
      >>> tokenizer = ByteTokenizer()
      >>> tokenizer.encode("Hi")
      [256, 72, 105]
      >>> tokenizer.decode([256, 72, 105, 257])
      'Hi'
    """

    vocab_size: int = 258
    bos_id: int | None = 256
    eos_ids: tuple[int, ...] = (257,)
    special_tokens: Mapping[str, str] = {"bos_token": "<bos>", "eos_token": "<eos>"}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = list(utf8_bytes(text))
        return [256, *ids] if add_special_tokens else ids

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(id for id in ids if id < 256).decode("utf-8", errors="replace")

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        raise ValueError("the byte tokenizer has no chat template")


@contextlib.contextmanager
def _library_errors(path: Path) -> Iterator[None]:
    """Make ValueErrors that name the file of what `tokenizers` raises: Exception, or BaseException for a panic."""
    try:
        yield
    except BaseException as error:
        if type(error) is Exception or type(error).__name__ == "PanicException":
            raise ValueError(f"{path}: the tokenizer failed: {error}") from error
        raise


class HFTokenizer:
    """A tokenizer that the `tokenizers` library runs.

    Args:
      path: of the file that it comes from, which errors name.
      special_tokens: such as `bos_token`, by name, as chat templates get them.

    Attributes:
      backend: the library's tokenizer.
      errors: context in which the library's errors become ValueErrors that name the file.
      special_ids: of special tokens by name; None: it is not in the vocabulary.
      sampling: parameters that `generation_config.json` recommends, as it has them.
      config: of `tokenizer_config.json`, as it is.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: tokenizers.Tokenizer,
        eos_ids: tuple[int, ...],
        special_tokens: Mapping[str, str],
        chat_template: ChatTemplate | None,
    ) -> None:
        self.errors = functools.partial(_library_errors, path)
        self.backend = tokenizer
        self.special_tokens, self.chat_template = dict(special_tokens), chat_template
        with self.errors():
            # Files may contain the padding and truncation settings of training.
            tokenizer.no_padding()
            tokenizer.no_truncation()
            tokenizer.encode("")  # fails now rather than later, if special tokens are wrong
        self.special_ids = {name: tokenizer.token_to_id(token) for name, token in special_tokens.items()}
        self.bos_id: int | None = self.special_ids.get("bos_token")
        eos_id = self.special_ids.get("eos_token")
        self.eos_ids: tuple[int, ...] = eos_ids or (() if eos_id is None else (eos_id,))
        self.sampling: Mapping[str, Any] = {}
        self.config: Mapping[str, Any] = {}

    @functools.cached_property
    def added_tokens(self) -> dict[int, tokenizers.AddedToken]:
        """The tokens that were added to the vocabulary, special or not, by id."""
        with self.errors():
            return self.backend.get_added_tokens_decoder()

    @functools.cached_property
    def control_names(self) -> dict[int, str]:
        """The special tokens but the unknown token, which stands for plain characters."""
        unknown: list[int] = []
        with contextlib.suppress(ValueError):  # from a tokenizer that has none
            unknown = self.encode(_UNKNOWN, add_special_tokens=False)
        return {id: token.content for id, token in self.added_tokens.items() if token.special and id not in unknown}

    @functools.cached_property
    def is_byte_level(self) -> bool:
        """Whether its vocabulary writes each byte as a character, as GPT-2's does."""
        decoder = self.backend.decoder
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    def token(self, id: int) -> tuple[str | None, bool]:
        """A token as the vocabulary writes it, None if there is none, and whether it was added to it as plain text."""
        with self.errors():
            return self.backend.id_to_token(id), id in self.added_tokens

    @property
    def largest_id(self) -> int:
        """The largest id that it gives; files may leave out ids."""
        return max(self.backend.get_vocab().values(), default=0)

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.encode_array(text, add_special_tokens).tolist()

    def encode_array(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        """The token ids of a text, int32 `[T]`."""
        utf8_bytes(text)  # tokenizers raises a TypeError that doesn't say what is wrong
        with self.errors():
            if len(text) > 2 * PIECE and self._pieces is not None:
                return self._pieces.encode(text, add_special_tokens)
            return np.array(self.backend.encode(text, add_special_tokens=add_special_tokens).ids, np.int32)

    @functools.cached_property
    def _pieces(self) -> PieceEncoder | None:
        return PieceEncoder(self.backend) if can_cut(self.backend) else None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_pieces"}

    def control_token(self, text: str) -> str | None:
        """The first special token that stands in a text and would be taken for one; None: there is none."""
        ids = self.encode(text, add_special_tokens=False)
        return next((self.control_names[id] for id in ids if id in self.control_names), None)

    def decode(self, ids: Iterable[int]) -> str:
        with self.errors():
            return self.backend.decode(list(ids), skip_special_tokens=True)

    def decode_all(self, ids: Iterable[int]) -> str:
        """The text with its special tokens."""
        with self.errors():
            return self.backend.decode(list(ids), skip_special_tokens=False)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        if self.chat_template is None:
            raise ValueError("this tokenizer has no chat template")
        return self.chat_template.render(messages, add_generation_prompt, self.special_tokens, **variables)


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer:
    """Load the tokenizer of a checkpoint directory, or of a GGUF file, from its metadata.

    Of a directory it reads `tokenizer.json`, and from `tokenizer_config.json` the special tokens and the chat template
    (`chat_template.jinja` takes precedence). The ids that end a generation are those of `generation_config.json`, or
    else the tokenizer's own. A directory whose `tokenizer_config.json` has the `longctx_class` or `tokenizer_class`
    `longctx.ByteTokenizer` needs no other file.

    Args:
      directory: a checkpoint directory, or a file `*.gguf`.

    Returns:
      The tokenizer.

    Raises:
      FileNotFoundError: no such directory or GGUF file, or no `tokenizer.json` in it.
      ValueError: the directory or a file cannot be read, or a file cannot be parsed.

    Examples:
      >>> from longctx.models import load_tokenizer
      >>> from longctx.models.builtin import TINY
      >>> tokenizer = load_tokenizer(TINY)
      >>> tokenizer.decode(tokenizer.encode("a café"))
      'a café'
    """
    directory = Path(directory)
    if is_gguf(directory):
        from longctx.models.gguf_tokenizer import read_gguf_tokenizer

        with _library_errors(directory):
            return HFTokenizer(directory, *read_gguf_tokenizer(directory))
    check_directory(directory)
    config_file, generation_file = directory / "tokenizer_config.json", directory / "generation_config.json"
    config = read_json(config_file) if is_file(config_file) else {}
    if BYTE_TOKENIZER_CLASS in (config.get("longctx_class"), config.get("tokenizer_class")):
        return ByteTokenizer()
    path = directory / "tokenizer.json"
    if not is_file(path):
        raise FileNotFoundError(f"{directory} has no tokenizer.json (other tokenizer formats are not read)")
    generation = read_json(generation_file) if is_file(generation_file) else {}
    try:
        eos_ids = check_token_ids("eos_token_id", generation.get("eos_token_id"))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{generation_file}: {error}") from error
    special, template = _special_tokens(config_file, config), _chat_template(config_file, config)
    made = HFTokenizer(path, _read_tokenizer(path), eos_ids, special, template)
    made.config = config
    if generation.get("do_sample", True):
        made.sampling = {name: generation[name] for name in _RECOMMENDED if generation.get(name) is not None}
    return made


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise ValueError(f"{path} is larger than {MAX_TOKENIZER_BYTES} bytes")
    with _library_errors(path):
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise ValueError(f"{path} is not a tokenizer that `tokenizers` reads: {error}") from error


def utf8_bytes(text: str) -> bytes:
    """Return a text's bytes; raise ValueError if it is not valid Unicode."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"text must be valid Unicode, and has {text[error.start]!r} at {error.start}") from None


def _special_tokens(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and the like; each is a string, or a dict with its `content`."""
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content", token)
        if token is not None:
            tokens[name] = _text(path, name, token)
    return tokens


def _chat_template(path: Path, config: dict[str, Any]) -> ChatTemplate | None:
    file = path.with_name("chat_template.jinja")
    if is_file(file):
        return ChatTemplate(file, read_text(file))
    template = config.get("chat_template")
    if isinstance(template, list):
        if not all(isinstance(entry, dict) for entry in template):
            raise ValueError(f"{path}: chat_template must be a string, or objects with name and template")
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return None if template is None else ChatTemplate(path, _text(path, "chat_template", template))


def _text(path: Path, name: str, value: Any) -> str:
    try:
        value.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise ValueError(f"{path}: {name} must be a string of valid Unicode, got {shown(value)}") from error
    return value


class StreamDecoder:
    """Decodes token ids one by one and never returns part of a character.

    All pieces, including that of `finish()`, join to the text of all ids decoded at once.

    Args:
      tokenizer: what decodes the ids.
      skip_special: leave special tokens out of the text; tokenizers of other kinds than `HFTokenizer` always do.

    Examples:
      >>> from longctx.models import ByteTokenizer, StreamDecoder
      >>> tokenizer = ByteTokenizer()
      >>> ids = tokenizer.encode("añ", add_special_tokens=False)  # ñ has two bytes
      >>> decoder = StreamDecoder(tokenizer)
      >>> [decoder.push(id) for id in ids]
      ['a', '', 'ñ']
      >>> decoder.finish()
      ''
    """

    # A character has at most four bytes, so an unfinished one has at most three tokens, or three U+FFFD.
    _UNFINISHED = 3

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        keeps = not skip_special and isinstance(tokenizer, HFTokenizer)
        self._decode = tokenizer.decode_all if keeps else tokenizer.decode  # type: ignore[attr-defined]
        # Only recent tokens, so that the work of a step does not grow with the text. They include some settled tokens,
        # because the text of a token may depend on whether there is one before it.
        self._recent: list[int] = []
        self._settled = 0
        self._emitted = 0

    def push(self, id: int) -> str:
        """The text that is certain after this token: often that of the token, sometimes none."""
        self._recent.append(id)
        text = self._decode(self._recent)
        unsure = len(text) - len(text.rstrip("\ufffd"))
        if len(self._recent) - self._settled > self._UNFINISHED:
            # The first of these bytes are no character; the last of them may begin one.
            unsure = min(unsure, self._UNFINISHED)
        piece = self._emit(text, len(text) - unsure)
        if not unsure:
            self._recent = self._recent[self._settled :]
            self._settled = len(self._recent)
            self._emitted = len(self._decode(self._recent))
        return piece

    def finish(self) -> str:
        """The text that was held back."""
        text = self._decode(self._recent)
        return self._emit(text, len(text))

    def _emit(self, text: str, end: int) -> str:
        piece = text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return piece


_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """Finds the bytes of the tokens of a tokenizer. Special tokens have those of their names."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def of(self, token: int) -> bytes:
        """The bytes of a token; of an id that the vocabulary leaves out there are none."""
        tokenizer = self._tokenizer
        if isinstance(tokenizer, ByteTokenizer):
            return bytes([token]) if token < 256 else b""
        if not isinstance(tokenizer, HFTokenizer):
            return tokenizer.decode([token]).encode()
        name, is_added = tokenizer.token(token)
        if name is None or is_added:
            return (name or "").encode()
        if tokenizer.is_byte_level:
            return b"".join(_BYTES[x] if x in _BYTES else x.encode() for x in name)
        byte = _BYTE.fullmatch(name)
        return bytes([int(byte[1], 16)]) if byte else name.replace("\u2581", " ").encode()


def _byte_characters() -> dict[str, bytes]:
    """The characters that byte-level vocabularies write bytes as: themselves where they can be seen, else from 256."""
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in seen]
    characters = {chr(byte): bytes([byte]) for byte in seen}
    return characters | {chr(256 + i): bytes([byte]) for i, byte in enumerate(others)}


_BYTES = _byte_characters()


def _problems(directory: Path, vocab_size: int | None) -> Iterator[str]:
    """List what is wrong with a tokenizer and its chat template; `checkpoint_verify` runs it as a process."""
    try:
        tokenizer = load_tokenizer(directory)
        tokenizer.decode(tokenizer.encode(_TEXT))
    except (FileNotFoundError, ValueError) as error:
        yield str(error)
        return
    limit = "the number of rows of token_embd.weight" if is_gguf(directory) else "vocab_size in config.json"
    largest = tokenizer.largest_id if isinstance(tokenizer, HFTokenizer) else tokenizer.vocab_size - 1
    if vocab_size is not None and largest >= vocab_size:
        yield f"{directory}: the tokenizer has the id {largest}, but {limit} is {vocab_size}"
    if not isinstance(tokenizer, HFTokenizer):
        return
    for id in tokenizer.eos_ids:
        if vocab_size is not None and id >= vocab_size:
            yield f"{directory}: eos_token_id {id} must be below {limit}, {vocab_size}"
    for name, known in tokenizer.special_ids.items():  # GGUF has their ids
        if known is None:
            token = shown(tokenizer.special_tokens[name])
            yield f"{directory}/tokenizer_config.json: {name} {token} is not in the vocabulary of tokenizer.json"
    if tokenizer.chat_template is not None:
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": _TEXT}])
        except ValueError as error:
            yield str(error)


if __name__ == "__main__":
    print(json.dumps([*_problems(Path(sys.argv[1]), json.loads(sys.argv[2]))]))
