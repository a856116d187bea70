"""Where commands keep compiled programs from one run to the next. Nothing here imports JAX."""

import os
from pathlib import Path

VARIABLE = "LONGCTX_CACHE"


def cache_root() -> Path:
    """The folder of `LONGCTX_CACHE`, or else the user's cache folder; RuntimeError: the user has no home."""
    import platformdirs

    named = os.environ.get(VARIABLE)
    return Path(named) if named else platformdirs.user_cache_path("longctx")
