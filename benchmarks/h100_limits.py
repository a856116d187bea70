"""The limits of an H100 SXM: the least time of each named shape, by FLOPs and by bytes. Needs no GPU."""

from typing import NamedTuple

from benchmarks.kernel_shapes import AttentionShape

# NVIDIA's data sheet of the H100 SXM: dense bf16 products, and memory.
FLOPS_PER_SECOND = 989e12
BYTES_PER_SECOND = 3.35e12


class Floor(NamedTuple):
    """Least milliseconds: all the products at full rate, and every operand and result moved once."""

    flops_ms: float
    bytes_ms: float

    @property
    def ms(self) -> float:
        return max(self.flops_ms, self.bytes_ms)

    @property
    def binds(self) -> str:
        return "FLOPs" if self.flops_ms > self.bytes_ms else "bytes"


def floor(flops: float, num_bytes: float) -> Floor:
    return Floor(flops / FLOPS_PER_SECOND * 1e3, num_bytes / BYTES_PER_SECOND * 1e3)


def floor_rows(shapes: list[AttentionShape]) -> list[dict[str, object]]:
    rows = []
    for shape in shapes:
        least = floor(shape.flops, shape.bytes)
        rows.append(
            {
                "shape": shape.name,
                "q": list(shape.q_shape),
                "kv": list(shape.kv_shape),
                "gflop": shape.flops / 1e9,
                "mb": shape.bytes / 1e6,
                "flop_per_byte": shape.flops / shape.bytes,
                "flops_ms": least.flops_ms,
                "bytes_ms": least.bytes_ms,
                "binds": least.binds,
            }
        )
    return rows


_FLOOR = ("GFLOP", "MB", "FLOP/byte", "FLOPs, ms", "bytes, ms")
_FLOOR_KEYS = ("gflop", "mb", "flop_per_byte", "flops_ms", "bytes_ms")
_PREDICTED = ("predicted ms", "TFLOP/s", "TB/s", "of the floor")
_PREDICTED_KEYS = ("predicted_ms", "predicted_tflops", "predicted_tbps", "predicted_of_floor")


def floor_table(rows: list[dict[str, object]]) -> str:
    """Rows of `floor_rows` in markdown, and what is predicted for them if they have it."""
    keys, names = list(_FLOOR_KEYS), list(_FLOOR)
    if rows and _PREDICTED_KEYS[0] in rows[0]:
        keys, names = keys + list(_PREDICTED_KEYS), names + list(_PREDICTED)
    lines = [
        f"| shape | q [B, T, N, H] | k, v [B, S, K, H] | {' | '.join(names)} | binds |",
        "|---" * (4 + len(names)) + "|",
    ]
    for row in rows:
        q, kv = (", ".join(map(str, row[x])) for x in ("q", "kv"))  # type: ignore[call-overload]
        numbers = " | ".join(f"{row[x]:.4g}" for x in keys)
        lines.append(f"| {row['shape']} | {q} | {kv} | {numbers} | {row['binds']} |")
    return "\n".join(lines)
