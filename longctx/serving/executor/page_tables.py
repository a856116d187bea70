"""Writes the page tables of slots, which live on the devices: only new entries are sent."""

import numpy as np

from longctx.serving.executor.row_layout import TableEntry
from longctx.serving.runner.model_runner import ModelRunner
from longctx.serving.scheduler.batch import TableRun

BLOCK = 1024  # entries that `set_entries` sends at a time


class PageTables:
    """How many pages of each slot each rank has, and where the next ones are written.

    Args:
      num_pages: of each rank.
    """

    def __init__(self, runner: ModelRunner, num_ranks: int, num_slots: int, num_pages: int) -> None:
        self._runner, self._num_pages = runner, num_pages
        self._held = np.zeros((num_ranks, num_slots), np.int32)

    def clear(self, slot: int) -> None:
        """A slot has a new sequence."""
        self._held[:, slot] = 0
        if len(self._held) > 1:
            self._runner.clear_slot(slot)

    def write(self, tables: list[TableRun], room: int) -> list[list[TableEntry]]:
        """Entries that go with the step, on each rank; runs for which it has no room are sent ahead of it.

        Args:
          room: entries of each rank that the step's shape has room for.
        """
        entries: list[list[TableEntry]] = [[] for _ in self._held]
        for slot, first, pages in tables:
            runs: list[list[TableEntry]] = [[] for _ in entries]
            for number, page in enumerate(pages, first):
                rank, local = divmod(page, self._num_pages)
                runs[rank].append(TableEntry(slot, int(self._held[rank, slot]), local, number))
                self._held[rank, slot] += 1
            if all(len(x) + len(run) <= room for x, run in zip(entries, runs, strict=True)):
                for x, run in zip(entries, runs, strict=True):
                    x += run
            else:
                self._send_ahead(slot, runs)
        return entries

    def _send_ahead(self, slot: int, runs: list[list[TableEntry]]) -> None:
        for start in range(0, max(map(len, runs)), BLOCK):
            pages, numbers = np.full((2, len(runs), BLOCK), -1, np.int32)
            firsts = np.zeros(len(runs), np.int32)
            for rank, run in enumerate(runs):
                part = run[start : start + BLOCK]
                if part:
                    firsts[rank] = part[0].entry
                    pages[rank, : len(part)] = [x.page for x in part]
                    numbers[rank, : len(part)] = [x.number for x in part]
            self._runner.set_entries(slot, firsts, pages, numbers)

    def warm_up(self) -> None:
        """Run what writes ahead of a step once, to no effect on pages."""
        ranks = len(self._held)
        block = np.full((ranks, BLOCK), -1, np.int32)
        if ranks > 1:
            self._runner.clear_slot(0)
        self._runner.set_entries(0, np.zeros(ranks, np.int32), block, block)
