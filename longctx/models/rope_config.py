"""The rotary frequencies of a model: their base, and their scaling to longer contexts.

They are computed once, on the host, in float64, as in Hugging Face `transformers` (`modeling_rope_utils.py`), which
defines these parameters of checkpoints.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from longctx.annotations import Real
from longctx.models.validation import MAX_INT32, check_bool, check_integer, check_real, shown

# The largest rotary base and scale that are accepted, far above those of published models: frequencies stay finite.
_MAX_THETA, _MAX_SCALE = 1e15, 1e6


@dataclass(frozen=True)
class LinearScaling:
    """Every frequency divided by `factor` (position interpolation, arXiv 2306.15595)."""

    factor: Real

    def scale(self, inv_freq: np.ndarray, theta: Real) -> np.ndarray:
        return inv_freq / self.factor

    @property
    def attention_factor(self) -> float:
        return 1.0


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: low frequencies divided by `factor`, high ones kept, and a linear blend between them."""

    factor: Real
    low_freq_factor: Real
    high_freq_factor: Real
    original_max_positions: int

    def scale(self, inv_freq: np.ndarray, theta: Real) -> np.ndarray:
        turns_in_context = self.original_max_positions * inv_freq / (2 * math.pi)
        blend_width = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((turns_in_context - self.low_freq_factor) / blend_width, 0.0, 1.0)
        return kept * inv_freq + (1 - kept) * inv_freq / self.factor

    @property
    def attention_factor(self) -> float:
        return 1.0


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): a blend over the dimensions, and a factor on cosines and sines."""

    factor: Real
    original_max_positions: int
    beta_fast: Real = 32.0
    beta_slow: Real = 1.0
    explicit_attention_factor: Real | None = None
    truncate: bool = True

    def scale(self, inv_freq: np.ndarray, theta: Real) -> np.ndarray:
        pairs = inv_freq.shape[0]
        low, high = (self._dimension(beta, pairs, theta) for beta in (self.beta_fast, self.beta_slow))
        if self.truncate:  # gpt-oss does not
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0.0), min(high, 2 * pairs - 1.0)
        if low == high:
            high += 0.001  # as transformers does, to avoid a division by zero
        stretched = np.clip((np.arange(pairs) - low) / (high - low), 0.0, 1.0)
        return stretched * inv_freq / self.factor + (1 - stretched) * inv_freq

    def _dimension(self, rotations: Real, pairs: int, theta: Real) -> float:
        """The (fractional) frequency index that turns `rotations` times in the original context."""
        return pairs * math.log(self.original_max_positions / (rotations * 2 * math.pi)) / math.log(theta)

    @property
    def attention_factor(self) -> float:
        if self.explicit_attention_factor is not None:
            return self.explicit_attention_factor
        return 1.0 if self.factor <= 1 else 0.1 * math.log(self.factor) + 1.0


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True)
class RopeConfig:
    """The base `theta`, which may be larger for longer contexts, and the scaling of its frequencies, if any.

    Attributes:
      theta: the base of the frequencies, more than 1.
      scaling: of the frequencies, to longer contexts. None: they are not scaled.

    Raises:
      TypeError, ValueError: a value is of a wrong type or out of range; the message names it.

    Source:
      Rotary embedding: RoFormer (Su et al. 2021).

    Examples:
      >>> import numpy as np
      >>> from longctx.models import LlamaConfig, RopeConfig
      >>> rope = RopeConfig(theta=500_000.0)
      >>> rope.inverse_frequencies(head_dim=8).round(6).tolist()
      [1.0, 0.037606, 0.001414, 5.3e-05]
      >>> stretched = LlamaConfig.preset("llama-3.1-8b").rope  # 8 times as long a context
      >>> slowest = (each.inverse_frequencies(128)[-1] for each in (RopeConfig(500_000.0), stretched))
      >>> round(float(np.divide(*slowest)), 3)
      8.0
    """

    theta: Real = 10000.0
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        check_theta("theta", self.theta)
        if self.scaling is not None:
            _check_scaling(self.scaling)
        if isinstance(self.scaling, Llama3Scaling) and not (
            self.scaling.low_freq_factor < self.scaling.high_freq_factor
        ):
            raise ValueError("llama3 rope scaling needs low_freq_factor < high_freq_factor")

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """The radians per token, float64 `[head_dim // 2]`, scaling included."""
        inv_freq = self.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        return inv_freq if self.scaling is None else self.scaling.scale(inv_freq, self.theta)

    @property
    def attention_factor(self) -> float:
        """The factor on cosines and sines: 1 except for YaRN."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor


def check_theta(name: str, theta: object) -> None:
    """Check the base of rotary frequencies."""
    if not check_real(name, theta, 0.0, _MAX_THETA) > 1:
        raise ValueError(f"{name}, the rotary base, must be greater than 1, got {theta}")


def _check_scaling(scaling: RopeScaling) -> None:
    for field in dataclasses.fields(scaling):
        value = getattr(scaling, field.name)
        if value is None and field.default is None:
            continue
        if field.name == "original_max_positions":
            check_integer(field.name, value, 1, MAX_INT32)
        elif field.name == "truncate":
            check_bool(field.name, value)
        else:
            check_real(field.name, value, 1 / _MAX_SCALE, _MAX_SCALE)


# Names in config.json that differ from our field names.
HF_NAMES = {
    "original_max_positions": "original_max_position_embeddings",
    "explicit_attention_factor": "attention_factor",
}
_KINDS: dict[str, type[RopeScaling]] = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}


def rope_from_hf(config: Mapping[str, Any]) -> RopeConfig:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`; ValueError names a wrong key."""
    key = "rope_parameters" if config.get("rope_parameters") not in (None, {}) else "rope_scaling"
    scaling = config.get(key)
    if not isinstance(scaling, Mapping | None):
        raise ValueError(f"{key} must be an object or null, got {shown(scaling)}")
    given = {name: value for name, value in (scaling or {}).items() if value is not None}
    theta = check_real(
        "rope_theta", _first(given.pop("rope_theta", None), config.get("rope_theta"), 1e4), 0, _MAX_THETA
    )
    kind = _first(given.pop("rope_type", None), given.pop("type", None), "default")
    if _first(given.pop("partial_rotary_factor", None), config.get("partial_rotary_factor"), 1.0) != 1.0:
        raise ValueError(f"{key}.partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        if given:
            raise ValueError(f"{key} of type 'default' has unsupported {shown(sorted(given))}")
        return RopeConfig(theta=theta)
    if not isinstance(kind, str) or kind not in _KINDS:
        supported = ", ".join(["default", *_KINDS])
        raise ValueError(f"{key} has unsupported rope type {shown(kind)}; supported: {supported}")
    if kind in ("llama3", "yarn"):
        given.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return RopeConfig(theta=theta, scaling=_scaling_from_hf(key, kind, given))


def _first(*values: Any) -> Any:
    """The first value that is not None."""
    return next(value for value in values if value is not None)


def _scaling_from_hf(key: str, kind: str, given: dict[str, Any]) -> RopeScaling:
    values = {}
    for field in dataclasses.fields(_KINDS[kind]):
        name = HF_NAMES.get(field.name, field.name)
        if name in given:
            values[field.name] = given.pop(name)
        elif field.default is dataclasses.MISSING:
            raise ValueError(f"{key} of type {kind!r} lacks {name!r}")
    if given:
        raise ValueError(f"{key} of type {kind!r} has unsupported {shown(sorted(given))}")
    return _KINDS[kind](**values)


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`: the older keys, which every version of transformers reads."""
    if rope.scaling is None:
        return {"rope_theta": rope.theta, "rope_scaling": None}
    kind = next(name for name, cls in _KINDS.items() if type(rope.scaling) is cls)
    fields = {HF_NAMES.get(name, name): value for name, value in dataclasses.asdict(rope.scaling).items()}
    if fields.get("truncate"):  # which older versions of transformers don't know
        del fields["truncate"]
    present = {name: value for name, value in fields.items() if value is not None}
    return {"rope_theta": rope.theta, "rope_scaling": {"rope_type": kind, **present}}
