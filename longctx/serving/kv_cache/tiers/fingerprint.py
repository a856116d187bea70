"""Fingerprint of what pages depend on besides their tokens: a digest that keeps those of different models apart."""

import hashlib
import json
from collections.abc import Mapping

from longctx.serving.kv_cache.page_layout import PageLayout

FINGERPRINT_BYTES = 16


def fingerprint_of(layout: PageLayout, weights: Mapping[str, str], settings: Mapping[str, object]) -> bytes:
    """A digest that is equal for two engines only if they compute the same pages for the same tokens.

    Args:
      layout: layers, heads, page size and dtype.
      weights: digests of the parameters by name.
      settings: all else that keys and values follow from, such as the rotary embedding's configuration; of values that
        JSON has, or others by their `repr`.

    Raises:
      ValueError: weights is empty: pages of different models would be taken for each other.
    """
    if not weights:
        raise ValueError("weights must say which parameters they are, got nothing")
    contents = {"layout": layout._asdict(), "weights": dict(weights), "settings": dict(settings)}
    text = json.dumps(contents, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=FINGERPRINT_BYTES, person=b"kv pages").digest()
