"""Pages that move to and from an engine in many processes: each moves its part, and a load ends when it has in all."""

from collections.abc import Container, Iterable

from longctx.serving.distributed.process_group import ProcessGroup
from longctx.serving.kv_cache.connector import Loaded


class LoadEnds:
    """Gathers the ends of loads in process 0, and which leases others ask for; a process alone has them at once."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._ends: dict[str, dict[int, Loaded]] = {}
        self._asked: set[str] = set()

    def report(self, ended: Iterable[Loaded]) -> None:
        """In the other processes: tell process 0 of loads that have ended here."""
        for loaded in ended:
            self._group.report(list(loaded))

    def complete(self, ended: Iterable[Loaded], wanted: Container[str]) -> list[Loaded]:
        """In process 0: loads that have ended in every process, given those that have just ended in this one.

        The pages are those that all have; the time is that of the slowest. Of loads that are not `wanted` any more,
        some process may never tell the end.
        """
        if self._group.num_processes == 1:
            return list(ended)
        for loaded in ended:
            self._ends.setdefault(loaded.name, {})[0] = loaded
        self._read_reports()
        self._ends = {name: ends for name, ends in self._ends.items() if name in wanted}
        complete = [name for name, ends in self._ends.items() if len(ends) == self._group.num_processes]
        return [
            Loaded(name, min(x.num_pages for x in ends), max(x.seconds for x in ends))
            for name in complete
            for ends in [list(self._ends.pop(name).values())]
        ]

    def report_asked(self, lease_id: str) -> None:
        """In the other processes: tell process 0 that a lease is asked for here."""
        self._group.report(lease_id)

    def asked(self) -> set[str]:
        """In process 0: the leases that were asked for elsewhere since the last call."""
        self._read_reports()
        asked, self._asked = self._asked, set()
        return asked

    def _read_reports(self) -> None:
        for process, value in self._group.reports():
            if isinstance(value, str):
                self._asked.add(value)
            else:
                name, num_pages, seconds = value
                self._ends.setdefault(name, {})[process] = Loaded(name, num_pages, seconds)
