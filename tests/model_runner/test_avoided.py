"""`--avoid-kernels`: each component can be turned off alone, and all of them down to plain torch."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from engine.model_runner.attention.selection import BACKENDS, select_backend
from engine.model_runner.kernels import probe, sgl
from engine.model_runner.kernels.avoided import AVOIDED, AvoidedKernels
from engine.model_runner.kernels.probe import Finding, KernelProbe
from engine.model_runner.kernels.quantized import QuantTarget, choose_provider, reasons_against_blocks
from engine.model_runner.load import avoidable_components, reason_against_graphs
from engine.model_runner.memory.io_buffers import InputBuffers
from engine.model_runner.op_selection import PROVIDERS, Target, select_ops
from engine.model_runner.recording.graphs.graph_sizes import GraphSizes, sizes_to_record
from engine.model_runner.sampling.backend_selection import PROVIDERS as SAMPLERS
from engine.model_runner.sampling.backend_selection import select_sampler_backend
from engine.model_runner.sampling.token_counts import TokenCounts
from engine.model_runner.sampling.torch_backend import TorchSamplerBackend
from engine.models.spec.experts_spec import ExpertsSpec, Routing
from engine.models.spec.model_spec import with_quantization
from engine.runtime.config.config_sources import from_yaml_file, merge
from engine.runtime.config.device_config import KernelConfig
from engine.runtime.errors import ConfigError
from tests.model_runner.attention.paged_batches import spec_of
from tests.model_runner.conftest import Driver, TinyModel
from tests.model_runner.kernels.test_quantized import HOPPER, fp8_weight, int4_weight

GPU, CPU = torch.device("cuda"), torch.device("cpu")
BF16 = torch.bfloat16
EVERYTHING = KernelProbe(Finding("0.4.10"), Finding("3.8.0"), (9, 0), (64, 128), (128,))
SPEC = spec_of(4, 2, 64)
COMPONENTS = [name for names in avoidable_components().values() for name in names]


@pytest.fixture(autouse=True)
def everything_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper GPU with both packages, without the GPU. One patch suffices for all callers of the probe."""
    names = ("rmsnorm", "fused_add_rmsnorm", "silu_and_mul", "gelu_tanh_and_mul")
    fake = SimpleNamespace(**{name: SimpleNamespace(default=name) for name in names})
    monkeypatch.setattr(sgl, "operators", lambda: fake)
    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", SimpleNamespace())
    monkeypatch.setattr(probe, "probe_kernels", lambda: EVERYTHING)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (9, 0))


def ops_without(*names: str, device: torch.device = GPU) -> dict[str, tuple[str, str]]:
    """Provider of each op, and the reasons against those before it."""
    ops = select_ops(Target(SPEC, device, BF16, avoid=AvoidedKernels(names)))
    return {choice.op: (choice.provider, choice.why) for choice in ops.choices}


def attention_without(*names: str, device: torch.device = GPU) -> str:
    return select_backend(SPEC, device, BF16, BF16, None, 16, AvoidedKernels(names)).name


def sampler_without(monkeypatch: pytest.MonkeyPatch, *names: str, device: torch.device = GPU) -> str:
    chosen: list[str] = []

    def make(name: str) -> Any:
        return lambda *_args: chosen.append(name)

    providers = [replace(each, make=make(each.name)) for each in SAMPLERS]
    counts = TokenCounts(9, InputBuffers(CPU))
    select_sampler_backend(counts, device, avoid=AvoidedKernels(names), providers=providers)
    return chosen[0]


# ------------------------------------------------------------ names


def test_the_names_are_those_of_the_tables():
    groups = avoidable_components()
    assert {*groups["packages"]} == {"onednn", "native", "triton", "sgl-kernel", "torch._scaled_mm"}
    for op, providers in PROVIDERS.items():
        for provider in providers:
            assert (f"{provider.name}:{op}" in COMPONENTS) == (provider.name != "torch")
    assert {"triton:sample", "native:sample", "fa3", "triton:attention", "native:attention"} < set(COMPONENTS)
    assert {"sgl-kernel:linear_fp8", "triton:linear_int4", "native:linear_blocks"} < set(COMPONENTS)
    assert {"prompt_graphs", "decode_graphs", "sampler_graphs", "pdl"} < set(COMPONENTS)
    assert not [name for name in COMPONENTS if name.partition(":")[0] in ("torch", "torch_native")]
    assert len(COMPONENTS) == len(set(COMPONENTS))


def test_an_unknown_name_is_refused_with_the_names():
    with pytest.raises(ConfigError) as caught:
        AvoidedKernels(["triton", "rms_norm", "torch"]).check(avoidable_components())
    text = str(caught.value)
    assert text.startswith("avoid_kernels has 'rms_norm', 'torch', but the names are: packages: ")
    assert "; of sgl-kernel: sgl-kernel:rms_norm, " in text
    assert "; of the runner: prompt_graphs, decode_graphs, sampler_graphs, pdl." in text
    assert "--no-overlap" in text and "--no-record-steps" in text
    AvoidedKernels(COMPONENTS).check(avoidable_components())


@pytest.mark.parametrize("given", ["", "triton,,fa3", "triton, ", ","])
def test_empty_names_are_refused(given):
    with pytest.raises(ConfigError, match="must be names with commas between them: --avoid-kernels fa3"):
        KernelConfig(avoid_kernels=(given,))


def test_names_are_separated_by_commas_or_repeated():
    config = KernelConfig(avoid_kernels=("fa3, triton:route", "pdl"))
    assert config.avoided == ("fa3", "triton:route", "pdl")
    assert KernelConfig().avoided == ()


def test_a_file_has_a_list_or_text(tmp_path):
    path = tmp_path / "engine.yaml"
    for text in ("[fa3, 'triton:route']", "fa3,triton:route"):
        path.write_text(f"avoid_kernels: {text}\n")
        assert merge(from_yaml_file(path)).config.kernels.avoided == ("fa3", "triton:route")


def test_a_name_that_nothing_uses_is_logged_once(make_driver, make_tiny_llama, caplog):
    tiny = make_tiny_llama()
    with caplog.at_level("INFO"):
        make_driver(tiny.spec, tiny.folder, avoid_kernels=("fa3,native:rms_norm,pdl,prompt_graphs",))
    lines = [line for line in caplog.messages if line.startswith("avoid_kernels")]
    assert lines == ["avoid_kernels: not in use here anyway: fa3, pdl, prompt_graphs"]


def test_an_unknown_name_is_an_error_of_the_start(make_driver, make_tiny_llama):
    tiny = make_tiny_llama()
    with pytest.raises(ConfigError, match="avoid_kernels has 'tritom', but the names are"):
        make_driver(tiny.spec, tiny.folder, avoid_kernels=("tritom",))


# ------------------------------------------------------------ each component alone


@pytest.mark.parametrize("device", [GPU, CPU], ids=str)
@pytest.mark.parametrize("op", PROVIDERS)
def test_each_provider_of_an_op_can_be_avoided_alone(op, device):
    """And no other op changes."""
    before = ops_without(device=device)
    if before[op][0] == "torch":
        return
    name = f"{before[op][0]}:{op}"
    after = ops_without(name, device=device)
    assert after[op][0] not in (before[op][0], "")
    assert f"{before[op][0]}: {AVOIDED}" in after[op][1]
    assert {**after, op: ()} == {**before, op: ()}


def test_a_whole_package_can_be_avoided():
    assert {provider for provider, _ in ops_without("sgl-kernel").values()} == {"triton", "torch"}
    assert {provider for provider, _ in ops_without("triton").values()} == {"sgl-kernel", "torch"}
    assert ops_without("sgl-kernel")["rms_norm"] == ("triton", f"sgl-kernel: {AVOIDED}")


def test_attention_backends_can_be_avoided():
    assert attention_without() == "fa3"
    assert attention_without("fa3") == attention_without("sgl-kernel") == "triton"
    assert (
        attention_without("fa3", "triton:attention")
        == attention_without("sgl-kernel", "triton")
        == "torch_native"
    )
    assert attention_without("triton:rms_norm", "sgl-kernel:rms_norm") == "fa3"
    assert attention_without("native:attention", device=CPU) == "torch_native"


def test_an_avoided_package_is_not_even_loaded(monkeypatch, caplog):
    """It may be what crashes. It was asked for, so nothing of it is a warning."""

    def crash(*_args: Any) -> Any:
        raise AssertionError("an avoided backend was asked")

    for backend in BACKENDS[:-1]:
        monkeypatch.setattr(backend, "reasons_against", staticmethod(crash))
    with caplog.at_level("WARNING"):
        assert attention_without("sgl-kernel", "triton", "native") == "torch_native"
        assert attention_without("sgl-kernel", "triton", "native", device=CPU) == "torch_native"
    assert caplog.messages == []


def test_an_avoided_backend_that_is_requested_is_a_contradiction():
    with pytest.raises(ConfigError, match=r"fa3: avoided \(--avoid-kernels\); omit"):
        select_backend(SPEC, GPU, BF16, BF16, ("fa3", "fa3"), 16, AvoidedKernels(["sgl-kernel"]))


def test_the_sampler_can_be_avoided(monkeypatch, caplog):
    assert sampler_without(monkeypatch) == "triton"
    with caplog.at_level("DEBUG"):
        assert sampler_without(monkeypatch, "triton:sample") == "torch"
    assert (
        f"op=sample provider=torch passed over: triton: {AVOIDED}; native: runs on CPUs only" in caplog.text
    )
    assert sampler_without(monkeypatch, "native", device=CPU) == "torch"


def test_dependent_launches_can_be_avoided(caplog):
    def norm(*names: str, capability: tuple[int, int] = (9, 0)) -> Any:
        kernels = EVERYTHING._replace(capability=capability)
        return select_ops(Target(SPEC, GPU, BF16, kernels, AvoidedKernels(names))).rms_norm

    with caplog.at_level("DEBUG"):
        assert norm().__self__._pdl and not norm(capability=(8, 0)).__self__._pdl
        assert "pdl=0" not in caplog.text
        assert not norm("pdl").__self__._pdl
    assert f"op=rms_norm pdl=0: {AVOIDED}" in caplog.messages


def test_recordings_can_be_avoided(caplog):
    def sizes(*names: str) -> GraphSizes:
        more: Any = {"spec": SPEC, "step_tokens": lambda: 100, "avoid": AvoidedKernels(names)}
        return sizes_to_record(KernelConfig(record_steps=True), 4, GPU, **more)

    assert sizes() == ([1, 2, 3, 4], [16, 32, 64, 100])
    with caplog.at_level("INFO"):
        assert sizes("prompt_graphs") == ([1, 2, 3, 4], [])
        assert sizes("decode_graphs") == ([], [16, 32, 64, 100])
    assert caplog.messages == [f"prompt_graphs=0: {AVOIDED}", f"decode_graphs=0: {AVOIDED}"]


@pytest.mark.parametrize(
    ("names", "gated", "dtype", "capability", "reason"),
    [
        ((), True, torch.float32, (8, 0), ""),
        (("triton:pack_experts",), True, BF16, (9, 0), ""),
        (("triton:pack_experts",), True, BF16, (10, 0), ""),
        (("triton:pack_experts",), True, BF16, (8, 9), AVOIDED),
        (("triton",), True, BF16, (12, 0), AVOIDED),
        (("triton",), True, torch.float32, (9, 0), AVOIDED),
        ((), False, torch.float32, (9, 0), "the model's experts have no gates"),
        ((), False, BF16, (9, 0), ""),
    ],
)
def test_steps_in_which_torch_s_product_of_experts_waits_are_not_recorded(
    names, gated, dtype, capability, reason, caplog, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: capability)
    routing = Routing(num_active=2)
    experts = ExpertsSpec(num_experts=8, intermediate_size=64, routing=routing, gated=gated)
    spec = msgspec.structs.replace(SPEC, experts=experts)
    ops = select_ops(Target(spec, GPU, dtype, avoid=AvoidedKernels(names)))
    found = reason_against_graphs(ops, spec, dtype, GPU)
    assert ("pack_experts (passed over: triton: " in found and reason in found) if reason else found == ""
    assert reason_against_graphs(ops, SPEC, dtype, GPU) == reason_against_graphs(ops, spec, dtype, CPU) == ""
    of_adapters = reason_against_graphs(ops, spec, dtype, GPU, changes_experts=True)
    assert ("pack_experts" in of_adapters) == (dtype != BF16 or capability[0] not in (9, 10))
    more: Any = {"spec": spec, "step_tokens": lambda: 100, "reason_against": found}
    for asked in (True, False):
        sizes = sizes_to_record(KernelConfig(record_steps=asked), 4, GPU, **more)
        assert bool(sizes.text) == (asked and not reason)
    lines = [line for line in caplog.messages if "prompt_graphs=0" in line]
    assert lines == ([f"decode_graphs=0 prompt_graphs=0: {found}"] if reason else [])


@pytest.mark.parametrize(
    ("names", "fp8", "int4"),
    [
        ((), "sgl-kernel", "triton"),
        (("sgl-kernel",), "torch._scaled_mm", "triton"),
        (("sgl-kernel:linear_fp8",), "torch._scaled_mm", "triton"),
        (("sgl-kernel", "torch._scaled_mm"), "triton", "triton"),
        (("triton:linear_fp8",), None, "triton"),  # it also quantizes the activations of the others
        (("triton:linear_int4",), "sgl-kernel", None),
        (("triton",), None, None),
    ],
)
def test_products_of_quantized_weights_can_be_avoided(names, fp8, int4):
    target = replace(HOPPER, avoid=AvoidedKernels(names))
    for weight, expected in ((fp8_weight(), fp8), (int4_weight(), int4)):
        provider, why = choose_provider(target, weight)
        assert (None if provider is None else provider.name) == expected
        assert (AVOIDED in why) or not names or expected in ("sgl-kernel", "triton")


@pytest.mark.parametrize("name", ["native", "native:linear_blocks"])
def test_products_of_blocks_can_be_avoided(name):
    target = QuantTarget(device=CPU, dtype=BF16, capability=(0, 0), triton_reason="-", sgl_reason="-")
    assert reasons_against_blocks(replace(target, avoid=AvoidedKernels([name]))) == [f"is {AVOIDED}"]


def test_a_loaded_model_avoids_them(make_driver, make_tiny_llama, caplog):
    """Weights in blocks have no other product; transformers' code takes its ops from the same tables."""
    tiny: TinyModel = make_tiny_llama()
    with pytest.raises(
        ConfigError, match=r"quantization is int8, but the product is avoided \(--avoid-kernels"
    ):
        make_driver(
            with_quantization(tiny.spec, "int8"),
            tiny.folder,
            dtype="bfloat16",
            avoid_kernels=("native:linear_blocks",),
        )
    with caplog.at_level("INFO"):
        make_driver(
            tiny.spec, tiny.folder, model_impl="transformers", avoid_kernels=("native", "onednn:pack_linear")
        )
    (line,) = [line for line in caplog.messages if line.startswith("ops: ")]
    assert "native" not in line and "by torch" in line


# ------------------------------------------------------------ the ladder down


def test_without_any_package_torch_computes_all(monkeypatch):
    """The last rung on a GPU, with `--no-record-steps --no-overlap`."""
    names = ("sgl-kernel", "triton")
    assert {provider for provider, _ in ops_without(*names).values()} == {"torch"}
    assert attention_without(*names) == BACKENDS[-1].name == "torch_native"
    assert sampler_without(monkeypatch, *names) == "torch"
    more: Any = {"spec": SPEC, "step_tokens": lambda: 100}
    assert sizes_to_record(KernelConfig(record_steps=False), 4, GPU, **more) == ((), ())


@pytest.mark.parametrize(
    "names", ["native,onednn", "native:attention", "native:rms_norm,native:sample", "onednn"]
)
def test_a_cpu_without_its_kernels_gives_the_same_tokens(make_driver, make_tiny_llama, names):
    tiny: TinyModel = make_tiny_llama()
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1]]
    driver: Driver = make_driver(tiny.spec, tiny.folder, avoid_kernels=(names,))
    assert driver.generate(prompts, num=6) == [tiny.greedy(prompt, 6) for prompt in prompts]
    if names == "native,onednn":
        assert driver.runner.attention_backend == "torch_native"
        assert isinstance(driver.runner.sampler._backend, TorchSamplerBackend)
