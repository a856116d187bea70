"""Measured runs of engines: TTFT and TPOT of a closed loop of users, read from a CSV file."""

import csv
import dataclasses
import zlib
from collections.abc import Mapping
from pathlib import Path

from longctx.models import LlamaConfig, RowwiseFp8

SYSTEM = "h100_sxm"
COLUMNS = (
    "id",
    "backend",
    "model_path",
    "system",
    "precision",
    "gemm_quant_mode",
    "isl",
    "osl",
    "batch_size",
    "tp_size",
    "silicon_ttft_ms",
    "silicon_tpot_ms",
)
MAX_POSITIONS = 2**17


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of an engine on H100.

    Attributes:
      name: that no other run has.
      engine: `"vllm"`, `"sglang"` or `"trtllm"`.
      model: name at Hugging Face.
      prompt_tokens, output_tokens: of a request.
      users: of the closed loop, each with one request at a time.
      tensor: GPUs.
      fp8_weights, fp8_cache: whether weights of layers, and keys and values, are FP8; else they are bfloat16.
      ttft, tpot: measured, seconds.
    """

    name: str
    engine: str
    model: str
    prompt_tokens: int
    output_tokens: int
    users: int
    tensor: int
    fp8_weights: bool
    fp8_cache: bool
    ttft: float
    tpot: float

    @property
    def is_fitted(self) -> bool:
        """Whether it belongs to the half on which overheads are fitted, by a checksum of its name."""
        return zlib.crc32(self.name.encode()) % 2 == 0

    @property
    def config(self) -> LlamaConfig:
        """Sizes of the model, with FP8 weights if the run has them."""
        model = dataclasses.replace(_preset(self.model), max_positions=MAX_POSITIONS)
        if self.fp8_weights:
            model = dataclasses.replace(model, quantization=RowwiseFp8.of(model.num_layers, "all"))
        return model


def read_runs(path: Path) -> list[Run]:
    """Read measured runs.

    Args:
      path: CSV with the columns `COLUMNS`, and others; times in milliseconds.

    Returns:
      The runs, in the order of the file.

    Raises:
      ValueError: columns are missing, a model is unknown, a cell is no number, or a run is of other GPUs.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path.name} has no column {', '.join(missing)}")
        runs = []
        for number, row in enumerate(reader, 2):
            try:
                runs.append(_run(row))
            except (ValueError, KeyError) as error:
                raise ValueError(f"{path.name}, line {number}: {error}") from None
    return runs


def _preset(model: str) -> LlamaConfig:
    """Sizes of a model by its name at Hugging Face, of which those of the instructed or FP8 one are the same."""
    name = model.rpartition("/")[2].lower().removeprefix("meta-").removesuffix("-fp8").removesuffix("-instruct")
    try:
        return LlamaConfig.preset(name)
    except ValueError as error:
        raise ValueError(f"model_path {model!r}: {error}") from None


def _run(row: dict[str, str]) -> Run:
    _preset(row["model_path"])
    if row["system"] != SYSTEM:
        raise ValueError(f"system must be {SYSTEM}, got {row['system']!r}")
    return Run(
        row["id"],
        row["backend"],
        row["model_path"],
        int(row["isl"]),
        int(row["osl"]),
        int(row["batch_size"]),
        int(row["tp_size"]),
        row["gemm_quant_mode"] == "fp8",
        row["precision"] == "fp8",
        float(row["silicon_ttft_ms"]) / 1e3,
        float(row["silicon_tpot_ms"]) / 1e3,
    )


def read_predictions(path: Path) -> dict[str, tuple[float, float]]:
    """Read predicted (TTFT, TPOT) in seconds, by the name of the run; a run without a prediction is left out.

    Args:
      path: CSV with the columns `id`, `ttft_ms` and `tpot_ms`.
    """
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["ttft_ms"]]
    return {row["id"]: (float(row["ttft_ms"]) / 1e3, float(row["tpot_ms"]) / 1e3) for row in rows}


def write_predictions(path: Path, predictions: Mapping[str, tuple[float, float]]) -> None:
    """Write predicted (TTFT, TPOT) in seconds, by the name of the run, for `read_predictions`."""
    rows = [f"{name},{1e3 * ttft:.6g},{1e3 * tpot:.6g}" for name, (ttft, tpot) in predictions.items()]
    path.write_text("\n".join(["id,ttft_ms,tpot_ms", *rows, ""]), encoding="utf-8")
