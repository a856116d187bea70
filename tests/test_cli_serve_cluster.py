"""`longctx serve --cluster`: its flags and its file, and the processes that it starts."""

import argparse
import functools
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_process import ServeProcess

from longctx.cli import command_parser, main
from longctx.cli.serve_cluster import _ROUTER, Secrets, engine_arguments, instance_arguments, instance_command
from longctx.cli.serve_settings import observer_settings, serve_config
from longctx.cluster.conductor.config import ROLES
from longctx.cluster.config import LAUNCHERS
from longctx.models import load_checkpoint, load_tokenizer
from longctx.models.builtin import TINY
from longctx.serving import Engine, EngineConfig, SamplingParams
from longctx.serving.kv_cache.secret import SecretFiles

PAIR = '[[instances]]\nrole = "prefill"\n[[instances]]\nrole = "decode"\n'
SMALL = "max_length = 2048\nnum_pages = 400\npage_size = 16\nmax_running = 8\ntoken_budget = 32\nbuckets = '32'\n"
STATIC = '[cluster]\nlauncher = "static"\n'


def written(tmp_path: Path, text: str) -> str:
    file = tmp_path / "cluster.toml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_flags_are_those_of_the_cluster_layer() -> None:
    parse = command_parser("serve").parse_args
    assert [parse(["--launcher", each]).launcher for each in LAUNCHERS] == list(LAUNCHERS)
    assert [parse(["--join-role", each]).join_role for each in ROLES] == list(ROLES)
    assert vars(parse([])).keys() | {"api_keys", "admin_keys"} >= _ROUTER


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (PAIR, ["--page-size", "0"], "[engine] --page-size must be"),
        (PAIR, ["--model", "no-such-model"], "no-such-model"),
        (PAIR, ["--role", "both"], "[engine] role is set by who starts the instances"),
        (PAIR, ["--kv-peer", "a:0"], "--kv-peer must be HOST or HOST:PORT, got 'a:0'"),
        (
            PAIR,
            ["--host", "0.0.0.0", "--allow-anonymous"],
            "--host 0.0.0.0 needs --admin-key-file: without it all who reach the router command it",
        ),
        (STATIC, ["--instance-key-file", "no-such"], "--instance-key-file needs --admin-key-file"),
        (PAIR, ["--join", "a:1"], "[engine] join is set by who starts the instances"),
        (PAIR, ["--launcher", "static"], "[[instances]] 1: url must be there"),
        (PAIR, ["--port", "70000"], "--port must be"),
        (PAIR, ["--admin-key", "short"], "--admin-key"),
        (PAIR, ["--instance-key-file", "no-such", "--admin-key", "a" * 16], "--instance-key-file: no such file"),
        ("[engine]\npage-sise = 3\n" + PAIR, [], "[engine] unknown key 'page-sise': did you mean 'page-size'"),
        ("[engine]\npage_size = 0\n" + PAIR, [], "[engine] --page-size must be"),
        ("[engine]\nplacement = 'any'\n" + PAIR, [], "[engine] --placement: invalid choice"),
        ("[engine]\nport = 1\n" + PAIR, [], "[engine] port is set by who starts the instances"),
        ("[engine]\nkv_secret_file = 'no-such'\n" + PAIR, [], "[engine] kv_secret_file"),
        (PAIR + "flags = { admin-key = 'x' }\n", [], "decode-0: flags.admin-key is set by"),
        (PAIR + "flags = { max_running = 0 }\n", [], "decode-0: --max-running must be"),
        (PAIR + "processes = 2\n", [], "decode-0: processes must divide the 1 devices of --stage, --context and"),
        (PAIR + "processes = 2\nflags = { stage = 3 }\n", [], "processes must divide the 3 devices"),
        (PAIR, ["--coordinator", "a:1"], "[engine] coordinator is set by who starts the instances"),
        (PAIR, ["--process-id", "1"], "[engine] process-id is set by who starts the instances"),
        (PAIR + "polcy = 1\n", [], "[[instances]] 2: unknown key 'polcy'"),
        (STATIC, [], "[engine] kv_secret_file must be there"),
        (PAIR + '[[instances]]\nrole = "both"\nurl = "http://h:1"\n', [], "[engine] kv_secret_file must be there"),
    ],
)
def test_what_can_not_be_is_told_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, arguments: list[str], message: str
) -> None:
    file = written(tmp_path, text)
    assert main(["serve", "--port", "0", "--cluster", file, *arguments]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("longctx: ")
    assert message in printed


def test_commands_of_instances(tmp_path: Path) -> None:
    files = Secrets.make(SecretFiles(), None)
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)
    assert len({path.read_text() for path in files}) == 2
    common = instance_arguments(engine_arguments("", {"page_size": 16, "no-compile-cache": True}), files, ["tiny"])
    make = instance_command(common, engine_arguments("", {"max-running": 3}))

    def parse(host: str, *hosts: str) -> argparse.Namespace:
        command = list(make(host, 8001, hosts))
        assert command[1:4] == ["-m", "longctx", "serve"]
        return command_parser("serve").parse_args(command[4:])

    here = parse("127.0.0.1", "127.0.0.1")
    assert (here.host, here.port, here.role, here.page_size, here.max_running) == ("127.0.0.1", 8001, "both", 16, 3)
    assert (here.kv_events, here.kv_peer, here.served_model_name) == ("tcp://127.0.0.1:*", [], ["tiny"])
    assert observer_settings(here).kv_events_secret == files.pages.read_text().strip()
    assert not here.compile_cache
    assert not here.heeds_deadlines
    assert serve_config(here).transfers
    there = parse("10.0.0.1", "10.0.0.1", "10.0.0.2")
    assert (there.kv_host, there.kv_peer, there.kv_events) == ("10.0.0.1", ["10.0.0.2"], "tcp://10.0.0.1:*")


def wait_until(what: str, condition: Callable[[], object], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.1)


def children(process: ServeProcess) -> list[int]:
    """Processes of instances that a server has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                is_instance = b"--end-with-stdin" in (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if parent == process.process.pid and is_instance:
                found.append(int(entry.name))
    return sorted(found)


def processes_in(folder: Path) -> list[str]:
    """Commands of the processes that have a folder for temporary files."""
    found = []
    for variables in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"TMPDIR={folder}\0".encode() in variables.read_bytes():
                found.append(variables.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_a_cluster_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts, serves, survives the death of an instance, and leaves nothing behind when it is killed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    both = '[[instances]]\nrole = "both"\ncount = 2\nname = "engine"\n'
    file = written(tmp_path, '[cluster]\nadmission = "none"\n[engine]\n' + SMALL + both)
    body = {"prompt": "ABCD" * 200, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    with ServeProcess("--cluster", file) as router:
        wait_until("all are there", lambda: re.search(r"^ready ", router.log, re.MULTILINE))
        pids = children(router)
        assert len(pids) == 2
        expected = router.post("/v1/completions", body)["choices"][0]["text"]
        assert len(expected) > 0

        def ask(number: int) -> str:
            return str(router.post("/v1/completions", body | {"max_tokens": 200})["choices"][0]["text"])

        with ThreadPoolExecutor(4) as pool:
            answers = pool.map(ask, range(4))
            time.sleep(0.5)
            os.kill(pids[-1], signal.SIGKILL)
            texts = list(answers)
        assert len(set(texts)) == 1
        assert texts[0].startswith(expected)
        listed = httpx.get(f"{router.url}/cluster/instances").json()["instances"]
        assert {each["name"] for each in listed} == {"engine-0", "engine-1"}
        wait_until("it is started again", lambda: len(children(router)) == 2)
        left = children(router)
        os.kill(router.process.pid, signal.SIGKILL)
        router.process.wait()
        wait_until("nothing is left", lambda: not any(Path(f"/proc/{pid}").exists() for pid in left), 30)
        wait_until("its other processes have ended", lambda: not processes_in(tmp_path), 30)
        assert "leaked" not in router.log
    assert [each.name for each in tmp_path.iterdir()] == ["cluster.toml"]


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), [("stage", None), (None, "tensor"), ("tensor", "stage")])
def test_instances_of_two_processes(prefill: str | None, decode: str | None, tmp_path: Path) -> None:
    """Pages go from and to all processes. One that is killed takes its instance along, which comes back."""
    lines = '[cluster]\nadmission = "none"\n[engine]\n' + SMALL
    for role, axis in (("prefill", prefill), ("decode", decode)):
        lines += f'[[instances]]\nrole = "{role}"\n'
        lines += "" if axis is None else f"processes = 2\nflags = {{ {axis} = 2 }}\n"
    body = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with ServeProcess("--cluster", written(tmp_path, lines)) as router:

        def ask(prompt: list[int], count: int) -> None:
            answer = router.post("/v1/completions", body | {"prompt": prompt, "max_tokens": count})
            assert answer["choices"][0]["token_ids"] == expected_tokens(prompt, count)

        def states() -> set[str]:
            return {each["state"] for each in httpx.get(f"{router.url}/cluster/instances").json()["instances"]}

        wait_until("all are there", lambda: re.search(r"^ready ", router.log, re.MULTILINE))
        for number in range(3):
            ask([(5 + number) * i % 200 for i in range(300 + 7 * number)], 20)
        pids = children(router)
        arguments = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in pids}
        instances = httpx.get(f"{router.url}/cluster/instances").json()["instances"]
        urls, keys = {each["role"]: each["url"] for each in instances}, {}  # each instance has a key of its own
        for role, url in urls.items():
            own = next(each for each in arguments.values() if re.search(rf"--port[=\0]{url.split(':')[-1]}\0", each))
            keys[role] = Path(re.findall(r"--admin-key-file=([^\0]+)", own)[0]).read_text().split()[1]

        def directly(role: str, params: dict[str, Any], count: int) -> dict[str, Any]:
            sent = body | {"prompt": list(range(150)), "max_tokens": count, "kv_transfer_params": params}
            headers = {"authorization": f"Bearer {keys[role]}"}
            answer = httpx.post(f"{urls[role]}/v1/completions", json=sent, headers=headers, timeout=60)
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found

        params = directly("prefill", {"do_remote_decode": True}, 1)["kv_transfer_params"]
        assert len(params.get("remote_followers", ())) == (prefill is not None)
        tokens = directly("decode", params, 20)["choices"][0]["token_ids"]
        assert tokens == expected_tokens(list(range(150)), 20)

        moved: dict[str, float] = {}
        for each in instances:
            headers = {"authorization": f"Bearer {keys[each['role']]}"}
            lines = httpx.get(f"{each['url']}/metrics", headers=headers).text
            for way, number in re.findall(
                r'^longctx:kv_transfer_bytes_total\{direction="(\w+)".*\} (.*)$', lines, re.M
            ):
                moved[f"{each['role']} {way}"] = float(number)
            outcomes = re.findall(r'^longctx:kv_transfers_received_total\{.*outcome="(\w+)"\} (.*)$', lines, re.M)
            assert {outcome for outcome, number in outcomes if float(number)} <= {"complete"}
        sent, received = moved["prefill sent"], moved["decode received"]  # by the first process of each
        assert received > 0
        if None in (prefill, decode):
            assert sent == (received / 2 if prefill else 2 * received)

        with ThreadPoolExecutor(2) as pool:
            prompts = [[(11 + number) * i % 200 for i in range(900)] for number in range(2)]
            asked = [pool.submit(ask, prompt, 200) for prompt in prompts]
            time.sleep(1.0)
            os.kill(next(pid for pid in pids if "--process-id=1" in arguments[pid]), signal.SIGKILL)
            for each in asked:
                each.result()
        wait_until("it is started again", lambda: len(children(router)) == len(pids) and states() == {"open"})
        ask(prompts[0], 30)
        left = children(router)
        router.process.terminate()
        assert router.process.wait(100) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in left)


@functools.cache
def reference() -> Engine:
    """One engine of one device, with the flags of `SMALL`."""
    model, params = load_checkpoint(TINY)
    config = EngineConfig(max_length=2048, num_pages=400, page_size=16, max_running=8, token_budget=32, buckets=(32,))
    return Engine(model, params, config, tokenizer=load_tokenizer(TINY))


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    return reference().generate([prompt], SamplingParams(max_tokens=count, ignore_eos=True))[0].token_ids


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'longctx-jax[cluster]'")
def test_a_cluster_on_ray(tmp_path: Path) -> None:
    """Instances on a local Ray cluster: the one reads the prompt, the other answers, and nothing is left."""
    ray = '[cluster]\nadmission = "none"\nlauncher = "ray"\n[ray]\ncpus = 0.5\nstrategy = "PACK"\n[engine]\n'
    with ServeProcess("--cluster", written(tmp_path, ray + SMALL + PAIR)) as router:
        wait_until("all are there", lambda: re.search(r"^ready ", router.log, re.MULTILINE))
        pids = [int(pid) for pid in re.findall(r"RayHost pid=(\d+)", router.log)]
        body = {"prompt": [i % 200 for i in range(300)], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        assert router.post("/v1/completions", body)["usage"]["completion_tokens"] == 20

        def blocks() -> list[int]:
            listed = httpx.get(f"{router.url}/cluster/instances").json()["instances"]
            return [each["blocks"]["device"] for each in listed]

        wait_until("both have the prompt's pages", lambda: min(blocks()) >= 300 // 16, 30)
        router.process.terminate()
        assert router.process.wait(100) == 0
        wait_until("nothing is left", lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 30)


@pytest.mark.slow
def test_instances_that_join(tmp_path: Path) -> None:
    """A router that starts nobody, and a server that registers by itself, leaves, and registers at another router."""
    secret, key = tmp_path / "secret", tmp_path / "key"
    for path, text in ((secret, "s" * 40), (key, "the-key-of-the-cluster")):
        path.write_text(text)
        path.chmod(0o600)
    file = written(tmp_path, STATIC + f"[engine]\nkv_secret_file = '{secret}'\n" + SMALL)
    keys = ["--admin-key-file", str(key), "--api-key", "a-key-of-clients"]
    headers = {"authorization": "Bearer the-key-of-the-cluster"}
    engine = ["--max-length", "2048", "--num-pages", "400", "--page-size", "16", "--max-running", "8"]
    engine += ["--token-budget", "32", "--buckets", "32", "--role", "both", "--kv-secret-file", str(secret)]
    events = ["--kv-events", "tcp://127.0.0.1:*", "--kv-events-replay", "tcp://127.0.0.1:*"]
    router = ServeProcess("--cluster", file, *keys, "--instance-key-file", str(key))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router, "is_ready", lambda: _answers(f"{router.url}/health"))
        with router:
            join = ["--join", f"127.0.0.1:{router.port}", "--join-key-file", str(key), "--join-name", "mine"]
            with ServeProcess(*engine, *events, *keys, *join):
                url = f"{router.url}/cluster/instances"
                wait_until("it has joined", lambda: "open" in httpx.get(url, headers=headers).text)
                [instance] = httpx.get(url, headers=headers).json()["instances"]
                assert (instance["name"], instance["role"]) == ("mine", "both")
                body = {"prompt": "ABCD", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
                assert router.post("/v1/completions", body, headers)["usage"]["completion_tokens"] == 4
            wait_until("it has left", lambda: not httpx.get(url, headers=headers).json()["instances"])


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.HTTPError:
        return False
