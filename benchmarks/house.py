"""The size of the product, and its import graph: files, lines, classes, and the folders' nodes, arrows and circles.

    python benchmarks/house.py                  # the numbers
    python benchmarks/house.py --check          # fails if one of the first six grew beyond benchmarks/house.json
    python benchmarks/house.py --write          # writes benchmarks/house.json
    python benchmarks/house.py --imports        # the import graph, folder by folder
    python benchmarks/house.py --root PATH      # another checkout, to compare

The product is every Python file outside tests/, benchmarks/, docs/, deploy/ and examples/. A protocol is a class with
`Protocol` among its bases; it counts as a class, too. Nothing is imported or run.

The import graph has one row per folder. Its nodes are the folder's modules and its inner folders, an inner folder being
one node; an arrow is an import between two nodes, imports inside functions and under TYPE_CHECKING included. Depth is
the length of the longest chain of arrows. A circle is a set of nodes that import each other.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

NOT_PRODUCT: Final = {"tests", "benchmarks", "build", "dist", "docs", "deploy", "examples"}

LIMITS: Final = Path(__file__).with_suffix(".json")
# Names that stand for a kind of change: the product files with such a name are those that the change touches.
EXAMPLES: Final = {
    "a model family (`olmo2`)": "olmo2",
    "a sampling parameter (`min_p`)": "min_p",
    "an endpoint (`/v1/embeddings`)": "/v1/embeddings",
    "a message (`FlushCache`)": "FlushCache",
}

Arrows = Mapping[str, set[str]]


@dataclass(frozen=True)
class Sizes:
    """What `--check` compares: figures that grow only in a commit that says why."""

    files: int
    lines: int
    classes: int
    protocols: int
    runtime_lines: int
    http_files: int


def measure(root: Path) -> Sizes:
    """Count the product's code below `root`."""
    paths = list(product_modules(root))
    classes = [
        node for path in paths for node in ast.walk(_tree(root / path)) if isinstance(node, ast.ClassDef)
    ]
    return Sizes(
        files=len(paths),
        lines=sum(_num_lines(root / path) for path in paths),
        classes=len(classes),
        protocols=sum(any(_is_protocol(base) for base in node.bases) for node in classes),
        runtime_lines=sum(_num_lines(root / path) for path in paths if path.parts[0] == "runtime"),
        http_files=sum(path.parts[:2] == ("tokenizer_manager", "http") for path in paths),
    )


def grown(sizes: Sizes, limits: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """The figures above their limit, each with the limit and its value."""
    return {name: (limits[name], now) for name, now in asdict(sizes).items() if now > limits[name]}


def check(root: Path, limits: Path) -> str | None:
    """Compare the product with the committed sizes.

    Returns:
        What to do if a figure grew, else None.
    """
    found = grown(measure(root), json.loads(limits.read_text()))
    if not found:
        return None
    rows = "\n".join(f"  {name}: {now:,}, the limit is {limit:,}" for name, (limit, now) in found.items())
    return (
        f"The product grew beyond {limits.name}:\n{rows}\n"
        f"Make it smaller, or run `python benchmarks/house.py --write` and change {limits.name} in the same commit, "
        "with the reason in its body."
    )


def rows(root: Path) -> Iterator[tuple[str, str]]:
    """The lines of the table: what is counted, and its count."""
    sizes = measure(root)
    yield "Python files of the product", f"{sizes.files:,}"
    yield "lines of the product", f"{sizes.lines:,}"
    yield "classes", f"{sizes.classes:,}"
    yield "protocols among them", f"{sizes.protocols:,}"
    yield "lines of `runtime/`", f"{sizes.runtime_lines:,}"
    yield "files of `tokenizer_manager/http/`", f"{sizes.http_files:,}"
    texts = [(root / path).read_text() for path in product_modules(root)]
    for change, name in EXAMPLES.items():
        yield f"product files that name {change}", f"{sum(name in text for text in texts):,}"
    for folder in ("tests", "benchmarks"):
        paths = list((root / folder).rglob("*.py"))
        yield f"files / lines of `{folder}/`", f"{len(paths):,} / {sum(map(_num_lines, paths)):,}"


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def _is_protocol(base: ast.expr) -> bool:
    """Whether a base class is `Protocol` or `Protocol[T]`, imported by name or from a module."""
    if isinstance(base, ast.Subscript):
        base = base.value
    return (base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")) == "Protocol"


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes(), filename=str(path))


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
    pending: list[ast.AST] = [_tree(root / path)]
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


def print_imports(root: Path) -> None:
    """Print one line per folder, then all circles."""
    print(f"{'folder':40} {'nodes':>5} {'arrows':>6} {'depth':>5} {'circles':>7}")
    found = []
    for graph in folder_graphs(root):
        circles = graph.circles()
        row = (len(graph.nodes), graph.num_arrows, graph.depth(), len(circles))
        print(f"{graph.folder:40} {row[0]:5} {row[1]:6} {row[2]:5} {row[3]:7}")
        found += [(graph.folder, circle) for circle in circles]
    for folder, circle in found:
        print(f"circle in {folder}: {', '.join(circle)}")


def main() -> None:
    """Print the numbers or the graph, or check or write the sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="fail if one of the first six figures grew")
    action.add_argument("--write", action="store_true", help="write the figures that --check compares with")
    action.add_argument("--imports", action="store_true", help="print the import graph")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the checkout to read")
    args = parser.parse_args()
    root: Path = args.root.resolve()
    if args.imports:
        print_imports(root)
        return
    if args.write:
        LIMITS.write_text(json.dumps(asdict(measure(root)), indent=2) + "\n")
    for name, count in rows(root):
        print(f"{name:66} {count:>18}")
    if args.check and (growth := check(root, LIMITS)):
        sys.exit(growth)


if __name__ == "__main__":
    main()
