"""Recorded logs: which engine they are of (`Header`), and their records (`RecordedLog`)."""

import base64
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longctx import __version__
from longctx.models.config import LlamaConfig
from longctx.models.validation import check_integer
from longctx.parallel.topology import Topology
from longctx.serving.config import EngineConfig
from longctx.serving.kv_cache.encryption import SEAL_BYTES, FileKey
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.file import Writable, predictor_from_dict, predictor_to_dict
from longctx.serving.recording.records import HEADER_BYTES, Record, decode, read_frames
from longctx.serving.scheduler.slo import Slo

FORMAT = "longctx log 3"
HEADER, RECORDS = "header.json", "records.log"


def log_key(path: str | os.PathLike[str] | None) -> FileKey | None:
    """Return the key that a secret's file gives for logs, see `FileKey`; None: they are not encrypted."""
    return None if path is None else FileKey(path, "key_file", b"logs at rest")


class RecordContext:
    """Context in which the records of a log are encrypted: its header, and the place of each. None can be moved."""

    def __init__(self, directory: Path) -> None:
        self._of = hashlib.blake2b((directory / HEADER).read_bytes(), digest_size=32).digest()

    def __call__(self, place: int) -> bytes:
        return self._of + place.to_bytes(8, "little")


@dataclasses.dataclass(frozen=True)
class Header:
    """Settings that an engine was made of, so that a replay can build the same core.

    Attributes:
      model: its sizes.
      config: without `hash_key`, which is never written.
      num_pages: of each context rank.
      max_length: tokens of the longest sequence.
      predictor: before correction.
      topology: by which exchanges were chosen.
    """

    model: LlamaConfig
    config: EngineConfig
    plan: ParallelPlan
    num_pages: int
    max_length: int
    predictor: Writable
    dtype: str | None
    topology: Topology | None
    created: str
    version: str = __version__

    def __post_init__(self) -> None:
        for name in ("num_pages", "max_length"):
            check_integer(name, getattr(self, name), 1)

    def write(self, directory: Path, key: FileKey | None = None) -> None:
        """Write `header.json`, which must not exist, encrypted with a key if there is one."""
        contents: dict[str, Any] = {"format": FORMAT} | dataclasses.asdict(self)
        contents |= {"model": self.model.to_hf(), "predictor": predictor_to_dict(self.predictor)}
        contents["config"]["hash_key"] = None
        path = directory / HEADER
        path.touch(mode=0o600, exist_ok=False)
        if key is not None:
            sealed = b"".join(key.seal([json.dumps(contents).encode()], HEADER.encode()))
            contents = {"format": FORMAT, "key": key.id, "sealed": base64.b64encode(sealed).decode()}
        path.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path, key: FileKey | None = None) -> "Header":
        """Read the header of a log; raise ValueError if it is not one, of another format, or of another key."""
        path = directory / HEADER
        try:
            contents = _unsealed(path, json.loads(path.read_text(encoding="utf-8")), key)
            found, config, topology = contents.pop("format"), contents["config"], contents["topology"]
            if found != FORMAT:
                raise ValueError(f"its format is {found!r}, and this version of longctx reads {FORMAT!r}")
            buckets, tiers = config["buckets"], config["tiers"]
            config |= {
                "slo": Slo(**config["slo"]),
                "buckets": None if buckets is None else tuple(buckets),
                "tiers": None if tiers is None else TierConfig(**tiers),
            }
            contents |= {
                "model": LlamaConfig.from_hf(contents["model"]),
                "config": EngineConfig(**config),
                "plan": ParallelPlan(**contents["plan"]),
                "predictor": predictor_from_dict(contents["predictor"]),
                "topology": None if topology is None else Topology.from_dict(topology),
            }
            return cls(**contents)
        except _WrongKey:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not as this version of longctx writes it: {error}") from None


class _WrongKey(ValueError):
    """The log needs a key, or another one."""


def _unsealed(path: Path, contents: dict[str, Any], key: FileKey | None) -> dict[str, Any]:
    """Return the contents of a header, decrypted if they are encrypted."""
    if (contents.get("key") is not None) != (key is not None):
        raise _WrongKey(
            f"{path} is {'not encrypted' if key else 'encrypted'}: key_file must {'not ' * bool(key)}be given"
        )
    if key is None:
        return contents
    if contents["key"] != key.id:
        raise _WrongKey(f"{path} is encrypted with another key than that of key_file")
    found: dict[str, Any] = json.loads(_decrypted(base64.b64decode(contents["sealed"]), key, HEADER.encode()))
    return found


def _decrypted(sealed: bytes, key: FileKey, context: bytes) -> bytes:
    out = bytearray(max(0, len(sealed) - SEAL_BYTES))
    if not key.open(memoryview(sealed), [out], context):
        raise ValueError("it was changed or moved since it was encrypted")
    return bytes(out)


class RecordedLog:
    """A run that was recorded.

    Args:
      directory: of the run, or of several, the last of which is read.
      key_file: the secret's file with which the run was encrypted. None: it was not.

    Attributes:
      header: see `Header`.
      torn_bytes: of an unfinished record at the end, which is cut; known when all have been read.

    Raises:
      FileNotFoundError: there is no log.
      ValueError: it is damaged, of another version, or encrypted with another key.
    """

    def __init__(self, directory: Path, key_file: str | os.PathLike[str] | None = None) -> None:
        self.directory, self._key = find_run(directory), log_key(key_file)
        self.header = Header.read(self.directory, self._key)
        self.torn_bytes = 0

    def records(self) -> Iterator[Record]:
        """Yield all records, in order.

        Raises:
          ValueError: the log is damaged, or has no record.
        """
        path, size, context = self.directory / RECORDS, 0, RecordContext(self.directory)
        for number, payload in enumerate(read_frames(path)):
            place, size = size, size + HEADER_BYTES + len(payload)
            try:
                yield decode(payload if self._key is None else _decrypted(payload, self._key, context(place)))
            except ValueError as error:
                raise ValueError(f"{path}, record {number}: {error}") from None
        self.torn_bytes = path.stat().st_size - size
        if not size:
            raise ValueError(f"{self.directory} has no whole record: nothing was recorded")


def find_run(directory: Path) -> Path:
    """Return the directory of a run: this one, or the last one in it; raise FileNotFoundError if there is none."""
    if not directory.is_dir():
        raise FileNotFoundError(f"no such directory: {directory}")
    if (directory / HEADER).exists():
        return directory
    runs = sorted(path.parent for path in directory.glob(f"*/{HEADER}"))
    if not runs:
        raise FileNotFoundError(f"{directory} is no log of an engine: neither it nor a directory in it has a {HEADER}")
    return runs[-1]
