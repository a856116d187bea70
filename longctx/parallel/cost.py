"""Cost model of one attention layer over a mesh axis: a roofline of compute, memory and link for each exchange."""

import dataclasses
import functools
import math
from typing import Any

from longctx.annotations import Integer, Real


def check_count(name: str, value: Integer, least: int) -> int:
    """The value as a Python int, which can't overflow; ValueError if it is no integer of at least `least`."""
    if not isinstance(value, Integer) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return int(value)


def as_float(value: object) -> float:
    """A real number, infinity if it is too large; NaN for anything else, which is in no range."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The heads of one attention layer on one device: all of them, or after `split` one tensor-parallel share.

    (A rank of the paper is a host of 8 GPUs, each with an eighth of the heads: 8 equal rings side by side, of which
    this and `Hardware` describe one.)

    Args:
      num_heads: query heads N, a multiple of K.
      num_kv_heads: key/value heads K.
      head_size: H.

    Raises:
      ValueError: one of them is no positive integer, or K doesn't divide N.

    Source:
      Context parallelism paper, 4.2.2 (KV heads that are repeated).

    Examples:
      >>> from longctx.parallel import ModelShape
      >>> llama = ModelShape(num_heads=32, num_kv_heads=8, head_size=128)
      >>> llama.split(4)  # the heads of one of four devices
      ModelShape(num_heads=8, num_kv_heads=2, head_size=128)
      >>> llama.split(16).num_kv_heads  # repeated, as there are fewer than devices
      1
    """

    num_heads: int
    num_kv_heads: int
    head_size: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, check_count(field.name, getattr(self, field.name), 1))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, {self.num_kv_heads}, got {self.num_heads}")

    def split(self, tensor: int) -> "ModelShape":
        """The heads of one of `tensor` devices; fewer KV heads than devices are repeated.

        Raises:
          ValueError: tensor does not divide the query heads, or neither divides the KV heads nor is a multiple of them.
        """
        tensor = check_count("tensor", tensor, 1)
        if self.num_heads % tensor or (self.num_kv_heads % tensor and tensor % self.num_kv_heads):
            raise ValueError(
                f"tensor must divide num_heads, and num_kv_heads or be a multiple of it, got {tensor}: {self}"
            )
        return ModelShape(self.num_heads // tensor, max(1, self.num_kv_heads // tensor), self.head_size)


def check_numbers(record: Any) -> dict[str, float]:
    """Check the name of a dataclass and its numbers, and return these as floats, but for those that are None.

    Shares and overlaps are at most 1; latencies, seconds, contention and overlaps may be 0.

    Raises:
      ValueError: one of them is out of range, or the name is no string.
    """
    if not isinstance(record.name, str):
        raise ValueError(f"name must be a string, got {record.name!r}")
    numbers = {}
    for field in dataclasses.fields(record):
        name, value = field.name, getattr(record, field.name)
        is_number = name not in ("name", "flops", "products", "attention", "all_reduces")
        if not is_number or (value is None and field.default is None):
            continue
        most = 1.0 if name.endswith(("share", "overlap")) else math.inf
        may_be_zero = name.endswith(("latency", "seconds", "contention", "overlap"))
        number = numbers[name] = as_float(value)
        is_right = 0 < number <= most and number < math.inf
        if not (is_right or (may_be_zero and number == 0) or (value == field.default == math.inf)):
            kind = "finite number that is not negative" if may_be_zero else "positive, finite number"
            limit = "" if most == math.inf else f", at most {most:g}"
            raise ValueError(f"{name} must be a {kind}{limit}, got {value!r}")
    return numbers


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A device that computes the heads of a `ModelShape`, and its link to the next rank.

    Args:
      peak_flops: C, FLOP/s of the device.
      bandwidth: BW, bytes/s that it can send.
      bytes_per_element: e, of queries, keys and values.
      latency: seconds that an exchange, a hop or a collective, takes for any size.
      memory_bandwidth: bytes/s at which the device reads keys and values, which limits decode.
      partial_bytes: bytes of an element of a partial result, float32 here, for predicted times. (The paper's equation 5
        has e for it, and its table 5 fits 2.)
      collective_bandwidth, collective_latency: bytes/s and seconds of a collective, which nothing runs beside; None: as
        of a hop.
      contention: which share of the seconds of a hop the attention that hides it loses to it.
      key_bytes_per_element: of keys and values, where they are not those of queries.
      name: what explanations call it; it does not count in comparisons.

    Raises:
      ValueError: one of them is not positive and finite (latencies and contention may be 0, memory_bandwidth infinite),
        or the name is no string.

    Source:
      Context parallelism paper, 3.4 and table 1, whose symbols are in capitals.

    Examples:
      >>> from longctx.parallel import Hardware, ModelShape, choose_ring
      >>> mine = Hardware(peak_flops=500e12, bandwidth=25e9, latency=20e-6, memory_bandwidth=3e12)  # as measured
      >>> round(mine.hop(64 * 2**20) * 1e3, 2)  # ms for 64 MiB to the next rank
      2.7
      >>> choose_ring(100_000, 0, num_ranks=8, model=ModelShape(32, 8, 128), hardware=mine).method
      'pass_kv'
    """

    peak_flops: Real
    bandwidth: Real
    bytes_per_element: Real = 2
    latency: Real = 0.0
    memory_bandwidth: Real = math.inf
    partial_bytes: Real = 4
    collective_bandwidth: Real | None = None
    collective_latency: Real | None = None
    contention: Real = 0.0
    key_bytes_per_element: Real | None = None
    name: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        check_numbers(self)

    def __str__(self) -> str:
        rates = f"{self.peak_flops / 1e12:,.4g} TFLOP/s, {self.bandwidth / 1e9:,.4g} GB/s to the next rank"
        return f"{self.name}: {rates}" if self.name else rates

    def hop(self, num_bytes: Real) -> float:
        """Seconds of a hop to the next rank."""
        return self.latency + num_bytes / self.bandwidth

    def collective(self, num_bytes: Real, count: int = 1) -> float:
        """Seconds of collectives, in each of which a rank sends a part of the bytes.

        Args:
          num_bytes: of all parts together.
          count: how many collectives.
        """
        latency = self.latency if self.collective_latency is None else self.collective_latency
        return count * latency + num_bytes / (self.collective_bandwidth or self.bandwidth)


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """Bytes that ranks send in one layer of attention, and seconds of sending them where nothing hides it.

    With one rank nothing is sent.

    Attributes:
      model: heads of one rank.
      hardware: of one rank, and its link.
      num_ranks: ranks of the axis.

    Examples:
      >>> from longctx.parallel import H100_RDMA
      >>> from longctx.parallel.cost import LLAMA3_405B, LayerCost
      >>> layer = LayerCost(LLAMA3_405B.split(8), H100_RDMA, num_ranks=4)
      >>> layer.key_bytes, layer.query_bytes
      (512, 4096)
      >>> round(1e6 * layer.hop(32_000 * layer.key_bytes))  # microseconds for the keys and values of 32,000 tokens
      363
    """

    model: ModelShape
    hardware: Hardware
    num_ranks: Integer

    @functools.cached_property
    def key_bytes(self) -> Real:
        """Bytes of a token's key and value."""
        element = self.hardware.key_bytes_per_element or self.hardware.bytes_per_element
        return 2 * self.model.num_kv_heads * self.model.head_size * element

    @functools.cached_property
    def query_bytes(self) -> Real:
        """Bytes of a row's queries."""
        return self.model.num_heads * self.model.head_size * self.hardware.bytes_per_element

    @functools.cached_property
    def state_bytes(self) -> Real:
        """Bytes of a row's partial results."""
        return self.model.num_heads * (self.model.head_size + 1) * self.hardware.partial_bytes

    def hop(self, num_bytes: Real) -> float:
        """Seconds in which each rank sends `num_bytes` to the next one."""
        return 0.0 if self.num_ranks == 1 else self.hardware.hop(num_bytes)

    def collective(self, num_bytes: Real, count: int = 1) -> float:
        """Seconds of `count` collectives, in which each rank sends `num_bytes` in all."""
        return 0.0 if self.num_ranks == 1 else self.hardware.collective(num_bytes, count)

    def ring(self, hop: Real, attention: Real) -> float:
        """Seconds that N - 1 hops of `hop` seconds add to N partial attentions of `attention` seconds."""
        lost = self.hardware.contention * min(hop, attention)
        return (self.num_ranks - 1) * (max(0.0, hop - attention) + lost)

    def send_states(self, rows: Real) -> float:
        """Seconds in which each rank gets the states of its `rows` from all ranks."""
        return self.collective((self.num_ranks - 1) * rows * self.state_bytes)

    def gather_keys(self, keys: Real) -> float:
        """Seconds in which all ranks get the `keys` tokens of each."""
        return self.collective((self.num_ranks - 1) * keys * self.key_bytes)

    def exchange_heads(self, rows: Real, keys: Real) -> float:
        """Seconds in which `rows` and `keys` of each rank become heads of all tokens, and results come back."""
        n, heads = self.num_ranks, self.model.num_heads
        copies = kv_head_copies(heads, self.model.num_kv_heads, n)
        sent = rows * (2 * self.query_bytes + 4 * heads) + keys * copies * self.key_bytes
        return self.collective((n - 1) / n * sent, count=2)

    def merge(self, rows: Real) -> float:
        """Seconds in which the states of `rows` of all ranks are merged, by the cheaper way of `kvp_attention`."""
        n, results = self.num_ranks, self.query_bytes + 4 * self.model.num_heads
        gather = self.collective((n - 1) * rows * self.state_bytes)
        share = math.ceil(rows / n)
        return min(gather, self.collective((n - 1) * share * (self.state_bytes + results), count=2))

    def merge_to_heads(self, rows: Real) -> float:
        """Seconds in which the states of `rows` that all ranks have are merged, of each rank's heads alone."""
        n = self.num_ranks
        return self.collective((n - 1) / n * rows * self.state_bytes)

    def share_rows(self, rows: Real, row_bytes: Real) -> float:
        """Seconds in which `rows` of each rank go through weights that ranks share, sequence parallelism.

        All ranks get their heads of the results of attention, and the feed-forward's inputs of `row_bytes` each, and
        return the sums of both products.
        """
        n = self.num_ranks
        sent = (n - 1) / n * self.query_bytes + 3 * (n - 1) * row_bytes
        return self.collective(rows * sent, count=4)


def kv_head_copies(num_heads: int, num_kv_heads: int, num_ranks: int) -> int:
    """Copies of each KV head that ranks need which have `num_heads / num_ranks` query heads each.

    All query heads of a copy are on one rank, and each rank has equally many copies.
    """
    group = num_heads // num_kv_heads
    return group // math.gcd(num_heads // num_ranks, group)


LLAMA3_405B = ModelShape(128, 8, 128)
"""Attention of a layer of Llama 3 405B, the model of the context parallelism paper's measurements.

Source:
  Context parallelism paper, 4.1 and table 9.

Examples:
  >>> from longctx.parallel.cost import LLAMA3_405B
  >>> LLAMA3_405B.split(8)  # of one of a host's 8 GPUs
  ModelShape(num_heads=16, num_kv_heads=1, head_size=128)
"""

# One H100 of the paper's hosts: 800 TFLOP/s at 500 W and 2.4 TB/s of HBM2e (appendix A), 400 or 100 Gb/s (4.1). A hop
# of a few bytes takes 35 us (table 8, decode: SendRecv of 3 hops is 105.7 us, of one 32.3); over TCP it isn't given.
H100_RDMA = Hardware(800e12, 50e9, latency=35e-6, memory_bandwidth=2.4e12, name="H100 (500 W), RDMA")
"""A GPU of Meta's hosts whose ring is over RDMA of 400 Gb/s a GPU: peaks, which are never all reached.

Source:
  Context parallelism paper, 4.1, table 8 and appendix A.

Examples:
  >>> from longctx.parallel import H100_RDMA
  >>> H100_RDMA.peak_flops / 1e12, H100_RDMA.bandwidth / 1e9  # TFLOP/s, GB/s of its link
  (800.0, 50.0)
"""
H100_TCP = dataclasses.replace(H100_RDMA, bandwidth=12.5e9, name="H100 (500 W), TCP")
"""A GPU of Meta's hosts whose ring is over TCP of 100 Gb/s a GPU.

Source:
  Context parallelism paper, 4.1.

Examples:
  >>> from longctx.parallel import H100_TCP
  >>> H100_TCP.hop(12.5e9)  # seconds for 12.5 GB
  1.000035
"""


def window_pairs(start: int, count: int, window: int) -> int:
    """Return the keys that `count` queries after `start` tokens see in a layer with a window, summed over queries."""
    within = min(max(0, window - start), count)  # queries that see all tokens before them
    return within * start + within * (within + 1) // 2 + (count - within) * window


def window_keys(start: int, count: int, window: int) -> int:
    """Return the keys that some of `count` queries after `start` tokens see in a layer with a window."""
    return min(start, window - 1) + count


@dataclasses.dataclass(frozen=True)
class Times:
    """Predicted seconds of one attention layer on one rank.

    A rank computes `steps` partial attentions of `attention` seconds each (table 5's ATTN). Between them are hops of
    `send` seconds (SendRecv), which the attention of the step before hides. Nothing hides `collective` (All2All) and
    `tokens`, the seconds to gather positions and segments. `contention`: see `Hardware`.
    """

    steps: int
    attention: Real
    send: Real
    collective: Real
    tokens: Real
    contention: Real = 0.0

    @property
    def compute(self) -> float:
        return self.steps * self.attention

    @property
    def exposed(self) -> float:
        """Seconds of communication that isn't hidden: `(N - 1) * max(0, SendRecv - ATTN)` (appendix C) and more."""
        hop = max(0.0, self.send - self.attention) + self.contention * min(self.send, self.attention)
        return (self.steps - 1) * hop + self.collective + self.tokens

    @property
    def total(self) -> float:
        return self.compute + self.exposed


def predict_times(
    new_tokens: Integer,
    cached_tokens: Integer,
    num_ranks: Integer,
    model: ModelShape,
    hardware: Hardware,
    fullest: Integer | None = None,
    with_ulysses: bool = False,
    window: Integer | None = None,
) -> dict[str, Times]:
    """Predict the times of `pass_kv`, `pass_q`, `all_gather` and `kvp`, in this order, for one sequence.

    After them comes `ulysses` if it is asked for and N divides the query heads.

    Each exchange sends the bytes that its docstring states. Tokens are sharded evenly, shards are as long as the
    longest (3.5.2), and the work is balanced, as in zigzag. `kvp` has its queries on all ranks already, and uses the
    cheaper of its two merges. The model differs from the paper's: attention is causal, with `T * P + T * (T + 1) / 2`
    pairs instead of `T * (T + P)`; a rank sends its shard, T / N or (T + P) / N tokens, where appendix C has all of
    them; each head has an lse, not each token; latency, memory and the 8 bytes of a token's position and segment count.

    Args:
      fullest: cached tokens of the rank that has most of them; None: they are sharded evenly. Where queries come to
        keys (`pass_q`, `kvp`) all wait for that rank; where keys come to queries, shards are padded to its.
      window: tokens that a query sees, itself included; None: all before it. Attention counts what it leaves, evenly
        divided too. All tokens are sent: `layout_hops` knows the layouts with which a ring needs few hops.

    Raises:
      ValueError: new_tokens T, num_ranks N or the window is no positive integer, cached_tokens P no non-negative one,
        or fullest is not P / N to P.
      TypeError: model is no `ModelShape`, or hardware no `Hardware`.

    Source: context parallelism paper, 3.4, table 3 and appendix C; KVP, Mnemosyne 4.4.
    """
    if not isinstance(model, ModelShape):
        raise TypeError(f"model must be a ModelShape, such as LLAMA3_405B, got {model!r}")
    if not isinstance(hardware, Hardware):
        raise TypeError(f"hardware must be a Hardware, such as H100_RDMA, got {hardware!r}")
    n = check_count("num_ranks", num_ranks, 1)
    new, cached = check_count("new_tokens", new_tokens, 1), check_count("cached_tokens", cached_tokens, 0)
    most = -(-cached // n) if fullest is None else check_count("fullest", fullest, -(-cached // n))
    if most > cached:
        raise ValueError(f"fullest must be at most cached_tokens, {cached}, got {fullest}")
    rows = -(-new // n)
    shard = rows + most
    layer = LayerCost(model, hardware, n)
    pairs_share, keys_share = 1.0, 1.0
    if window is not None:
        size = check_count("window", window, 1)
        pairs_share = window_pairs(cached, new, size) / (new * cached + new * (new + 1) // 2)
        keys_share = window_keys(cached, new, size) / (cached + new)

    def compute(queries: int, cached_keys: Real, read_share: Real = 1) -> float:
        """Seconds of the attention of some queries to one shard, of whose KV heads a share is read."""
        flops = 4 * queries * (cached_keys + (new + 1) / 2 / n) * model.num_heads * model.head_size
        read = (rows + math.ceil(cached_keys)) * layer.key_bytes * read_share
        return max(pairs_share * flops / hardware.peak_flops, keys_share * read / hardware.memory_bandwidth)

    def gather(num_tokens: int) -> float:
        return layer.collective((n - 1) * 8 * num_tokens)

    mean, lost = cached / n, hardware.contention
    here = mean if fullest is None else most
    keys, queries = layer.hop(shard * layer.key_bytes), layer.hop(rows * layer.query_bytes)
    times = {
        "pass_kv": Times(n, compute(rows, mean), keys, 0.0, gather(shard), lost),
        "pass_q": Times(n, compute(rows, here), queries, layer.send_states(rows), gather(rows), lost),
        "all_gather": Times(n, compute(rows, mean), 0.0, layer.gather_keys(shard), gather(shard)),
        "kvp": Times(1, compute(new, here), 0.0, layer.merge(new), 0.0),
    }
    if with_ulysses and model.num_heads % n == 0:
        # The queries of all ranks, with an n-th of the heads.
        attention = compute(rows, mean, kv_head_copies(model.num_heads, model.num_kv_heads, n) / n)
        times["ulysses"] = Times(n, attention, 0.0, layer.exchange_heads(rows, shard), gather(rows + shard))
    return times


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """The thresholds of the paper's equations.

    From a miss rate `T / (T + P)` of `equation_1` on, keys and values are no more bytes than queries. From T =
    `equation_2` on, attention hides ring pass-KV; from T + P = `equation_3` on, it hides pass-Q's ring. From a miss
    rate of `equation_5` on, which depends on T, pass-Q's all-to-all costs more than the part of pass-KV that isn't
    hidden. All are as printed: they count attention without a causal mask, which is twice the work where P = 0, and
    partial results with e bytes an element. Predicted times count the mask, and `Hardware.partial_bytes`.
    """

    equation_1: Real
    equation_2: Real
    equation_3: Real
    equation_5: Real

    @classmethod
    def of(cls, new_tokens: Integer, num_ranks: Integer, model: ModelShape, hardware: Hardware) -> "Thresholds":
        # C * e / BW: operations that the device computes while it sends one element.
        intensity = hardware.peak_flops * hardware.bytes_per_element / hardware.bandwidth
        miss_rate = 2 * model.num_kv_heads / model.num_heads
        hidden = 4 * new_tokens / (num_ranks * intensity)
        return cls(
            equation_1=miss_rate,
            equation_2=num_ranks * intensity * miss_rate / 4,
            equation_3=num_ranks * intensity / 4,
            equation_5=miss_rate - hidden,
        )
