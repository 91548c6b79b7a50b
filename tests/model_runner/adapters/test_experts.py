"""Adapters of experts against peft: stacks as peft writes them, and the single modules of older versions."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model_runner.adapters.adapter_store import SlotSizes
from engine.model_runner.kernels.cpu.library import reasons_against_library
from engine.model_runner.kernels.native_experts import NativeExperts
from engine.models.adapters.base_modules import BaseModules, target_of
from engine.models.adapters.read_adapter import read_adapter
from engine.runtime.errors import ConfigError
from tests.model_runner.conftest import SeeingExecutor
from tests.model_runner.structures.families import FAMILIES

from .peft_adapters import make_adapter
from .test_peft import assert_equal, tiny_logits

STACKS = ["experts.gate_up_proj", "experts.down_proj"]
TARGETS = {"q_proj", "experts"}
MODELS = (
    "qwen3_moe",
    "gpt_oss",
    "mixtral",
    "deepseek_v2 experts",
    "llama4 as Scout",
    "nemotron_h experts of latents",
)
PROMPT = [5, 60, 33, 7, 71, 12, 44, 8, 90]
SINGLE = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2")}


def adapter_of(tiny: Any, folder: Any, parameters: list[str] = STACKS, **options: Any) -> Any:
    """An adapter of q and of stacks of experts."""
    return make_adapter(
        tiny.reference, folder, target_modules=["q_proj"], target_parameters=parameters, r=3, **options
    )


def check(tiny: Any, driver: Any, adapters: list[Any], specs: list[Any]) -> None:
    """Requests with each adapter, and without one, in the same steps."""
    seen = SeeingExecutor(driver)
    for n, spec in enumerate(specs, start=1):
        driver.runner.adapters.store.read(n, spec)
    slots = [0, *range(1, len(specs) + 1)]
    reqs = [driver.start(PROMPT[: 9 - slot], adapter_slot=slot) for slot in slots]
    driver.step([(req, 5) for req in reqs], adapter_loads=[(n, n) for n in slots[1:]])
    driver.step([(req, len(req.tokens) - 5) for req in reqs])
    for _ in range(3):
        driver.step([(req, 1) for req in reqs])
    for slot, req in enumerate(reqs):
        wanted = adapters[slot - 1].logits(req.tokens) if slot else tiny_logits(tiny, req.tokens)
        found = torch.stack([logits[slot] for logits in seen.logits[-4:]])
        assert_equal(found, wanted[req.prompt_len - 1 : -1])
    base = tiny_logits(tiny, reqs[-1].tokens)
    assert (adapters[-1].logits(reqs[-1].tokens) - base).abs().max() > 0.01


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("parameters", [STACKS, STACKS[:1], STACKS[1:]], ids=["both", "gate_up", "down"])
@pytest.mark.parametrize("name", MODELS)
def test_stacks_of_experts_are_those_of_peft(make_tiny_model, make_driver, tmp_path, name, parameters):
    row = FAMILIES[name]
    if name.startswith("nemotron"):
        parameters = [one.replace("gate_up", "up") for one in parameters]
    tiny = make_tiny_model(row.made_as, **row.options)
    adapters = [adapter_of(tiny, tmp_path / f"a{n}", parameters, seed=n) for n in range(2)]
    specs = [read_adapter(one.folder, f"a{n}", tiny.spec) for n, one in enumerate(adapters)]
    driver = make_driver(tiny.spec, tiny.folder, adapter_slots=SlotSizes(2, 4, TARGETS))

    check(tiny, driver, adapters, specs)


def test_a_slot_keeps_nothing_of_the_adapter_before(make_tiny_model, make_driver, tmp_path):
    """The second adapter changes fewer experts and products than the first one in its slot."""
    tiny = make_tiny_model("qwen3_moe", **FAMILIES["qwen3_moe"].options)
    adapters = [adapter_of(tiny, tmp_path / f"a{n}", [STACKS[1]] if n else STACKS, seed=n) for n in range(2)]
    specs = [read_adapter(one.folder, f"a{n}", tiny.spec) for n, one in enumerate(adapters)]
    driver = make_driver(tiny.spec, tiny.folder, adapter_slots=SlotSizes(1, 4, TARGETS))
    for n, spec in enumerate(specs, start=1):
        driver.runner.adapters.store.read(n, spec)
    for n, adapter in enumerate(adapters, start=1):
        seen = SeeingExecutor(driver)
        reqs = [driver.start(PROMPT, adapter_slot=1), driver.start(PROMPT)]
        driver.step([(req, len(PROMPT)) for req in reqs], adapter_loads=[(1, n)])
        assert_equal(seen.logits[-1][:1], adapter.logits(reqs[0].tokens)[len(PROMPT) - 1 : -1])
        assert_equal(seen.logits[-1][1:], tiny_logits(tiny, reqs[1].tokens)[len(PROMPT) - 1 : -1])


def single(folder: Any, name: str, in_turn: bool = False) -> None:
    """Rewrite an adapter of stacks with a module of each expert, as peft had them when they were linear layers."""
    block, gate, up, down = SINGLE.get(name, ("mlp", "gate_proj", "up_proj", "down_proj"))
    path = folder / "adapter_model.safetensors"
    found = {}
    for stored, tensor in load_file(path).items():
        if ".experts." not in stored:
            found[stored] = tensor
            continue
        head, _, tail = stored.partition(".mlp.experts.")
        is_a, nested = "lora_A" in stored, tail.startswith("base_layer")
        num = 6 if name == "mixtral" else 8
        for expert in range(num):
            own = (
                tensor.unflatten(0, (num, -1))[expert]
                if is_a
                else tensor.unflatten(1, (-1, num))[:, :, expert]
            )
            for part, rows in ((gate, 0), (up, 1)) if nested else ((down, None),):
                mine = own if is_a or rows is None else own.chunk(2)[rows]
                key = f"{head}.{block}.experts.{expert}.{part}.lora_{'A' if is_a else 'B'}.weight"
                found[key] = mine.contiguous().clone()
    save_file(found, path, {"format": "pt"})
    config = json.loads((folder / "adapter_config.json").read_text())
    config |= {"target_parameters": None, "target_modules": ["q_proj", gate, up, down]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_modules_of_single_experts_are_the_same(make_tiny_model, make_driver, tmp_path, name):
    tiny = make_tiny_model(name, **FAMILIES[name].options)
    adapter = adapter_of(tiny, tmp_path / "a")
    single(adapter.folder, name)
    spec = read_adapter(adapter.folder, "one", tiny.spec)
    driver = make_driver(tiny.spec, tiny.folder, adapter_slots=SlotSizes(1, 4, TARGETS))

    check(tiny, driver, [adapter], [spec])


def test_the_kernels_for_the_cpu_change_experts(make_tiny_model, make_driver, tmp_path):
    if reasons := reasons_against_library():
        pytest.skip("; ".join(reasons))
    row = FAMILIES["qwen3_moe"]
    options = row.options | {"hidden_size": 64, "moe_intermediate_size": 32}
    tiny = make_tiny_model("qwen3_moe", dtype="bfloat16", **options)
    adapter = adapter_of(tiny, tmp_path / "a", size=1.0)
    spec = read_adapter(adapter.folder, "one", tiny.spec)
    driver = make_driver(tiny.spec, tiny.folder, dtype="bfloat16", adapter_slots=SlotSizes(1, 4, TARGETS))
    driver.runner.adapters.store.read(1, spec)
    seen = SeeingExecutor(driver)
    mixed, base = driver.start(PROMPT, adapter_slot=1), driver.start(PROMPT)
    driver.step([(mixed, 9), (base, 9)], adapter_loads=[(1, 1)])
    for _ in range(3):
        driver.step([(mixed, 1), (base, 1)])

    assert isinstance(driver.runner.model.layers[0].mlp.experts, NativeExperts)
    for n, req in enumerate((mixed, base)):
        reference = adapter.logits if req is mixed else lambda tokens: tiny_logits(tiny, tokens)
        rounded = reference(req.tokens)[8:-1]
        tiny.reference.float(), adapter.reference.float()
        exact = reference(req.tokens)[8:-1]
        tiny.reference.bfloat16(), adapter.reference.bfloat16()
        found = torch.stack([logits[n].float() for logits in seen.logits])
        assert (found - exact).abs().mean() < 1.5 * (rounded - exact).abs().mean() + 1e-3


def test_memory_of_experts_is_reserved_only_if_they_are_named(make_tiny_model, make_driver):
    tiny = make_tiny_model("qwen3_moe", **FAMILIES["qwen3_moe"].options | {"moe_intermediate_size": 32})
    without, with_experts = (
        make_driver(tiny.spec, tiny.folder, adapter_slots=SlotSizes(2, 16, targets))
        for targets in (None, {"experts"})
    )
    assert without.runner.model.layers[0].mlp.changes is None
    widths = 2 * 8 * (2 * (48 + 32) + (32 + 48))  # layers and experts; gate and up, down
    assert with_experts.runner.adapters.layers.num_bytes == 3 * 16 * widths * 4
    modules = BaseModules(tiny.spec).by_name.values()
    assert widths == sum(one.inputs + one.outputs for one in modules if target_of(one.name) == "experts")


@pytest.mark.parametrize(
    ("named", "words"),
    [
        (["mlp.experts.gate_up_proj_bias"], "only up_proj and down_proj of experts are supported"),
        (["mlp.gate.weight"], "only up_proj and down_proj of experts are supported"),
        (None, "has not the adapters of target_parameters, None"),
        (["mlp.experts.down_proj"], "has not the adapters of target_parameters"),
    ],
)
def test_parameters_that_do_not_fit_the_tensors_are_refused(make_tiny_model, tmp_path, named, words):
    tiny = make_tiny_model("qwen3_moe", **FAMILIES["qwen3_moe"].options)
    adapter = adapter_of(tiny, tmp_path / "a")
    path = adapter.folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_parameters": named}))
    with pytest.raises(ConfigError, match=words):
        read_adapter(adapter.folder, "one", tiny.spec)
