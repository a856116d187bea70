"""Long documents packed into sequences of one length, for `finetune_llama.py`.

A sequence depends on its index only, so that a resumed training sees what an uninterrupted one would have seen.
"""

import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from longctx.models import Tokenizer

SUFFIXES = (".md", ".py", ".rst", ".txt")
LONG = 50_000  # bytes from which a module of the standard library is a long document


class Batch(NamedTuple):
    """Documents packed into one sequence: four int32 arrays `[T]`."""

    tokens: np.ndarray
    targets: np.ndarray  # the token that comes next; -1 at the end of a document
    positions: np.ndarray  # from 0 in each document
    segment_ids: np.ndarray  # which document of the sequence


def read_documents(path: Path | None) -> list[str]:
    """The text of a file, or of each text file of a directory; None: long modules of Python's standard library.

    Raises:
      ValueError: there are none, or one cannot be read; the message names it.
    """
    if path is None:
        files = [file for file in Path(sysconfig.get_path("stdlib")).glob("*.py") if file.stat().st_size >= LONG]
    elif path.is_dir():
        files = [file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file()]
    else:
        files = [path]
    try:
        documents = [file.read_text(encoding="utf-8") for file in sorted(files)]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as text: {error}") from error
    if not any(documents):
        raise ValueError(f"{path} holds no text in files {', '.join('*' + suffix for suffix in SUFFIXES)}")
    return documents


def encode_documents(documents: Sequence[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """The token ids of each document that has any, with the token that ends a text, if there is one."""
    ids = [np.array(tokenizer.encode(text) + list(tokenizer.eos_ids[:1]), np.int32) for text in documents if text]
    return [tokens for tokens in ids if len(tokens) > 1]


class PackedDocuments:
    """An endless stream of documents, in a new random order each epoch, cut into sequences of `length` tokens.

    What a cut leaves of a document goes on in the next sequence as a document of its own, so no token is padding or
    lost. Documents are also cut after `longest` tokens, the positions that the model knows.
    """

    def __init__(self, documents: Sequence[np.ndarray], length: int, longest: int, seed: int = 0) -> None:
        self.documents = [
            piece for tokens in documents for piece in np.split(tokens, range(longest, len(tokens), longest))
        ]
        self.length, self.seed = length, seed

    def digest(self) -> str:
        """16 hexadecimal digits that differ where any token of the documents does."""
        digest = hashlib.blake2b(digest_size=8)
        for tokens in self.documents:
            digest.update(len(tokens).to_bytes(8, "little") + tokens.tobytes())
        return digest.hexdigest()

    def batch(self, index: int) -> Batch:
        """The sequence number `index`, from 0."""
        epoch, skipped = divmod(index * self.length, sum(map(len, self.documents)))
        pieces: list[np.ndarray] = []
        missing = self.length
        while missing:
            for i in np.random.default_rng([self.seed, epoch]).permutation(len(self.documents)):
                piece = self.documents[i][skipped : skipped + missing]
                skipped = max(0, skipped - len(self.documents[i]))
                missing -= len(piece)
                if len(piece):
                    pieces.append(piece)
            epoch += 1
        parts = [
            Batch(tokens, np.append(tokens[1:], -1), np.arange(len(tokens)), np.full(len(tokens), segment))
            for segment, tokens in enumerate(pieces)
        ]
        return Batch(*(np.concatenate(arrays, dtype=np.int32) for arrays in zip(*parts, strict=True)))
