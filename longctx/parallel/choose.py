"""Chooses an exchange by the rules of the context parallelism paper or by predicted times, and explains the choice."""

import dataclasses
import functools
import math

import numpy as np
from numpy.typing import ArrayLike

from longctx.annotations import Integer, Real
from longctx.parallel.cost import Hardware, ModelShape, Thresholds, Times, as_float, check_count, predict_times
from longctx.parallel.topology import Topology

RULES = ("predicted", "algorithm_1", "algorithm_5")


@dataclasses.dataclass(frozen=True)
class EmpiricalRule:
    """`h(T, P) = alpha * log(T) + beta * log(T / (T + P)) + gamma`: pass-KV where positive, else pass-Q.

    Logarithms are natural. Don't use the paper's own coefficients, -1.059, 1.145 and 12.112: they choose pass-Q in all
    14 rows of its table 4, and (as alpha is negative) for every full prefill of 93,000 tokens or more.

    Attributes:
      alpha, beta, gamma: the coefficients.

    Raises:
      ValueError: a coefficient is no finite number.

    Source:
      Context parallelism paper, appendix D.

    Examples:
      >>> from longctx.parallel import H100_RDMA, EmpiricalRule, ModelShape, choose_ring
      >>> new, cached = [1000, 4000, 16_000, 64_000], [127_000, 124_000, 112_000, 64_000]  # tokens of your measurements
      >>> rule = EmpiricalRule.fit(new, cached, pass_kv_times=[2.0, 2.1, 4, 9], pass_q_times=[1.5, 2, 4.4, 11])  # in ms
      >>> rule.prefers_pass_kv(2000, 126_000), rule.prefers_pass_kv(32_000, 96_000)
      (False, True)
      >>> EmpiricalRule.parse(rule.name.removeprefix("empirical:")) == rule
      True
      >>> choose_ring(2000, 126_000, 4, ModelShape(16, 1, 128), H100_RDMA, rule=rule).method
      'pass_q'
    """

    alpha: Real
    beta: Real
    gamma: Real

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            number = as_float(value)
            if not math.isfinite(number):
                raise ValueError(f"{field.name} must be a finite number, got {value!r}")
            object.__setattr__(self, field.name, number)

    @classmethod
    def parse(cls, text: str) -> "EmpiricalRule":
        """A rule from `"ALPHA,BETA,GAMMA"`.

        Raises:
          ValueError: these are not three finite numbers.
        """
        try:
            alpha, beta, gamma = map(float, text.split(","))
        except ValueError:
            raise ValueError(f"there must be three numbers, separated by commas, got {text!r}") from None
        return cls(alpha, beta, gamma)

    @property
    def name(self) -> str:
        """`"empirical:ALPHA,BETA,GAMMA"`, as a plan's `exchange` has it."""
        return f"empirical:{self.alpha!r},{self.beta!r},{self.gamma!r}"

    def h(self, new_tokens: Integer, cached_tokens: Integer) -> float:
        """The value of h for T new and P cached tokens.

        Args:
          new_tokens: T, at least 1.
          cached_tokens: P, at least 0.

        Raises:
          ValueError: one of them is no integer, or too small.
        """
        new, cached = check_count("new_tokens", new_tokens, 1), check_count("cached_tokens", cached_tokens, 0)
        return self.alpha * math.log(new) + self.beta * math.log(new / (new + cached)) + self.gamma

    def prefers_pass_kv(self, new_tokens: Integer, cached_tokens: Integer) -> bool:
        """Whether h is positive for T new and P cached tokens, `new_tokens` and `cached_tokens`."""
        return self.h(new_tokens, cached_tokens) > 0

    @classmethod
    def fit(
        cls, new_tokens: ArrayLike, cached_tokens: ArrayLike, pass_kv_times: ArrayLike, pass_q_times: ArrayLike
    ) -> "EmpiricalRule":
        """Fit which exchange is faster by logistic regression. The weight of a row is `|log(q / kv)|`.

        So a row counts by what the wrong choice costs. A small ridge picks one solution where several fit: rows that a
        line separates get a wide margin, and rows of one T + P, which cannot tell alpha from beta (as in table 4), get
        equal ones: a threshold for `T * T / (T + P)`, midway between equations 1 and 2.

        Args:
          new_tokens, cached_tokens: T and P of each measurement, integers `[rows]`.
          pass_kv_times, pass_q_times: `[rows]`, in any one unit.

        Returns:
          The rule, whose h is positive where pass-KV is predicted to be faster.

        Raises:
          ValueError: shapes differ, numbers are not positive and finite (P may be 0), or no two times differ.
        """
        names = ("new_tokens", "cached_tokens", "pass_kv_times", "pass_q_times")
        columns = [np.asarray(x, np.float64) for x in (new_tokens, cached_tokens, pass_kv_times, pass_q_times)]
        for name, column in zip(names, columns, strict=True):
            if column.ndim != 1 or column.shape != columns[0].shape:
                raise ValueError(f"{name} must have the shape [rows], as many as new_tokens, got {column.shape}")
            if not np.isfinite(column).all() or (column < 0).any() or (name != "cached_tokens" and not column.all()):
                raise ValueError(f"{name} must be positive and finite, got {column}")
        new, cached, pass_kv, pass_q = columns
        gain = np.log(pass_q) - np.log(pass_kv)
        if not gain.any():
            raise ValueError("pass_kv_times must differ from pass_q_times in some row")
        weights = np.abs(gain) / np.abs(gain).sum()
        features = np.stack([np.log(new), np.log(new / (new + cached))], 1)
        center = weights @ features
        # Features times the sign of the answer: the rule is right in a row where their product with it is positive.
        signed = np.sign(gain)[:, None] * np.column_stack([features - center, np.ones(len(new))])
        alpha, beta, offset = _logistic(signed, weights).tolist()
        return cls(alpha, beta, offset - float(np.array([alpha, beta]) @ center))


def _logistic(signed: np.ndarray, weights: np.ndarray, ridge: Real = 1e-5) -> np.ndarray:
    """The minimum over c of `weights @ log(1 + exp(-signed @ c)) + ridge / 2 * c @ c`, by damped Newton steps."""
    c = np.zeros(signed.shape[1])
    for _ in range(200):
        wrong = (1 - np.tanh(signed @ c / 2)) / 2
        gradient = ridge * c - signed.T @ (weights * wrong)
        hessian = ridge * np.eye(len(c)) + (signed.T * (weights * wrong * (1 - wrong))) @ signed
        step = np.linalg.solve(hessian, gradient)
        # A full Newton step may diverge. This step descends: the third derivative is at most reach * the second.
        reach = np.abs(signed @ step).max()
        if reach < 1e-9:
            break
        c = c - np.log1p(reach) / reach * step
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
class Choice:
    """The choice of `choose_ring`, with its reasons.

    Attributes:
      method: `"pass_kv"`, `"pass_q"`, `"all_gather"`, `"kvp"` or `"ulysses"`.
      rule: by which it was chosen.
      times: predicted seconds of each method.
      answers: the method that each rule chooses.
      thresholds: of the paper's equations.
      new_tokens, cached_tokens, num_ranks: T, P and N.
      hardware: the device and link that times were predicted for, in words.
      h: the value of the given `EmpiricalRule`, or else of the one that is fitted to the paper's table 4.

    Source:
      Context parallelism paper, algorithms 1 and 5, appendix D.

    Examples:
      >>> from longctx.parallel import H100_RDMA, ModelShape, choose_ring
      >>> model = ModelShape(num_heads=128, num_kv_heads=8, head_size=128).split(8)  # of Llama 3 405B, on 8 GPUs a host
      >>> choice = choose_ring(1280, 126_720, num_ranks=4, model=model, hardware=H100_RDMA, rule="algorithm_5")
      >>> choice.method, round(1e6 * choice.times["pass_kv"].total)  # predicted microseconds of a layer
      ('pass_q', 1243)
      >>> print(choice)  # what it was compared with
      pass_q, by algorithm_5: 1,280 new and 126,720 cached tokens on 4 ranks
      hardware: H100 (500 W), RDMA: 800 TFLOP/s, 50 GB/s to the next rank
      predicted, us      compute     exposed       total
      pass_kv              417.3       825.4     1,242.7
      pass_q               417.3       228.7       646.0
      all_gather           417.3     1,068.4     1,485.7
      kvp                  417.3       308.4       725.7
      equation 1: miss rate 1.00% < 12.50%: Q is fewer bytes
      equation 2: T 1,280 < 4,000: pass-KV is exposed
      equation 3: T + P 128,000 >= 32,000: Q is hidden
      equation 5: miss rate 1.00% < 8.50%: All2All costs less
      predicted: pass_q
      algorithm_1: pass_q
      algorithm_5: pass_q
      empirical: pass_q (h = -20.872, fitted to table 4)
    """

    method: str
    rule: str
    times: dict[str, Times]
    answers: dict[str, str]
    thresholds: Thresholds
    new_tokens: int
    cached_tokens: int
    num_ranks: int
    hardware: str
    h: Real

    def __str__(self) -> str:
        return self.explain()

    def explain(self) -> str:
        """The predicted times, both sides of the paper's equations, and the answer of each rule: lines to `print`."""
        new, total, answers = self.new_tokens, self.new_tokens + self.cached_tokens, self.answers
        eq, ranks = self.thresholds, "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        lines = [
            f"{self.method}, by {self.rule}: {new:,} new and {self.cached_tokens:,} cached tokens on {ranks}",
            f"hardware: {self.hardware}",
            f"{'predicted, us':14}{'compute':>12}{'exposed':>12}{'total':>12}",
        ]
        for method, times in self.times.items():
            columns = (times.compute, times.exposed, times.total)
            lines.append(f"{method:14}" + "".join(f"{1e6 * seconds:12,.1f}" for seconds in columns))
        miss = f"miss rate {new / total:.2%}"
        for number, left, is_met, right, if_met, if_not in (
            (1, miss, new / total >= eq.equation_1, f"{eq.equation_1:.2%}", "KV is fewer bytes", "Q is fewer bytes"),
            (2, f"T {new:,}", new >= eq.equation_2, f"{eq.equation_2:,.0f}", "pass-KV is hidden", "pass-KV is exposed"),
            (3, f"T + P {total:,}", total >= eq.equation_3, f"{eq.equation_3:,.0f}", "Q is hidden", "Q is exposed"),
            (5, miss, new / total >= eq.equation_5, f"{eq.equation_5:.2%}", "All2All costs more", "All2All costs less"),
        ):
            lines.append(f"equation {number}: {left} {'>=' if is_met else '<'} {right}: {if_met if is_met else if_not}")
        for rule, method in answers.items():
            source = "" if self.rule == "empirical" else ", fitted to table 4"
            lines.append(f"{rule}: {method}" + (f" (h = {self.h:.3f}{source})" if rule == "empirical" else ""))
        if answers["algorithm_1"] != answers["algorithm_5"]:
            lines.append("algorithm 1 and 5 differ: equation 5 counts pass-Q's all-to-all, equation 1 doesn't")
        return "\n".join(lines)


def choose_ring(
    new_tokens: Integer,
    cached_tokens: Integer,
    num_ranks: Integer,
    model: ModelShape,
    hardware: Hardware | Topology,
    rule: str | EmpiricalRule = "predicted",
    fullest: Integer | None = None,
    with_ulysses: bool = False,
    window: Integer | None = None,
) -> Choice:
    """Choose the exchange for new tokens that attend to themselves and to cached tokens, in a prefill or a decode.

    Args:
      new_tokens: T, at least 1.
      cached_tokens: P, at least 0.
      num_ranks: N, ranks of the ring.
      model: the heads of one rank; under tensor parallelism, a device's share.
      hardware: one rank; `H100_RDMA` and the like are one GPU. Rates that were achieved predict better than peaks
        (3.4). Or a `Topology`, whose link of the axis `context` counts, for elements of 2 bytes.
      rule: `"predicted"`: the least predicted time of all. It counts attention alone: `kvp` needs the queries on
        all ranks, so the layers' other work isn't divided by N. `"algorithm_1"`: equations 1 and 2. `"algorithm_5"`:
        equations 5 and 2, which counts pass-Q's all-to-all. Or an `EmpiricalRule`, appendix D's h. All but the first
        choose between pass-KV and pass-Q.
      fullest: cached tokens of the rank that has most of them. None: they are sharded evenly.
      with_ulysses: whether `"ulysses"` may be chosen too, by predicted times, where N divides the query heads.
        (`context_parallel_attention` has it, an engine has not.)
      window: tokens that a query sees, itself included, which predicted times count; None: all before it.

    Returns:
      A `Choice`, whose method is `"pass_kv"`, `"pass_q"`, `"all_gather"`, `"kvp"` or `"ulysses"`.

    Raises:
      TypeError, ValueError: an argument is of the wrong type or out of range, or there is no such rule; the message
        names it.

    Source:
      Context parallelism paper, algorithms 1 and 5, equations 1, 2, 3 and 5, appendix D.

    Examples:
      >>> from longctx.parallel import H100_RDMA, ModelShape, Topology, choose_ring
      >>> model = ModelShape(num_heads=128, num_kv_heads=8, head_size=128).split(8)  # of Llama 3 405B, on 8 GPUs a host
      >>> choose_ring(128_000, 0, num_ranks=4, model=model, hardware=H100_RDMA).method  # full prefill
      'pass_kv'
      >>> choose_ring(500, 127_500, num_ranks=4, model=model, hardware=H100_RDMA).method  # few new tokens
      'pass_q'
      >>> choose_ring(500, 127_500, num_ranks=4, model=model, hardware=H100_RDMA, rule="algorithm_1").method
      'pass_q'
      >>> choose_ring(1, 128_000, num_ranks=4, model=model, hardware=Topology.preset("h100-tcp")).method  # decode
      'kvp'
    """
    if not isinstance(rule, EmpiricalRule) and rule not in RULES:
        raise ValueError(f"rule must be an EmpiricalRule or one of {', '.join(RULES)}, got {rule!r}")
    if isinstance(hardware, Topology):
        hardware = hardware.hardware("context")
    times = predict_times(new_tokens, cached_tokens, num_ranks, model, hardware, fullest, with_ulysses, window)
    new, cached, num_ranks = int(new_tokens), int(cached_tokens), int(num_ranks)
    eq = Thresholds.of(new, num_ranks, model, hardware)
    empirical = rule if isinstance(rule, EmpiricalRule) else paper_rule()
    miss_rate = new / (new + cached)
    passes_kv = {
        "algorithm_1": new >= eq.equation_2 or miss_rate >= eq.equation_1,
        "algorithm_5": new >= eq.equation_2 or miss_rate >= eq.equation_5,
        "empirical": empirical.prefers_pass_kv(new, cached),
    }
    answers = {"predicted": min(times, key=lambda method: times[method].total)}
    answers |= {name: "pass_kv" if passes else "pass_q" for name, passes in passes_kv.items()}
    name = rule if isinstance(rule, str) else "empirical"
    return Choice(
        answers[name], name, times, answers, eq, new, cached, num_ranks, str(hardware), empirical.h(new, cached)
    )
