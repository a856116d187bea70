"""Recorded logs: which engine they are of (`Header`), and their records (`RecordedLog`)."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longctx import __version__
from longctx.models.config import LlamaConfig
from longctx.models.validation import check_integer
from longctx.parallel.topology import Topology
from longctx.serving.config import EngineConfig
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.file import Writable, predictor_from_dict, predictor_to_dict
from longctx.serving.recording.records import HEADER_BYTES, Record, decode, read_frames
from longctx.serving.scheduler.slo import Slo

FORMAT = "longctx log 3"
HEADER, RECORDS = "header.json", "records.log"


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

    def write(self, directory: Path) -> None:
        """Write `header.json`, which must not exist."""
        contents: dict[str, Any] = {"format": FORMAT} | dataclasses.asdict(self)
        contents |= {"model": self.model.to_hf(), "predictor": predictor_to_dict(self.predictor)}
        contents["config"]["hash_key"] = None
        path = directory / HEADER
        path.touch(mode=0o600, exist_ok=False)
        path.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> "Header":
        """Read the header of a log; raise ValueError if it is not one, or of another format."""
        path = directory / HEADER
        try:
            contents = json.loads(path.read_text(encoding="utf-8"))
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
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not as this version of longctx writes it: {error}") from None


class RecordedLog:
    """A run that was recorded.

    Args:
      directory: of the run, or of several, the last of which is read.

    Attributes:
      header: see `Header`.
      torn_bytes: of an unfinished record at the end, which is cut; known when all have been read.

    Raises:
      FileNotFoundError: there is no log.
      ValueError: it is damaged, or of another version.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = find_run(directory)
        self.header = Header.read(self.directory)
        self.torn_bytes = 0

    def records(self) -> Iterator[Record]:
        """Yield all records, in order.

        Raises:
          ValueError: the log is damaged, or has no record.
        """
        path, size = self.directory / RECORDS, 0
        for number, payload in enumerate(read_frames(path)):
            size += HEADER_BYTES + len(payload)
            try:
                yield decode(payload)
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
