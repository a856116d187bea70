"""FP8 rows in NumPy, in float64 but for the roundings of the format: the oracle of FP8 weights and of FP8 pages."""

import ml_dtypes
import numpy as np

E4M3 = ml_dtypes.float8_e4m3fn


def quantize(x: np.ndarray, upper_bound: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Rows `[..., n]` -> (e4m3 values, float32 scales `[...]`)."""
    wide = x.astype(np.float32)
    largest = np.abs(wide).max(-1)
    if upper_bound is not None:
        largest = np.minimum(largest, np.float32(upper_bound))
    scale = np.maximum(largest, np.float32(1e-12)) * np.float32(1 / 448)
    return np.clip(wide / scale[..., None], -448, 448).astype(E4M3), scale


def round_rows(x: np.ndarray) -> np.ndarray:
    """What rows are worth in FP8, float64."""
    values, scale = quantize(x)
    return values.astype(np.float64) * scale[..., None].astype(np.float64)


def product(x: np.ndarray, values: np.ndarray, scale: np.ndarray, upper_bound: float | None = None) -> np.ndarray:
    """Multiply x `[rows, n]`, e4m3 values `[outputs, n]`, their scales `[outputs]` -> float64 `[rows, outputs]`."""
    rows, row_scale = quantize(x, upper_bound)
    sums = rows.astype(np.float64) @ values.astype(np.float64).T
    return sums * row_scale[:, None].astype(np.float64) * scale.astype(np.float64)


def rounding(x: np.ndarray, values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The most that a float32 sum in any order, and the scaling of it, may differ from `product`."""
    rows, row_scale = quantize(x)
    sums = np.abs(rows.astype(np.float64)) @ np.abs(values.astype(np.float64)).T
    return (x.shape[1] + 2) * 2.0**-24 * sums * row_scale[:, None] * scale


def format_error(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The most that a product of quantised rows may differ from `x @ weight.T` (docs/fp8.md), `[rows, outputs]`."""
    relative, least = 2.0**-4, 2.0**-10  # of half of a step: of a normal value; of a subnormal one, before scaling
    (_, x_scale), (_, weight_scale) = quantize(x), quantize(weight)
    x, weight = np.abs(x).astype(np.float64), np.abs(weight).astype(np.float64)
    x_error = np.maximum(relative * x, least * x_scale[:, None])
    weight_error = np.maximum(relative * weight, least * weight_scale[:, None])
    return x_error @ weight.T + x @ weight_error.T + x_error @ weight_error.T
