"""`longctx kv-index`: an index of many instances' blocks over HTTP."""

import argparse

from longctx import extras


def run(options: argparse.Namespace) -> int:
    if not 0 <= options.port < 2**16:
        raise ValueError(f"--port must be 0 to 65535, got {options.port}")
    if not 0 <= options.hash_seed < 2**64:
        raise ValueError(f"--hash-seed must be 0 to 2^64 - 1, got {options.hash_seed}")
    with extras.needed("serve", "longctx kv-index"):
        import uvicorn

        from longctx.cluster.prefix_index.indexer.app import make_app
        from longctx.cluster.prefix_index.indexer.indexer import KvIndexer
        from longctx.cluster.prefix_index.reader import KvEventReader

    indexer = KvIndexer(options.hash_seed)
    app = make_app(indexer, KvEventReader(indexer))
    level = "warning" if options.quiet else "info"
    server = uvicorn.Server(uvicorn.Config(app, options.host, options.port, log_level=level, server_header=False))
    server.run()
    return 0 if server.started else 1
