"""Registration at a router: no key and no prompt goes to a server that does not know the cluster's secret."""

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from cluster.router.routed import HASH, Routed, routed
from disaggregated import NAME, body, make_engine, make_transfers
from served import served

from longctx.cluster.join import Joining
from longctx.cluster.launcher.launcher import Address
from longctx.cluster.router.instances import RouterSettings
from longctx.serving.server.settings import ApiKey, ObserverSettings, ServerSettings

SECRET, ANY = "0123456789abcdef" * 2, "tcp://127.0.0.1:*"
INSTANCE_KEY = "key-of-the-instances"


class Listener(http.server.HTTPServer):
    """A server that notes what it is asked, and with which key."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Listener

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["authorization"]))
        self.send_response(200)
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def attacker() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.shutdown()
    listener.server_close()


@pytest.fixture
def router() -> Iterator[Routed]:
    """Router without keys of clients, with one of its instances."""
    with routed([], router=RouterSettings(INSTANCE_KEY, look_seconds=0.05)) as running:
        yield running


def test_without_the_secret_nothing_is_registered_and_no_key_is_sent(router: Routed, attacker: Listener) -> None:
    """An anonymous POST made the router send its instances' key to any URL."""
    client, nonce = router.client(), "0" * 32
    mine: dict[str, Any] = {"url": attacker.url, "name": None, "role": "both", "nonce": nonce}
    assert client.post("/cluster/register", json=mine).status_code == 400
    made = client.post("/cluster/challenge", json={"nonce": nonce}).json()
    other = HASH.sign("instance", nonce, made["challenge"], "http://127.0.0.1:9", None, "both")
    for proof in ("", made["proof"], other, "0" * 64):
        answer = client.post("/cluster/register", json=mine | {"challenge": made["challenge"], "proof": proof})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "instance_not_proven")
    assert router.instances() == {}
    assert attacker.asked == []


@pytest.mark.parametrize("url", ["http://192.0.2.1:8000", "http://example.com:8000", "http://127.0.0.2:8000"])
def test_instances_are_of_known_hosts(router: Routed, url: str) -> None:
    refused = router.register(url)
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "url")
    assert router.instances() == {}


def test_hosts_of_kv_peer_may_register() -> None:
    peers = ("192.0.2.0/24", "prefill-1", "prefill-2:8000")
    with routed([], router=RouterSettings(INSTANCE_KEY, peers=peers)) as router:
        for url, status in (
            ("http://192.0.2.1:8000", 200),
            ("http://prefill-1", 200),
            ("http://prefill-2:8000", 200),
            ("http://prefill-2:8001", 403),
            ("http://prefill-3:8000", 403),
        ):
            assert router.register(url).status_code == status


def test_an_instance_joins_by_its_secret_and_is_heard_encrypted() -> None:
    """Challenge, registration, the key, and KV events, whose endpoint is for administrators alone."""
    events = ObserverSettings(kv_events=ANY, kv_events_replay=ANY, kv_events_secret=SECRET)
    keys, admins = (ApiKey("ann", "key-of-ann"),), (ApiKey("router", INSTANCE_KEY),)
    settings = ServerSettings(prepare_processes=0, api_keys=keys, admin_keys=admins)
    more: dict[str, Any] = {"make_transfers": make_transfers, "warm_up": lambda engine: None, "observers": events}
    with (
        served(make_engine(), settings, names=(NAME,), **more) as instance,
        routed([], router=RouterSettings(INSTANCE_KEY, SECRET)) as router,
        Joining([router.url], instance.url, "both", lambda: True, HASH, name="mine", seconds=0.2),
    ):
        router.wait_until("it has joined", lambda: "mine" in router.instances())
        router.wait_state("mine", "open")
        assert router.client().post("/v1/completions", json=body()).status_code == 200
        router.wait_until("its pages are known", lambda: router.server.index.num_blocks > 0)
        for key, is_shown in (("key-of-ann", False), (INSTANCE_KEY, True)):
            info = router.client(headers={"authorization": f"Bearer {key}"}).get(f"{instance.url}/server_info").json()
            assert ("kv_events" in info) == is_shown
    with (
        served(make_engine(), settings, names=(NAME,), **more) as instance,
        routed([Address("deaf", "both", instance.url)], router=RouterSettings(INSTANCE_KEY), is_ready=False) as router,
    ):
        router.wait_state("deaf", "excluded")
        assert "KV events can't be read: is_encrypted needs the secret" in router.instances()["deaf"]["reason"]
