"""`AdapterStore`: reads beside the steps; a broken adapter fails alone."""

from __future__ import annotations

import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model_runner.adapters import adapter_layers as adapter_weights
from engine.model_runner.adapters import adapter_store
from engine.model_runner.adapters.adapter_layers import AdapterLayers
from engine.model_runner.adapters.adapter_store import AdapterRead, AdapterStore
from engine.models.adapters.read_adapter import read_adapter
from engine.runtime.errors import ConfigError

FILE = "adapter_model.safetensors"


@pytest.fixture
def store(make_adapted, make_adapted_driver):
    driver = make_adapted_driver(make_adapted(1))
    yield driver.runner.adapters.store
    driver.runner.adapters.store.close()


def test_reads_on_a_thread(make_adapted, store):
    adapted = make_adapted(2)
    for number, spec in enumerate(adapted.specs):
        store.read_later(number, spec)
    assert [store.wait(), store.wait()] == [AdapterRead(0), AdapterRead(1)]
    assert store.done() == []
    assert store.get(1).name == "a1"
    store.drop(1)
    with pytest.raises(KeyError):
        store.get(1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(make_adapted, store, value):
    adapted = make_adapted(2)
    path = adapted.specs[1].file
    tensors = load_file(path)
    name = sorted(tensors)[3]
    tensors[name][0, 0] = value
    save_file(tensors, path)
    spec = read_adapter(path.parent, "bad", adapted.tiny.spec)
    store.read_later(7, spec)
    store.read_later(8, adapted.specs[0])
    failed, good = store.wait(), store.wait()
    assert failed.store_id == 7 and name in failed.error and "not finite" in failed.error
    assert good == AdapterRead(8)


def test_a_file_that_has_changed(make_adapted, store):
    adapted = make_adapted(1)
    spec = adapted.specs[0]
    save_file({name: tensor * 2 for name, tensor in load_file(spec.file).items()}, spec.file)
    with pytest.raises(ConfigError, match="has changed since adapter 'a0' was loaded"):
        store.read(3, spec)


def test_a_file_that_is_gone(make_adapted, store):
    spec = make_adapted(1).specs[0]
    spec.file.unlink()
    store.read_later(3, spec)
    assert "cannot be read" in store.wait().error


def test_a_rank_or_module_without_memory(make_adapted, store):
    adapted = make_adapted(4)
    with pytest.raises(ConfigError, match=r"has rank 5, the maximum is 3.*--max-lora-rank"):
        store.read(3, adapted.specs[3])
    layers = AdapterLayers(
        adapted.tiny.spec,
        max_slots=1,
        max_rank=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
        targets=["q_proj"],
    )
    with pytest.raises(ConfigError, match=r"no memory; start it with down_proj in --lora-target-modules"):
        AdapterStore(layers).read(3, adapted.specs[0])


def test_an_adapter_that_is_dropped_while_it_is_read(make_adapted, store, monkeypatch):
    spec = make_adapted(1).specs[0]
    may_read, reads = threading.Event(), adapter_weights.read_modules

    def read_modules(spec):
        assert may_read.wait(60)
        return reads(spec)

    monkeypatch.setattr(adapter_store, "read_modules", read_modules)
    store.read_later(3, spec)
    store.drop(3)
    may_read.set()
    store.read_later(4, spec)
    assert store.wait() == AdapterRead(4)
    with pytest.raises(KeyError):
        store.get(3)
