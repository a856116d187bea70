"""Index of the instances that hold each block of KV cache, kept by their KV events.

No JAX: `PrefixIndex` is plain data, and a `KvEventReader` fills it from instances' sockets.
"""
