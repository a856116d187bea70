"""Whether two directories hold the same checkpoint, without reading all of it."""

import hashlib
import os
from pathlib import Path

_PLACES, _BYTES = 64, 4096  # that are read of a file of tensors


def checkpoint_fingerprint(directory: str | os.PathLike[str]) -> dict[str, str]:
    """A digest of each file of a checkpoint: of JSON files whole, of safetensors files size, header and 64 samples.

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
            for place in range(_PLACES):  # the header is at the beginning
                file.seek(place * (size - _BYTES) // (_PLACES - 1))
                digest.update(file.read(_BYTES))
    return digest.hexdigest()
