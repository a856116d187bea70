"""A digest of a checkpoint, to compare directories of several hosts without reading them whole."""

import hashlib
import os
from pathlib import Path

from longctx.models.json_file import check_directory, is_file, is_gguf

_PLACES, _BYTES = 64, 4096  # number and size of the samples that are read of a file of tensors
_WHOLE = 256 * 2**20  # the most bytes of a JSON file that are read


def checkpoint_fingerprint(directory: str | os.PathLike[str]) -> dict[str, str]:
    """A digest of each file of a checkpoint: all of a JSON file; size and 64 samples of files of tensors.

    The samples of a safetensors file have its header. A GGUF file is the only one of its checkpoint.

    Args:
      directory: a checkpoint directory, or a file `*.gguf`.

    Returns:
      By the name of each file, 16 hexadecimal digits of its digest, blake2b.

    Raises:
      FileNotFoundError: no such directory or GGUF file.
      ValueError: it cannot be read.

    Examples:
      >>> import shutil
      >>> from pathlib import Path
      >>> from longctx.models import checkpoint_fingerprint
      >>> from longctx.models.builtin import TINY  # the directory of a small model
      >>> _ = shutil.copytree(TINY, "copy")  # as if on another host
      >>> _ = Path("copy/config.json").write_text("{}")
      >>> here, there = checkpoint_fingerprint(TINY), checkpoint_fingerprint("copy")
      >>> [name for name in here if here[name] != there[name]]
      ['config.json']
    """
    directory = Path(directory)
    if is_gguf(directory):
        if not is_file(directory):
            raise FileNotFoundError(f"no such file: {directory}")
        return {directory.name: _digest(directory)}
    check_directory(directory)
    paths = sorted([*directory.glob("*.json"), *directory.glob("*.safetensors")])
    return {path.name: _digest(path) for path in paths if is_file(path)}


def _digest(path: Path) -> str:
    size, digest = path.stat().st_size, hashlib.blake2b(digest_size=8)
    digest.update(str(size).encode())
    with path.open("rb") as file:
        if size <= (_WHOLE if path.suffix == ".json" else _PLACES * _BYTES):
            digest.update(file.read())
        else:
            for place in range(_PLACES):  # the first sample holds the header
                file.seek(place * (size - _BYTES) // (_PLACES - 1))
                digest.update(file.read(_BYTES))
    return digest.hexdigest()
