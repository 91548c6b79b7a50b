from __future__ import annotations

from engine.runtime.installation import __version__
from engine.tokenizer_manager.telemetry import metrics as build_info
from engine.tokenizer_manager.telemetry.metrics import read_build_info


def test_it_takes_the_facts_of_the_schedulers_process_and_leaves_others(monkeypatch):
    monkeypatch.setattr(build_info, "source_commit", lambda: "0123abc")
    facts = {
        "torch": "2.9+cpu",
        "device": "cpu",
        "backend": "native",
        "instruction_set": "amx",
        "load_s": "3",
    }
    labels = read_build_info(facts).labels()

    assert labels.pop("version") == __version__
    assert labels.pop("commit") == "0123abc"
    assert labels == {"torch": "2.9+cpu", "device": "cpu", "backend": "native", "instruction_set": "amx"}


def test_without_facts_there_is_still_a_version():
    assert read_build_info({}).labels()["torch"] == ""
