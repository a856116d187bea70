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
        node, at, path = self._root, 0, list[_Node]()
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
                break  # whatever is below has no other prompt either
            node = child
            path.append(node)
        for node in reversed(path):
            _join(node)

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

    def __len__(self) -> int:
        """Runs in the tree."""
        count, nodes = 0, [self._root]
        while nodes:
            children = nodes.pop().children.values()
            count += len(children)
            nodes += children
        return count


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


def _join(node: _Node) -> None:
    """Make one run of two that all of their prompts go through, else hot prefixes fall to pieces in the long run."""
    if len(node.children) == 1:
        (child,) = node.children.values()
        if child.prompts == node.prompts:
            node.keys, node.children = np.concatenate([node.keys, child.keys]), child.children
