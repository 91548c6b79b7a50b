"""The import graph of the product, folder by folder: nodes, arrows, depth, circles.

    python benchmarks/import_graph.py            # this checkout
    python benchmarks/import_graph.py PATH       # another checkout, to compare

A row is one folder. Its nodes are its own modules and its inner folders, an inner folder being one node; an arrow is
an import between two nodes, imports inside functions and under TYPE_CHECKING included. Depth is the length of the
longest chain of arrows. A circle is a set of nodes that import each other. Nothing is imported or run.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

NOT_PRODUCT: Final = {"tests", "benchmarks", "build", "dist", "docs", "deploy", "examples"}

Arrows = Mapping[str, set[str]]


@dataclass(frozen=True)
class FolderGraph:
    """The imports between the direct members of one folder.

    Attributes:
        nodes: modules of the folder, and inner folders with a trailing slash.
        arrows: node -> the nodes that it imports; no arrow from a node to itself.
    """

    folder: str
    nodes: frozenset[str]
    arrows: Arrows

    @property
    def num_arrows(self) -> int:
        """All imports between two nodes, counted once per pair and direction."""
        return sum(len(targets) for targets in self.arrows.values())

    def circles(self) -> list[list[str]]:
        """Sets of nodes that import each other, directly or through others; sorted."""
        return sorted(sorted(group) for group in _strong_groups(self.nodes, self.arrows) if len(group) > 1)

    def depth(self) -> int:
        """Nodes in the longest chain of imports; a circle counts as one node."""
        groups = _strong_groups(self.nodes, self.arrows)
        group_of = {node: n for n, group in enumerate(groups) for node in group}
        depths: dict[int, int] = {}
        for n, group in enumerate(groups):  # Tarjan's order: what is imported comes first
            below = {group_of[target] for node in group for target in self.arrows.get(node, ())} - {n}
            depths[n] = 1 + max((depths[b] for b in below), default=0)
        return max(depths.values(), default=0)


def product_modules(root: Path) -> Iterator[Path]:
    """Paths of all product modules, relative to the root."""
    for first in sorted(root.iterdir()):
        if first.suffix == ".py":
            yield Path(first.name)
        elif first.is_dir() and first.name not in NOT_PRODUCT and not first.name.startswith("."):
            yield from (path.relative_to(root) for path in sorted(first.rglob("*.py")))


def imported_modules(root: Path, path: Path) -> Iterator[Path]:
    """The product files that the module at `path`, relative to the root, imports by relative imports."""
    pending: list[ast.AST] = [ast.parse((root / path).read_bytes(), filename=str(path))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.parent.parts[: len(path.parent.parts) - (node.level - 1)]
            target = Path(*base, *(node.module.split(".") if node.module else ()))
            for alias in node.names:
                if found := _file_of(root, target / alias.name) or _file_of(root, target):
                    yield found
        for inner in ("body", "handlers", "cases", "orelse", "finalbody"):  # no expression holds an import
            pending.extend(getattr(node, inner, ()))


def folder_graphs(root: Path) -> list[FolderGraph]:
    """One graph per folder that holds code, the root included (its name is ".")."""
    nodes: dict[Path, set[str]] = defaultdict(set)
    arrows: dict[Path, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in product_modules(root):
        for folder in path.parents:
            nodes[folder].add(_node(folder, path))
        for target in imported_modules(root, path):
            for folder in _folders(path) & _folders(target):
                source_node, target_node = _node(folder, path), _node(folder, target)
                if source_node != target_node and target.name != "__init__.py":
                    arrows[folder][source_node].add(target_node)
    return [
        FolderGraph(str(folder), frozenset(nodes[folder]), arrows[folder])
        for folder in sorted(nodes)
        if len(nodes[folder]) > 1
    ]


@functools.cache
def _folders(path: Path) -> frozenset[Path]:
    return frozenset(path.parents)


@functools.cache
def _file_of(root: Path, target: Path) -> Path | None:
    if target.name and (root / target).with_suffix(".py").is_file():
        return target.with_suffix(".py")
    if (root / target / "__init__.py").is_file():
        return target / "__init__.py"
    return None


@functools.cache
def _node(folder: Path, path: Path) -> str:
    parts = path.relative_to(folder).parts
    return parts[0] if len(parts) == 1 else f"{parts[0]}/"


def _strong_groups(nodes: Iterable[str], arrows: Arrows) -> list[list[str]]:
    """Tarjan's strongly connected components, each before those that import it."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(arrows.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            at = stack.index(node)
            groups.append(stack[at:])
            del stack[at:]

    for node in sorted(nodes):
        if node not in index:
            visit(node)
    return groups


def main() -> None:
    """Print one line per folder, then all circles."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
    print(f"{'folder':40} {'nodes':>5} {'arrows':>6} {'depth':>5} {'circles':>7}")
    found = []
    for graph in folder_graphs(root):
        circles = graph.circles()
        row = (len(graph.nodes), graph.num_arrows, graph.depth(), len(circles))
        print(f"{graph.folder:40} {row[0]:5} {row[1]:6} {row[2]:5} {row[3]:7}")
        found += [(graph.folder, circle) for circle in circles]
    for folder, circle in found:
        print(f"circle in {folder}: {', '.join(circle)}")


if __name__ == "__main__":
    main()
