"""The header of a log, `header.json`: which engine it is of, so that a replay can build the same."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longctx import __version__
from longctx.models.config import LlamaConfig
from longctx.models.validation import check_bool, check_integer, shown
from longctx.parallel.topology import Topology
from longctx.serving.config import EngineConfig
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.file import Writable as Writable
from longctx.serving.predictor.file import predictor_from_dict
from longctx.serving.predictor.roofline import element_bytes_of
from longctx.serving.predictor.runtime import Predictor
from longctx.serving.scheduler.slo import Slo
from longctx.serving.validation import check_text

FORMAT = "longctx log 2"
NAME = "header.json"


@dataclasses.dataclass(frozen=True)
class Header:
    """Settings that an engine was made of.

    Attributes:
      model: its sizes. `model_name` and `weights` (a fingerprint by file, see `checkpoint_fingerprint`) say which.
      config: without `hash_key`, which is never written; a custom policy is given by its name alone.
      num_pages: of each context rank. `max_length`: tokens of the longest sequence.
      predictor: before correction; None: a custom one, which can't be written.
      is_private: whether contents are left out.
      topology: by which exchanges were chosen.
    """

    model: LlamaConfig
    model_name: str
    weights: Mapping[str, str] | None
    config: EngineConfig
    custom_policy: str | None
    plan: ParallelPlan
    num_pages: int
    max_length: int
    predictor: Writable | None
    dtype: str | None
    is_private: bool
    created: str
    topology: Topology | None = None
    version: str = __version__

    def __post_init__(self) -> None:
        for name, least in (("num_pages", 1), ("max_length", 1)):
            check_integer(name, getattr(self, name), least)
        check_bool("is_private", self.is_private)
        for name in ("model_name", "created", "version"):
            check_text(name, getattr(self, name))
        for name in ("custom_policy", "dtype"):
            if getattr(self, name) is not None:
                check_text(name, getattr(self, name))
        if not isinstance(self.weights, Mapping | None):
            raise TypeError(f"weights must be a mapping, got {shown(self.weights)}")

    @property
    def element_bytes(self) -> int:
        """Bytes of a number that is not quantised."""
        return element_bytes_of(self.dtype, self.topology)

    def write(self, directory: Path) -> None:
        """Write `header.json`, which must not exist."""
        contents: dict[str, Any] = {"format": FORMAT} | dataclasses.asdict(self)
        contents["model"] = self.model.to_hf()
        contents["config"] |= {"hash_key": None, "policy": _policy_name(self.config)}
        if self.predictor is not None:
            contents["predictor"]["kind"] = type(self.predictor).__name__
        path = directory / NAME
        path.touch(mode=0o600, exist_ok=False)
        path.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> "Header":
        """Read the header of a log.

        Raises:
          FileNotFoundError: there is none.
          ValueError: it is not one, or of another format.
        """
        path = directory / NAME
        if not path.is_file():
            raise FileNotFoundError(f"{directory} is no log of an engine: it has no {NAME}")
        try:
            contents = json.loads(path.read_text(encoding="utf-8"))
            found, predictor = contents.pop("format"), contents["predictor"]
            if found != FORMAT:
                raise ValueError(f"its format is {found!r}, and this version of longctx reads {FORMAT!r}")
            return cls(
                **contents
                | {
                    "model": LlamaConfig.from_hf(contents["model"]),
                    "config": _config(contents["config"]),
                    "plan": ParallelPlan(**contents["plan"]),
                    "predictor": None if predictor is None else predictor_from_dict(predictor),
                    "topology": None if contents.get("topology") is None else Topology.from_dict(contents["topology"]),
                }
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not as this version of longctx writes it: {error}") from None


def writable(predictor: Predictor) -> Writable | None:
    """A predictor that a header can hold; None: it is another."""
    return predictor if isinstance(predictor, Writable) else None


def custom_policy(config: EngineConfig) -> str | None:
    """The name of a policy that is not one of ours."""
    return None if isinstance(config.policy, str) else type(config.policy).__qualname__


def _policy_name(config: EngineConfig) -> str:
    # A custom one has to be given again for a replay.
    return config.policy if isinstance(config.policy, str) else "fcfs"


def _config(fields: dict[str, Any]) -> EngineConfig:
    buckets = fields["buckets"]
    tiers = fields.get("tiers")
    return EngineConfig(
        **fields
        | {
            "slo": Slo(**fields["slo"]),
            "buckets": None if buckets is None else tuple(buckets),
            "tiers": None if tiers is None else TierConfig(**tiers),
        }
    )
