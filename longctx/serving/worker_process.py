"""Processes that work for this one."""

import multiprocessing
import os
import signal
import threading


def follow_parent() -> None:
    """In a new process of `multiprocessing`: leave signals to the parent, and end with it, however it ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
