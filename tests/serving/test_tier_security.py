"""Who may find which pages beyond the devices; and nothing that arrives or is read is code."""

import ast
import os
from pathlib import Path
from typing import Any

import pytest
from tiered_fake import make_tiered_engine, settle

import longctx
from longctx.serving import Engine, Request, SamplingParams
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.kv_cache.tiers.store import TieredStore

FIVE = SamplingParams(max_tokens=5, ignore_eos=True)
PROMPT = [i % 50 for i in range(40)]
ROOT = Path(longctx.__file__).parent


def engine_of(folder: Path | None = None, **options: Any) -> Engine:
    tiers = TierConfig(2**16) if folder is None else TierConfig(2**16, 2**20, str(folder))
    return make_tiered_engine(tiers=tiers, **options)


def ask(engine: Engine, **fields: str) -> tuple[int, int, int]:
    """Tokens found, loads begun and steps made for a prompt, when nothing is on the devices."""
    engine.core.pool.clear()
    engine.scheduler.loads.seconds_per_page = None
    store = engine.pages.store
    assert isinstance(store, TieredStore)
    steps, hits = engine.stats().steps, store.stats.host.hits + store.stats.disk.hits
    (output,) = engine.generate(Request(PROMPT, FIVE, **fields))  # type: ignore[arg-type]
    steps = engine.stats().steps - steps
    settle(engine)
    return output.metrics.cached_tokens, store.stats.host.hits + store.stats.disk.hits - hits, steps


def test_a_tenant_finds_no_page_of_another_in_any_tier(tmp_path: Path) -> None:
    """Neither by what is found, nor by how long it takes: as many steps as if nobody had asked."""
    for folder in (None, tmp_path):
        engine = engine_of(folder)
        cold = ask(engine, tenant="nobody")
        assert cold[:2] == (0, 0)
        ask(engine, tenant="alice")
        if folder is not None:
            engine.pages.store.evict(lambda key: True)  # type: ignore[union-attr]
        assert ask(engine, tenant="alice")[:2] == (36, 9)
        for other in (
            {"tenant": "bob"},
            {"tenant": ""},
            {"tenant": "alice", "cache_salt": "salt"},
            {"tenant": "alice "},
        ):
            assert ask(engine, **other) == cold
        assert ask(engine, tenant="alice", cache_salt="salt")[0] == 36
        engine.pages.close()


def test_whoever_has_not_the_secret_finds_nothing_on_a_disk(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    ask(engine, tenant="alice")
    engine.pages.close()
    stranger = engine_of(tmp_path, hash_key=b"x" * 16)
    assert ask(stranger, tenant="alice")[:2] == (0, 0)
    stranger.pages.close()
    again = engine_of(tmp_path)
    assert ask(again, tenant="alice")[0] == 36
    again.pages.close()
    # Nobody but the owner reads the files, and they have no prompts.
    old = os.umask(0)
    os.umask(old)
    for path in tmp_path.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


# Modules and calls that make objects, and so run code, of bytes.
MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
PIPES = {"multiprocessing.connection", "multiprocessing.managers"}
METHODS, FUNCTIONS = {"recv_pyobj", "send_pyobj", "unsafe_load"}, {"eval", "exec"}


def makes_objects(path: Path) -> list[str]:
    """What a source has of these."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names = [module + alias.name for alias in node.names]
            found += [name for name in names if name.split(".")[0] in MODULES or name in PIPES]
        elif isinstance(node, ast.Call):
            is_method = isinstance(node.func, ast.Attribute)
            call = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            found += [call] * (call in (METHODS if is_method else FUNCTIONS))
            found += [ast.unparse(x) for x in node.keywords if ast.unparse(x) == "allow_pickle=True"]
    return found


def test_no_bytes_become_objects(tmp_path: Path) -> None:
    """Neither those of sockets nor those of files, but between this process and those that it starts itself."""
    sources = list(ROOT.rglob("*.py"))
    assert len(sources) > 300
    found = {str(path.relative_to(ROOT)): makes_objects(path) for path in sources}
    assert {path: names for path, names in found.items() if names} == {"serving/server/body_process.py": ["pickle"]}
    for text in ("import pickle", "from marshal import loads", "socket.recv_pyobj()", "np.load(f, allow_pickle=True)"):
        example = tmp_path / "example.py"
        example.write_text(text)
        assert makes_objects(example), text


@pytest.mark.parametrize("contents", [b"\x80\x04\x95", b"cos\nsystem\n(S'true'\ntR."])
def test_a_file_that_is_a_pickle_is_no_file_of_pages(tmp_path: Path, contents: bytes) -> None:
    engine = engine_of(tmp_path)
    ask(engine)
    engine.pages.close()
    paths = [*tmp_path.rglob("*.page")]
    for path in paths:
        path.write_bytes(contents)
    engine = engine_of(tmp_path)
    assert ask(engine)[:2] == (0, 0)
    assert engine.pages.store.stats.disk.corrupt == len(paths) > 0  # type: ignore[union-attr]
    engine.pages.close()
