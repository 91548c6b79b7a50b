"""Steps on the mirror and on the CPU, to compare the results: one function for each ability of the runner.

Each gets a driver that has no requests, leaves none, and returns what must be equal: token ids, and arrays of floats
that may differ by rounding.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from engine.model_runner.adapters.adapter_store import SlotSizes
from engine.models.adapters.read_adapter import read_adapter
from engine.runtime.pooling import PoolingKind, PoolingParams
from engine.runtime.step_plan import StepResult, TokenMasks
from tests.model_runner.conftest import GREEDY, Driver
from tests.model_runner.drafted_steps import step_with_drafts

from .runners import LLAMA, PROMPT, ROWS, Ahead, load_driver

DRAWN = replace(GREEDY, temperature=1.0, seed=3)
KINDS = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "filtered": replace(GREEDY, temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, seed=4),
    "penalized": replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2),
    "edited": replace(
        GREEDY, min_new_tokens=8, logit_bias={5: 2.0, 7: -100.0}, ignore_eos=False, temperature=0.7, seed=2
    ),
    "logprobs": replace(GREEDY, logprobs=3),
}
"""The kinds of rows that the sampler has."""

Results = dict[str, Any]
"""Lists must be equal; arrays of floats nearly so."""


def floats(data: bytes) -> npt.NDArray[np.float32]:
    return np.frombuffer(data, dtype=np.float32)


def logprobs_of(results: list[StepResult]) -> npt.NDArray[np.float32]:
    """All log-probabilities of sampled tokens, in the order of the steps."""
    rows = [row for result in results for row in result.logprobs if row is not None]
    return np.concatenate([floats(part) for row in rows for part in (row.token_logprobs, row.top_logprobs)])


def kind(name: str) -> Callable[[Driver], Results]:
    """Two requests of one kind: a prompt in two chunks, a mixed step, decodes of one and of both."""

    def scenario(driver: Driver) -> Results:
        ahead = Ahead(driver)
        first, second = ahead.start(PROMPT[:6], KINDS[name]), ahead.start(PROMPT[:11], KINDS[name])
        ahead.go([(first, 4)])
        ahead.prompt(first)
        ahead.go([(second, 11), (first, 1)])
        ahead.decode(first, second, num=2)
        ahead.decode(second)
        tokens = ahead.finish(first, second)
        return {"tokens": tokens, **({"logprobs": logprobs_of(ahead.results)} if name == "logprobs" else {})}

    return scenario


def all_kinds(driver: Driver) -> Results:
    """A request of each kind in one batch."""
    ahead = Ahead(driver)
    reqs = [ahead.start(PROMPT[n : n + 3 + n], params) for n, params in enumerate(KINDS.values())]
    ahead.go([(req, len(req.tokens)) for req in reqs])
    ahead.decode(*reqs, num=2)
    ahead.decode(*reqs[1:3])
    tokens = ahead.finish(*reqs)
    return {"tokens": tokens, "logprobs": logprobs_of(ahead.results)}


def prompt_logprobs(driver: Driver) -> Results:
    """Log-probabilities of a prompt in two chunks, beside a decode."""
    ahead = Ahead(driver)
    other = ahead.start(PROMPT[5:9])
    req = ahead.start(PROMPT[:9], replace(GREEDY, prompt_logprobs=2))
    ahead.prompt(other)
    ahead.go([(req, 5), (other, 1)])
    ahead.go([(req, 4), (other, 1)])
    ahead.decode(other, req)
    tokens = ahead.finish(other, req)
    packed = [result.prompt_logprobs[0] for result in ahead.results if result.prompt_logprobs]
    return {
        "tokens": tokens,
        "ids": [row.top_ids for row in packed],
        "logprobs": np.concatenate([floats(row.token_logprobs + row.top_logprobs) for row in packed]),
    }


def prefix(driver: Driver) -> Results:
    """A request that shares the pages of one that still runs, and is itself in flight when that one ends."""
    ahead = Ahead(driver)
    donor = ahead.start(PROMPT[:10])
    ahead.prompt(donor)
    ahead.decode(donor)
    hit = ahead.start(PROMPT[:8] + PROMPT[20:23], prefix=(donor, 8))
    ahead.go([(hit, 3), (donor, 1)])
    ahead.decode(donor, hit, num=2)
    tokens = ahead.finish(donor, hit)
    return {"tokens": tokens}


def page_copies(driver: Driver) -> Results:
    """A sibling that starts from a copy of a page that the first one goes on to fill, in the same step."""
    ahead = Ahead(driver)
    first = ahead.start(PROMPT[:6], DRAWN)
    ahead.prompt(first)
    sibling = ahead.start(PROMPT[:6], replace(DRAWN, seed=8))
    copied = driver.pages.pop()
    sibling.pages = [first.pages[0], copied]
    sibling.computed = sibling.prefix_len = 5
    ahead.go([(sibling, 1), (first, 1)], page_copies=[(first.pages[1], copied)])
    ahead.decode(first, sibling, num=3)
    tokens = ahead.finish(first)
    sibling.prefix_len = 4
    return {"tokens": tokens + ahead.finish(sibling)}


def swaps(driver: Driver) -> Results:
    """A request that leaves the device while another one runs, whose pages take its place, and comes back."""
    ahead = Ahead(driver)
    first, other = ahead.start(PROMPT[:7], DRAWN), ahead.start(PROMPT[3:8])
    ahead.go([(first, 7), (other, 5)])
    ahead.decode(first, other, num=2)
    ahead.settle()
    host = list(range(len(first.pages)))
    outs = [*zip(first.pages, host, strict=True)]
    driver.finish(first)
    driver.pages.sort(key=lambda page: page not in first.pages)  # the next pages are those
    late = ahead.start(PROMPT[11:20])
    ahead.go([(late, 9), (other, 1)], swap_outs=outs)
    back = ahead.start(first.tokens, DRAWN, prompt_len=first.prompt_len)
    back.computed = back.prefix_len = first.computed
    back.pages = [driver.pages.pop() for _ in host]
    ahead.go([(back, 1), (late, 1), (other, 1)], swap_ins=[*zip(host, back.pages, strict=True)])
    ahead.decode(back, late, other)
    back.prefix_len = 0
    return {"tokens": ahead.finish(back, late, other)}


def drafts(driver: Driver) -> Results:
    """Drafts that are right, wrong, and missing; the next step begins where they ended."""
    first, second = driver.start(PROMPT[:6]), driver.start(PROMPT[:9], DRAWN)
    driver.step([(first, 6), (second, 9)])
    ahead = driver.generate([PROMPT[:6]], num=4)[0]  # what the first one will say
    counts = [
        step_with_drafts(driver, [(first, ahead[1:3]), (second, [])]),
        step_with_drafts(driver, [(first, [95]), (second, [1, 2])]),
    ]
    driver.step([(first, 1), (second, 1)])
    for req in (first, second):
        driver.finish(req)
    assert counts[0][0] == 3, "the drafts are accepted"
    return {"tokens": [first.output, second.output], "counts": counts}


class Masks:
    """A `GetMasks` that allows the same few tokens in each step, for the first row."""

    def __init__(self, allowed: list[int]) -> None:
        bits = np.zeros((1, 96), dtype=np.uint8)
        bits[0, allowed] = 1
        packed = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        self._masks = TokenMasks(np.array([0]), packed)

    def __call__(self) -> TokenMasks | None:
        return self._masks

    def before(self) -> TokenMasks | None:
        return self._masks

    def drafted(self, draft_ids: bytes) -> None:
        raise AssertionError("there is no drafter")

    def unmasked(self, token_ids: npt.NDArray[np.int64]) -> None:
        """For figures only."""

    def after(self, token_ids: npt.NDArray[np.int64]) -> TokenMasks | None:
        return None


def masks(driver: Driver) -> Results:
    """A grammar's mask for one of two requests."""
    ahead = Ahead(driver)
    ahead.masks = Masks([3, 17, 50, 51, 80])
    masked, other = ahead.start(PROMPT[:6], DRAWN), ahead.start(PROMPT[:9])
    ahead.go([(masked, 6), (other, 9)])
    ahead.decode(masked, other, num=3)
    tokens = ahead.finish(masked, other)
    assert set(tokens[0]) <= {3, 17, 50, 51, 80}
    return {"tokens": tokens}


def pooling(driver: Driver) -> Results:
    """The vector of a text in two chunks, one of them beside a decode; the probabilities of two labels."""
    ahead = Ahead(driver)
    text = ahead.start(PROMPT[:9], pooling=PoolingParams(normalize=True))
    labeled = ahead.start(PROMPT[2:9], pooling=PoolingParams(kind=PoolingKind.LABELS, label_ids=(3, 17)))
    other = ahead.start(PROMPT[5:9])
    ahead.prompt(other)
    ahead.go([(text, 6)])
    ahead.go([(text, 3), (labeled, 7), (other, 1)])
    tokens = ahead.finish(other)
    for req in (text, labeled):
        driver.finish(req)
    vector, labels = [data for result in ahead.results for data in result.vectors.values()]
    return {"tokens": tokens, "vector": floats(vector), "labels": floats(labels)}


def adapters(driver: Driver) -> Results:
    """Two adapters and the base model in one batch; a slot gets another adapter while steps are in flight."""
    ahead = Ahead(driver)
    reqs = [ahead.start(PROMPT[n : n + 5], adapter_slot=slot) for n, slot in enumerate((1, 0, 2))]
    ahead.go([(req, 5) for req in reqs], adapter_loads=[(1, 1), (2, 2)])
    ahead.decode(*reqs, num=2)
    ahead.decode(reqs[2], reqs[0])
    tokens = ahead.finish(*reqs)
    late = ahead.start(PROMPT[:7], adapter_slot=1)
    ahead.go([(late, 7)], adapter_loads=[(2, 1)])
    ahead.decode(late, num=2)
    return {"tokens": tokens + ahead.finish(late)}


SCENARIOS: dict[str, Callable[[Driver], Results]] = {
    **{name: kind(name) for name in KINDS},
    "all kinds": all_kinds,
    "prompt log-probabilities": prompt_logprobs,
    "prefix": prefix,
    "page copies": page_copies,
    "swaps": swaps,
    "drafts": drafts,
    "masks": masks,
    "pooling": pooling,
}
"""With a driver of `load_driver(spec, mirror, num_host_pages=8)`."""


def write_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter of `LLAMA` as peft saves it."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    rank, hidden = 2 + seed, LLAMA.hidden_size
    modules = {"self_attn.q_proj": (hidden, hidden), "mlp.down_proj": (LLAMA.intermediate_size, hidden)}
    tensors = {}
    for layer in range(LLAMA.num_layers):
        for module, (num_in, num_out) in modules.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn((rank, num_in), generator=generator) * 0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn((num_out, rank), generator=generator) * 0.5
    save_file(tensors, folder / "adapter_model.safetensors")
    names = [module.rpartition(".")[2] for module in modules]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": names, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
    return folder


def load_adapted(mirror: Any, folder: Path, **options: Any) -> Driver:
    """A driver with two adapters in its store, for `adapters`."""
    driver = load_driver(LLAMA, mirror, adapter_slots=SlotSizes(2, 4), **options)
    store = driver.runner.adapters.store
    for number in (1, 2):
        path = folder / f"adapter{number}"
        store.read(
            number, read_adapter(path if path.exists() else write_adapter(path, number), f"a{number}", LLAMA)
        )
    return driver


def assert_same(found: Results, expected: Results) -> None:
    """Fails where a result is another one."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_allclose(found[name], value, atol=2e-4, rtol=2e-4, err_msg=name)
        else:
            assert found[name] == value, name


def assert_idle(driver: Driver) -> None:
    """All rows and pages are free again."""
    assert sorted(driver.rows) == list(range(ROWS))
    assert sorted(driver.pages) == list(range(1, driver.capacity.num_pages + 1))
