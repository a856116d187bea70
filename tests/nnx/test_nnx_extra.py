"""`longctx.nnx` needs flax, and says how to install it."""

import importlib
import sys

import pytest


def test_without_flax_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flax", None)
    monkeypatch.delitem(sys.modules, "longctx.nnx", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"longctx\.nnx needs flax: pip install 'longctx-jax\[train\]'"):
        importlib.import_module("longctx.nnx")
