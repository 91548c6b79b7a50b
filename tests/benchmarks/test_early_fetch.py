"""`early_fetch`: both kinds of steps give the same bits, and are measured."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from engine.model_runner.kernels.cpu.compiler import NoLibraryError
from engine.model_runner.kernels.cpu.library import load_library

from .conftest import run_benchmark as run


@pytest.fixture
def early_fetch(import_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    module = import_benchmark("early_fetch")
    try:
        module.make_weights(load_library(), 1)
    except (NoLibraryError, module.ComparisonError) as error:
        pytest.skip(str(error))
    return module


SMALL = ("--layers", 3, "--rounds", 2, "--tokens", 130)


@pytest.mark.parametrize("kv", ["bfloat16", "int8"])
def test_both_kinds_are_measured(
    early_fetch: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kv: str
) -> None:
    run(early_fetch, monkeypatch, *SMALL, "--kv", kv, "--requests", 5, 65)
    _, few, many = capsys.readouterr().out.splitlines()
    for line, requests in ((few, 5), (many, 65)):
        assert int(line.split()[0]) == requests and all(float(number) > 0 for number in line.split()[1:4])


def test_steps_that_disagree_are_not_reported(
    early_fetch: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make = early_fetch._step

    def broken(*args: object) -> object:
        step = make(*args)
        return step._replace(result=torch.full_like(step.result, float(args[-1].most_bytes)))  # type: ignore[attr-defined]

    monkeypatch.setattr(early_fetch, "_step", broken)
    with pytest.raises(SystemExit, match="not give the same bits"):
        run(early_fetch, monkeypatch, *SMALL, "--requests", 20)
    assert len(capsys.readouterr().out.splitlines()) == 1  # the head
