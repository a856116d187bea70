"""`EngineTransfers`: moves requests between a server's engine and those of other servers, with their pages.

Source: Mooncake, section 3: pages are streamed to the decoding side, which checks once more, on arrival, that it can
keep its TBT.
"""

import contextlib
import dataclasses
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from longctx.cluster.conductor.config import ROLES as ROLES
from longctx.cluster.conductor.config import Role as Role
from longctx.cluster.engine_messenger import EngineMessenger
from longctx.cluster.peers import Peers, parse_peer
from longctx.cluster.prefill import PrefillRequests, count_here
from longctx.cluster.server_url import host_port
from longctx.cluster.transfer.stats import TransferStats
from longctx.serving.engine.engine import Engine
from longctx.serving.engine.thread import Received
from longctx.serving.kv_cache.connector import LeasedSource
from longctx.serving.predictor.runtime import window_of
from longctx.serving.predictor.work import Work
from longctx.serving.request.handoff import Handoff
from longctx.serving.request.output import Output
from longctx.serving.request.request import PreparedRequest
from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.server.errors import DROPPED, ApiError, not_servable
from longctx.serving.server.schemas import PagePrefix, Prefill, TransferParams
from longctx.serving.server.tls import Tls

_NAME = "kv_transfer_params"
_LEASE = re.compile(r"[0-9a-f]{32}")
_RETRY = 1.0  # seconds after which another instance, or this one, may have room


class EngineTransfers:
    """`Transfers` of a server: sends and fetches pages for its engine.

    Of an engine of several processes it is the first one's; each of the others has an `EngineMessenger` alone.

    Args:
      messenger: of the engine; it is closed with this, also where this can't be made.
      peers: hosts that this engine fetches pages from, besides this machine, see `Peers`. Clients can't name others.
      role: what it does for others: `"prefill"` reads prompts that other servers go on with, `"decode"` goes on.
        Whatever it is, requests that ask for neither are served from beginning to end.
      tls: of the server, for requests to others.

    Attributes:
      prefills: requests to other servers to compute prompts.

    Raises:
      ValueError: a role or peer can't be.
    """

    def __init__(
        self, messenger: EngineMessenger, peers: Sequence[str] = (), role: Role = "both", tls: Tls | None = None
    ) -> None:
        engine = messenger.engine
        with contextlib.ExitStack() as stack:  # closes what was opened, in the reverse order
            stack.callback(messenger.close)
            if role not in ROLES:
                raise ValueError(f"role must be one of {', '.join(ROLES)}, got {role!r}")
            self._peers = Peers(peers, messenger.host)
            self._messenger, self.sender, self.receiver = messenger, messenger.sender, messenger.receiver
            self.prefills = PrefillRequests(engine, self._source_at, self.check_peer, tls)
            stack.callback(self.prefills.close)
            self._open = stack.pop_all()
        assert engine.page_identity is not None
        assert engine.core.page_hash is not None
        self._hash = engine.core.page_hash
        layout, fingerprint = engine.page_identity
        self._fingerprint, self._kv_dtype = fingerprint.hex(), layout.dtype
        self.engine_id, self._engine, self.role = secrets.token_hex(8), engine, role
        self.host, self.port = messenger.host, messenger.port
        self.num_refused = 0

    def lease(self, wanted: str | None) -> str:
        """Return the id of a new lease: a peer's, if it is one of random bits, else a new one. ApiError."""
        if self.role == "decode":
            raise ApiError(400, f"{_NAME}: this server reads no prompts for others (--role decode)", _NAME)
        return wanted if wanted is not None and _LEASE.fullmatch(wanted) else secrets.token_hex(16)

    def params(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Make `kv_transfer_params` of the answer of a request with a lease."""
        followers, handoff = self._messenger.followers, Handoff.of(outputs)
        return ({"remote_followers": followers} if followers else {}) | {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_block_ids": [],
            "remote_host": self.host,
            "remote_port": self.port,
            "fingerprint": self._fingerprint,
            "kv_dtype": self._kv_dtype,
            "handoff": handoff.to_dict(),
            "signature": self._hash.sign(*_signed(self.host, self.port, followers, handoff)),
        }

    def receive(self, params: TransferParams, prepared: PreparedRequest) -> Received:
        """Take what was sent along with a request, see `Transfers`."""
        if self.role == "prefill":
            raise ApiError(400, f"{_NAME}: this server goes on with nobody's requests (--role prefill)", _NAME)
        if params.handoff is None or params.remote_host is None or params.remote_port is None:
            raise ApiError(400, f"{_NAME} must have handoff, remote_host and remote_port, as a prefill answers", _NAME)
        if params.kv_dtype not in (None, self._kv_dtype):
            message = f"{_NAME}: its pages have kv_dtype {params.kv_dtype}, those of this server {self._kv_dtype}"
            raise ApiError(409, message, _NAME)
        if params.fingerprint != self._fingerprint:
            raise ApiError(
                409, f"{_NAME}: they are of another model than this server's, or of pages of another kind", _NAME
            )
        handoff = _read_handoff(params.handoff)
        said = _signed(params.remote_host, params.remote_port, params.remote_followers, handoff)
        if not self._hash.is_signed(params.signature or "", *said):
            message = f"{_NAME} must be as a server with this one's --kv-secret-file answered: the signature is wrong"
            raise ApiError(403, message, _NAME, "not_signed")
        try:
            self._check(handoff, prepared)
        except ApiError:
            refused = dataclasses.replace(handoff, completions=handoff.completions[: prepared.request.sampling.n])
            self._received(params, refused).release()
            raise
        received = self._received(params, handoff)
        if _breaks_tpot(self._engine, len(prepared.tokens), prepared.request.tpot_target):
            self.num_refused += 1
            received.release()
            message = "one more request would make those that run here slower than their targets"
            headers = {DROPPED: "tpot"}
            raise ApiError(503, message, None, "server_is_overloaded", _RETRY, headers)
        return received

    def resume(
        self,
        params: TransferParams | None,
        prefill: Prefill | None,
        prepared: PreparedRequest,
        headers: Mapping[str, str],
    ) -> Received | None:
        """Return what a request that another server sends begins with, see `Transfers`."""
        handoff = None if params is None or params.handoff is None else _read_handoff(params.handoff)
        if handoff is not None and any(each.lease is not None for each in handoff.completions):
            assert params is not None
            return self.receive(params, prepared)
        if self.role == "prefill":
            raise ApiError(400, "this server goes on with nobody's requests (--role prefill)", "request")
        if handoff is not None:
            self._check(handoff, prepared)
        wanted, prefix = None, None
        if prefill is not None:
            wanted, prefix = prefill.prefix, None
            if prefill.url is not None:
                wanted = PagePrefix(url=prefill.url, seconds=prefill.seconds, grant=prefill.grant)
                prefix = prefill.prefix
        received = None if wanted is None else self.prefills.ask(prepared, headers, wanted, prefix, handoff)
        return Received(handoff, {}) if received is None and handoff is not None else received

    def fetch_prefix(
        self, prefix: PagePrefix, prepared: PreparedRequest, headers: Mapping[str, str]
    ) -> Received | None:
        """Get the first pages of a prompt from a server that has them, see `Transfers`."""
        return self.prefills.ask(prepared, headers, prefix)

    def lend(self, prepared: PreparedRequest) -> PreparedRequest:
        """Make a request that reads a prompt whose full pages are all here, see `Transfers`."""
        length = len(prepared.keys) * self._engine.config.page_size
        if not prepared.keys or count_here(self._engine, prepared, length) < length:
            raise ApiError(404, "the pages of this prompt are not here", _NAME, "pages_not_here")
        request = dataclasses.replace(prepared.request, priority=prepared.request.priority + 1)
        return prepared._replace(request=request)

    def draw_first(self, prepared: PreparedRequest, sampling: SamplingParams) -> PreparedRequest:
        """Make a request that draws its one token as another server wants it, see `Transfers`."""
        least = min(sampling.min_tokens, 1)  # that draw the same first token, and no other
        first = dataclasses.replace(sampling, max_tokens=1, min_tokens=least, stop=(), n=1)
        request = dataclasses.replace(prepared.request, sampling=first)
        try:
            self._engine.input_processor.check_request(request, len(prepared.tokens))
        except (TypeError, ValueError) as error:
            raise not_servable(error) from None
        return prepared._replace(request=request)

    def check_peer(self, host: str, port: int | None = None) -> None:
        """Raise ApiError unless requests come from this host and go to it; with `port`, unless its pages are there."""
        if not self._peers.admits(host, port):
            where = host if port is None else f"{host} port {port}"
            raise ApiError(403, f"requests and pages move between hosts of --kv-peer alone, not {where}", "host")

    @property
    def counts(self) -> dict[str, TransferStats]:
        """See `Transfers`."""
        return {"sent": self.sender.stats, "received": self.receiver.stats}

    def info(self) -> dict[str, Any]:
        """Describe what others have to know to fetch pages from here."""
        info: dict[str, Any] = {"engine_id": self.engine_id, "role": self.role, "host": self.host, "port": self.port}
        info |= {
            "fingerprint": self._fingerprint,
            "kv_dtype": self._kv_dtype,
            "answers": dict(self.prefills.answers),
        }
        return info | {"followers": self._messenger.followers} if self._messenger.followers else info

    def close(self) -> None:
        """End all transfers."""
        self._open.close()

    def _source_at(
        self, addresses: Sequence[str], lease: str, deadline: float | None = None, lease_timeout: float = 0.0
    ) -> LeasedSource:
        """Make the source of pages of a server that a request has named. ApiError: they may not come from there."""
        for address in addresses:
            try:
                host, port = parse_peer(address)
                if port is None:
                    raise ValueError(f"{address!r} has no port")
            except ValueError as error:
                raise ApiError(400, f"{_NAME}: pages must be at HOST:PORT: {error}", _NAME) from None
            self.check_peer(host, port)
        return self._messenger.source(addresses, lease, deadline, lease_timeout)

    def _check(self, handoff: Handoff, prepared: PreparedRequest) -> None:
        try:
            handoff.check(len(prepared.tokens), prepared.request.sampling, self._engine.model.config.vocab_size)
        except ValueError as error:
            raise ApiError(400, f"{_NAME}: {error}", _NAME) from None

    def _received(self, params: TransferParams, handoff: Handoff) -> Received:
        """Make the sources of the pages of a handoff, without a connection. ApiError: they may not come from there."""
        assert params.remote_host is not None
        assert params.remote_port is not None
        leases = [each.lease for each in handoff.completions if each.lease is not None]
        if not all(map(_LEASE.fullmatch, (lease.partition("/")[0] for lease in leases))):
            raise ApiError(400, f"{_NAME}: a lease must be 32 hexadecimal digits", _NAME)
        addresses = [host_port(params.remote_host, params.remote_port), *params.remote_followers]
        return Received(handoff, {lease: self._source_at(addresses, lease) for lease in leases})


def _read_handoff(fields: dict[str, Any]) -> Handoff:
    try:
        return Handoff.from_dict(fields)
    except ValueError as error:
        raise ApiError(400, f"{_NAME}: {error}", _NAME) from None


def _signed(host: str, port: int, followers: Sequence[str], handoff: Handoff) -> tuple[object, ...]:
    """Return what is signed of `kv_transfer_params`: where pages are fetched, and which. Clients can't choose these."""
    return "pages", host, port, list(followers), [each.lease for each in handoff.completions]


def _breaks_tpot(engine: Engine, length: int, target: float | None) -> bool:
    """Predict whether a step of all decodes and one more, after `length` tokens, exceeds one of their TPOT targets."""
    decoding = tuple(engine.scheduler.running.decoding)
    if not decoding:
        return False  # one that decodes alone breaks nothing
    own = engine.config.slo.per_token(engine.plan.stage).tpot if target is None else target
    least = min((each for each in (own, *(e.tpot_target for e in decoding)) if each is not None), default=None)
    chunks, ranks = ((each.computed, 1, True) for each in decoding), engine.plan.context
    work = Work.of(chunks, window_of(engine.predictor))
    if ranks > 1:
        shared = ("rows", "decode_keys", "window_decode_keys")
        work = work._replace(**{name: -(-getattr(work, name) // ranks) for name in shared})
        work = work.with_sharded(length, 1, ranks, samples=True)
    else:
        work = work.with_chunk(length, 1, True)
    return least is not None and work.rows <= engine.config.token_budget and engine.predictor.seconds(work) > least
