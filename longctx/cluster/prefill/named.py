"""`NamedReaders`: servers that a request names to read its prompt, or to give the pages that they have of it.

A router that knows who has what decides; here its words are followed. Whatever goes wrong only means that pages don't
come, and are computed here.

Source: Mooncake, section 3, and algorithm 1 (blocks go from the instance that has most of a prefix to the one that
reads the prompt, which has them too from then on: so hot blocks are replicated).
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from longctx.cluster.prefill.dispatcher import FORWARDED, count_here, prefill_body, prompt_handoff
from longctx.cluster.prefill.instance import NamedInstance, PrefillInstance
from longctx.cluster.prefill.reading import COMPUTES, LENDS, PrefillThread, Reading
from longctx.cluster.transfer.lease import make_lease_id
from longctx.serving.engine.engine import Engine
from longctx.serving.engine.thread import Received
from longctx.serving.kv_cache.connector import LeasedSource
from longctx.serving.request.handoff import Handoff
from longctx.serving.request.request import PreparedRequest
from longctx.serving.server.auth import TENANT_HEADER
from longctx.serving.server.errors import ApiError
from longctx.serving.server.schemas import PagePrefix

_MOST_INSTANCES = 64  # that are remembered


class NamedReaders(PrefillThread):
    """Asks servers that requests name. Its methods are for one thread, the event loop's, and don't wait.

    Args:
      source: see `PrefillThread`.
      check_host: ApiError, unless requests may go to this host.
    """

    def __init__(
        self, engine: Engine, source: Callable[..., LeasedSource], check_host: Callable[[str], object]
    ) -> None:
        super().__init__(source)
        self._engine, self._check_host = engine, check_host
        self._instances: OrderedDict[str, NamedInstance] = OrderedDict()

    def ask(
        self,
        prepared: PreparedRequest,
        headers: Mapping[str, str],
        wanted: PagePrefix,
        prefix: PagePrefix | None = None,
        handoff: Handoff | None = None,
    ) -> Received | None:
        """Have a server read a prompt's first tokens, and what the request waits for; None: they are all here.

        Args:
          headers: of the request. Those that say who sends it go along.
          wanted: the server, and how many tokens; None of them: all full pages before the prompt's last token.
          prefix: from where that server gets the first pages.
          handoff: what has been computed of the request, without pages.

        Raises:
          ApiError: it may not be asked.
        """
        instance = self._instance(wanted.url)
        if prefix is not None:
            self._check_url(prefix.url)
        engine, size = self._engine, self._engine.config.page_size
        length = (len(prepared.tokens) - 1) // size * size
        if wanted.tokens is not None:
            length = min(length, wanted.tokens // size * size)
        there = count_here(engine, prepared, length)
        if there >= length:
            return None
        lease, sent = make_lease_id(), {name: headers[name] for name in FORWARDED if name in headers}
        sent[TENANT_HEADER] = quote(prepared.request.tenant)
        if wanted.tokens is None:
            more = None if prefix is None else prefix.to_dict()
            body, patience = prefill_body(prepared, lease, len(prepared.tokens), more), COMPUTES
            seconds = engine.scheduler.forecast.prefill_seconds(there, length)
        else:
            body, patience = prefill_body(prepared, lease, length + 1, is_cached=True), LENDS
            seconds = 0.0
        seconds = seconds if wanted.seconds is None else wanted.seconds
        reading = Reading(self, lease, body, sent, seconds, lambda tried: None if tried else instance, patience)
        staged = self.stage(engine, prepared, reading.prefill, there, length)
        self.begin(reading.run())
        if staged is not None:
            return Received(handoff, {}, staged)
        return Received(_with_pages(prepared, handoff, lease, length), {lease: reading.prefill})

    def _instance(self, url: str) -> PrefillInstance:
        self._check_url(url)
        instance = self._instances.get(url)
        if instance is None:
            instance = self._instances[url] = NamedInstance(url)
            if len(self._instances) > _MOST_INSTANCES:
                self._instances.popitem(last=False)
        self._instances.move_to_end(url)
        return instance

    def _check_url(self, url: str) -> None:
        try:
            instance = NamedInstance(url)
            host: Any = urlsplit(instance.url).hostname
        except ValueError as error:
            raise ApiError(400, str(error), "url") from None
        self._check_host(host)


def _with_pages(prepared: PreparedRequest, handoff: Handoff | None, lease: str, length: int) -> Handoff:
    """What a request goes on with whose prompt's first `length` tokens come under a lease."""
    if handoff is None:
        return prompt_handoff(prepared, lease, length)
    completions = tuple(each._replace(lease=lease, length=length) for each in handoff.completions)
    return handoff._replace(completions=completions)
