"""Reads and writes `quantization_config` of a `config.json`: two forms of FP8 row-wise weights, and no other.

`fbgemm_fp8` is that of Llama-3.1-405B-Instruct-FP8 (context parallelism paper, section 4.1); `compressed-tensors` with
channel weights and dynamic token activations is what vLLM's tools write as "FP8-dynamic". The weights are the same.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from longctx.annotations import Real
from longctx.models.validation import MAX_LAYERS, check_integer, check_real, shown

MODULES = {
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "w_gate": "mlp.gate_proj",
    "w_up": "mlp.up_proj",
    "w_down": "mlp.down_proj",
}
"""The module of a layer that has a parameter's weight, for each parameter that may be quantised."""

_HEAD = "lm_head"
_DEFAULT_BOUND = 1200.0  # of transformers' FbgemmFp8Config
_BOUNDS = 1e-6, 1e30  # in which the scales of rows are normal float32
# More is no list of modules: a file must not ask for endless work.
_MAX_NAMES, _MAX_LENGTH, _MAX_PATTERNS, _MAX_WILDCARDS = 200_000, 200, 8, 2

MAX_RUNS = 16
"""Most runs of consecutive layers with the same quantised weights, each of which is compiled. Meta's model has 3."""

# compressed-tensors: the values of a scheme that mean FP8 row-wise. Other keys must be absent, null or empty.
_SCHEME = {"num_bits": 8, "type": "float", "symmetric": True}
_WEIGHTS = {**_SCHEME, "strategy": "channel", "dynamic": False}
_ACTIVATIONS = {**_SCHEME, "strategy": "token", "dynamic": True}
_OF_CALIBRATION = ("observer", "observer_kwargs")  # how scales were found, which are there now
_NOT_READ = ("config_groups", "ignore", "version", "global_compression_ratio")


@dataclass(frozen=True)
class RowwiseFp8:
    """Which weights are quantised in FP8, with a scale an output row.

    Attributes:
      layers: for each layer the names of its quantised parameters, in the order of `MODULES`.
      activation_scale_ub: the largest absolute value of a token's activations counts as at most this; None: no bound.

    Raises:
      TypeError, ValueError: it is no tuple of tuples of names, a name is unknown, more than `MAX_RUNS` runs of layers
        are alike, or the bound is not positive.

    Source:
      Context parallelism paper, 4.1 (row-wise FP8 weights of the feed-forward).

    Examples:
      >>> import dataclasses
      >>> from longctx.models import LlamaConfig, RowwiseFp8
      >>> config = LlamaConfig.preset("llama-3.1-405b")
      >>> quantized = dataclasses.replace(config, quantization=RowwiseFp8.of(config.num_layers))
      >>> quantized.quantization.layers[:2]  # the first layer stays as it is
      ((), ('w_gate', 'w_up', 'w_down'))
    """

    layers: tuple[tuple[str, ...], ...]
    activation_scale_ub: Real | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.layers, tuple) or not all(_is_names(names) for names in self.layers):
            raise TypeError(f"layers must be a tuple of tuples of names, one for each layer, got {shown(self.layers)}")
        for names in set(self.layers):
            if names != tuple(name for name in MODULES if name in names):
                raise ValueError(f"quantization must name parameters among {', '.join(MODULES)}, got {shown(names)}")
        if (runs := len([*itertools.groupby(self.layers)])) > MAX_RUNS:
            raise ValueError(
                f"quantization has {runs} runs of consecutive layers with the same quantised weights; at most "
                f"{MAX_RUNS} are supported, because each is compiled by itself"
            )
        if self.activation_scale_ub is not None:
            bound = check_real("activation_scale_ub", self.activation_scale_ub, *_BOUNDS)
            object.__setattr__(self, "activation_scale_ub", bound)

    @staticmethod
    def of(num_layers: int, modules: str = "ffn", activation_scale_ub: Real | None = _DEFAULT_BOUND) -> RowwiseFp8:
        """Quantise the feed-forward of every layer but the first and the last (`"ffn"`), or all projections (`"all"`).

        `"ffn"` is what Meta's 405B model has.

        Args:
          num_layers: of the model.
          modules: `"ffn"` or `"all"`.
          activation_scale_ub: as of the class.

        Returns:
          Which weights are quantised.

        Raises:
          TypeError, ValueError: an argument is of a wrong type or out of range; the message names it.
        """
        check_integer("num_layers", num_layers, 1, MAX_LAYERS)
        if modules not in ("ffn", "all"):
            raise ValueError(f"modules must be ffn or all, got {shown(modules)}")
        if modules == "all":
            return RowwiseFp8((tuple(MODULES),) * num_layers, activation_scale_ub)
        ffn = tuple(name for name, module in MODULES.items() if module.startswith("mlp."))
        inner = range(1, num_layers - 1)
        return RowwiseFp8(tuple(ffn if i in inner else () for i in range(num_layers)), activation_scale_ub)


def _is_names(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) for name in value)


def quantization_from_hf(source: Any, num_layers: int) -> RowwiseFp8 | None:
    """Read a `quantization_config`; None: no weight is quantised. TypeError or ValueError names a wrong key."""
    if source is None:
        return None
    if not isinstance(source, Mapping):
        raise TypeError(f"quantization_config must be an object, got {shown(source)}")
    method = source.get("quant_method")
    if method == "fbgemm_fp8":
        _check("", source, {"quant_method": method}, {}, ("activation_scale_ub", "modules_to_not_convert"))
        bound = source.get("activation_scale_ub", _DEFAULT_BOUND)
        check_real("quantization_config.activation_scale_ub", bound, *_BOUNDS)
        is_excluded = _matcher("modules_to_not_convert", source.get("modules_to_not_convert"), has_patterns=False)
    elif method == "compressed-tensors":
        _check_compressed_tensors(source)
        bound, is_excluded = None, _matcher("ignore", source.get("ignore"), has_patterns=True)
    else:
        raise ValueError(
            f"quantization_config.quant_method = {shown(method)} is not supported, only fbgemm_fp8 and "
            "compressed-tensors, both with FP8 row-wise weights"
        )
    layers = tuple(
        tuple(name for name, module in MODULES.items() if not is_excluded(f"model.layers.{i}.{module}"))
        for i in range(check_integer("num_layers", num_layers, 1, MAX_LAYERS))
    )
    quantization = RowwiseFp8(layers, bound)
    return quantization if any(layers) else None


def quantization_to_hf(quantization: RowwiseFp8) -> dict[str, Any]:
    """Make a `quantization_config`: fbgemm_fp8, or compressed-tensors if activations have no bound."""
    excluded = [
        f"model.layers.{i}.{module}"
        for i, names in enumerate(quantization.layers)
        for name, module in MODULES.items()
        if name not in names
    ]
    if quantization.activation_scale_ub is not None:
        return {
            "quant_method": "fbgemm_fp8",
            "activation_scale_ub": quantization.activation_scale_ub,
            "modules_to_not_convert": [*excluded, _HEAD],
        }
    group = {"targets": ["Linear"], "weights": dict(_WEIGHTS), "input_activations": dict(_ACTIVATIONS)}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [*excluded, _HEAD],
    }


def _check_compressed_tensors(source: Mapping[str, Any]) -> None:
    groups, sparsity = source.get("config_groups"), source.get("sparsity_config")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise ValueError("quantization_config.config_groups must be an object of one group")
    if isinstance(sparsity, Mapping) and sparsity.get("format") == "dense":
        source = {**source, "sparsity_config": None}
    optional = {"quantization_status": "compressed"}
    _check("", source, {"quant_method": "compressed-tensors", "format": "float-quantized"}, optional, _NOT_READ)
    scheme = {"targets": ["Linear"], "weights": _WEIGHTS, "input_activations": _ACTIVATIONS}
    _check("config_groups.", next(iter(groups.values())), scheme, {"format": "float-quantized"}, _OF_CALIBRATION)


def _check(
    where: str, source: Any, wanted: Mapping[str, Any], optional: Mapping[str, Any], not_read: tuple[str, ...]
) -> None:
    """Check for an object of these values, in which optional ones and others may be absent, null or empty."""
    if not isinstance(source, Mapping):
        raise TypeError(f"quantization_config.{where[:-1]} must be an object, got {shown(source)}")
    for key, value in {**dict.fromkeys(source), **optional, **wanted}.items():
        own, is_absent = source.get(key), source.get(key) in (None, {}, [])
        if isinstance(value, Mapping):
            _check(f"{where}{key}.", own, value, {}, not_read)
        elif key in not_read or (is_absent and key not in wanted):
            continue
        elif own != value or type(own) is not type(value):
            only = "" if value is None else f", only {value!r}"
            raise ValueError(f"quantization_config.{where}{shown(key)[1:-1]} = {shown(own)} is not supported{only}")


def _matcher(key: str, names: Any, has_patterns: bool) -> Callable[[str], bool]:
    r"""Whether a list excludes a module: by its name, by a module that it is part of, or by the end of its name.

    With `has_patterns`, `re:` begins a pattern of plain characters, `\.`, `\d+` and `.*`.
    """
    names = [] if names is None else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"quantization_config.{key} must be a list of names, got {shown(names)}")
    if len(names) > _MAX_NAMES:
        raise ValueError(f"quantization_config.{key} must have at most {_MAX_NAMES} names, got {len(names)}")
    plain, patterns = set(), []
    for name in names:
        if has_patterns and name.startswith("re:"):
            patterns.append(_pattern(key, name))
        elif re.fullmatch(rf"[\w.\-]{{1,{_MAX_LENGTH}}}", name) is None:
            raise ValueError(f"quantization_config.{key} has {shown(name)}, which is not the name of a module")
        else:
            plain.add(name)
    if len(patterns) > _MAX_PATTERNS:
        raise ValueError(f"quantization_config.{key} must have at most {_MAX_PATTERNS} patterns, got {len(patterns)}")

    def is_excluded(module: str) -> bool:
        parts = module.split(".")
        return (
            any(".".join(parts[:end]) in plain for end in range(1, len(parts) + 1))
            or any(".".join(parts[start:]) in plain for start in range(1, len(parts)))
            or any(pattern.match(module) for pattern in patterns)
        )

    return is_excluded


def _pattern(key: str, name: str) -> re.Pattern[str]:
    """compressed-tensors matches a pattern from the start of a name (`re.match`)."""
    body = name.removeprefix("re:").removeprefix("^")
    while body.endswith(".*"):
        body = body[:-2]
    is_plain = len(name) <= _MAX_LENGTH and re.fullmatch(r"(?:\.\*|\\\.|\\d\+|[\w.\-])*\$?", body) is not None
    if not is_plain or body.count(".*") + body.count("+") > _MAX_WILDCARDS:
        raise ValueError(
            f"quantization_config.{key} has {shown(name)}: only names with {_MAX_WILDCARDS} `.*` are supported"
        )
    return re.compile(body)
