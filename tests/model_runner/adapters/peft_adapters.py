"""Adapters made and computed by peft, the reference of these tests."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PHI3_LINEAR = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter in a folder, and the model with it."""

    folder: Path
    reference: Any

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[len, vocab] float32."""
        logits: torch.Tensor = self.reference(torch.tensor([tokens])).logits[0].float()
        return logits


def make_adapter(
    model: Any, folder: Path, *, seed: int = 0, size: float = 0.3, **options: Any
) -> PeftAdapter:
    """Put a random adapter on a copy of a model of transformers, and save it; `options`: of peft's `LoraConfig`."""
    from peft import LoraConfig, get_peft_model

    options = {"r": 4, "lora_alpha": 8, "target_modules": ALL_LINEAR, "task_type": "CAUSAL_LM", **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights and saved embeddings
        reference = get_peft_model(copy.deepcopy(model), LoraConfig(**options)).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                if "lora_" in name:
                    numbers = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(numbers * size / max(1, parameter.shape[-1]) ** 0.5)
        reference.save_pretrained(str(folder))
    return PeftAdapter(folder, reference)
