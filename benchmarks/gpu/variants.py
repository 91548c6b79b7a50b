"""Variants of the Triton kernels that servers launch on a GPU, compiled ahead of time.

A *variant* is a kernel with the types, alignments and constants of a launch: what Triton compiles. Those in
`variants.json` were seen on the mirror of a GPU (`python -m tests.mirror.harvest`). `triton_report.py` prints their
registers and spills. `bundle.py` compiles them for its GPU, and `path.py` puts them into Triton's cache there.

Triton's own key of a compiled kernel contains the bytes of its shared library, which is another one for each version of
Python. `Built.key` is the rest: the versions of Triton and of the assembler, the source of the kernel and of what it
calls, types, constants and options. A compiled kernel with another key is not used.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

# With it kernels would be plain Python functions. A process that only imports this module keeps it.
if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

LIST: Final = Path(__file__).with_suffix(".json")
HOPPER: Final = 90  # as `ARCHITECTURE` in `bundle.py`
INDEX: Final = "index.json"
_NUMBERS: Final = {"i32": 16, "u32": 16, "i64": 1 << 40, "u64": 1 << 63, "i1": True, "u1": True, "fp32": 0.5}
"""An argument of each type; integers are multiples of 16."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel as servers launch it.

    Attributes:
        module, function: of the kernel.
        signature: type of each argument that is not a constant: "*bf16", "i64", "fp32". With ":16" a pointer is
            aligned to 16 bytes, or an integer is a multiple of 16.
        constants: value of each `tl.constexpr` argument, and of arguments that are 1 or None.
        options: num_warps and the like.
        architectures: compute capabilities without the dot on which it is launched.
        servers: names of those that launched it.
    """

    module: str
    function: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    architectures: tuple[int, ...]
    servers: tuple[str, ...] = field(default=(), compare=False)

    @property
    def identity(self) -> tuple[Any, ...]:
        """The facts by which Triton compiles it, without those of its servers."""
        return self.module, self.function, self.signature, self.constants, self.options

    @property
    def name(self) -> str:
        """Such as "norm.rms_norm bf16 BLOCK=1024 num_warps=4"."""
        module, function = self.module.rpartition(".")[2], self.function.strip("_").removesuffix("_kernel")
        types = dict.fromkeys(
            kind.partition(":")[0][1:] for kind in self.signature.values() if kind[0] == "*"
        )
        values = [f"{name}={value}" for name, value in (*self.constants.items(), *self.options.items())]
        return " ".join((f"{module}.{function}", "/".join(types), *values))


def read_variants(path: Path = LIST) -> list[Variant]:
    """Variants of a file that `write_variants` wrote."""
    rows = json.loads(path.read_text())
    return [Variant(**{**row, **{k: tuple(row[k]) for k in ("architectures", "servers")}}) for row in rows]


def write_variants(variants: Iterable[Variant], path: Path = LIST) -> None:
    """One line each, so that a diff shows which are new."""
    lines = sorted(json.dumps(asdict(variant)) for variant in variants)
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


@dataclass(frozen=True)
class Pointer:
    """An argument in the place of a tensor."""

    dtype: Any
    address: int

    def data_ptr(self) -> int:
        return self.address


class Built(NamedTuple):
    """The inputs of Triton's compiler for a variant on one architecture; `key`: see the module."""

    source: Any
    target: Any
    options: Any
    key: str
    cache_hash: str

    def compile(self) -> Any:
        """Triton's `CompiledKernel`, from its cache if it is there."""
        import triton

        return triton.compile(self.source, target=self.target, options=self.options.__dict__)


def build(variant: Variant, arch: int) -> Built:
    """The steps of `JITFunction.run` up to the compilation, with arguments that have the variant's types.

    Raises:
        ValueError: Triton compiles another variant for such arguments.
    """
    import triton
    from triton import knobs
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.cache import get_cache_key
    from triton.runtime.jit import create_function_from_signature

    kernel = getattr(importlib.import_module(variant.module), variant.function)
    if not set(kernel.arg_names) >= set(variant.signature) | set(variant.constants):
        raise ValueError(f"{variant.function} has other arguments: {', '.join(kernel.arg_names)}")
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    bound, specialization, keywords = create_function_from_signature(
        kernel.signature, kernel.params, backend
    )(
        **arguments_of(variant),
        **variant.options,
        debug=kernel.debug or knobs.runtime.debug,
        instrumentation_mode=knobs.compilation.instrumentation_mode,
    )
    for name, (kind, attribute) in zip(kernel.arg_names, specialization, strict=True):
        wanted = variant.signature.get(name, "constexpr")
        found = kind if kind == "constexpr" or not attribute else f"{kind}:16"
        if found != wanted:
            raise ValueError(f"{variant.function}: {name} is {found} for Triton, not {wanted}")
    options, signature, constants, attributes = kernel._pack_args(
        backend, keywords, bound, specialization, keywords
    )
    source = ASTSource(kernel, signature, constants, attributes)
    whole = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
    key = "-".join((triton.__version__, source.hash(), backend.hash(), options.hash()))
    return Built(source, target, options, _digest(key), _digest(whole))


def arguments_of(variant: Variant) -> dict[str, Any]:
    """Arguments that have the variant's types, alignments and constants."""
    return {name: _argument(kind) for name, kind in variant.signature.items()} | dict(variant.constants)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _argument(kind: str) -> Any:
    kind, _, divisor = kind.partition(":")
    if kind[0] == "*":
        return Pointer(_dtypes()[kind[1:]], 0 if divisor else 1)
    number = _NUMBERS[kind]
    return number + 1 if kind[1:] in ("32", "64") and not divisor else number


@functools.cache
def _dtypes() -> dict[str, Any]:
    import torch
    from triton.runtime.jit import mangle_type

    dtypes = [each for each in vars(torch).values() if isinstance(each, torch.dtype)]
    found = {}
    for dtype in dtypes:
        try:
            found[mangle_type(Pointer(dtype, 0))[1:]] = dtype
        except (KeyError, TypeError, ValueError, AttributeError):
            continue  # Triton has no such type
    return found


# ---------------------------------------------------------------- in the bundle


def pack(variants: Iterable[Variant], arch: int, archive: Path) -> int:
    """Compile for one architecture into a tar.xz: an index, and two files of Triton's cache for each; their number."""
    import triton

    index, files = [], {}
    for variant in variants:
        if arch not in variant.architectures:
            continue
        built = build(variant, arch)
        compiled = built.compile()
        metadata = next(path for name, path in compiled.metadata_group.items() if name.endswith(".json"))
        files[f"{built.key}.cubin"] = compiled.asm["cubin"]
        files[f"{built.key}.json"] = Path(metadata).read_bytes()
        index.append({"key": built.key, "variant": asdict(variant)})
    contents = {"triton": triton.__version__, "arch": arch, "kernels": index}
    write_archive(archive, {INDEX: json.dumps(contents).encode(), **files})
    return len(index)


def write_archive(archive: Path, files: Mapping[str, bytes]) -> None:
    """Files as tar.xz: kernels are much alike, and take less than a tenth of their size."""
    with tarfile.open(archive, "w:xz") as tar:
        for name, data in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


def read_archive(archive: Path) -> dict[str, bytes]:
    """The contents of each file."""
    with tarfile.open(archive) as tar:
        found = {entry.name: tar.extractfile(entry) for entry in tar}
        return {name: file.read() for name, file in found.items() if file is not None}


def seat(archive: Path) -> str:
    """Put the compiled kernels of a bundle into Triton's cache; returns what was done, in one line."""
    import triton
    from triton.runtime.cache import get_cache_manager

    packed = read_archive(archive)
    contents = json.loads(packed[INDEX])
    if contents["triton"] != triton.__version__:
        return f"compiled kernels are not used: they are of Triton {contents['triton']}, not {triton.__version__}"
    used, other = 0, []
    for entry in contents["kernels"]:
        variant = Variant(**entry["variant"])
        try:
            built = build(variant, contents["arch"])
        except (AttributeError, ImportError, ValueError) as error:  # the checkout has other kernels
            other.append(f"{variant.function}: {error}")
            continue
        if built.key != entry["key"]:
            other.append(f"{variant.function}: another key")
            continue
        manager = get_cache_manager(built.cache_hash)
        name = built.source.name[:150]  # as in `triton.compile`
        metadata = json.loads(packed[f"{built.key}.json"]) | {"hash": built.cache_hash}
        files = {
            f"{name}.cubin": packed[f"{built.key}.cubin"],
            f"{name}.json": json.dumps(metadata),
        }
        manager.put_group(f"{name}.json", {file: manager.put(data, file) for file, data in files.items()})
        used += 1
    line = f"{used} of {used + len(other)} compiled kernels for sm_{contents['arch']} are in Triton's cache"
    return "; not used: ".join((line, *other[:1])) + (f" and {len(other) - 1} more" if len(other) > 1 else "")


def main() -> None:
    """`pack ARCHIVE` or `seat ARCHIVE`."""
    command, archive = sys.argv[1], Path(sys.argv[2])
    if command == "pack":
        print(f"{pack(read_variants(), HOPPER, archive)} compiled kernels for sm_{HOPPER}", flush=True)
    else:
        print(seat(archive), flush=True)


if __name__ == "__main__":
    main()
