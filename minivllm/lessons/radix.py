"""A radix tree of prefixes, as SGLang keeps one (Zheng et al., "SGLang", NeurIPS 2024): a model of what it finds.

It knows tokens and no blocks: what it finds ends at any token. The engine does not use it; the lesson compares.
"""

from dataclasses import dataclass, field
from itertools import count


@dataclass(eq=False)
class Node:
    """Tokens that follow each other without a branch; its children go on differently, by their first token."""

    token_ids: list[int]
    parent: "Node | None" = None
    children: dict[int, "Node"] = field(default_factory=dict)
    last_used: int = 0


class RadixCache:
    """All token sequences that were served, as a tree, in at most `num_slots` tokens."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots, self.num_used = num_slots, 0
        self.root, self._clock = Node([]), count(1)

    def serve(self, token_ids: list[int]) -> int:
        """Finds what is there of a sequence, at most all but its last token, and stores the rest; returns how many
        tokens were found."""
        node, found, now = self.root, 0, next(self._clock)
        while found < len(token_ids) and token_ids[found] in node.children:
            child = node.children[token_ids[found]]
            rest = token_ids[found : found + len(child.token_ids)]
            common = next((i for i, (a, b) in enumerate(zip(child.token_ids, rest, strict=False)) if a != b), len(rest))
            if common < len(child.token_ids):
                child = self._split(child, common)
            node, found = child, found + common
            node.last_used = now
        if found < len(token_ids):
            node.children[token_ids[found]] = Node(token_ids[found:], node, last_used=now)
            self.num_used += len(token_ids) - found
        self._evict(now)
        return min(found, len(token_ids) - 1)

    def _split(self, node: Node, length: int) -> Node:
        """Cuts a node in two, where sequences branch; returns the upper part."""
        upper = Node(node.token_ids[:length], node.parent, {node.token_ids[length]: node}, node.last_used)
        assert node.parent is not None
        node.parent.children[upper.token_ids[0]] = upper
        node.token_ids, node.parent = node.token_ids[length:], upper
        return upper

    def _evict(self, now: int) -> None:
        """Drops the leaves that were used longest ago, until the rest fits."""
        while self.num_used > self.num_slots:
            leaves = [leaf for leaf in self._nodes(self.root) if not leaf.children and leaf.last_used < now]
            if not leaves:
                return
            oldest = min(leaves, key=lambda leaf: leaf.last_used)
            assert oldest.parent is not None
            del oldest.parent.children[oldest.token_ids[0]]
            self.num_used -= len(oldest.token_ids)

    def _nodes(self, node: Node) -> list[Node]:
        return [found for child in node.children.values() for found in (child, *self._nodes(child))]
