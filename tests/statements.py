"""The statements of a file, for tests that read the imports of all: expressions, most of a tree, hold none."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def inner(node: ast.AST) -> Iterator[ast.AST]:
    """The statements directly inside a module or statement, and its handlers and cases, which hold others."""
    for field in ("body", "handlers", "cases", "orelse", "finalbody"):
        yield from getattr(node, field, ())


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """All statements at any depth."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(inner(node))
