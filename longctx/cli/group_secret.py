"""`longctx group-secret`: print a new secret for processes that run an engine together."""

import argparse

from longctx.serving.distributed.environment import make_group_secret


def run(options: argparse.Namespace) -> int:
    """Print the secret."""
    print(make_group_secret())
    return 0
