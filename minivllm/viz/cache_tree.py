"""The blocks that can be found, as a tree, and where each of its nodes stands: nothing here draws."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from minivllm.trace import TraceState


@dataclass(eq=False)
class Node:
    """All blocks of one key: requests that computed the same text at the same time have one each.

    Attributes:
        key: of the blocks.
        parent: key of the block before; None for a first block.
        block_ids: the blocks.
        filled_by: whose tokens are in the first of them; empty if that was before the trace.
        last_used_step: the last step in which somebody held one.
        holders: requests that hold one now.
        ending: those of them that hold nothing findable behind it.
        children: the blocks that go on from here.
        place: blocks before it in the text.
        row: where it is drawn, from the top.
        end_row: where the names of those who end here stand, if others go on.
    """

    key: str
    parent: str | None
    block_ids: list[int]
    filled_by: str
    last_used_step: int
    holders: list[str] = field(default_factory=list)
    ending: list[str] = field(default_factory=list)
    children: "list[Node]" = field(default_factory=list)
    place: int = 0
    row: float = 0.0
    end_row: float | None = None


def build(state: TraceState) -> tuple[list[Node], list[Node]]:
    """The cache as trees: those that begin with a first block, and those whose beginning is lost."""
    nodes: dict[str, Node] = {}
    for block in state.cached_blocks.values():
        new = Node(block.key, block.parent, [], block.request_id, block.last_used_step)
        node = nodes.setdefault(block.key, new)
        node.block_ids.append(block.block_id)
        node.last_used_step = max(node.last_used_step, block.last_used_step)
    for request in state.requests.values():
        keys = [state.cached_blocks[block].key for block in request.block_ids if block in state.cached_blocks]
        for key in keys:
            nodes[key].holders.append(request.request_id)
        if keys:
            nodes[keys[-1]].ending.append(request.request_id)
    roots, orphans = [], []
    for node in nodes.values():
        if node.parent is None:
            roots.append(node)
        elif node.parent in nodes:
            nodes[node.parent].children.append(node)
        else:
            orphans.append(node)
    reached = {node for top in (*roots, *orphans) for node in walk(top)}
    for node in nodes.values():  # keys that leave their parents out can go round in circles
        if node not in reached:
            nodes[node.parent or ""].children.remove(node)
            orphans.append(node)
            reached |= set(walk(node))
    return roots, orphans


def walk(top: Node) -> Iterator[Node]:
    """A node and all behind it, each before those behind it."""
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack += reversed(node.children)


def lay_out(roots: Sequence[Node], orphans: Sequence[Node]) -> tuple[int, int]:
    """Gives every node its place and its row; returns the number of rows, and that of the first lost branch."""
    num_rows = first_orphan = 0
    for top in (*roots, *orphans):
        if orphans and top is orphans[0]:  # with a line above them
            num_rows += 2 if roots else 1
            first_orphan = num_rows
        nodes = list(walk(top))
        for node in nodes:
            for child in node.children:
                child.place = node.place + 1
            if node.ending and node.children:
                node.end_row, num_rows = num_rows, num_rows + 1
            elif not node.children:
                node.row, num_rows = num_rows, num_rows + 1
        for node in reversed(nodes):
            rows = [child.row for child in node.children] + ([] if node.end_row is None else [node.end_row])
            if node.children:
                node.row = (min(rows) + max(rows)) / 2
    return num_rows, first_orphan


def runs(tops: Sequence[Node]) -> Iterator[list[Node]]:
    """The tree cut into runs without a branch, each of the same holders."""
    taken = set[Node]()
    for node in chain.from_iterable(map(walk, tops)):
        if node in taken:
            continue
        run = [node]
        while len(run[-1].children) == 1 and run[-1].children[0].holders == node.holders:
            run.append(run[-1].children[0])
        taken.update(run)
        yield run
