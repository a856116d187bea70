"""What benchmarks of several processes share."""

import socket


def free_coordinator() -> str:
    """The address of a port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
