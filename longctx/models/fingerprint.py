"""A digest of a checkpoint, to compare directories of several hosts without reading them whole."""

import hashlib
import os
from pathlib import Path

_PLACES, _BYTES = 64, 4096  # number and size of the samples that are read of a file of tensors


def checkpoint_fingerprint(directory: str | os.PathLike[str]) -> dict[str, str]:
    """A digest of each file of a checkpoint: all of a JSON file; size, header and 64 samples of a safetensors file.

    Raises:
      FileNotFoundError: no such directory.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"no such directory: {directory}")
    paths = sorted([*directory.glob("*.json"), *directory.glob("*.safetensors")])
    return {path.name: _digest(path) for path in paths}


def _digest(path: Path) -> str:
    size, digest = path.stat().st_size, hashlib.blake2b(digest_size=8)
    digest.update(str(size).encode())
    with path.open("rb") as file:
        if path.suffix == ".json" or size <= _PLACES * _BYTES:
            digest.update(file.read())
        else:
            for place in range(_PLACES):  # the first sample holds the header
                file.seek(place * (size - _BYTES) // (_PLACES - 1))
                digest.update(file.read(_BYTES))
    return digest.hexdigest()
