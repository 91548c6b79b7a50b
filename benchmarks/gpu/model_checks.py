"""`check.py`'s sections about whole models: tiny ones against transformers, graphs, overlap, chaos."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from benchmarks.gpu.models import ARCHITECTURES, TINY_VOCAB, write_tiny_model
from benchmarks.gpu.sections import LoggedMessages, Report, settings_that_passed

if TYPE_CHECKING:
    from engine import LLM
    from engine.offline.outputs import GenerationOutput

TIE: Final = 0.25
"""Nats: bfloat16 moves log-probabilities of these models by 0.04 on average, so it may choose within this."""
EIGHT_BITS: Final = 0.4
"""Nats, mean: on the CPU keys and values of 8 bits cost 0.15, weights 0.22; a wrong scale costs several."""


def models(report: Report) -> None:
    """Every architecture, in float32 and bfloat16, is as exact as transformers; with chunks and mixed steps."""
    names = ["gemma3_text", "olmo2"] if report.tiny else list(ARCHITECTURES)
    for model_type in names:
        for dtype in ("float32", "bfloat16"):
            with_all = report.device == "cuda" and dtype == "bfloat16"
            avoided = settings_that_passed().get("avoid_kernels", ())
            by_triton = [] if {"triton", "triton:attention"} & set(avoided) else ["triton"]
            backends = ["", *by_triton, "torch_native"] if with_all else [""]
            with tempfile.TemporaryDirectory() as name:
                reference = write_tiny_model(Path(name), model_type, dtype).to(report.device)
                for backend in backends:
                    with report.part(f"{model_type} {dtype} attention={backend or 'auto'}"):
                        settings = {"attention_backend": backend} if backend else {}
                        _compare_with(reference, Path(name), dtype, report, settings)
    if report.device == "cuda":
        _eight_bits(report)


def _eight_bits(report: Report) -> None:
    """Keys, values or weights of 8 bits: further from exact, but not far."""
    with tempfile.TemporaryDirectory() as name:
        reference = write_tiny_model(Path(name), "llama", "bfloat16").to(report.device)
        for settings in ({"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}):
            with report.part(f"llama bfloat16 {settings}"):
                _compare_with(reference, Path(name), "bfloat16", report, settings, slack=EIGHT_BITS)


def _compare_with(
    reference: Any, folder: Path, dtype: str, report: Report, settings: dict[str, str], slack: float = 0.0
) -> None:
    prompts = prompts_of((3, 200, 60, 130, 9))
    with (
        LoggedMessages() as log,
        make_llm(folder, report, dtype=dtype, chunked_prefill_size=64, **settings) as llm,
    ):
        outputs = generate(llm, prompts, num=16)
    print(*log.messages, sep="\n")
    rounded = getattr(torch, dtype)
    ours, theirs, slack = 0.0, 0.0, slack + (1e-2 if dtype == "float32" else 2e-2)  # Triton may use TF32
    for prompt, output in zip(prompts, outputs, strict=True):
        exact = _logprobs(reference.float(), prompt, output.token_ids)
        rough = _logprobs(reference.to(rounded), prompt, output.token_ids)
        assert output.logprobs is not None
        found = torch.tensor([token.logprob for token in output.logprobs])
        ours += float((found - exact).abs().mean()) / len(prompts)
        theirs += float((rough - exact).abs().mean()) / len(prompts)
    reference.float()
    assert ours <= 1.5 * theirs + slack, (
        f"log-probabilities are off by {ours:.4f}, transformers' by {theirs:.4f}"
    )


@torch.inference_mode()
def _logprobs(model: Any, prompt: list[int], output: Sequence[int]) -> torch.Tensor:
    """Log-probabilities of each output token, by the model alone and without a cache."""
    tokens = torch.tensor([[*prompt, *output]], device=next(model.parameters()).device)
    logprobs: torch.Tensor = model(tokens).logits[0].float().log_softmax(-1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, tokens[0, len(prompt) :, None])[:, 0].cpu()


def graphs(report: Report) -> None:
    """Recorded decodes, prompts and mixed steps return the same tokens as the same steps without recording.

    Chunks of 64 tokens make mixed steps and decodes of more rows than are recorded; those of 512 are large recordings.
    """
    for model_type, chunk in (("llama", 64), ("llama", 512), ("qwen3_moe", 64)):
        with LoggedMessages() as log:
            _same(report, model_type, {"record_steps": False}, {"record_steps": True}, chunk=chunk)
        with report.part(f"{model_type}: decodes and prompts of up to {chunk} tokens were recorded"):
            for name in {"decode_graphs", "prompt_graphs"} - set(
                settings_that_passed().get("avoid_kernels", ())
            ):
                kind = f"{name}="
                recorded = [line for line in log.starting_with(kind) if f"{kind}0" not in line]
                assert recorded, log.starting_with(kind, "attention_backend=")
                report.note(recorded[-1])
            for line in log.starting_with("prompts and mixed steps"):
                report.note(line)


def overlap(report: Report) -> None:
    """Planning a step while the previous one runs changes no token."""
    _same(report, "llama", {"overlap": False}, {"overlap": True})


def chaos(report: Report) -> None:
    """Random retractions and out-of-memory steps do not change the results."""
    for fault in ("retract=0.2:100", "oom=0.2:50"):
        _same(report, "llama", {}, {"chaos": fault})


def _same(
    report: Report, model_type: str, plain: dict[str, Any], other: dict[str, Any], *, chunk: int = 64
) -> None:
    """The same requests under two configurations; a token may differ only at a near tie, within rounding."""
    name, value = next(iter(other.items()))
    with report.part(f"{model_type}: {name}={value}"), tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder), model_type, "bfloat16")
        prompts = prompts_of(range(2, 60 if report.tiny else 130, 7))
        answers = []
        for settings in (plain, other):
            with make_llm(
                Path(folder), report, dtype="bfloat16", chunked_prefill_size=chunk, **settings
            ) as llm:
                outputs = generate(llm, prompts, num=12 if report.tiny else 40)
                answers.append([answer_of(output) for output in outputs])
        differing = sum(differs(one, two) for one, two in zip(*answers, strict=True))
        assert not differing, f"{differing} of {len(prompts)} requests have other tokens"
        report.note(f"same tokens for {len(prompts)} requests")


class Answer(NamedTuple):
    """The generated tokens, and for each the log-probabilities of the best few, including its own."""

    tokens: list[int]
    tops: list[dict[int, float]]
    text: str = ""


def answer_of(output: GenerationOutput) -> Answer:
    """The answer in an output with log-probabilities."""
    assert output.logprobs is not None
    tops = [{token.token_id: token.logprob, **token.top} for token in output.logprobs]
    return Answer(list(output.token_ids), tops)


def differs(one: Answer, two: Answer) -> bool:
    """Whether the first different token is clearly better than the other's; later tokens are not compared."""
    for a, b, top in zip(one.tokens, two.tokens, one.tops, strict=True):
        if a != b:
            return b not in top or top[a] - top[b] > TIE
    return one.text != two.text


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    """Random prompts, the same in every run."""
    source = random.Random(0)
    return [[source.randrange(3, TINY_VOCAB) for _ in range(length)] for length in lengths]


def make_llm(folder: Path, report: Report, **settings: Any) -> LLM:
    """The engine with a tiny model, in this process."""
    from engine import LLM

    defaults: dict[str, Any] = {
        "device": report.device,
        "max_model_len": 512,
        "max_total_tokens": 16384,
        "max_running_requests": 32,
        "max_recorded_bs": 8,
        "seed": 1,
    }
    return LLM(str(folder), **{**defaults, **settings_that_passed(), **settings})


def generate(llm: LLM, prompts: list[list[int]], num: int) -> list[GenerationOutput]:
    """`num` greedy tokens of each prompt."""
    from engine import SamplingParams

    params = SamplingParams(temperature=0.0, max_new_tokens=num, ignore_eos=True, logprobs=5)
    outputs = llm.generate(prompts, params)
    for output in outputs:
        assert output.finish_reason == "length" and len(output.token_ids) == num, output
    return outputs
