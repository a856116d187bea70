"""TLS of a server: OpenAI's client, certificates of clients, files that are replaced, and files that can't be used."""

import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from certificates import Certificate, make_ca, make_certificate
from served import NAME, Served, fake_engine, served

from longctx.serving.server.settings import ServerSettings
from longctx.serving.server.tls import Tls


class Files:
    """A CA, certificates of it, and those of another CA."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ca, self.other_ca = folder, make_ca(folder), make_ca(folder, "other")
        self.server, self.client = (make_certificate(folder, self.ca, name) for name in ("server", "client"))
        self.stranger = make_certificate(folder, self.other_ca, "stranger")
        self.expired = make_certificate(folder, self.ca, "expired", -1)

    def trust(self, own: Certificate | None = None, ca: Certificate | None = None) -> ssl.SSLContext:
        """The context of a client, which has a certificate or not."""
        context = ssl.create_default_context(cafile=str((ca or self.ca).cert))
        if own is not None:
            context.load_cert_chain(*own)
        return context


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def encrypted(files: Files) -> Iterator[Served]:
    """A server whose clients need no certificate."""
    settings = ServerSettings(prepare_processes=0, header_timeout=1.0)
    with served(fake_engine(), settings, tls=Tls(*files.server)) as running:
        yield running


def test_openai_s_client_works_by_https(encrypted: Served, files: Files) -> None:
    with openai.OpenAI(
        base_url=f"{encrypted.url}/v1", api_key="none", http_client=httpx.Client(verify=files.trust())
    ) as client:
        whole = client.completions.create(model=NAME, prompt="ABCD", max_tokens=8, temperature=0)
        chunks = client.completions.create(model=NAME, prompt="ABCD", max_tokens=8, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text != ""


def test_clients_without_tls_or_with_another_ca_or_an_old_protocol_are_refused(encrypted: Served, files: Files) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(encrypted.url.replace("https", "http") + "/health")
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(f"{encrypted.url}/health", verify=files.trust(ca=files.other_ca))
    old = files.trust()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert httpx.get(f"{encrypted.url}/health", verify=old).status_code == 200
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{encrypted.url}/health", verify=old)


def test_handshakes_that_do_not_come_count_as_connections_and_time_out(encrypted: Served) -> None:
    with socket.create_connection(("127.0.0.1", encrypted.port), 10) as connection:
        encrypted.wait_until("it counts", lambda: len(encrypted.http.connections) == 1)
        assert connection.recv(1) == b""
    encrypted.wait_until("it is forgotten", lambda: not len(encrypted.http.connections))
    assert not encrypted.http.server_state.connections


def test_handshakes_that_do_not_come_make_room(files: Files) -> None:
    settings = ServerSettings(prepare_processes=0, max_connections=4)
    with served(fake_engine(), settings, tls=Tls(*files.server)) as running:
        idle = [socket.create_connection(("127.0.0.1", running.port), 10) for _ in range(10)]
        assert httpx.get(f"{running.url}/v1/models", verify=files.trust()).status_code == 200
        assert all(each.recv(1) == b"" for each in idle[:6])
        for each in idle:
            each.close()


def test_with_a_ca_requests_need_a_certificate_and_probes_do_not(files: Files) -> None:
    settings = ServerSettings(prepare_processes=0)
    with served(fake_engine(), settings, tls=Tls(*files.server, files.ca.cert)) as running:
        body = {"prompt": "ABCD", "max_tokens": 2}

        def post(own: Certificate | None) -> httpx.Response:
            return httpx.post(f"{running.url}/v1/completions", json=body, verify=files.trust(own))

        refused = post(None)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "certificate_needed")
        assert httpx.get(f"{running.url}/health", verify=files.trust()).status_code == 200
        assert post(files.client).status_code == 200
        for own in (files.stranger, files.expired):
            with pytest.raises(httpx.TransportError):
                post(own)


def test_new_files_are_for_new_connections_and_wrong_ones_change_nothing(files: Files, tmp_path: Path) -> None:
    used = Certificate(tmp_path / "used.pem", tmp_path / "used.key")

    def replace(by: Certificate) -> None:
        for source, target in zip(by, used, strict=True):
            target.write_bytes(source.read_bytes())
            target.chmod(0o600)

    def reload(running: Served) -> None:
        done = threading.Event()
        running.http.loop.call_soon_threadsafe(lambda: (running.http.reload(), done.set()))
        assert done.wait(10)

    def shown(running: Served) -> bytes:
        return ssl.get_server_certificate(("127.0.0.1", running.port)).encode()

    replace(files.server)
    with served(fake_engine(), tls=Tls(*used)) as running:
        running.executor.pause = 0.01
        before = shown(running)
        with (
            httpx.Client(verify=files.trust()) as client,
            client.stream(
                "POST",
                f"{running.url}/v1/completions",
                json={"prompt": "ABCD", "max_tokens": 60, "ignore_eos": True, "stream": True},
            ) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            replace(files.client)
            reload(running)
            assert shown(running) != before
            used.key.write_bytes(files.server.key.read_bytes())  # of another certificate
            reload(running)
            assert shown(running) != before
            assert list(lines)[-2] == "data: [DONE]"


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("cert", None, "tls_cert: .*cert can't be read: No such file"),
        ("key", None, "tls_key: .*key can't be read: No such file"),
        ("ca", None, "tls_ca: .*ca can't be read: No such file"),
        ("cert", "", "tls_cert: .*cert has no certificate in PEM"),
        ("cert", "server.key", "tls_cert: .*cert has no certificate in PEM"),
        ("key", "server.pem", "tls_key: .*key has no private key in PEM"),
        ("ca", "server.key", "tls_ca: .*ca has no certificate in PEM"),
        ("ca", "server.pem", "tls_ca: .*ca has no certificate of a CA"),
        ("key", "client.key", "tls_key: .*key is not the key of the certificate in .*cert"),
        ("key", "encrypted.key", "tls_key: .*key needs a password"),
        ("cert", "expired.pem", "tls_cert: .*cert would be refused: certificate has expired"),
        ("cert", "damaged.pem", "tls_cert and tls_key can't be used"),
        ("ca", "damaged.pem", "tls_ca: .*ca can't be used"),
    ],
)
def test_files_that_cannot_be_used_are_refused_by_name(
    files: Files, tmp_path: Path, name: str, contents: str | None, message: str
) -> None:
    pem = files.server.cert.read_text()
    (files.folder / "damaged.pem").write_text(pem[:28] + "AAAA" + pem[32:])
    password = ["openssl", "ec", "-in", files.server.key, "-aes256", "-passout", "pass:word"]
    subprocess.run([*password, "-out", files.folder / "encrypted.key"], check=True, capture_output=True)
    used = {"cert": files.server.cert, "key": files.server.key, "ca": files.ca.cert}
    if contents == "expired.pem":
        used["key"] = files.expired.key
    used[name] = tmp_path / name
    if contents is not None:
        used[name].write_bytes((files.folder / contents).read_bytes() if contents else b"")
        used[name].chmod(0o600)
    with pytest.raises(ValueError, match=message):
        Tls(used["cert"], used["key"], used["ca"])


def test_a_key_that_others_may_read_is_refused(files: Files, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(files.server.key.read_bytes())
    key.chmod(0o644)
    with pytest.raises(ValueError, match=f"tls_key: others than its owner have access to {key}"):
        Tls(files.server.cert, key)


PROGRAM = """
import sys, threading
from pathlib import Path
from served import NAME, fake_engine
from longctx.serving.server.http_server import HttpServer, bind
from longctx.serving.server.server import Server
from longctx.serving.server.settings import ServerSettings
from longctx.serving.server.tls import Tls
server = Server(fake_engine(), (NAME,), ServerSettings(prepare_processes=0))
listener = bind("127.0.0.1", 0)
http = HttpServer(server, tls=Tls(*map(Path, sys.argv[1:])))
print(listener.getsockname()[1], flush=True)
http.run([listener])
"""


def test_sighup_reads_the_files_again(files: Files, tmp_path: Path) -> None:
    used = Certificate(tmp_path / "used.pem", tmp_path / "used.key")
    for source, target in zip(files.server, used, strict=True):
        target.write_bytes(source.read_bytes())
        target.chmod(0o600)
    paths = {"PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROGRAM, *map(str, used)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=paths) as process:
        assert process.stdout is not None
        address = "127.0.0.1", int(process.stdout.readline())
        end = time.monotonic() + 60

        def wait_for(expected: Certificate) -> None:
            shown = ""
            while ssl.PEM_cert_to_DER_cert(expected.cert.read_text()) != shown:
                assert time.monotonic() < end
                try:
                    shown = ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(address))
                except OSError:  # it does not listen yet
                    time.sleep(0.1)

        wait_for(files.server)
        for source, target in zip(files.client, used, strict=True):
            target.write_bytes(source.read_bytes())
        process.send_signal(signal.SIGHUP)
        wait_for(files.client)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
