"""Prints how the engine serves each model of a folder of config.json files: natively, by transformers, or not, and why.

    python benchmarks/model_configs.py FOLDER [FOLDER ...] [--refused]

A file is a model's config.json under any name that ends in .json; `X_hf_quant_config.json` beside `X_config.json` is
that model's description of its quantization. No weights are needed: what only they show is not seen here. Two
collections of real files: aic-core/src/aiconfigurator_core/model_configs of ai-dynamo/aiconfigurator (its two of
Step-3.7 are shortened by hand, and refused), and pkg/hfutil/modelconfig/testdata of sgl-project/ome.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from engine.launch.resolve.model_resolution import find_model, read_model, runs_in_transformers
from engine.runtime.config.engine_config import ModelConfig
from engine.runtime.errors import ConfigError

NATIVE, FALLBACK, REFUSED = "native", "transformers", "refused"
_QUANTIZATION: Final = "hf_quant_config.json"


def verdict(path: Path) -> tuple[str, str]:
    """How a config.json is served, and the reason if it is not."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(path, folder / "config.json")
        beside = path.with_name(path.name.removesuffix("config.json") + _QUANTIZATION)
        if beside != path and beside.exists():
            shutil.copy(beside, folder / _QUANTIZATION)
        config = ModelConfig(model=name, load_format="dummy")
        try:
            model = read_model(config, find_model(config, fetch=False))
        except ConfigError as error:
            return REFUSED, re.sub(rf"{re.escape(name)}/?(?:config\.json)?(?:: )?", "", str(error))
        return (FALLBACK if runs_in_transformers(config, model.spec) else NATIVE), ""


def files_of(folders: list[Path]) -> Iterator[Path]:
    """The files that describe models."""
    for folder in folders:
        for path in sorted(folder.rglob("*.json")):
            if not path.name.endswith(_QUANTIZATION):
                yield path


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--refused", action="store_true", help="print only those that are refused")
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    for path in files_of(args.folders):
        kind, reason = verdict(path)
        counts[kind] += 1
        if kind == REFUSED or not args.refused:
            print(f"{path.stem.removesuffix('_config'):<60} {kind:<12} {reason}")
    print(", ".join(f"{counts[kind]} {kind}" for kind in (NATIVE, FALLBACK, REFUSED)), f"of {counts.total()}")
    return 0 if counts else 1


if __name__ == "__main__":
    sys.exit(main())
