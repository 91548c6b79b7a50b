"""`LLM` over the real parts and a tiny random model: batches, streams, aborts, errors, seeds."""

from __future__ import annotations

import gc
import json
import shutil
import threading
from array import array
from typing import Any

import msgspec
import numpy as np
import pytest

from engine import LLM, ConfigError, EngineDeadError, RequestError, SamplingParams
from engine.offline.batch import Batch, CheckedRequest
from engine.offline.outputs import OutputBuilder
from engine.runtime.config.presets import PRESETS
from engine.runtime.errors import EngineError
from engine.runtime.messages import FlushCacheDone
from engine.scheduler.kv_stores.page_mover import PageMover
from engine.scheduler.tiers import page_tier
from engine.tokenizer_manager.scheduling_options import Scheduling

GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
PROMPTS = ["one", "a longer prompt that has more tokens", "x", "the quick brown fox jumps over the lazy dog"]


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(str(tiny_model), dtype="float32", num_threads=1, max_running_requests=8, page_size=4) as llm:
        yield llm


def idle(llm):
    """Wait until the scheduler has nothing left, by a request that it serves last."""
    llm.generate("idle", SamplingParams(max_new_tokens=1))
    return llm.flush_cache()


def test_one_prompt_one_output(llm):
    output = llm.generate("Hello", GREEDY)
    assert output.prompt_token_ids == llm.tokenizer.encode("Hello")
    assert len(output.token_ids) == 12
    assert output.text == llm.tokenizer.decode(output.token_ids)
    assert (output.finish_reason, output.stop, output.error) == ("length", None, None)
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (5, 12)


def test_a_batch_keeps_its_order_and_equals_single_runs(llm):
    batch = llm.generate(PROMPTS, GREEDY)
    assert [output.prompt_token_ids for output in batch] == [
        llm.tokenizer.encode(prompt) for prompt in PROMPTS
    ]
    assert [output.token_ids for output in batch] == [llm.generate(p, GREEDY).token_ids for p in PROMPTS]
    assert llm.generate([], GREEDY) == []


def test_more_prompts_than_may_run_at_once(llm):
    params = [SamplingParams(temperature=0, max_new_tokens=1 + i % 7, ignore_eos=True) for i in range(40)]
    outputs = llm.generate([f"prompt {i}" for i in range(40)], params)
    assert [len(output.token_ids) for output in outputs] == [1 + i % 7 for i in range(40)]


def test_token_ids_are_a_prompt_too(llm):
    token_ids = llm.tokenizer.encode("Hello")
    assert llm.generate(token_ids, GREEDY).token_ids == llm.generate("Hello", GREEDY).token_ids
    assert [o.prompt_token_ids for o in llm.generate([token_ids, [7]], GREEDY)] == [token_ids, [7]]


def test_a_stream_is_the_output_in_pieces(llm):
    chunks = list(llm.generate(PROMPTS, GREEDY, stream=True))
    whole = llm.generate(PROMPTS, GREEDY)
    for index, output in enumerate(whole):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert "".join(chunk.text for chunk in own) == output.text
        assert [token_id for chunk in own for token_id in chunk.token_ids] == output.token_ids
        assert [chunk.finish_reason for chunk in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == "length"


def test_seeds_decide_and_are_reported(llm):
    params = SamplingParams(temperature=1.0, max_new_tokens=16, ignore_eos=True)
    drawn = llm.generate("Hello", params)
    again = llm.generate(
        "Hello", SamplingParams(temperature=1.0, max_new_tokens=16, ignore_eos=True, seed=drawn.seed)
    )
    other = llm.generate("Hello", params)
    assert again.token_ids == drawn.token_ids
    assert other.seed != drawn.seed
    assert other.token_ids != drawn.token_ids


def test_the_engines_seed_is_for_requests_without_one(tiny_model):
    params = SamplingParams(temperature=1.0, max_new_tokens=16, ignore_eos=True)
    with LLM(str(tiny_model), dtype="float32", num_threads=1, seed=5, max_total_tokens=512) as llm:
        first, second = llm.generate("Hello", params), llm.generate("Hello", params)
    assert first.seed == second.seed == 5
    assert first.token_ids == second.token_ids


def test_the_models_sampling_defaults_are_for_calls_without_parameters(tiny_model, tmp_path):
    folder = tmp_path / "greedy"
    shutil.copytree(tiny_model, folder)
    (folder / "generation_config.json").write_text(json.dumps({"top_k": 1, "temperature": 3}))
    settings: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_total_tokens": 512}
    with LLM(str(folder), **settings) as llm:
        defaults = llm.get_default_sampling_params()
        assert (defaults.top_k, defaults.temperature, defaults.top_p) == (1, 3.0, 1.0)
        some = {"max_new_tokens": 12, "ignore_eos": True}
        greedy = llm.generate("Hello", GREEDY).token_ids
        assert llm.generate("Hello", some).token_ids == greedy
        assert llm.sample("Hello", 2, some)[1].token_ids == greedy
        own = llm.generate(["Hello"] * 4, [some | {"top_k": -1}] * 4)
        assert len({tuple(output.token_ids) for output in own}) > 1
        hello = [{"role": "user", "content": "Hello"}]
        answers = {tuple(llm.chat(hello, {"max_new_tokens": 4}).token_ids) for _ in range(3)}
        assert len(answers) == 1
        free = llm.generate("Hello", SamplingParams(max_new_tokens=12, ignore_eos=True, seed=1))
        assert free.token_ids != greedy  # a SamplingParams is taken as it is
    with LLM(str(folder), sampling_defaults="openai", **settings) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_stop_strings_end_the_text_before_them(llm):
    free = llm.generate("Hello", SamplingParams(temperature=0, max_new_tokens=64, ignore_eos=True))
    stop = next(c for c in free.text[8:] if c.isascii() and c.isprintable())
    cut = llm.generate(
        "Hello", SamplingParams(temperature=0, max_new_tokens=64, ignore_eos=True, stop=(stop,))
    )
    assert cut.text == free.text[: free.text.index(stop)]
    assert (cut.finish_reason, cut.stop) == ("stop", stop)
    assert idle(llm).kept_tokens == 0


def test_a_control_token_is_a_stop_string(llm):
    params = {"max_new_tokens": 6, "ignore_eos": True, "logit_bias": {1: 100}}
    for more in ({}, {"skip_special_tokens": False}):
        output = llm.generate("a", params | more | {"stop": "<|im_start|>"})
        assert (output.text, output.finish_reason, output.stop) == ("", "stop", "<|im_start|>")
        assert output.token_ids == [1]


def test_a_second_bos_is_warned_of_and_can_be_avoided(tiny_model, tmp_path, caplog):
    folder = tmp_path / "with-bos"
    shutil.copytree(tiny_model, folder)
    core = json.loads((folder / "tokenizer.json").read_text())
    bos = {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
    core["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": bos},
    }
    (folder / "tokenizer.json").write_text(json.dumps(core))
    with LLM(str(folder), dtype="float32", num_threads=1, max_total_tokens=512) as llm:
        one = {"max_new_tokens": 1}
        assert llm.generate("a", one).prompt_token_ids[0] == 1
        assert llm.generate([[1, 1, 5]], one)[0].prompt_token_ids == [1, 1, 5]
        once = llm.generate("<|im_start|>a", one, add_special_tokens=False)
        sampled = llm.sample("<|im_start|>a", 1, one, add_special_tokens=False)
        assert once.prompt_token_ids == sampled[0].prompt_token_ids == llm.generate("a", one).prompt_token_ids
        assert not caplog.records
        twice = llm.generate(["a", "<|im_start|>a", "<|im_start|>b"], one)
        assert twice[1].prompt_token_ids[:2] == [1, 1]
        llm.sample("<|im_start|>a", 1, one)
    problem = "begins with <|im_start|>, and tokenization adds another one; pass add_special_tokens=False"
    assert [record.getMessage() for record in caplog.records] == [
        f"prompt[1] {problem} (and 1 more)",
        f"prompt {problem}",
    ]


def test_logprobs_come_with_their_tokens(llm):
    output = llm.generate(
        "Hello",
        SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=0),
    )
    assert output.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    for entry in output.logprobs:
        assert max(entry.top, key=entry.top.__getitem__) == entry.token_id  # greedy
        assert entry.logprob == pytest.approx(entry.top[entry.token_id])
    assert output.prompt_logprobs is not None
    assert [entry.token for entry in output.prompt_logprobs] == list("ello")


def test_logprobs_of_given_tokens(llm):
    params = SamplingParams(
        temperature=0, max_new_tokens=3, logprobs=1, prompt_logprobs=1, logprob_token_ids=(5, 9)
    )
    output = llm.generate("Hello", params)
    assert output.logprobs is not None and output.prompt_logprobs is not None
    for entry in [*output.prompt_logprobs, *output.logprobs]:
        assert {5, 9} <= entry.top.keys() and len(entry.top) <= 3
        assert max(entry.top.values()) >= entry.top[5]


def test_the_prefix_cache_serves_the_second_time(llm):
    prompt = "a prompt of which whole pages stay in the cache"
    llm.flush_cache()
    assert llm.generate(prompt, GREEDY).usage.cached_tokens == 0
    assert llm.generate(prompt, GREEDY).usage.cached_tokens == (len(prompt) - 1) // 4 * 4


def test_chat_renders_the_template(llm):
    messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"}]
    output = llm.chat(messages, GREEDY)
    prompt = llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    assert (
        prompt == "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "".join(chunk.text for chunk in llm.chat(messages, GREEDY, stream=True)) == output.text


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ([{"role": "user"}], r"messages\[0\].content is missing"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content is 5, but it must be a string or a list"),
        (["hi"], r"messages\[0\] is 'hi', but it must be a dict with a role and a content"),
        (5, "messages is 5, but it must be a list of messages"),
    ],
)
def test_bad_messages_are_refused(llm, messages, message):
    with pytest.raises(RequestError, match=message):
        llm.chat(messages)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("", None, "prompt has no tokens"),
        (
            [5, 1_000_000],
            None,
            r"prompt holds 1000000, but it must be a text or a list of token ids in \[0, 272\)",
        ),
        ([5, "x"], None, "prompt holds 'x'"),
        ("x", msgspec.structs.replace(GREEDY, temperature=-1), "temperature is -1"),
        (
            "x",
            msgspec.structs.replace(GREEDY, max_new_tokens=2.5),
            "max_new_tokens is 2.5, but it must be an int",
        ),
        ("x", msgspec.structs.replace(GREEDY, stop_token_ids=(272,)), r"token ids in \[0, 272\)"),
        ("x", {"max_new_tokens": 0}, "max_new_tokens is 0, but it must be at least 1"),
        ("x", 4, "params is 4, but it must be a SamplingParams, a dict of its fields or a list of them"),
        (["a", "b"], [GREEDY, 4], "params is 4, but it must be a SamplingParams, a dict of its fields"),
        (b"ab", None, "prompts is b'ab', but it must be a text .* decode bytes"),
        (bytearray(b"ab"), None, "prompts is bytearray"),
        ([b"ab"], None, "prompt is b'ab', but it must be a text or a list of token ids; decode bytes"),
        (["a", 5.5], None, "prompt 1: prompt is 5.5, but it must be a text or a list"),
        (["a", None], None, "prompt 1: prompt is None"),
        ([5, 6.0], None, "prompt holds 6.0"),
        ([True, False], None, "prompt holds True"),
        (5, None, "prompts is 5, but it must be a text"),
        (None, None, "prompts is None"),
        ({"prompt": "x"}, None, "prompts is {'prompt': 'x'}, .* not a dict"),
        (np.array([1.5, 2.5]), None, "prompt 0: prompt is 1.5"),
        (np.zeros((1, 1, 1), np.int32), None, "prompts is array"),
        (np.array([5, 300]), None, "prompt holds 300"),
        ("x", SamplingParams(max_new_tokens=2000), "max_new_tokens is 2000: .* the context holds 1024"),
        ("x" * 1024, None, "the prompt has 1024 tokens and the context holds 1024"),
        (["fine", "x" * 2000], None, "prompt 1: the prompt has 2000 tokens"),
        (["a", "b"], [SamplingParams()], "there are 2 prompts and 1 params"),
        ("lone \ud800 surrogate", None, "lone surrogate"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(llm, prompts, params, message):
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params)
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params, stream=True)


def test_one_wrong_value_does_not_end_the_engine(llm):
    """Neither at the call nor past every check of `LLM`; a request beside it is answered."""
    with pytest.raises(RequestError, match=r"max_new_tokens is 2\.5, but it must be an integer"):
        llm.generate("a b", SamplingParams(max_new_tokens=2.5, ignore_eos=True))  # type: ignore[arg-type]
    unchecked = msgspec.structs.replace(GREEDY, max_new_tokens=2.5, seed=1)
    sound = msgspec.structs.replace(GREEDY, seed=1)
    prompt = llm.tokenizer.encode("a b")
    requests = [CheckedRequest("unchecked", prompt, unchecked), CheckedRequest("sound", prompt, sound)]

    bad, good = Batch(llm._engine, llm.tokenizer, requests, Scheduling()).run(progress_bar=False)

    assert (bad.finish_reason, bad.error) == ("error", "max_new_tokens is 2.5, but it must be an integer")
    assert good.token_ids == llm.generate("a b", GREEDY).token_ids
    assert len(good.token_ids) == 12


def test_arrays_and_tensors_are_token_ids(llm):
    torch = pytest.importorskip("torch")
    expected = llm.generate([5, 6, 7, 8], GREEDY)
    for prompt in (
        np.arange(5, 9),
        list(np.arange(5, 9)),
        tuple(range(5, 9)),
        range(5, 9),
        array("i", [5, 6, 7, 8]),
        torch.arange(5, 9),
        list(torch.arange(5, 9)),
    ):
        output = llm.generate(prompt, GREEDY)
        assert output.prompt_token_ids == [5, 6, 7, 8]
        assert {type(token_id) for token_id in output.prompt_token_ids} == {int}
        assert output.token_ids == expected.token_ids
    rows = llm.generate(np.array([[5, 6], [7, 8]]), GREEDY)
    assert [row.prompt_token_ids for row in rows] == [[5, 6], [7, 8]]
    assert [o.prompt_token_ids for o in llm.generate(iter([np.array([5]), "a"]), GREEDY)] == [
        [5],
        llm.tokenizer.encode("a"),
    ]


def test_leaving_a_stream_aborts_it(llm):
    stream = llm.generate(
        "Hello", SamplingParams(temperature=0, max_new_tokens=1000, ignore_eos=True), stream=True
    )
    next(stream)
    stream.close()
    assert idle(llm).kept_tokens == 0  # nothing runs any more that would hold pages


def test_an_interrupt_aborts_the_batch(llm, monkeypatch):
    def interrupted(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(OutputBuilder, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, SamplingParams(max_new_tokens=500, ignore_eos=True))
    monkeypatch.undo()
    assert idle(llm).kept_tokens == 0


def test_threads_share_one_engine(llm):
    expected = {prompt: llm.generate(prompt, GREEDY).text for prompt in PROMPTS}
    seen = {}

    def ask(prompt):
        seen[prompt] = llm.generate(prompt, GREEDY).text

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == expected


def test_a_closed_engine_says_so(tiny_model):
    llm = LLM(str(tiny_model), dtype="float32", num_threads=1, max_total_tokens=512, chaos="slow=0.02")
    stream = llm.generate("Hello", SamplingParams(max_new_tokens=400, ignore_eos=True), stream=True)
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="the engine has been closed"):
        list(stream)
    with pytest.raises(EngineDeadError, match="the engine has been closed"):
        llm.generate("Hello")


def test_a_forgotten_engine_ends_its_thread(tiny_model):
    before = set(threading.enumerate())
    llm = LLM(str(tiny_model), dtype="float32", num_threads=1, max_total_tokens=512)
    (thread,) = (each for each in threading.enumerate() if each not in before and each.name == "engine")
    del llm
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_settings_are_checked(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match="unknown setting 'max_model_length'; did you mean 'max_model_len'"):
        LLM(str(tiny_model), max_model_length=5)
    with pytest.raises(ConfigError, match=r"page_size is 0, .* \(set by argument page_size\)"):
        LLM(str(tiny_model), page_size=0)
    with pytest.raises(ConfigError, match="there is no such folder"):
        LLM(str(tmp_path / "missing"))


def test_a_broken_model_raises_here_and_not_on_the_thread(tiny_model, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_model.iterdir():
        data = file.read_bytes()
        (broken / file.name).write_bytes(data[:100] if file.suffix == ".safetensors" else data)
    before = threading.active_count()
    with pytest.raises(ConfigError, match="safetensors"):
        LLM(str(broken), num_threads=1)
    assert threading.active_count() == before


def test_the_steps_of_the_start_are_told(tiny_model):
    steps: list[str] = []
    LLM(str(tiny_model), dtype="float32", num_threads=1, max_total_tokens=512, on_step=steps.append).close()
    assert steps == ["model files", "tokenizer", "import torch", "load weights"]


def sent_by(monkeypatch, llm):
    """The requests that reach the engine thread from now on."""
    sent = []
    submit_all = llm._engine.submit_all

    def spy(requests, rows):
        sent.extend(requests)
        submit_all(requests, rows)

    monkeypatch.setattr(llm._engine, "submit_all", spy)
    return sent


def test_options_of_a_call_reach_every_request(llm, monkeypatch):
    sent = sent_by(monkeypatch, llm)
    one = SamplingParams(max_new_tokens=1)
    llm.generate(["a", "b"], one, priority="high", tenant="t", cache_salt="s", queue_timeout=60, timeout=90.5)
    llm.generate("a", one)
    wishes = [(r.priority, r.tenant, r.extra_key, r.queue_timeout_s, r.timeout_s, r.group) for r in sent]
    assert wishes == [(20, "t", "s", 60, 90.5, "")] * 2 + [(0, "", "", None, None, "")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": "urgent"}, 'priority is "urgent", but it must be an integer or one of "high"'),
        ({"priority": 10**7}, "priority is 10000000, but it must lie in"),
        ({"priority": 1.5}, "priority is 1.5, but it must be an integer or a class"),
        ({"priority": True}, "priority is True, but it must be an integer"),
        ({"priority": None}, "priority is None, but it must be an integer"),
        ({"tenant": 5}, "tenant is 5, but it must be a text"),
        ({"cache_salt": b"x"}, "cache_salt is b'x', but it must be a text"),
        ({"cache_salt": "\ud800"}, "cache_salt is .* lone surrogate"),
        ({"tenant": "\ud800"}, "tenant is .* lone surrogate"),
        ({"queue_timeout": 0}, r"queue_timeout is 0, but it must lie in \(0, 86400\] seconds"),
        ({"timeout": float("nan")}, "timeout is nan, but"),
        ({"timeout": float("inf")}, "timeout is inf, but"),
        ({"timeout": "5"}, "timeout is '5', but it must be a number of seconds"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(llm, monkeypatch, options, message):
    sent = sent_by(monkeypatch, llm)
    with pytest.raises(RequestError, match=message):
        llm.generate(["a", "b"], **options)
    with pytest.raises(RequestError, match=message):
        llm.sample("a", 2, **options)
    assert sent == []


def test_an_unknown_option_is_a_type_error(llm):
    with pytest.raises(
        TypeError,
        match=r"unexpected keyword argument 'tempreature'; .* params=SamplingParams\(temperature=...\)",
    ):
        llm.generate("a", tempreature=1)


def test_samples_are_siblings_with_seeds_in_a_row(llm, monkeypatch):
    sent = sent_by(monkeypatch, llm)
    params = SamplingParams(temperature=1.0, max_new_tokens=8, ignore_eos=True, seed=40)
    outputs = llm.sample("Hello", 3, params)

    assert [output.seed for output in outputs] == [40, 41, 42]
    assert len({request.group for request in sent}) == 1
    assert sent[0].group
    assert len({request.rid for request in sent}) == 3
    for output in outputs:  # the same as alone
        alone = llm.generate(
            "Hello", SamplingParams(temperature=1.0, max_new_tokens=8, ignore_eos=True, seed=output.seed)
        )
        assert alone.token_ids == output.token_ids
    sent.clear()
    assert len(llm.sample("Hello", 1, params)) == 1
    assert sent[0].group == ""
    with pytest.raises(RequestError, match="n is 0, but it must be at least 1"):
        llm.sample("Hello", 0)
    with pytest.raises(RequestError, match=r"n is 2\.5, but it must be an integer"):
        llm.sample("Hello", 2.5)
    assert idle(llm).kept_tokens == 0


def test_pins_keep_a_prefix_until_they_are_taken_back(llm):
    prompt = "instructions that every request begins with"
    llm.flush_cache()
    llm.generate(prompt, SamplingParams(max_new_tokens=1))
    done = llm.pin(prompt, ttl=60)
    assert done.asked_tokens == len(prompt)
    assert done.pinned_tokens >= len(prompt) // 4 * 4 - 4
    assert llm.pin(prompt, ttl=60, cache_salt="other").pinned_tokens == 0
    assert llm.pin(prompt, ttl=0).pinned_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "ttl", "message"),
    [
        ("a", -1, r"ttl is -1, but it must lie in \[0, 1e\+09\] seconds; 0 unpins"),
        ("a", float("nan"), "ttl is nan"),
        ("a", float("inf"), "ttl is inf"),
        ("", 1, "prompt has 0 tokens"),
        ([1] * 100_000, 1, "prompt has 100000 tokens, but one has at least 1 and at most"),
        ([-1], 1, "prompt holds -1"),
        (b"a", 1, "prompt is b'a'"),
        ("a", "5", "ttl is '5', but it must be a number"),
        ("a", None, "ttl is None"),
    ],
)
def test_bad_pins_are_refused(llm, prompt, ttl, message):
    with pytest.raises(RequestError, match=message):
        llm.pin(prompt, ttl=ttl)


def test_why_tells_of_a_finished_request(llm):
    output = llm.generate("Hello", SamplingParams(max_new_tokens=2))
    explanation = llm.why(output.request_id)
    assert explanation.found
    assert explanation.sentence
    assert not llm.why("llm-no-such").found
    with pytest.raises(RequestError, match="request_id is .*, but it must be a string"):
        llm.why([output])
    with pytest.raises(RequestError, match="cache_salt is 5, but it must be a string"):
        llm.pin("Hello", ttl=5, cache_salt=5)


def test_presets_and_names_of_other_engines_are_settings(tiny_model):
    with LLM(
        str(tiny_model), dtype="float32", num_threads=1, preset="latency", max_num_seqs=3, block_size=4
    ) as llm:
        assert llm.config.scheduler.max_running_requests == 3
        assert llm.config.scheduler.phases == "decode-first"
        assert llm.config.cache.page_size == 4
        assert len(llm.generate("Hello", GREEDY).token_ids) == 12
    with pytest.raises(ConfigError, match="argument page_size and argument block_size are two names"):
        LLM(str(tiny_model), page_size=4, block_size=4)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_changes_the_order_of_work_and_no_answer(llm, tiny_model, preset):
    with LLM(str(tiny_model), dtype="float32", num_threads=1, page_size=4, preset=preset) as other:
        outputs = other.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == [llm.generate(p, GREEDY).token_ids for p in PROMPTS]


def test_ranks_are_for_the_server_and_the_refusal_says_how(tiny_model):
    with pytest.raises(
        ConfigError, match=r"tp is 2, .* start `engine serve \S+tiny-llama --tp 2` and use its HTTP API"
    ):
        LLM(str(tiny_model), tp=2, device="cpu")


def test_prompts_outlive_an_engine_on_a_disk(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(page_tier, "MIN_TOKENS", 16)
    settings: dict[str, Any] = {
        "dtype": "float32",
        "num_threads": 1,
        "page_size": 4,
        "max_total_tokens": 512,
        "kv_disk": str(tmp_path / "kv"),
    }
    prompt = [5 + number % 20 for number in range(61)]
    answers = []
    for _ in range(2):
        with LLM(str(tiny_model), **settings) as llm:
            answers.append(llm.generate(prompt, GREEDY))
    computed, loaded = answers
    assert loaded.token_ids == computed.token_ids
    assert (computed.usage.loaded_tokens, loaded.usage.loaded_tokens) == (0, 60)
    assert loaded.usage.cached_tokens == 60
    with LLM(str(tiny_model), **settings) as llm:
        llm.flush_cache()
        assert llm.generate(prompt, GREEDY).usage.cached_tokens == 0
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="kv_disk is .*, which is or is in a file"):
        LLM(str(tiny_model), **settings | {"kv_disk": str(tmp_path / "file")})


def test_an_error_after_the_start_of_a_tier_ends_its_threads(tiny_model, tmp_path, monkeypatch):
    def fail(_):
        raise ZeroDivisionError

    monkeypatch.setattr(PageMover, "wait_until_open", fail)
    with pytest.raises(ZeroDivisionError):
        LLM(str(tiny_model), dtype="float32", num_threads=1, kv_disk=str(tmp_path / "kv"))
    assert not {"kv-store", "kv-store-calls"} & {thread.name for thread in threading.enumerate()}


def test_a_flush_that_the_disk_may_not_have_done_is_an_error(llm, monkeypatch):
    done = FlushCacheDone(16, 0, "the store does not answer")
    monkeypatch.setattr(llm._engine, "call", lambda *_: done)
    with pytest.raises(EngineError, match="but not the tier: the store does not answer; flush again"):
        llm.flush_cache()
