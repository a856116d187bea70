"""Which exchange to take: the rules of the context parallelism paper, and predicted times to explain them."""

import dataclasses
import functools
import math

import numpy as np
from numpy.typing import ArrayLike

from longctx.parallel.cost import H100_RDMA as H100_RDMA
from longctx.parallel.cost import H100_TCP as H100_TCP
from longctx.parallel.cost import Hardware, ModelShape, Times, check_count, predict_times


@dataclasses.dataclass(frozen=True)
class EmpiricalRule:
    """`h(T, P) = alpha * log(T) + beta * log(T / (T + P)) + gamma`: pass-KV where positive, else pass-Q.

    Logarithms are natural. The paper's coefficients, -1.059, 1.145 and 12.112, are not to be copied: they choose pass-Q
    in all 14 rows of its table 4, and (as alpha is negative) for any full prefill of 92,600 tokens or more.

    Source: context parallelism paper, appendix D.
    """

    alpha: float
    beta: float
    gamma: float

    def h(self, new_tokens: int, cached_tokens: int) -> float:
        new, cached = check_count("new_tokens", new_tokens, 1), check_count("cached_tokens", cached_tokens, 0)
        return self.alpha * math.log(new) + self.beta * math.log(new / (new + cached)) + self.gamma

    def prefers_pass_kv(self, new_tokens: int, cached_tokens: int) -> bool:
        return self.h(new_tokens, cached_tokens) > 0

    @classmethod
    def fit(
        cls, new_tokens: ArrayLike, cached_tokens: ArrayLike, pass_kv_times: ArrayLike, pass_q_times: ArrayLike
    ) -> "EmpiricalRule":
        """Logistic regression of which is faster, each row weighing what the wrong choice costs, `|log(q / kv)|`.

        So rows that hardly differ hardly count. A slight ridge picks one answer where rows leave several: those that a
        line separates get a wide margin, and where T + P is the same in all, which cannot tell alpha from beta (as in
        table 4), the two are equal: a threshold for `T * T / (T + P)`, midway between equations 1 and 2.

        Args:
          new_tokens, cached_tokens: T and P of each measurement, `[rows]`.
          pass_kv_times, pass_q_times: `[rows]`, in any one unit.

        Raises:
          ValueError: shapes differ, numbers are not positive and finite (P may be 0), or no two times differ.
        """
        given = dict(new_tokens=new_tokens, cached_tokens=cached_tokens)  # noqa: C408
        given |= dict(pass_kv_times=pass_kv_times, pass_q_times=pass_q_times)  # noqa: C408
        columns = {name: np.asarray(values, np.float64) for name, values in given.items()}
        for name, column in columns.items():
            if column.ndim != 1 or column.shape != columns["new_tokens"].shape:
                raise ValueError(f"{name} must have the shape [rows], as many as new_tokens, got {column.shape}")
            if not np.isfinite(column).all() or (column < (0 if name == "cached_tokens" else 1e-300)).any():
                raise ValueError(f"{name} must be positive and finite, got {column}")
        new, cached, pass_kv, pass_q = columns.values()
        gain = np.log(pass_q) - np.log(pass_kv)
        if not gain.any():
            raise ValueError("pass_kv_times must differ from pass_q_times in some row")
        weights = np.abs(gain) / np.abs(gain).sum()
        features = np.stack([np.log(new), np.log(new / (new + cached))], 1)
        center = weights @ features
        # The features with the sign of the answer: the rule is right in a row where their product with it is positive.
        signed = np.sign(gain)[:, None] * np.column_stack([features - center, np.ones(len(new))])
        alpha, beta, offset = _logistic(signed, weights).tolist()
        return cls(alpha, beta, offset - float(np.array([alpha, beta]) @ center))


def _logistic(signed: np.ndarray, weights: np.ndarray, ridge: float = 1e-5) -> np.ndarray:
    """The minimum over c of `weights @ log(1 + exp(-signed @ c)) + ridge / 2 * c @ c`, by damped Newton steps."""

    def loss(c: np.ndarray) -> float:
        return float(weights @ np.logaddexp(0, -signed @ c) + ridge / 2 * c @ c)

    c = np.zeros(signed.shape[1])
    for _ in range(100):
        wrong = (1 - np.tanh(signed @ c / 2)) / 2
        gradient = ridge * c - signed.T @ (weights * wrong)
        hessian = ridge * np.eye(len(c)) + (signed.T * (weights * wrong * (1 - wrong))) @ signed
        step = np.linalg.solve(hessian, gradient)
        slope = float(gradient @ step)
        if slope < 1e-15:
            break
        size = 1.0
        while loss(c - size * step) > loss(c) - 1e-4 * size * slope and size > 1e-9:
            size /= 2
        c = c - size * step
    return c


@functools.cache
def paper_rule() -> EmpiricalRule:
    """The fit of the paper's table 4: Llama3 405B, T + P = 128,000, 4 hosts of 8 H100 over RDMA; times in ms."""
    new = np.array([1280, 3200, 4160, 6400, *range(12800, 128001, 12800)])
    pass_kv = [1023.39, 1110.18, 1298.92, 1305.56, 2080.67, 3353.02, 4629.23, 5745.08, 6845.21, 7890.35]
    pass_q = [898.71, 1046.43, 1280.1, 1302.01, 2205.27, 3617.02, 4922.52, 6217.83, 7367.99, 8468.66]
    pass_kv += [8697.27, 10105.78, 11136.4, 11462.15]
    pass_q += [9666.62, 10652.39, 11571.62, 12360.57]
    return EmpiricalRule.fit(new, 128000 - new, pass_kv, pass_q)


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """What the paper's equations compare with; the names tell which.

    From a miss rate `T / (T + P)` of `equation_1`, keys and values are no more bytes than queries; from T =
    `equation_2`, attention hides ring pass-KV; from T + P = `equation_3`, it hides pass-Q's ring. From a miss rate of
    `equation_5`, which holds for one T, pass-Q's all-to-all costs more than the part of pass-KV that isn't hidden.

    In equation 5 partial results are as wide as they travel, not e: `T / (T + P)` is multiplied by `partial_bytes / e`.
    """

    equation_1: float
    equation_2: float
    equation_3: float
    equation_5: float

    @classmethod
    def of(cls, new_tokens: int, num_ranks: int, model: ModelShape, hardware: Hardware) -> "Thresholds":
        # C * e / BW: operations that the device does while it sends an element.
        intensity = hardware.peak_flops * hardware.bytes_per_element / hardware.bandwidth
        miss_rate = 2 * model.num_kv_heads / model.num_heads
        hidden = 4 * new_tokens / (num_ranks * intensity)
        return cls(
            equation_1=miss_rate,
            equation_2=num_ranks * intensity * miss_rate / 4,
            equation_3=num_ranks * intensity / 4,
            equation_5=(miss_rate - hidden) * hardware.bytes_per_element / hardware.partial_bytes,
        )


@dataclasses.dataclass(frozen=True)
class Choice:
    """What `choose_ring` chose, and why: `times` of each method, and the `answers` of each rule."""

    method: str
    times: dict[str, Times]
    answers: dict[str, str]
    thresholds: Thresholds
    heading: str

    def explain(self) -> None: ...


def choose_ring(
    new_tokens: int,
    cached_tokens: int,
    num_ranks: int,
    model: ModelShape,
    hardware: Hardware,
    rule: str | EmpiricalRule = "predicted",
) -> Choice: ...
