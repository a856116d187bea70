"""Engines of fake devices whose pages, which are tokens, go through the real tiers and come back."""

from collections.abc import Callable
from collections.abc import Sequence as List
from types import SimpleNamespace
from typing import Any

import numpy as np
from fake_device import FakeExecutor, model_with

from longctx.serving import Engine, EngineConfig, ParallelPlan
from longctx.serving.distributed import ProcessGroup
from longctx.serving.kv_cache.connector import PageBlock
from longctx.serving.kv_cache.page_layout import PageLayout
from longctx.serving.kv_cache.tiers.store import TieredStore

LOST = -7  # a token that nobody may see


class _Read:
    def __init__(self, layout: PageLayout, data: np.ndarray) -> None:
        self._layout, self._data, self.num_bytes = layout, data, data.nbytes

    def result(self) -> list[PageBlock]:
        return [PageBlock(0, self._layout.whole, self._data)]


class TieredExecutor(FakeExecutor):
    """Fake devices whose pages move: a layer for each stage, keys and values both the tokens.

    With a window there is one more layer for each stage, of window pages.
    """

    def __init__(self, config: EngineConfig, plan: ParallelPlan, num_pages: int, **options: Any) -> None:
        super().__init__(config, plan, num_pages, **options)
        self._num_pages, self._num_window_pages = num_pages, self.shapes.num_window_pages
        self._num_layers, kinds = plan.stage, 2 if self._num_window_pages else 1
        self._layout = PageLayout(kinds * plan.stage, 1, 1, config.page_size, "int32")
        runner: Any = self.runner
        for name in ("read_pages", "write_placed", "write_pages"):
            setattr(runner, name, getattr(self, f"_{name}"))
        runner.transfer = SimpleNamespace(
            layout=self._layout, needed=self._needed, place=self._place_block, compile=lambda: None
        )

    def open_store(self, config: EngineConfig, fingerprint: bytes = b"fake") -> TieredStore:
        assert config.tiers is not None
        return TieredStore(config.tiers, self._layout, fingerprint)

    def _at(self, page: int) -> Any:
        pages: Any = self.runner.pages  # type: ignore[attr-defined]  # [stage, rank, page, offset]
        return pages[:, page // self._num_pages, page % self._num_pages]

    def _window_at(self, window: int) -> Any:
        pages: Any = self.runner.window_pages  # type: ignore[attr-defined]
        return pages[:, window // self._num_window_pages, window % self._num_window_pages]

    def _read_pages(self, pages: List[int], layers: tuple[int, int], windows: List[int] | None = None) -> _Read:
        tokens = np.stack([self._at(page) for page in pages])  # [pages, stages, page_size]
        assert (windows is None) == (self._num_window_pages == 0)
        if windows is not None:
            lost = np.full_like(tokens[0], LOST)
            kept = [lost if window < 0 else self._window_at(window) for window in windows]
            tokens = np.concatenate([tokens, np.stack(kept)], 1)
        return _Read(self._layout, np.repeat(tokens.astype(np.int32)[:, :, None, :, None, None], 2, axis=2))

    def _needed(self, pages: List[int], windows: List[int] | None = None) -> np.ndarray:
        for page in pages:  # a load begins
            self._at(page)[:] = LOST
        has = np.ones((len(pages), self._layout.num_layers, 1), bool)
        if windows is not None:
            has[np.array(windows) < 0, self._num_layers :] = False
        return has

    def _place_block(self, pages: List[int], block: PageBlock, windows: List[int] | None = None) -> Any:
        own = slice(block.first, block.first + len(block.data))
        return list(pages[own]), list(windows[own]) if windows else [-1] * len(block.data), np.array(block.data)

    def _write_placed(self, blocks: List[Any]) -> None:
        for pages, windows, data in blocks:
            for page, window, tokens in zip(pages, windows, data[:, :, 0, :, 0, 0], strict=True):
                self._at(page)[:] = tokens[: self._num_layers]
                if window >= 0:
                    self._window_at(window)[:] = tokens[self._num_layers :]

    def _write_pages(self, pages: List[int], block: PageBlock, windows: List[int] | None = None) -> None:
        self._write_placed([self._place_block(pages, block, windows)])


def make_tiered_engine(
    num_pages: int = 24,
    page_size: int = 4,
    plan: ParallelPlan | None = None,
    executor_of: Callable[..., TieredExecutor] = TieredExecutor,
    tokenizer: Any = None,
    group: ProcessGroup | None = None,
    window: int | None = None,
    **options: Any,
) -> Engine:
    """An engine with the tiers of `options["tiers"]`."""
    options = {"max_running": 6, "token_budget": 16, "hash_key": bytes(16)} | options
    config = EngineConfig(page_size=page_size, num_pages=num_pages, **options)
    executor = executor_of(config, plan or ParallelPlan(), num_pages, window=window)
    store = executor.open_store(config)
    executor.move_pages(store)
    return Engine(
        model_with(window),
        None,
        config,
        executor=executor,
        clock=executor.clock,
        plan=plan,
        tokenizer=tokenizer,
        store=store,
        process_group=group,
    )


def settle(engine: Engine) -> None:
    """Let all pages leave the devices, and be kept."""
    while engine.has_work:
        engine.step()
    assert engine.pages.store is not None
    assert engine.pages.store.flush(30)
