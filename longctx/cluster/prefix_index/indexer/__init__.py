"""An index of many instances' blocks as a service of its own, with the HTTP API of Mooncake's conductor indexer.

The API is documented in kvcache-ai/Mooncake, docs/source/api-reference/http/conductor-indexer.md.
"""
