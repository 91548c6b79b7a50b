"""The "may import" table of docs/architecture.md: which room may know which other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "runtime": set(),
    "tokenizer_manager": {"runtime"},
    "detokenizer": {"runtime"},
    "model_runner": {"runtime"},
    "scheduler": {"runtime"},
    "simulator": {"runtime", "scheduler"},
    "offline": {"runtime", "tokenizer_manager", "scheduler", "model_runner", "detokenizer"},
    "cli": {"runtime"},  # others inside functions, so that `engine --help` loads nothing
}
ALSO = {
    "scheduler/process.py": {"model_runner"},  # rank 0 lives in the scheduler's process
    "cli/trace/": {"scheduler"},  # reads the scheduler's records; the command line loads it when it is used
}
WITHOUT_TORCH = ("runtime", "scheduler", "tokenizer_manager", "detokenizer", "simulator", "cli", "offline")


def modules(room: str) -> Iterator[Path]:
    yield from (ROOT / room).rglob("*.py")


def imports_at_load(path: Path, root: Path = ROOT) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """The imports that run when the module is loaded, each with the room or package it names."""
    package = path.relative_to(root).parent.parts
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                yield node, (node.module or "").split(".")[0]
            else:
                base = package[: len(package) - (node.level - 1)]
                where = [
                    *base,
                    *(node.module.split(".") if node.module else [alias.name for alias in node.names]),
                ]
                yield node, where[0]
        pending.extend(ast.iter_child_nodes(node))


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_it_may(room):
    wrong = []
    for path in modules(room):
        name = str(path.relative_to(ROOT))
        also = (rooms for prefix, rooms in ALSO.items() if name.startswith(prefix))
        allowed = MAY_IMPORT[room].union({room}, *also)
        for node, target in imports_at_load(path):
            if (
                isinstance(node, ast.ImportFrom)
                and node.level
                and target in MAY_IMPORT
                and target not in allowed
            ):
                wrong.append(f"{name}:{node.lineno} imports {target}")
    assert wrong == []


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_only_the_model_runner_needs_torch_to_load(room):
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in modules(room)
        for node, target in imports_at_load(path)
        if target == "torch"
    ]
    assert wrong == []


def test_inside_the_product_imports_are_relative():
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for room in MAY_IMPORT
        for path in modules(room)
        for node, target in imports_at_load(path)
        if target == "engine"
    ]
    assert wrong == []


def test_the_check_sees_what_it_forbids(tmp_path):
    (tmp_path / "detokenizer").mkdir()
    path = tmp_path / "detokenizer" / "wrong.py"
    path.write_text("from ..scheduler.req import Req\nimport torch\ndef f():\n    from ..cli import main\n")

    assert {target for _, target in imports_at_load(path, tmp_path)} == {"scheduler", "torch"}
