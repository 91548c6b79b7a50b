"""`LLM` with LoRA adapters: the option `lora` of each call, loads and unloads, and every error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine import LLM, ConfigError, RequestError, SamplingParams
from engine.launch.resolve.prepare import prepare
from engine.models.spec.model_spec import ModelSpec
from engine.runtime.config.config_sources import from_arguments, merge
from tests.adapter_files import write_adapter
from tests.embedders import make_decoder_embedder
from tests.scheduler.speculation.proposers import free_drafts

GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_new_tokens=400, ignore_eos=True)
PROMPT = "a prompt of which whole pages stay in the cache"


def open_llm(model: Path, **settings: Any) -> LLM:
    return LLM(str(model), dtype="float32", num_threads=1, page_size=4, show_progress=False, **settings)


@pytest.fixture(scope="module")
def base(tiny_model: Path) -> ModelSpec:
    return prepare(merge(from_arguments({"model": str(tiny_model)}))).spec


@pytest.fixture(scope="module")
def root(base: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters a0 to a3, and broken ones."""
    root = tmp_path_factory.mktemp("adapters")
    for n in range(4):
        write_adapter(root / f"a{n}", base, seed=n, size=3.0)
    file = write_adapter(root / "nan", base, seed=9) / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = np.nan
    save_file(tensors, file)
    write_adapter(root / "wide", base, rank=32)
    return root


@pytest.fixture(scope="module")
def llm(tiny_model: Path, root: Path) -> Iterator[LLM]:
    with open_llm(tiny_model, lora=[f"sql={root / 'a0'}"], enable_lora=True, max_loaded_loras=3) as llm:
        yield llm


@pytest.fixture(autouse=True)
def only_the_first(llm: LLM) -> Iterator[None]:
    yield
    for adapter in llm.adapters:
        if adapter.name != "sql":
            llm.unload_adapter(adapter.name)
    llm.flush_cache()


def test_each_call_takes_the_adapter(llm: LLM, root: Path):
    plain = llm.generate(PROMPT, GREEDY).token_ids
    adapted = llm.generate(PROMPT, GREEDY, lora="sql")
    assert adapted.token_ids != plain
    assert adapted.usage.cached_tokens == 0  # pages of the base are of other weights
    assert llm.generate(PROMPT, GREEDY, lora=f"{llm.model_name}:sql").usage.cached_tokens > 0
    assert llm.generate(PROMPT, GREEDY, lora=None).token_ids == plain
    assert [each.token_ids for each in llm.sample(PROMPT, 2, GREEDY, lora="sql")] == [adapted.token_ids] * 2
    chunks = llm.generate(PROMPT, GREEDY, lora="sql", stream=True)
    assert [token for chunk in chunks for token in chunk.token_ids] == adapted.token_ids
    hello = [{"role": "user", "content": "Hello"}]
    assert llm.chat(hello, GREEDY, lora="sql").token_ids != llm.chat(hello, GREEDY).token_ids
    assert [(each.name, each.rank) for each in llm.adapters] == [("sql", 4)]
    assert llm.adapters[0].path == str(root / "a0")


def test_labels_take_the_adapter(tiny_model: Path, root: Path):
    labels = ["a", "b", "c"]
    with open_llm(tiny_model, lora=[f"sql={root / 'a0'}"]) as llm:
        assert llm.label_probabilities(PROMPT, labels, lora="sql") != llm.label_probabilities(PROMPT, labels)


def test_drafts_of_a_model_without_the_adapter_change_nothing(tiny_model: Path, root: Path, llm: LLM):
    """Steps with a drafter keep all tokens to the end of the layers, also those without logits."""
    scored = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True, prompt_logprobs=1, logprobs=1)
    prompts, drafter = (
        [PROMPT, PROMPT[:20], PROMPT[5:]],
        {"speculative": "draft", "speculative_model": tiny_model},
    )
    with free_drafts(), open_llm(tiny_model, lora=[f"sql={root / 'a0'}"], **drafter) as drafting:
        found = drafting.generate(prompts, [scored, GREEDY, scored], lora="sql")
    expected = llm.generate(prompts, [scored, GREEDY, scored], lora="sql")
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert sum(each.usage.draft_tokens for each in found) > 10
    for ours, theirs in zip(found, expected, strict=True):
        logprobs = [[each.logprob for each in one.prompt_logprobs or ()] for one in (ours, theirs)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)


def test_a_prompt_in_chunks_takes_the_adapter(tiny_model: Path, root: Path, llm: LLM):
    with open_llm(tiny_model, lora=[f"sql={root / 'a0'}"], chunked_prefill_size=16) as chunked:
        in_chunks = chunked.generate(PROMPT, GREEDY, lora="sql").token_ids
    assert in_chunks == llm.generate(PROMPT, GREEDY, lora="sql").token_ids


def test_vectors_take_the_adapter(tmp_path: Path):
    model = make_decoder_embedder(tmp_path / "embedder")
    base = prepare(merge(from_arguments({"model": str(model)}))).spec
    write_adapter(tmp_path / "a", base, size=3.0)
    with open_llm(model, lora=[f"own={tmp_path / 'a'}"]) as llm:
        assert not np.allclose(llm.embed("one two", lora="own"), llm.embed("one two"))
        assert np.array_equal(llm.embed("one two", lora="own"), llm.embed("one two", lora="own"))
        with pytest.raises(
            RequestError, match="lora is 'x', but there is no such adapter; the adapters are own"
        ):
            llm.embed("one", lora="x")


def test_adapters_come_and_go(llm: LLM, root: Path):
    added = llm.load_adapter("b", root / "a1")
    assert (added.name, added.rank) == ("b", 4)
    first = llm.generate(PROMPT, GREEDY, lora="b")
    assert llm.load_adapter("c", root / "a1").fingerprint == added.fingerprint
    shared = llm.generate(PROMPT, GREEDY, lora="c")  # another name of the same weights
    assert shared.token_ids == first.token_ids and shared.usage.cached_tokens > 0

    llm.load_adapter("b", root / "a2", replace=True)
    changed = llm.generate(PROMPT, GREEDY, lora="b")

    assert changed.usage.cached_tokens == 0
    assert changed.token_ids != first.token_ids
    assert llm.generate(PROMPT, GREEDY, lora="c").token_ids == first.token_ids
    llm.unload_adapter("c")
    with pytest.raises(
        RequestError, match="lora is 'c', but there is no such adapter; the adapters are sql, b"
    ):
        llm.generate(PROMPT, GREEDY, lora="c")
    llm.load_adapter("c", root / "a1")
    assert llm.generate(PROMPT, GREEDY, lora="c").token_ids == first.token_ids


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("sql", "a1", "an adapter has the name 'sql' already; .* or pass replace=True"),
        ("a/b", "a1", "cannot be an adapter's name"),
        ("", "a1", "an adapter's name has 0 characters"),
        ("b", "nowhere", "nowhere: no such adapter"),
        ("b", "nan", "not finite"),
        ("b", "wide", r"has rank 32, the maximum is 16; .* a larger max_lora_rank$"),
    ],
)
def test_what_cannot_be_loaded(llm: LLM, root: Path, name: str, path: str, message: str):
    with pytest.raises(RequestError, match=message):
        llm.load_adapter(name, root / path)
    assert [each.name for each in llm.adapters] == ["sql"]
    assert len(llm.generate("Hello", GREEDY, lora="sql").token_ids) == 12


def test_too_many(llm: LLM, root: Path):
    llm.load_adapter("b", root / "a1")
    llm.load_adapter("c", root / "a2")
    with pytest.raises(
        RequestError, match="3 adapters are loaded, the limit is 3; .* raise max_loaded_loras$"
    ):
        llm.load_adapter("d", root / "a3")


@pytest.mark.parametrize("value", [5, ["sql"], True, b"sql"])
def test_values_of_other_types(llm: LLM, root: Path, value: Any):
    with pytest.raises(RequestError, match="lora is .*, but it must be the name of an adapter"):
        llm.generate("a", GREEDY, lora=value)
    with pytest.raises(RequestError, match="name"):
        llm.load_adapter(value, root / "a1")
    with pytest.raises(RequestError, match="path is .*, but it must be the path of a folder or a file"):
        llm.load_adapter("b", value if not isinstance(value, bytes) else 7)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="name"):
        llm.unload_adapter(value)


def test_arguments_of_vllm_and_sglang_are_answered(llm: LLM):
    for argument in ("lora_request", "lora_path"):
        with pytest.raises(TypeError, match="use lora='NAME'"):
            llm.generate("a", **{argument: "sql"})  # type: ignore[call-overload]


def test_an_adapter_in_use_stays_or_its_requests_end(llm: LLM, root: Path):
    llm.load_adapter("b", root / "a1")
    stream = llm.generate(PROMPT, LONG, lora="b", stream=True)
    next(stream)
    with pytest.raises(
        RequestError, match="1 request still uses the adapter 'b'; let it end first, or pass force"
    ):
        llm.unload_adapter("b")
    llm.load_adapter("b", root / "a2", replace=True)  # the stream keeps its weights
    llm.load_adapter("c", root / "a1")
    llm.unload_adapter("c", force=True)
    *_, last = stream
    assert last.finish_reason == "error"
    assert last.error is not None and "unloaded" in last.error
    assert [each.name for each in llm.adapters] == ["sql", "b"]


@pytest.mark.slow
def test_running_requests_keep_replaced_weights(llm: LLM, root: Path):
    llm.load_adapter("b", root / "a1")
    alone = llm.generate(PROMPT, LONG, lora="b").token_ids
    llm.flush_cache()
    stream = llm.generate(PROMPT, LONG, lora="b", stream=True)
    tokens = list(next(stream).token_ids)
    llm.load_adapter("b", root / "a2", replace=True)
    tokens += [token for chunk in stream for token in chunk.token_ids]
    assert tokens == alone
    assert llm.generate(PROMPT, LONG, lora="b").token_ids != alone


def test_threads(llm: LLM, root: Path):
    """Loads and unloads on one thread, calls on others: each answer is that of its adapter, or the name is unknown."""
    llm.load_adapter("b", root / "a1")
    right = llm.generate(PROMPT, GREEDY, lora="b").token_ids
    wrong: list[Any] = []
    stop = threading.Event()

    def call() -> None:
        while not stop.is_set():
            try:
                output = llm.generate(PROMPT, GREEDY, lora="b")
            except RequestError as error:
                if "no such adapter" not in error.message:
                    wrong.append(error.message)
                continue
            if (output.finish_reason == "length" and output.token_ids != right) or (
                output.finish_reason == "error" and "adapter" not in (output.error or "")
            ):
                wrong.append(output)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        llm.unload_adapter("b", force=True)
        llm.load_adapter("b", root / "a1")
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_prefix_is_pinned_for_its_adapter(llm: LLM):
    llm.generate(PROMPT, GREEDY, lora="sql")
    assert llm.pin(PROMPT, ttl=60).pinned_tokens == 0
    assert llm.pin(PROMPT, ttl=60, lora="sql").pinned_tokens > 0
    assert llm.pin(PROMPT, ttl=0, lora="sql").pinned_tokens == 0


def test_without_memory_for_adapters(tiny_model: Path, root: Path):
    with open_llm(tiny_model) as llm:
        assert llm.adapters == []
        hint = r"make the LLM with lora=\['NAME=PATH'\], or with enable_lora=True to load adapters later"
        with pytest.raises(RequestError, match=hint):
            llm.generate("a", GREEDY, lora="sql")
        with pytest.raises(RequestError, match=hint):
            llm.load_adapter("a", root / "a1")


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (["sql"], "lora is 'sql', but it must be NAME=PATH"),
        (["a=/nowhere"], "/nowhere: no such adapter"),
        ({"sql": "x"}, "lora is"),
        ([5], "lora"),
    ],
)
def test_a_bad_start(tiny_model: Path, lora: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        open_llm(tiny_model, lora=lora)
