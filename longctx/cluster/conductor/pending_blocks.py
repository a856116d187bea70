"""`PendingBlocks`: blocks that instances do not have yet, and will have once assigned prompts are computed."""

from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False, slots=True)
class _Node:
    """A run of blocks that the same prompts go through.

    Attributes:
      keys: uint64 `[blocks]`.
      prompts: by instance, how many prompts that are assigned to it go through the run.
      children: by their first key.
    """

    keys: np.ndarray
    prompts: dict[str, int] = field(default_factory=dict)
    children: dict[int, "_Node"] = field(default_factory=dict)


class PendingBlocks:
    """A radix tree of the prompts that instances are to compute, counted by instance.

    A key stands for its block and all before it, so two prompts that have a key in common have all before it in common.
    """

    def __init__(self) -> None:
        self._root = _Node(np.empty(0, np.uint64))

    def add(self, instance: str, keys: np.ndarray) -> None:
        """Add a prompt, keys uint64 `[blocks]`."""
        node, at = self._root, 0
        while at < len(keys):
            child = node.children.get(int(keys[at]))
            if child is None:
                child = node.children[int(keys[at])] = _Node(keys[at:].copy())
            else:
                common = common_blocks(child.keys, keys[at:])
                if common < len(child.keys):
                    _split(child, common)
            child.prompts[instance] = child.prompts.get(instance, 0) + 1
            node, at = child, at + len(child.keys)

    def remove(self, instance: str, keys: np.ndarray) -> None:
        """Remove a prompt that was added."""
        node, at = self._root, 0
        while at < len(keys):
            first = int(keys[at])
            child = node.children[first]
            at += len(child.keys)
            count = child.prompts[instance] - 1
            if count:
                child.prompts[instance] = count
            else:
                del child.prompts[instance]
            if not child.prompts:
                del node.children[first]
                return  # whatever is below has no other prompt either
            node = child

    def match(self, keys: np.ndarray) -> dict[str, int]:
        """The leading blocks of a prompt that each instance will have; instances with none are left out."""
        found: dict[str, int] = {}
        node, at = self._root, 0
        while at < len(keys):
            child = node.children.get(int(keys[at]))
            if child is None:
                break
            common = common_blocks(child.keys, keys[at:])
            at += common
            for instance in child.prompts:
                found[instance] = at
            if common < len(child.keys):
                break
            node = child
        return found

    def __bool__(self) -> bool:
        return bool(self._root.children)


def common_blocks(a: np.ndarray, b: np.ndarray) -> int:
    """The leading blocks that two runs have in common."""
    both = min(len(a), len(b))
    differs = a[:both] != b[:both]
    first = int(differs.argmax()) if both else 0
    return first if both and differs[first] else both


def _split(node: _Node, at: int) -> None:
    """Divide a run in two."""
    rest = _Node(node.keys[at:], dict(node.prompts), node.children)
    node.keys, node.children = node.keys[:at], {int(rest.keys[0]): rest}
