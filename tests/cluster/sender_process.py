"""A sender of pages in a process of its own: prints its address and lease id, then sends until it is killed.

Arguments: pages, seconds that each read takes, and the secret; "mooncake" in its place: the way.
"""

import sys
import time

from cluster.fake_engine import LAYOUT, FakeEngine
from cluster.ways import OPTIONS

from longctx.cluster.transfer.mooncake import MooncakeStaging, make_engine
from longctx.cluster.transfer.zmq_sender import PageSender


def main() -> None:
    num_pages, seconds, secret = sys.argv[1:]
    staging = None
    if secret == "mooncake":
        staging = MooncakeStaging(make_engine("127.0.0.1"), "127.0.0.1", 4, OPTIONS.block_bytes)
    engine = FakeEngine(seconds=float(seconds))
    lease, _ = engine.add(int(num_pages))
    with PageSender(engine, LAYOUT, secret=None if staging else secret, options=OPTIONS, staging=staging) as sender:
        print(sender.address, lease.lease_id, flush=True)
        time.sleep(100)


if __name__ == "__main__":
    main()
