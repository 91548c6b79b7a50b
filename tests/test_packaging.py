"""The wheel holds the whole product and nothing else, and what the product imports is what it declares.

The repository root is the package `engine` and its folders are listed by hand in `pyproject.toml`, so a checkout works
when a folder is missing in the list, and only a wheel shows it.
"""

from __future__ import annotations

import ast
import configparser
import functools
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import engine
from tests.statements import statements

ROOT = Path(__file__).parent.parent
NOT_PACKAGED = {"tests", "docs", "benchmarks", "deploy", "examples", "build", "dist", "__pycache__"}
# Imported where they are installed, and only there: triton comes with torch's CUDA builds, sgl_kernel with the extras.
OPTIONAL_IMPORTS = {
    "pypdf",
    "PIL",
    "redis",
    "cryptography",
    "triton",
    "sgl_kernel",
    "transformers",
    "jsonschema_rs",
    "opentelemetry",
}


def product_files() -> Iterator[Path]:
    """Every file of the product, relative to the root: those that stand there, and all in its folders."""
    yield Path("__init__.py")
    yield Path("__main__.py")
    yield Path("py.typed")
    for folder in sorted(ROOT.iterdir()):
        if not folder.is_dir() or folder.name.startswith(".") or folder.name.endswith(".egg-info"):
            continue
        if folder.name in NOT_PACKAGED:
            continue
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix not in {".md", ".pyc"}:
                yield path.relative_to(ROOT)


def product_modules() -> list[Path]:
    return [path for path in product_files() if path.suffix == ".py"]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel of a copy of the repository: nothing built earlier can slip in. Needs no network."""
    source = tmp_path_factory.mktemp("source") / "a folder of any name"
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    )
    target = tmp_path_factory.mktemp("wheel")

    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    build = subprocess.run(
        [*command, "-w", target, source], check=False, capture_output=True, text=True, timeout=100
    )

    assert build.returncode == 0, build.stdout + build.stderr
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> dict[str, bytes]:
    """The files of the wheel's dist-info folder by name."""
    names = [name for name in wheel.namelist() if name.split("/")[0].endswith(".dist-info")]
    return {name.split("/", 1)[1]: wheel.read(name) for name in names}


def test_every_folder_with_code_is_a_listed_package(project: dict[str, Any]) -> None:
    folders = {".".join(("engine", *path.parent.parts)) for path in product_modules()}

    listed = project["tool"]["setuptools"]["packages"]

    assert sorted(folders) == sorted(listed), "mend the list `packages` in pyproject.toml"


def test_wheel_holds_every_file_of_the_product_and_no_other(wheel: zipfile.ZipFile) -> None:
    expected = {f"engine/{path.as_posix()}" for path in product_files()}

    packed = {name for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")}

    assert packed - expected == set(), "not part of the product"
    assert expected - packed == set(), "missing: see `packages` and `package-data` in pyproject.toml"


def test_wheel_metadata(metadata: dict[str, bytes]) -> None:
    message = message_from_bytes(metadata["METADATA"])

    assert message["Name"] == "engine"
    assert message["Version"] == engine.__version__
    assert message["Requires-Python"] == ">=3.11"
    assert message["License-Expression"] == "Apache-2.0"
    assert "END OF TERMS AND CONDITIONS" in metadata["licenses/LICENSE"].decode()
    assert set(message.get_all("Provides-Extra", [])) == {
        "cuda",
        "cuda-torch211",
        "transformers",
        "ray",
        "otel",
        "pdf",
        "vision",
        "redis",
        "bench",
        "test",
        "dev",
    }


def test_command_line_runs_from_the_wheel(
    wheel: zipfile.ZipFile, metadata: dict[str, bytes], tmp_path: Path
) -> None:
    scripts = configparser.ConfigParser()
    scripts.read_string(metadata["entry_points.txt"].decode())
    assert dict(scripts["console_scripts"]) == {"engine": "engine.__main__:main"}
    wheel.extractall(tmp_path)
    program = "import engine, sys; from engine.cli.main import main; print(engine.__file__); sys.exit(main())"

    run = subprocess.run(
        [sys.executable, "-c", program, "--version"],
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert run.returncode == 0, run.stderr
    place, version = run.stdout.splitlines()
    assert Path(place) == tmp_path / "engine" / "__init__.py"
    assert engine.__version__ in version


@functools.cache
def imported_modules(path: Path) -> list[tuple[int, str]]:
    """Line and name of each absolute import of a file."""
    found: list[tuple[int, str]] = []
    for node in statements(ast.parse((ROOT / path).read_bytes(), filename=str(path))):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.append((node.lineno, node.module))
    return found


def test_product_imports_itself_relatively() -> None:
    own = {"engine"} | {path.parts[0] for path in product_modules() if len(path.parts) > 1}

    absolute = [
        f"{path}:{line}: {name}"
        for path in product_modules()
        for line, name in imported_modules(path)
        if name.split(".")[0] in own
    ]

    assert absolute == []


def test_product_imports_only_declared_dependencies(project: dict[str, Any]) -> None:
    declared = {canonicalize_name(Requirement(line).name) for line in project["project"]["dependencies"]}
    providers = importlib.metadata.packages_distributions()

    undeclared = {
        f"{path}:{line}: {name}"
        for path in product_modules()
        for line, name in imported_modules(path)
        if (top := name.split(".")[0]) not in sys.stdlib_module_names | OPTIONAL_IMPORTS
        and declared.isdisjoint(canonicalize_name(provider) for provider in providers.get(top, []))
    }

    assert undeclared == set()


def test_constraints_pin_every_requirement_within_its_range(project: dict[str, Any]) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    versions = {canonicalize_name(name): version for name, version in pins}
    extras = project["project"]["optional-dependencies"]
    required = [*project["project"]["dependencies"], *extras["test"], *extras["dev"]]

    for line in required:
        requirement = Requirement(line)
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not pinned"
        assert requirement.specifier.contains(version), f"{requirement} excludes the pinned {version}"


@pytest.mark.parametrize("torch_version", ["2.11.0", "2.14.1"])
def test_range_of_torch_admits_what_the_gpu_extras_need(project: dict[str, Any], torch_version: str) -> None:
    requirements = [Requirement(line) for line in project["project"]["dependencies"]]

    (torch,) = (requirement for requirement in requirements if requirement.name == "torch")

    assert torch.specifier.contains(torch_version)


@pytest.mark.parametrize("path", ["Makefile", ".ci/run"])
def test_imports_in_shell_commands_exist(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    imports = re.findall(r"from (engine[\w.]*) import (\w+)", text)
    assert imports
    for module, name in imports:
        assert hasattr(importlib.import_module(module), name), f"{path}: {module}.{name}"
