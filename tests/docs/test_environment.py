"""`docs/environment.md` lists the environment variables that the product reads or sets, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from .conftest import DOCS

ROOT = DOCS.parent
NOT_PRODUCT = {"tests", "docs", "benchmarks", "build", "dist"}
NAME = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
ENVIRONMENT = re.compile("environ|getenv|variable|envvar")
# Words in capitals in modules that use the environment: values, placeholders of options, what Ray calls resources.
OTHER_WORDS = {
    "AMD64",
    "AMX",
    "COMMIT",
    "CPU",
    "DONE",
    "DRAM",
    "FILE",
    "GPU",
    "HEAD",
    "INT",
    "NIXL_INIT_AGENT",
    "NUMBER",
    "P2PHANDSHAKE",
    "PACK",
    "PCI_BUS_ID",
    "PROC",
    "STRICT_PACK",
    "TEXT",
    "UCX",
    "VRAM",
    "WRITE",
}
LIBRARIES = "## Read by libraries and tools"
TESTS = "## Tests"


def modules(*folders: Path) -> Iterator[ast.Module]:
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if ENVIRONMENT.search(text):  # parsing the others would take seconds
                yield ast.parse(text, filename=str(path))


def product_folders() -> list[Path]:
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return [path for path in folders if path.name not in NOT_PRODUCT and (path / "__init__.py").exists()]


def uses_environment(node: ast.AST) -> bool:
    return (
        (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"))
        or (isinstance(node, ast.Name) and node.id in ("environ", "getenv", "variable"))
        or (isinstance(node, ast.keyword) and node.arg == "envvar")
    )


def names_in(module: ast.Module) -> set[str]:
    """Strings that look like variables, of a module that uses the environment; placeholders of options are none."""
    nodes = list(ast.walk(module))
    if not any(map(uses_environment, nodes)):
        return set()
    placeholders = {
        id(node.value) for node in nodes if isinstance(node, ast.keyword) and node.arg == "metavar"
    }
    strings = (
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in placeholders
    )
    return {text for text in strings if len(text) > 1 and NAME.fullmatch(text)} - OTHER_WORDS


def documented(text: str) -> list[str]:
    """The variables that have a heading."""
    return re.findall(r"^### `(\w+)`$", text, re.MULTILINE)


def sections() -> tuple[str, str, str]:
    """The text about the product, about libraries, and about tests."""
    text = (DOCS / "environment.md").read_text(encoding="utf-8")
    product, _, rest = text.partition(LIBRARIES)
    libraries, _, tests = rest.partition(TESTS)
    return product, libraries, tests


def test_every_variable_of_the_product_is_documented():
    used = set().union(*map(names_in, modules(*product_folders())))

    names = documented(sections()[0])

    assert len(names) == len(set(names))
    assert used - set(names) == set(), "used by the code, missing in docs/environment.md"
    assert set(names) - used == set(), "in docs/environment.md, used by no code"


def test_the_search_finds_each_way_to_name_a_variable():
    assert names_in(ast.parse('import os\nos.environ.get("A_B")\n')) == {"A_B"}
    assert names_in(ast.parse('import os\nenv = os.environ | {"C_D": "1"}\n')) == {"C_D"}
    assert names_in(ast.parse('from os import getenv\nX = "E_F"\ngetenv(X)\n')) == {"E_F"}
    assert names_in(ast.parse('option(envvar="G_H")\n')) == {"G_H"}
    assert names_in(ast.parse('WORDS = ("NOT_READ",)\n')) == set()


def test_variables_of_the_tests_are_documented():
    own = {
        name for module in modules(ROOT / "tests") for name in names_in(module) if name.startswith("ENGINE_")
    }
    of_product = set(documented(sections()[0]))

    assert set(documented(sections()[2])) == own - of_product


def test_a_variable_of_a_library_is_not_used_by_the_product():
    """Else it belongs to the first part."""
    used = set().union(*map(names_in, modules(*product_folders())))
    names = documented(sections()[1])

    assert names
    assert used.isdisjoint(names)


def test_lines_fit_120_columns():
    lines = (DOCS / "environment.md").read_bytes().splitlines()

    assert [line.decode() for line in lines if len(line) > 120] == []
