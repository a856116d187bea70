"""A cluster whose servers know each other by certificates of one CA."""

import logging
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from certificates import make_ca, make_certificate
from disaggregated import NAME, body, instance, make_engine, transfers_of
from routed import HASH, Routed, members_of, routed
from served import Served

from longctx.cluster.join import Joining
from longctx.cluster.router.server import RouterSettings
from longctx.serving.server.tls import Tls

# httpcore leaves a transport open whose handshake is cancelled, as the router's last look may be.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed resource <TCPTransport:ResourceWarning")


class Cluster:
    """A prefill and a decode instance, and the files of a CA."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ca = folder, make_ca(folder)
        self.instances: list[Served] = []

    def tls(self, name: str) -> Tls:
        return Tls(*make_certificate(self.folder, self.ca, name), self.ca.cert)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("certificates"))
    with (
        instance(make_engine(), "prefill", tls=made.tls("prefill")) as prefill,
        instance(make_engine(), "decode", tls=made.tls("decode")) as decode,
    ):
        made.instances = [prefill, decode]
        yield made


def ask(router: Routed, cluster: Cluster) -> str:
    """The answer to a user, who has no certificate."""
    trust = ssl.create_default_context(cafile=str(cluster.ca.cert))
    answer = router.client(verify=trust).post("/v1/completions", json=body())
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def wait_until_tried(router: Routed) -> None:
    known = router.server.instances.by_name
    router.wait_until("all are tried", lambda: all("does not answer" in each.reason for each in known.values()))


def test_servers_of_a_cluster_ask_each_other_by_https_also_with_new_certificates(cluster: Cluster) -> None:
    prefill, decode = cluster.instances
    tls = cluster.tls("router")
    with routed(members_of(cluster.instances, "pd"), router=RouterSettings(tls=tls)) as router:
        first = ask(router, cluster)
        assert transfers_of(decode).prefills.answers == {"done": 1}
        for each in (tls, prefill.http.tls, decode.http.tls):
            assert each is not None
            before = each.client
            each.load()
            assert each.client is not before
        assert ask(router, cluster) == first
        router.wait_until("it is looked at again", lambda: router.server.instances.by_name["p0"].missed == 0)
        assert [each.state for each in router.server.instances] == ["open", "open"]


def test_an_instance_lets_no_router_in_without_a_certificate_of_its_ca(cluster: Cluster, tmp_path: Path) -> None:
    other = make_ca(tmp_path)
    own, members = make_certificate(tmp_path, other, "router"), members_of(cluster.instances, "pd")
    for ca in (other, cluster.ca):  # by the second it would trust the instances
        with routed(members, router=RouterSettings(tls=Tls(*own, ca.cert)), is_ready=False) as router:
            wait_until_tried(router)
            assert not router.server.instances.members
    trust = ssl.create_default_context(cafile=str(cluster.ca.cert))
    for path in ("/load", "/server_info", "/v1/models"):
        assert httpx.get(f"{cluster.instances[0].url}{path}", verify=trust).status_code == 403


def test_an_instance_registers_by_https(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "longctx.cluster.join")
    tls = cluster.tls("joining")
    with routed([], router=RouterSettings(tls=tls), is_ready=False) as router:
        address = router.url.partition("://")[2]
        url = cluster.instances[0].url
        with Joining([address], url, "both", lambda: True, HASH, name="here", tls=tls, seconds=0.2):
            router.wait_until("it is there", lambda: "here" in router.server.instances.by_name)
            router.wait_state("here", "open")
        router.wait_until("it has left", lambda: "here" not in router.server.instances.by_name)
        assert NAME in router.server.model_names
