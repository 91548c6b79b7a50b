"""Steps of several adapters: each request gets what it gets alone, in every kind of step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.model_runner.kernels.cpu.library import reasons_against_library
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import ForwardMode, StepPlan
from tests.model_runner.conftest import SeeingExecutor, int32
from tests.model_runner.weights.test_loading import write_gguf

pytestmark = pytest.mark.skipif(bool(reasons_against_library()), reason="needs the CPU kernels")
NUM = 8
PROMPTS = [[int(t) for t in np.random.default_rng(n).integers(3, 96, 5 + 7 * n)] for n in range(NUM + 2)]
SLOTS = [*range(1, NUM + 1), 0, 3]


def logits_of_all(driver, order, *, chunk, num=4):
    """Logits of the sampled tokens, by request: prompts in chunks, then decodes, of these requests in this order."""
    seen = SeeingExecutor(driver)
    reqs = {n: driver.start(PROMPTS[n], adapter_slot=SLOTS[n]) for n in order}
    found: dict[int, list[torch.Tensor]] = {n: [] for n in order}
    while any(len(req.output) < num for req in reqs.values()):
        work = [
            (n, req, min(chunk, len(req.tokens) - req.computed))
            for n, req in reqs.items()
            if len(req.output) < num
        ]
        work.sort(key=lambda item: item[2] == 1)
        sampling = [n for n, req, count in work if req.computed + count == len(req.tokens)]
        driver.step([(req, count) for _, req, count in work])
        if sampling:
            for n, row in zip(sampling, seen.logits[-1], strict=True):
                found[n].append(row.clone())
    driver.runner.executor = seen.inner
    for req in reqs.values():
        driver.finish(req)
    return {n: torch.stack(rows) for n, rows in found.items()}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("chunk", [1 << 20, 9])
def test_a_mixed_batch_has_the_bits_of_each_alone(make_adapted, make_adapted_driver, chunk):
    adapted = make_adapted(NUM, "bfloat16")
    driver = make_adapted_driver(adapted, dtype="bfloat16", deterministic=True)
    together = logits_of_all(driver, range(len(PROMPTS)), chunk=chunk)
    shuffled = logits_of_all(driver, [3, 9, 8, 0, 7, 2, 5, 1, 6, 4], chunk=chunk)
    for n in range(len(PROMPTS)):
        alone = logits_of_all(driver, [n], chunk=1 << 20)[n]
        assert torch.equal(together[n], alone), n
        assert torch.equal(shuffled[n], alone), n
    base = make_adapted_driver(type(adapted)(adapted.tiny, [], []), dtype="bfloat16", deterministic=True)
    assert torch.equal(logits_of_all(base, [8], chunk=1 << 20)[8], together[8]), "a request of the base model"


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_recorded_steps_have_the_bits_of_eager_ones(make_adapted, make_adapted_driver, dtype):
    adapted = make_adapted(3, dtype)
    found = []
    for is_eager in (False, True):
        driver = make_adapted_driver(adapted, dtype=dtype)
        if is_eager:
            driver.run_eagerly()
            driver.runner.executor.forward = driver.runner.model.forward
        executor = driver.runner.executor
        reqs = [driver.start(PROMPTS[n], adapter_slot=slot) for n, slot in ((1, 2), (2, 0), (3, 1), (4, 2))]
        seen = SeeingExecutor(driver)
        driver.step([(req, len(req.tokens)) for req in reqs])
        for _ in range(3):
            driver.step([(req, 1) for req in reqs])
        for _ in range(2):  # other adapters in the same recording
            driver.step([(req, 1) for req in (reqs[2], reqs[0], reqs[3], reqs[1])])
        driver.step([(reqs[1], 1)])
        driver.step([(reqs[0], 1)])
        found.append(torch.cat(seen.logits))
        if dtype == "bfloat16" and not is_eager:
            assert executor.num_replayed == 4 and not executor.reason_against_adapters
            assert executor.eager.forward.with_adapters
    assert torch.equal(*found)


def test_prompts_of_any_length_as_a_program(make_adapted, make_adapted_driver):
    adapted = make_adapted(2, "bfloat16")
    found = []
    for is_eager in (False, True):
        driver = make_adapted_driver(adapted, dtype="bfloat16", max_model_len=256)
        if is_eager:
            driver.run_eagerly()
            driver.runner.executor.forward = driver.runner.model.forward
        seen = SeeingExecutor(driver)
        for length in (1, 3, 17, 70, 200):
            prompt = [int(t) for t in np.random.default_rng(length).integers(3, 96, length)]
            one, other = driver.start(prompt, adapter_slot=1), driver.start(prompt, adapter_slot=2)
            driver.step([(one, length), (other, length)])
        found.append(torch.cat(seen.logits))
    assert torch.equal(*found)


def test_a_multi_step_decode(make_adapted, make_adapted_driver):
    adapted = make_adapted(2, "bfloat16")
    outputs = []
    for num_rounds in (1, 4):
        driver = make_adapted_driver(adapted, dtype="bfloat16")
        reqs = [driver.start(PROMPTS[n], adapter_slot=n) for n in range(3)]
        driver.step([(req, len(req.tokens)) for req in reqs])
        if num_rounds == 1:
            for _ in range(4):
                driver.step([(req, 1) for req in reqs])
            outputs.append([req.output for req in reqs])
            continue
        plan = driver.plan([(req, 1) for req in reqs])
        locs = []
        for number in range(num_rounds):
            for req in reqs:
                while len(req.pages) * driver.capacity.page_size <= req.computed + number:
                    req.pages.append(driver.pages.pop())
                locs += driver.slots(req.pages, req.computed + number, req.computed + number + 1)
        burst = StepPlan(
            step_id=plan.step_id,
            mode=ForwardMode.DECODE,
            rows=plan.rows,
            num_computed_tokens=plan.num_computed_tokens,
            num_scheduled_tokens=plan.num_scheduled_tokens,
            out_cache_loc=int32(locs),
            samples=plan.samples,
            total_num_scheduled_tokens=plan.total_num_scheduled_tokens,
            num_rounds=num_rounds,
        )
        result = driver.runner.launch(burst).wait()
        tokens = np.frombuffer(result.next_token_ids, dtype=np.int32).reshape(3, num_rounds)
        outputs.append([[*req.output, *mine.tolist()] for req, mine in zip(reqs, tokens, strict=True)])
    assert outputs[0] == outputs[1]


def test_prompt_logprobs_are_of_the_adapters_head(make_adapted, make_adapted_driver, unpack):
    adapted = make_adapted(1, target_modules=["lm_head", "embed_tokens", "q_proj"])
    driver = make_adapted_driver(adapted, {"lm_head", "embed_tokens", "q_proj"})
    prompt = PROMPTS[2]
    req = driver.start(prompt, SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=0), adapter_slot=1)
    other = driver.start(PROMPTS[1])
    result = driver.step([(req, len(prompt)), (other, len(PROMPTS[1]))])
    values, _, _ = unpack(result.prompt_logprobs[0])
    wanted = adapted.adapters[0].logits(prompt).log_softmax(-1)
    expected = wanted[torch.arange(len(prompt) - 1), prompt[1:]]
    torch.testing.assert_close(torch.tensor(np.array(values)), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("quantization", ["Q4_1", "Q8_0"])
def test_on_quantized_weights(make_adapted, make_adapted_driver, make_tiny_model, tmp_path, quantization):
    """In float32 the file's weights are dequantized, which peft does here, too; in bfloat16 they keep their bits."""
    import gguf

    adapted = make_adapted(2)
    path = tmp_path / "base.gguf"
    write_gguf(path, adapted.tiny, quantization)
    kind = gguf.GGMLQuantizationType[quantization]
    for adapter in adapted.adapters:
        for name, parameter in adapter.reference.named_parameters():
            if parameter.ndim == 2 and "lora_" not in name:
                rounded = gguf.dequantize(gguf.quantize(parameter.detach().numpy(), kind), kind)
                parameter.data.copy_(torch.from_numpy(rounded))
    for dtype, tolerance in (("float32", 5e-5), ("bfloat16", 0.1)):
        driver = make_adapted_driver(adapted, path=path, kind="gguf", dtype=dtype)
        seen = SeeingExecutor(driver)
        reqs = [driver.start(PROMPTS[2], adapter_slot=slot) for slot in (1, 2)]
        driver.step([(req, len(req.tokens)) for req in reqs])
        driver.step([(req, 1) for req in reqs])
        for n, adapter in enumerate(adapted.adapters):
            wanted = adapter.logits(reqs[n].tokens)[-3:-1]
            found = torch.stack([logits[n] for logits in seen.logits])
            assert (found - wanted).abs().max() < tolerance * wanted.abs().max()


def test_a_gguf_adapter_is_equal_to_the_folder_it_was_made_of(
    make_adapted, make_adapted_driver, tmp_path: Path
):
    import gguf
    from safetensors.torch import load_file

    from engine.models.adapters.read_adapter import read_adapter

    targets = {"q_proj", "k_proj", "v_proj", "down_proj", "embed_tokens", "lm_head"}
    adapted = make_adapted(1, target_modules=sorted(targets))
    tiny = adapted.tiny
    config = tiny.reference.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    writer = gguf.GGUFWriter(tmp_path / "adapter.gguf", "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    for name, tensor in load_file(adapted.adapters[0].folder / "adapter_model.safetensors").items():
        if "base_layer" in name:
            continue
        module, _, part = name.removeprefix("base_model.model.").rpartition(".lora_")
        is_a = part.split(".")[0].endswith("A")
        for projection, heads in (("q_proj", 4), ("k_proj", 2)):
            if projection in module and not is_a:
                tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        if "embedding_A" in part:
            tensor = tensor.T
        stored = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        writer.add_tensor(f"{stored}.lora_{'a' if is_a else 'b'}", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    spec = read_adapter(tmp_path / "adapter.gguf", "gguf", tiny.spec)
    both = type(adapted)(tiny, adapted.adapters, [adapted.specs[0], spec])
    driver = make_adapted_driver(both, targets)
    seen = SeeingExecutor(driver)
    reqs = [driver.start(PROMPTS[3], adapter_slot=slot) for slot in (1, 2)]
    driver.step([(req, len(req.tokens)) for req in reqs])
    driver.step([(req, 1) for req in reqs])
    for logits in seen.logits:
        torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=1e-5)
    wanted = adapted.adapters[0].logits(reqs[1].tokens)[-3]
    torch.testing.assert_close(seen.logits[0][1], wanted, atol=5e-5, rtol=5e-5)


def test_a_server_without_adapters_pays_nothing(make_adapted, make_driver):
    adapted = make_adapted(0)
    driver = make_driver(adapted.tiny.spec, adapted.tiny.folder)
    model = driver.runner.model
    assert driver.runner.adapters is None
    assert all(layer.attention.qkv.delta is None and layer.mlp.down.delta is None for layer in model.layers)
