"""Which folder may import which: the table of docs/architecture.md, and no circle inside any folder."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.statements import inner

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "runtime": set(),
    "models": {"runtime"},
    "launch": {"runtime", "models"},
    "supervisor": {"runtime", "models", "launch"},
    "grammar": {"runtime", "models", "launch"},
    "tokenizer_manager": {"runtime", "models", "launch", "grammar"},
    "detokenizer": {"runtime", "models", "launch"},
    "model_runner": {"runtime", "models", "launch"},
    "scheduler": {"runtime", "models", "launch", "grammar"},
    "simulator": {"runtime", "models", "launch", "scheduler"},
    "offline": {
        *("runtime", "models", "launch", "grammar"),
        *("tokenizer_manager", "scheduler", "model_runner", "detokenizer"),
    },
    "cli": {"runtime", "models", "launch"},  # others inside functions, so that `engine --help` loads nothing
}
ALSO = {
    "scheduler/process.py": {"model_runner"},  # rank 0 lives in the scheduler's process
    # `engine fleet` loads them when it runs: the fleet is of the supervisor, its endpoint has the guards of the API.
    "cli/fleet/": {"supervisor", "tokenizer_manager"},
    "simulator/dispatch.py": {"tokenizer_manager"},  # the policies of `--dp`, which import the runtime only
    "cli/batch/": {"tokenizer_manager"},  # reads and writes lines as /v1/batches does; loaded when it runs
    "cli/trace/": {"scheduler"},  # reads the scheduler's records; the command line loads it when it is used
}
WITHOUT_TORCH = tuple(room for room in MAY_IMPORT if room != "model_runner")


@pytest.fixture(scope="module")
def import_graph() -> ModuleType:
    """`benchmarks/house.py`, which is a script and no package."""
    spec = importlib.util.spec_from_file_location("house", ROOT / "benchmarks" / "house.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def modules(room: str) -> Iterator[Path]:
    yield from (ROOT / room).rglob("*.py")


@functools.cache
def imports_at_load(path: Path, root: Path = ROOT) -> list[tuple[ast.Import | ast.ImportFrom, str]]:
    """The imports that run when the module is loaded, each with the room or package it names."""
    return list(_imports_at_load(path, root))


def _imports_at_load(path: Path, root: Path) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    package = path.relative_to(root).parent.parts
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
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
        pending.extend(inner(node))


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


def test_no_folder_has_a_circle(import_graph):
    """Members of a folder, inner folders among them, do not import each other in a circle, not even for types."""
    circles = {
        graph.folder: circles for graph in import_graph.folder_graphs(ROOT) if (circles := graph.circles())
    }
    assert circles == {}


def test_the_circle_check_sees_a_circle(import_graph, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.py").write_text("def f():\n    from .two import y\n")
    (tmp_path / "a" / "two.py").write_text("from .one import x\n")

    (graph,) = import_graph.folder_graphs(tmp_path)

    assert graph.circles() == [["one.py", "two.py"]]
    assert (graph.num_arrows, graph.depth()) == (2, 1)


def test_every_folder_says_what_it_owns():
    """`__init__.py` is one docstring, and nothing else."""
    wrong = []
    for room in MAY_IMPORT:
        for path in (ROOT / room).rglob("__init__.py"):
            body = ast.parse(path.read_text()).body
            if len(body) != 1 or ast.get_docstring(ast.Module(body, [])) is None:
                wrong.append(str(path.relative_to(ROOT)))
    assert wrong == []


def test_the_check_sees_what_it_forbids(tmp_path):
    (tmp_path / "detokenizer").mkdir()
    path = tmp_path / "detokenizer" / "wrong.py"
    path.write_text("from ..scheduler.req import Req\nimport torch\ndef f():\n    from ..cli import main\n")

    assert {target for _, target in imports_at_load(path, tmp_path)} == {"scheduler", "torch"}


MAX_FILES_OF_VALUES = 10


@pytest.mark.parametrize("name", ["messages", "step_plan"])
def test_values_that_every_process_reads_need_few_files(name):
    """What travels between processes can be read without the rest of the engine; `__init__.py` files do not count."""
    needed = files_needed(ROOT / "runtime" / f"{name}.py") - {ROOT / "runtime" / f"{name}.py"}

    assert len(needed) <= MAX_FILES_OF_VALUES, sorted(str(path.relative_to(ROOT)) for path in needed)


def files_needed(path: Path) -> set[Path]:
    """The file, and all files of ours that it imports when it is loaded, directly or through others."""
    needed, pending = {path}, [path]
    while pending:
        importer = pending.pop()
        for node, _ in imports_at_load(importer):
            if isinstance(node, ast.ImportFrom) and node.level:
                folder = importer.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                names = [folder / f"{alias.name}.py" for alias in node.names]
                new = {each for each in (folder.with_suffix(".py"), *names) if each.exists()} - needed
                needed |= new
                pending += new
    return needed
