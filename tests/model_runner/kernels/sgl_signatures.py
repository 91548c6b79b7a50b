"""What sgl_kernel's wheels promise: the signatures that our calls are held to, on machines that cannot load them.

Kept in `sgl_signatures/<version>.json`, read from a wheel by

    pip download --no-deps --only-binary :all: --platform manylinux2014_x86_64 sglang-kernel==0.4.10
    python tests/model_runner/kernels/sgl_signatures.py sglang_kernel-0.4.10-cp310-abi3-manylinux2014_x86_64.whl
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).with_suffix("")
VERSIONS: Final = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))

# Of interest to us: the rest of the wheel is for other models and devices.
OPERATORS: Final = (
    "apply_token_bitmask_inplace_cuda",
    "fp8_scaled_mm",
    "fused_add_rmsnorm",
    "fwd",
    "gelu_tanh_and_mul",
    "get_scheduler_metadata",
    "moe_align_block_size",
    "moe_sum",
    "rmsnorm",
    "sgl_per_token_quant_fp8",
    "silu_and_mul",
    "topk_softmax",
)
MODULES: Final = ("elementwise", "flash_attn", "gemm", "grammar", "moe")

_NAMES: Final = "|".join(OPERATORS).encode()
_ARGUMENTS: Final = rb"[^\x00()]*(?:\([^\x00()]*\)[^\x00()]*)*"  # with one level of brackets: Tensor(a!)
_SCHEMA: Final = re.compile(rb"\b(" + _NAMES + rb")\((" + _ARGUMENTS + rb")\) -> ([^\x00]+)\x00")


def operator_schemas(version: str) -> dict[str, str]:
    """Of each operator, in torch's own language: "rmsnorm(Tensor! output, ...) -> ()"."""
    found: dict[str, str] = _read(version)["operators"]
    return found


def function(version: str, name: str) -> inspect.Signature:
    """Of a Python function: "flash_attn.flash_attn_with_kvcache". To hold a call to it: `.bind(...)`."""
    import torch  # the name of a default

    namespace: dict[str, Any] = {"torch": torch}
    exec(f"def it({_read(version)['functions'][name]}): ...", namespace)  # noqa: S102  (our own file)
    return inspect.signature(namespace["it"])


def _read(version: str) -> dict[str, Any]:
    contents: dict[str, Any] = json.loads((FOLDER / f"{version}.json").read_text())
    return contents


def from_wheel(wheel: Path) -> dict[str, Any]:
    """Read both kinds out of a wheel: schemas stand in its libraries as text, signatures in its Python files."""
    functions: dict[str, str] = {}
    operators: dict[str, str] = {}
    with zipfile.ZipFile(wheel) as archive:
        for module in MODULES:
            tree = ast.parse(archive.read(f"sgl_kernel/{module}.py"))
            for node in tree.body:
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                    functions[f"{module}.{node.name}"] = _arguments(node.args)
        for library in ("sgl_kernel/sm90/common_ops.abi3.so", "sgl_kernel/flash_ops.abi3.so"):
            operators |= _schemas(archive, library)
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        pins = re.findall(r"^Requires-Dist: (.+)$", archive.read(metadata).decode(), re.MULTILINE)
    return {"requires": pins, "operators": dict(sorted(operators.items())), "functions": functions}


def _arguments(arguments: ast.arguments) -> str:
    """As source text, without annotations, whose names would have to exist."""
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    return ast.unparse(arguments)


def _schemas(archive: zipfile.ZipFile, library: str) -> dict[str, str]:
    found: dict[str, str] = {}
    before = b""
    with archive.open(library) as file:
        while piece := file.read(1 << 24):  # one of them is a gigabyte
            for match in _SCHEMA.finditer(before + piece):
                name, arguments, results = (part.decode() for part in match.groups())
                found[name] = f"{name}({' '.join(arguments.split())}) -> {results.strip()}"
            before = piece[-4096:]  # longer than any schema
    return found


if __name__ == "__main__":
    for wheel in map(Path, sys.argv[1:]):
        version = wheel.name.split("-")[1]
        (FOLDER / f"{version}.json").write_text(json.dumps(from_wheel(wheel), indent=1) + "\n")
