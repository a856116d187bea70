"""A process that a launcher starts in tests: it answers at a port until it ends; with `--wrong` it does not start."""

import http.server
import os
import re
import signal
import sys
import threading

from longctx.cluster.launcher.supervised import WRONG_INPUT, end_with_parent


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(" ".join([os.environ.get("CUDA_VISIBLE_DEVICES", ""), *sys.argv[1:]]).encode())

    def log_message(self, *args: object) -> None:
        pass


def main() -> None:
    if "--wrong" in sys.argv:
        print("longctx: --wrong must not be there", file=sys.stderr)
        sys.exit(WRONG_INPUT)
    end_with_parent(1.0)
    if re.search(r"--process-id=[1-9]", sys.argv[-1]):
        print("follows", os.environ["CUDA_VISIBLE_DEVICES"], file=sys.stderr, flush=True)
        signal.pause()
    server = http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Handler)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    print("it listens", file=sys.stderr, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
