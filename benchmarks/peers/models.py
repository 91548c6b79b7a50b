"""The default model in the forms that the peers read: a bf16 folder in Hugging Face layout and a BF16 GGUF file.

Both hold the weights of the default model's own GGUF file, rounded to bf16, so all servers compute with one model. The
folder is written through the engine's readers, which undo what GGUF does to a model: `GGUFStore` gives tensors the
names and the row order of Hugging Face, and the tokenizer is built with the split rule that the file only names.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.limits import ModelCosts, ServedModel
from benchmarks.peers.server import Models
from engine.models.gguf.gguf_file import GGUFFile
from engine.models.gguf.gguf_tokenizer import build_gguf_tokenizer
from engine.models.gguf_config import read_gguf_spec
from engine.models.load_spec import load_spec
from engine.models.source import resolve_source
from engine.models.spec.model_spec import ModelSpec
from engine.models.tokenizer.tokenizer import Tokenizer
from engine.models.weight_files.weight_memory import num_parameters
from engine.runtime.errors import ConfigError


class OtherModelError(Exception):
    """A side would serve another model than the rest; the message names it and the fix."""


def models_in(folder: Path, gguf: Path) -> Models:
    """The forms of a GGUF file that `cpu_vs_peers.py setup` makes in the peers' folder."""
    forms = folder / "models"
    return Models(gguf, forms / f"{gguf.stem}-bf16", forms / f"{gguf.stem}-bf16.gguf")


def served_model(models: Models, sides: Sequence[str]) -> ServedModel:
    """The model of the bf16 folder, which all sides must serve.

    Raises:
        OtherModelError: the form of one side has another size.
    """
    spec = _spec_of(models.bf16_folder)
    costs = ModelCosts.of(spec)
    others = [side for side in sides if ModelCosts.of(_spec_of(models.form_of(side))) != costs]
    if others:
        raise OtherModelError(
            f"{models.bf16_folder} holds another model than {' and '.join(others)} would serve, "
            f"{models.form_of(others[0])}: leave out these --sides, or give all forms of one model "
            "(--gguf, --bf16-folder, --bf16-gguf)"
        )
    if not any(models.form_of(side) == models.gguf for side in sides):
        return ServedModel(costs)
    in_file = models.gguf.stat().st_size * costs.all_parameters / num_parameters(spec)
    return ServedModel(costs, round(in_file / 1e6))


def _spec_of(model: Path) -> ModelSpec:
    return load_spec(resolve_source(str(model), need_weights=False))


def ensure_bf16_folder(gguf: Path, folder: Path) -> Path:
    """The folder, written atomically if it is missing.

    Raises:
        ConfigError: the model is of another family than Llama, or a tensor has no equivalent in Hugging Face's layout.
    """
    if (folder / "config.json").exists():
        return folder
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    file = GGUFFile(gguf)
    spec = read_gguf_spec(file)
    tokenizer = Tokenizer.from_gguf(file)
    (partial / "config.json").write_text(json.dumps(_config(spec), indent=2) + "\n")
    (partial / "generation_config.json").write_text(json.dumps(_special_ids(spec), indent=2) + "\n")
    build_gguf_tokenizer(file).save(str(partial / "tokenizer.json"))
    (partial / "tokenizer_config.json").write_text(
        json.dumps(_tokenizer_config(spec, tokenizer), indent=2) + "\n"
    )
    if template := tokenizer.chat_templates.get("default"):
        (partial / "chat_template.jinja").write_text(template)
    _write_weights(gguf, spec, partial / "model.safetensors")
    os.replace(partial, folder)
    return folder


def ensure_bf16_gguf(gguf: Path, out: Path, quantize: Path, timeout_s: float = 600.0) -> Path:
    """The same model as a BF16 GGUF file, written by llama.cpp's own tool if it is missing."""
    if out.exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    command = [str(quantize), "--allow-requantize", str(gguf), str(partial), "BF16"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    if done.returncode != 0:
        sys.exit(f"{quantize.name} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    os.replace(partial, out)
    return out


def _write_weights(gguf: Path, spec: ModelSpec, path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from engine.model_runner.weights.gguf import GGUFStore

    store = GGUFStore(gguf, spec)
    tensors = {}
    for name in sorted(store.names()):
        shape = store.shape(name, ())
        if shape is None:
            raise ConfigError(f"{gguf}: the tensor {name!r} has no name in Hugging Face's layout")
        tensors[name] = torch.empty(shape, dtype=torch.bfloat16)
        store.read(name, tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # readable like the other files; safetensors does not set that


def _config(spec: ModelSpec) -> dict[str, object]:
    if spec.model_type != "llama" or spec.rope_scaling.kind != "default":
        raise ConfigError(
            f"only plain Llama models are converted, not {spec.model_type} with {spec.rope_scaling.kind} rotary"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": spec.max_position_embeddings,
        "attention_bias": spec.biases.qkv,
        "mlp_bias": spec.biases.mlp,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **_special_ids(spec),
    }


def _special_ids(spec: ModelSpec) -> dict[str, object]:
    eos = spec.eos_token_ids
    ids = {"bos_token_id": spec.bos_token_id, "eos_token_id": eos[0] if len(eos) == 1 else list(eos)}
    return {name: value for name, value in ids.items() if value not in (None, [])}


def _tokenizer_config(spec: ModelSpec, tokenizer: Tokenizer) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": spec.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        **tokenizer.special_tokens,
    }
