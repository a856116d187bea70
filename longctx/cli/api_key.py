"""`longctx api-key NAME`: make a key of a server, and the line that stands for it in a file of keys."""

import argparse
import secrets
import sys

from longctx.serving.server.settings import ApiKey, hash_key


def run(options: argparse.Namespace) -> int:
    """Print the line on standard output, so that it can be appended to the file, and the key on standard error."""
    key = secrets.token_hex(32)
    line = ApiKey(options.name, hash_key(key))  # checks the name
    print(line.name, line.key)
    print(key, file=sys.stderr)
    return 0
