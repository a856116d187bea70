"""httpx's clients of other servers, whose new connections have the certificates of the time."""

import ssl

import httpx

from longctx.serving.server.tls import Tls


def make_client(tls: Tls | None, limits: httpx.Limits) -> httpx.AsyncClient:
    """Make a client; `tls`: of this server. None: the servers have certificates of a CA that the system knows."""
    return httpx.AsyncClient(trust_env=False, transport=_Transport(tls, limits))


class _Transport(httpx.AsyncBaseTransport):
    """Pool of connections that is replaced when the certificates are; requests that run keep the old one."""

    def __init__(self, tls: Tls | None, limits: httpx.Limits) -> None:
        self._tls, self._limits = tls, limits
        self._context = ssl.create_default_context() if tls is None else tls.client
        self._pools = [self._make()]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._tls is not None and self._tls.client is not self._context:
            self._context = self._tls.client
            self._pools.append(self._make())
            if len(self._pools) > 2:  # certificates are replaced much less often than requests end
                await self._pools.pop(0).aclose()
        return await self._pools[-1].handle_async_request(request)

    async def aclose(self) -> None:
        for pool in self._pools:
            await pool.aclose()

    def _make(self) -> httpx.AsyncHTTPTransport:
        return httpx.AsyncHTTPTransport(verify=self._context, limits=self._limits, trust_env=False)
