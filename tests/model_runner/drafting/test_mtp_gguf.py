"""Layers that predict further tokens in GGUF files, as llama.cpp's converter writes them: `blk.N.nextn.*`."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
from msgspec import structs

from engine.cli.doctor.model import check_fit
from engine.launch.resolve.prepare import prepare
from engine.models.gguf.gguf_file import GGUFFile
from engine.models.gguf_config import read_gguf_spec
from engine.models.source import ModelSource
from engine.models.spec.model_spec import ModelSpec
from engine.models.weight_files.check_weights import check_gguf_weights
from engine.runtime.config.config_sources import from_arguments, merge
from engine.runtime.errors import ConfigError
from tests.cli.doctor.conftest import host
from tests.model_runner.structures.test_delta_nets import write_gguf as write_delta_nets
from tests.model_runner.weights.test_gguf_latent import write as write_latent
from tests.model_runner.weights.test_gguf_mixtures import write as write_mixture

from .mtp_models import MTPModel, make_mtp_model
from .test_mtp import check_logits, model_greedy

FORMS: dict[str, dict[str, Any]] = {
    "glm-4.5": {},
    "qwen3.5": {"linear_value_head_dim": 32},
    "qwen3.5-moe": {"linear_value_head_dim": 32},
    "qwen3-next": {"linear_value_head_dim": 32},
    "deepseek-v3": {},
}


def write(
    make_tiny_model: Any,
    path: Path,
    form: str,
    *,
    kind: str = "F32",
    nextn: bool = True,
    head_norm: bool = True,
) -> MTPModel:
    """A model and its file.

    `nextn`: the further layer has its tensors beside the block; `head_norm`: one of them is a norm before the head.
    """
    whole: list[Any] = []

    def kept(*args: Any, **options: Any) -> Any:
        """The model before its last layer becomes the further one."""
        tiny = make_tiny_model(*args, **options)
        folder = Path(shutil.copytree(tiny.folder, path.parent / "whole"))
        state, config = dict(tiny.reference.state_dict()), copy.deepcopy(tiny.reference.config)
        reference = SimpleNamespace(config=config, state_dict=lambda: state)
        whole.append(SimpleNamespace(folder=folder, reference=reference, spec=tiny.spec))
        return tiny

    model = make_mtp_model(kept, form, **FORMS[form])
    (tiny,) = whole
    last = model.model.config.num_hidden_layers
    norms = {"enorm": "enorm", "hnorm": "hnorm", "norm": "shared_head_norm"}
    tensors = {stored: model.norms[name] for name, stored in norms.items()} | {"eh_proj": model.projection}
    if not head_norm:
        del tensors["shared_head_norm"]
        model.norms["norm"] = model.model.model.norm.weight.detach()
    if model.feeds_normed:
        tensors = {name: x + 1.0 if name != "eh_proj" else x for name, x in tensors.items()}
        tiny.reference.config.num_hidden_layers = last
        write_delta_nets(path, tiny, kind, tensors if nextn else None)
        return model
    begin = gguf.GGUFWriter.write_header_to_file

    def with_nextn(writer: gguf.GGUFWriter, *args: Any) -> None:
        writer.add_nextn_predict_layers(1)
        for name, tensor in tensors.items() if nextn else ():
            writer.add_tensor(f"blk.{last}.nextn.{name}.weight", tensor.numpy())
        if nextn:  # of some files; it is not read
            writer.add_tensor(
                f"blk.{last}.nextn.shared_head_head.weight", model.model.lm_head.weight.detach().numpy()
            )
        begin(writer, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_nextn)
        if form == "glm-4.5":
            write_mixture(path, tiny, "glm4moe")
        else:
            write_latent(path, tiny, split=True)
    return model


def used(spec: ModelSpec) -> ModelSpec:
    """The model drafts with its layer."""
    assert spec.mtp is not None
    return structs.replace(
        spec, mtp=structs.replace(spec.mtp, is_used=True, feature_token_bytes=spec.hidden_size * 4)
    )


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_plain_torch(make_tiny_model, make_driver, tmp_path, form):
    """So they are those of the folder with the same weights, see `test_mtp.py`."""
    path = tmp_path / "model.gguf"
    model = write(make_tiny_model, path, form)
    spec = used(read_gguf_spec(GGUFFile(path)))
    check_gguf_weights(GGUFFile(path), spec)
    check_logits(model, make_driver(spec, path, kind="gguf", speculative="mtp"))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["qwen3.5", "glm-4.5", "deepseek-v3"])
def test_a_file_without_its_tensors_is_served_without_it(make_tiny_model, make_driver, tmp_path, form):
    """With `--no-nextn` of the converter, or of before it had them."""
    path = tmp_path / "model.gguf"
    model = write(make_tiny_model, path, form, nextn=False)
    spec = read_gguf_spec(GGUFFile(path))
    assert spec.mtp is None and spec.num_layers == model.model.config.num_hidden_layers
    check_gguf_weights(GGUFFile(path), spec)
    driver = make_driver(spec, path, kind="gguf")
    prompt = [5, 17, 40, 23]
    assert driver.generate([prompt], num=4) == [model_greedy(model, prompt, 4)]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("form", ["qwen3.5", "glm-4.5"])
def test_without_a_norm_before_the_head_it_has_the_models(make_tiny_model, make_driver, tmp_path, form):
    """As in llama.cpp (`shared_head_norm` is not required)."""
    path = tmp_path / "model.gguf"
    model = write(make_tiny_model, path, form, head_norm=False)
    spec = used(read_gguf_spec(GGUFFile(path)))
    check_gguf_weights(GGUFFile(path), spec)
    check_logits(model, make_driver(spec, path, kind="gguf", speculative="mtp"))


@pytest.mark.slow
def test_a_file_with_a_part_of_the_layer_is_refused(make_tiny_model, tmp_path):
    path = tmp_path / "model.gguf"
    write(make_tiny_model, path, "glm-4.5")
    path.write_bytes(path.read_bytes().replace(b"nextn.hnorm", b"nextn.other"))
    with pytest.raises(ConfigError, match=r"hnorm.* missing"):
        prepare(merge(from_arguments({"model": path, "speculative": "auto"})))


@pytest.mark.slow
def test_blocks_of_the_layer_stay_quantized(make_tiny_model, tmp_path):
    path = tmp_path / "model.gguf"
    write(make_tiny_model, path, "qwen3.5", kind="Q8_0")
    spec = read_gguf_spec(GGUFFile(path))
    assert spec.quantization is not None and spec.mtp is not None
    of_layer = {name for name in spec.quantization.types if name.startswith(f"{spec.mtp.layer}.")}
    assert {f"{spec.mtp.layer}.eh_proj", f"{spec.mtp.layer}.self_attn.o_proj"} <= of_layer


def test_auto_takes_it_and_doctor_says_so(make_tiny_model, tmp_path):
    path = tmp_path / "model.gguf"
    write(make_tiny_model, path, "glm-4.5")
    merged = merge(from_arguments({"model": path, "speculative": "auto"}))
    found, source = prepare(merged), ModelSource("gguf", str(path), "test")
    check = check_fit(read_gguf_spec(GGUFFile(path)), merged.config, host(), source)
    assert check.text.endswith("; drafts with its own layer that predicts further tokens")
    assert found.config.scheduler.speculative == "mtp"
    assert found.notes["speculative"] == "the files have a layer that predicts further tokens"
