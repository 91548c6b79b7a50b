"""Nothing in the product runs what a file or a request contains: no pickle, no eval, no YAML that makes objects.

Read from the syntax trees, so that a new use is a failing test and not a line that somebody overlooks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import engine

ROOT = Path(engine.__file__).parent
NOT_THE_PRODUCT = {"tests", "build", "dist"}
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "torch.load",
    "numpy.load",
    "np.load",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.full_load",
    "yaml.Loader",
    "yaml.FullLoader",
    "yaml.UnsafeLoader",
    "os.system",
    "os.popen",
    "pandas.read_pickle",
}
ALLOWED: dict[str, set[str]] = {
    "benchmarks/gpu/first_difference.py": {"torch.load"},  # of calls that triage.py has saved
}
"""File -> what it may use, with the reason beside it."""


DOT = r"\s*\.\s*"
WORDS = re.compile(
    rf"\b(?:{'|'.join(MODULES)}|allow_pickle|shell|trust_remote_code)\b"
    rf"|(?<![.\w])(?:{'|'.join(BUILTINS)})\s*\("
    rf"|\b(?:{'|'.join(CALLS).replace('.', DOT)})\b"
)
"""What a file must have to be worth parsing."""


def sources() -> Iterator[Path]:
    """The product's files."""
    for first in sorted(ROOT.iterdir()):
        if first.name not in NOT_THE_PRODUCT and not first.name.startswith("."):
            yield from [first] if first.suffix == ".py" else sorted(first.rglob("*.py"))


def uses(tree: ast.AST) -> Iterator[str]:
    """Everything in a file that could run what it is given."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name.partition(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in MODULES:
                yield module
            case ast.Call(func=ast.Name(id=name)) if name in BUILTINS:
                yield name
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if f"{owner}.{name}" in CALLS:
                yield f"{owner}.{name}"
            case ast.keyword(
                arg="shell" | "allow_pickle" | "trust_remote_code", value=ast.Constant(value=True)
            ):
                yield f"{node.arg}=True"


def test_no_file_runs_what_it_is_given():
    found = {}
    for path in sources():
        text, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
        if WORDS.search(text) and (names := set(uses(ast.parse(text))) - ALLOWED.get(name, set())):
            found[name] = sorted(names)
    assert found == {}


def test_the_product_is_looked_at():
    names = {path.relative_to(ROOT).parts[0] for path in sources()}
    assert {"runtime", "scheduler", "model_runner", "tokenizer_manager", "cli"} <= names


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", "pickle"),
        ("import torch.x, dill.y", "dill.y"),
        ("from marshal import loads", "marshal"),
        ("eval('1')", "eval"),
        ("x = yaml.load(text, Loader=yaml.Loader)", "yaml.load"),
        ("torch.load(path)", "torch.load"),
        ("subprocess.run(text, shell=True)", "shell=True"),
        ("f = AutoModel(name, trust_remote_code=True)", "trust_remote_code=True"),
    ],
)
def test_a_use_is_found(source, found):
    assert WORDS.search(source)
    assert found in set(uses(ast.parse(source)))
