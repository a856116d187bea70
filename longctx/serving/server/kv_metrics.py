"""The metrics of pages beyond the devices: tiers, loads and stores, transfers between engines, leases."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from prometheus_client.core import Metric

from longctx.serving.engine.thread import EngineThread
from longctx.serving.kv_cache.connector import Loaded
from longctx.serving.kv_cache.tiers.stats import TierStats
from longctx.serving.kv_cache.tiers.store import TieredStore
from longctx.serving.server.series import Histogram, counter, counters, gauge, gauges

_LOAD_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_COUNTERS = {
    "hits": "Pages of loads that came from a tier.",
    "misses": "Pages of loads that a tier had not.",
    "stored": "Pages written to a tier.",
    "evicted": "Pages removed from a tier for room.",
    "dropped": "Pages that were not written to a tier: there was no room, or an error.",
    "corrupt": "Pages of a tier that were not what had been written, and unusable files.",
    "failed": "Writes to a tier that raised an error.",
    "bytes_read": "Bytes of pages read from a tier.",
    "bytes_written": "Bytes of pages written to a tier.",
}
_GAUGES = {
    "pages": "Pages that a tier has.",
    "num_bytes": "Bytes that they take.",
    "pinned_bytes": "Bytes of those that may not go.",
}
_PREFILLS = {
    "decision": "Prompts of ordinary requests, by where they were read: here, for a reason, or by another server.",
    "answer": "Prompts that other servers were asked to read, by how that ended.",
}
_NAMES = {"bytes_read": "read_bytes", "bytes_written": "written_bytes", "failed": "failed_writes", "num_bytes": "bytes"}


@runtime_checkable
class TransferCounts(Protocol):
    """How the transfers of one direction ended, and how much they moved, since the start."""

    bytes: int
    blocks: int
    strangers: int

    @property
    def outcomes(self) -> Mapping[Any, int]:
        """How many transfers ended in each way."""
        ...


@runtime_checkable
class CacheCounts(Protocol):
    """Documents that are kept now (`/v1/caches`), and their tokens."""

    @property
    def num_caches(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...


class KvMetrics:
    """Part of `OwnMetrics`. Families are there for what the engine has only.

    Attributes:
      caches: documents that are kept.
      transfers: by direction; None: requests don't move.
      prefills: prompts by where they were read (`"decision"`), and by how reading them elsewhere ended (`"answer"`);
        None: no other server reads any.
    """

    def __init__(self, thread: EngineThread, prefix: str, labels: dict[str, str]) -> None:
        self._engine, self._prefix, self._labels = thread.engine, prefix, labels
        self.caches: CacheCounts | None = None
        self.transfers: Mapping[str, TransferCounts] | None = None
        self.prefills: Mapping[str, Mapping[str, int]] | None = None
        self._load_seconds = Histogram("Seconds of a load of pages from beyond the devices.", _LOAD_SECONDS)
        self._engine.pages.on_load.append(self._observe_load)

    def _observe_load(self, loaded: Loaded) -> None:
        self._load_seconds.observe(loaded.seconds)

    def families(self) -> Iterator[Metric]:
        """All of them, for `prometheus_client`."""
        store = self._engine.pages.store
        if isinstance(store, TieredStore):
            yield from self._of_tiers(store.stats, store)
            if self.caches is not None:
                caches, tokens = self.caches.num_caches, self.caches.num_tokens
                yield gauge(self._prefix + "kv_caches", "Documents of /v1/caches.", self._labels, caches)
                yield gauge(self._prefix + "kv_cache_tokens", "Tokens of these documents.", self._labels, tokens)
        if self.transfers is not None:
            yield from self._of_transfers(self.transfers)
        if store is not None or self.transfers is not None:
            yield from self._of_loads()

    def _of_tiers(self, stats: TierStats, store: TieredStore) -> Iterator[Metric]:
        of = {tier: getattr(stats, tier) for tier in store.tiers}
        for make, families in ((counters, _COUNTERS), (gauges, _GAUGES)):
            for name, help in families.items():
                values = {tier: float(getattr(own, name)) for tier, own in of.items()}
                yield make(f"{self._prefix}kv_tier_{_NAMES.get(name, name)}", help, self._labels, "tier", values)
        waiting = "Bytes of pages on their way from the devices, or to tiers below host memory."
        yield gauge(self._prefix + "kv_waiting_bytes", waiting, self._labels, stats.waiting_bytes)

    def _of_transfers(self, transfers: Mapping[str, TransferCounts]) -> Iterator[Metric]:
        for direction, counts in transfers.items():
            help = f"Transfers of pages {direction}, by how they ended."
            outcomes = {name: float(count) for name, count in counts.outcomes.items()}
            yield counters(f"{self._prefix}kv_transfers_{direction}", help, self._labels, "outcome", outcomes)
        for name, help in (
            ("bytes", "Bytes of pages that transfers moved."),
            ("blocks", "Blocks of pages that transfers moved."),
            ("strangers", "Connections and messages of who has not the secret, or speaks another protocol."),
        ):
            moved = {direction: float(getattr(counts, name)) for direction, counts in transfers.items()}
            yield counters(f"{self._prefix}kv_transfer_{name}", help, self._labels, "direction", moved)
        for label, found in (self.prefills or {}).items():
            help = _PREFILLS[label]
            values = {name: float(count) for name, count in tuple(found.items())}
            yield counters(f"{self._prefix}prefill_{label}s", help, self._labels, label, values)

    def _of_loads(self) -> Iterator[Metric]:
        pages, labels, prefix = self._engine.pages, self._labels, self._prefix
        yield self._load_seconds.family(prefix + "kv_load_seconds", labels)
        verified = pages.verifier.stats
        for name, help, value in (
            ("kv_verified", "Loaded pages that were computed again and compared.", verified.verified),
            ("kv_mismatch", "Those of them that differed, though their checksums were right.", verified.mismatches),
        ):
            yield counter(prefix + name, help, labels, value)
        moved = pages.moved
        if moved is not None:
            for name, help, value in (
                ("kv_loads", "Loads that ended.", moved.loads),
                ("kv_short_loads", "Loads that came short.", moved.short_loads),
                ("kv_failed_loads", "Loads that raised an error.", moved.failed_loads),
                ("kv_late_loads", "Loads given up, as nothing came for too long.", moved.late_loads),
                ("kv_loaded_pages", "Pages written to the devices.", moved.loaded_pages),
                ("kv_loaded_bytes", "Bytes written to the devices.", moved.loaded_bytes),
                ("kv_stored_pages", "Pages read from the devices, to be kept.", moved.stored_pages),
                ("kv_stored_bytes", "Bytes of these.", moved.stored_bytes),
                ("kv_dropped_pages", "Pages not read from the devices: there was no room.", moved.dropped_stores),
            ):
                yield counter(prefix + name, help, labels, value)
        recomputed = {source: float(count) for source, count in pages.recomputed.items()}
        help = "Pages that were expected of loads, did not come, and were computed instead."
        yield counters(prefix + "kv_recomputed_pages", help, labels, "source", recomputed)
        leases = self._engine.core.leases
        yield gauge(prefix + "kv_leases", "Leases of pages that other engines may fetch.", labels, len(leases))
        help = "Pages that leases keep, of requests that have ended."
        yield gauge(prefix + "kv_leased_pages", help, labels, leases.num_pages)
