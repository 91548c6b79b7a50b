"""Runs whole texts through a real `ModelRunner` of a tiny random encoder, and keeps their hidden states."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import structs

from engine.model_runner.input_batch import InputBatch
from engine.model_runner.recording.executor import RecordedBytes, StepOutput
from engine.models.hf.hf_config import read_hf_spec
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.feasibility import pages_for
from engine.runtime.pooling import PoolingParams
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import ForwardMode, NewReq, StepPlan, StepResult

WHOLE = PoolingParams(all_tokens=True)

SETTINGS: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class TinyEncoder:
    """A random encoder of transformers, saved to a folder, and the facts our reader finds there, without pooling."""

    reference: Any
    folder: Path
    spec: ModelSpec

    @torch.inference_mode()
    def states(self, tokens: Sequence[int], second_start: int = 0) -> torch.Tensor:
        """[n, hidden] float32, of the text alone."""
        more: dict[str, Any] = {}
        if second_start:
            more["token_type_ids"] = torch.tensor([[int(n >= second_start) for n in range(len(tokens))]])
        base = getattr(self.reference, self.reference.base_model_prefix, self.reference)
        result = base(
            torch.tensor([tokens]), attention_mask=torch.ones((1, len(tokens)), dtype=torch.long), **more
        )
        states: torch.Tensor = result.last_hidden_state[0].float()
        return states


def make_encoder(
    folder: Path,
    model_type: str,
    *,
    head: str = "Model",
    dtype: str = "float32",
    seed: int = 0,
    **options: Any,
) -> TinyEncoder:
    """A tiny encoder; `head`: the ending of a class of transformers."""
    import transformers

    settings = dict(SETTINGS)
    if model_type == "distilbert":
        theirs = {
            "hidden_size": "dim",
            "intermediate_size": "hidden_dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
        }
        settings = {theirs.get(name, name): value for name, value in settings.items()}
    elif "roberta" in model_type:
        settings["pad_token_id"] = 1
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(model_type, **{**settings, **options})
    makers = {
        "Model": transformers.AutoModel,
        "ForMaskedLM": transformers.AutoModelForMaskedLM,
        "ForSequenceClassification": transformers.AutoModelForSequenceClassification,
    }
    reference = makers[head].from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "norm" in name.lower() and "weight" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.3 if parameter.ndim == 1 else 1.5 / parameter.shape[-1] ** 0.5)
    reference = reference.to(getattr(torch, dtype))
    reference.save_pretrained(folder)
    return TinyEncoder(reference, folder, structs.replace(read_hf_spec(folder), pooling=None))


class Texts:
    """Computes texts with a driver's runner; `hidden` and `batches` have the result and the input of each step."""

    recorded_bytes = RecordedBytes()

    def __init__(self, driver: Any, seed: int = 0) -> None:
        self.runner, self.capacity = driver.runner, driver.capacity
        self.inner, driver.runner.executor = driver.runner.executor, self
        self.hidden: list[torch.Tensor] = []
        self.batches: list[InputBatch] = []
        self._random = random.Random(seed)
        self._step_id = 0
        self._finished: list[int] = []

    def run(self, batch: InputBatch) -> StepOutput:
        output: StepOutput = self.inner.run(batch)
        assert output.hidden is not None
        self.batches.append(batch)
        self.hidden.append(self.runner.model.final_states(output.hidden.clone()).float())
        return output

    def step(
        self, texts: Sequence[Sequence[int]], params: Sequence[PoolingParams] | None = None
    ) -> StepResult:
        """One step with these texts, in rows and pages at random places."""
        params = params or [WHOLE] * len(texts)
        rows = self._random.sample(range(self.capacity.max_running_requests), len(texts))
        size = self.capacity.page_size
        pages = self._random.sample(range(1, self.capacity.num_pages + 1), self.capacity.num_pages)
        slots: list[int] = []
        for text in texts:
            mine = [pages.pop() for _ in range(pages_for(len(text), size))]
            slots += [mine[n // size] * size + n % size for n in range(len(text))]
        self._step_id += 1
        plan = StepPlan(
            step_id=self._step_id,
            mode=ForwardMode.EXTEND,
            rows=_int32(rows),
            num_computed_tokens=_int32([0] * len(texts)),
            num_scheduled_tokens=_int32([len(text) for text in texts]),
            out_cache_loc=_int32(slots),
            samples=bytes(len(texts)),
            pools=bytes([1]) * len(texts),
            total_num_scheduled_tokens=len(slots),
            finished_rows=_int32(self._finished),
            new_reqs=tuple(
                NewReq(f"r{row}", row, _int32(text), len(text), b"", SamplingParams(seed=0), pooling)
                for row, text, pooling in zip(rows, texts, params, strict=True)
            ),
        )
        self._finished = rows
        result: StepResult = self.runner.launch(plan).wait()
        return result

    def states(
        self, texts: Sequence[Sequence[int]], params: Sequence[PoolingParams] | None = None
    ) -> list[torch.Tensor]:
        """The hidden states of each text, all in one step."""
        result = self.step(texts, params)
        assert not result.errors, result.errors
        return list(self.hidden[-1].split([len(text) for text in texts]))


def _int32(numbers: Sequence[int]) -> bytes:
    return np.array(numbers, dtype=np.int32).tobytes()
