"""Which instances hold which blocks of KV cache, learnt from their KV events.

No JAX: `PrefixIndex` is plain data, and a `KvEventReader` fills it from instances' sockets.
"""
