"""Flags of `longctx kv-index`."""

import argparse

SUMMARY = "Serve an index of which instances have which prefixes, with the API of Mooncake's conductor indexer."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen at; whoever reaches it can have it connect to any address; default: %(default)s",
    )
    parser.add_argument("--port", type=int, default=13333, metavar="N", help="default: %(default)s")
    parser.add_argument("--hash-seed", type=int, default=0, metavar="N", help="of XXH3-64, for /query_by_hash")
