from __future__ import annotations

import torch

from engine.model_runner.assembly import build_facts
from engine.model_runner.kernels.cpu.compiler import ISAS


def test_it_says_what_computes(driver):
    facts = build_facts(driver.runner)

    assert facts["torch"] == str(torch.__version__)
    assert type(facts["torch"]) is str  # torch's own is a subclass, which messages cannot carry
    assert (facts["device"], facts["backend"]) == ("cpu", driver.runner.attention_backend)
    if facts["backend"] == "native":
        assert facts["instruction_set"] in ISAS
    else:
        assert facts["instruction_set"] == torch.backends.cpu.get_cpu_capability().lower()


def test_without_the_engines_kernels_it_names_those_of_torch(driver, monkeypatch):
    monkeypatch.setattr(driver.runner, "attention_backend", "torch_native")

    assert build_facts(driver.runner)["instruction_set"] == torch.backends.cpu.get_cpu_capability().lower()
