"""The compile report of every Triton kernel; it needs no GPU.

    python benchmarks/triton_report.py [--arch 80,90,100] [--only NAME] [--json FILE]

How to add a kernel: `model_runner/kernels/triton/compile_report.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

# With it kernels would be plain Python functions. A process that only imports this script keeps it.
if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

from engine.model_runner.kernels.triton.compile_report import (
    ARCHITECTURES,
    all_variants,
    check_arch,
    compile_variant,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if something is over a limit or does not compile, or there is nothing to compile."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arch", type=_architectures, default=ARCHITECTURES, help="such as 90 or 80,90,100")
    parser.add_argument(
        "--only", action="append", default=[], help="variants with this prefix of the name; may be repeated"
    )
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    options = parser.parse_args(arguments)
    variants, rows, failed = all_variants(), [], 0
    for name in options.only:
        if not any(variant.name.startswith(name) for variant in variants):
            failed += 1
            print(f"no variant's name begins with {name!r}", file=sys.stderr)
    for variant in variants:
        if options.only and not variant.name.startswith(tuple(options.only)):
            continue
        for arch in options.arch:
            if arch < variant.min_arch:
                continue
            try:
                row = compile_variant(variant, arch)
            except Exception as err:  # a compiler may raise anything: continue with the other kernels
                failed += 1
                print(f"sm_{arch:<4} {variant.name:<48} does not compile: {err}")
                continue
            rows.append(row)
            failed += bool(row.complaints)
            print(
                f"sm_{arch:<4} {variant.name:<48} registers={row.registers:<4} stack_bytes={row.stack_bytes:<5} "
                f"shared_bytes={row.shared_bytes:<7} {'; '.join(row.complaints)}".rstrip()
            )
    if not rows and not failed:
        failed += 1
        print("no variant exists for these architectures", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return int(failed > 0)


def _architectures(text: str) -> tuple[int, ...]:
    try:
        found = tuple(map(int, text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 80,90,100") from error
    for arch in found:
        try:
            check_arch(arch)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return found


if __name__ == "__main__":
    sys.exit(main())
