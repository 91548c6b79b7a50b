"""Everything at once: random lives of a scheduler over all of its settings, every promise checked after each step.

The harness checks pages, locks and rows after each step, exactly one verdict per waiting request and pass, exactly one
answer per request with the tokens it gets alone; the FakeRunner checks every KV slot that a step reads, and every mask
of a request with a grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runtime.config.engine_config import EvictionPolicyName, SchedulePolicyName
from engine.runtime.messages import Call, FinishKind, GrammarReady, PinPrefix
from engine.runtime.sampling_params import SamplingParams
from tests.selection import examples

from .fake_runner import expected_output, remembered
from .grammar.toy_matcher import ToyGrammar
from .harness import VOCAB_SIZE, Harness
from .speculation.proposers import proposing

BASE = [1 + (k * k + 3 * k) % (VOCAB_SIZE - 1) for k in range(80)]  # prompts share beginnings of it
MOST_STEPS = 20_000
RIGHT = st.sampled_from([None, 0.0, 0.7, 1.0])
FAULTS = ["dead", "refuse", "accept", "allows", "fill", "fill_drafts", "validate", "forced"]


def one_of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Any settings together, small enough that memory, rows and budgets run out all the time."""
    page_size = draw(one_of(1, 2, 4, 16))
    max_partial = draw(one_of(1, 1, 2, 4))
    overlap = draw(one_of(0, 1, 2))
    radix_cache = draw(one_of(True, True, False))
    return {
        "page_size": page_size,
        "num_pages": draw(st.integers(2, 14) if page_size == 16 else st.integers(4, 40)),
        "max_model_len": 120,
        "max_running_requests": draw(st.integers(1, 7)),
        "num_host_pages": draw(one_of(0, 3, 40)),
        "kv_token_bytes": draw(one_of(1024, 1 << 30)),  # of the second, a step copies few
        "radix_cache": radix_cache,
        "overlap": overlap,
        "speculative": "off" if overlap else draw(one_of("off", "ngram", "suffix", "mtp")),
        "speculative_num_draft_tokens": draw(one_of(1, 3, 8)),
        "memory": draw(one_of(None, 1, 2)),  # outputs that can be guessed
        "schedule_policy": draw(st.sampled_from(get_args(SchedulePolicyName))),
        "phases": draw(one_of("mixed", "prefill-first", "decode-first")),
        "prefill_decode_interval": draw(one_of(0, 0, 3)),
        "max_prefill_steps_in_a_row": draw(st.integers(1, 3)),
        "chunked_prefill_size": draw(one_of(-1, 1, 8, 24, 64)),
        "multi_step_ms": 0.0 if overlap else draw(one_of(0.0, 25.0, 1e9)),
        "target_step_ms": draw(one_of(0.0, 0.0, 0.1, 12.0, 1e9)),
        "max_prefill_tokens": draw(one_of(1, 5, 32, 200)),
        "max_num_batched_tokens": draw(one_of(None, None, 1, 4, 16)),
        "max_num_partial_prefills": max_partial,
        "max_long_partial_prefills": draw(st.integers(1, max_partial)),
        "long_prefill_token_threshold": draw(one_of(0, 4, 10)),
        "admission_estimator": draw(one_of("ratio", "beta", "full", "none")),
        "schedule_conservativeness": draw(one_of(0.01, 1.0)),
        "look_ahead": draw(one_of(0, 1, 16)),
        "in_batch_prefix_caching": draw(st.booleans()),
        "preemption_mode": draw(one_of("cost", "recompute", "swap", "swap")),
        "max_loras_per_batch": draw(one_of(1, 2, 8)),
        "num_lookahead_tokens": draw(one_of(0, 0, 1, 9)),
        "chaos": draw(one_of(None, "retract=0.3:50", "retract=1.0:30")),
        "priority_preemption_threshold": draw(one_of(0, 1, 5)),
        "priority_ageing": draw(one_of(0.0, 0.05, 10.0)),
        "static_batch_size": draw(st.integers(1, 4)),
        "static_batch_wait": draw(one_of(0.0, 0.05, 1.0)),
        "tenant_quantum": draw(one_of(1, 16, 2048)),
        "length_estimate": draw(one_of("max-tokens", "tenant-average")),
        "queue_timeout": draw(one_of(None, None, None, 0.3)),
        "request_timeout": draw(one_of(None, None, None, 0.5)),
        "cache": {
            "eviction_policy": draw(st.sampled_from(get_args(EvictionPolicyName))),
            "pin_fraction": draw(one_of(0.0, 0.25, 1.0)),
            "kv_host_size": draw(one_of(0.0, 1.0)) if radix_cache else 0.0,
        },
    }


class Life:
    """One scheduler and what clients do to it."""

    def __init__(self, harness: Harness, seed: int) -> None:
        self.harness = harness
        self.rng = np.random.default_rng(seed)
        self.harness.has_news = lambda: bool(self.rng.random() < 0.2)
        self.without_grammar: list[str] = []
        harness._fake_runner.late = bool(self.rng.random() < 0.5)
        right = float(self.rng.choice([0.0, 0.7, 1.0]))
        harness._fake_runner.drafts_right = lambda: bool(self.rng.random() < right)

    def act(self) -> None:
        """One random thing."""
        choice = self.rng.random()
        if choice < 0.35:
            self.submit()
        elif choice < 0.45 and self.harness.answers:
            self.harness.abort(self.any_rid())
        elif choice < 0.48 and self.harness.answers:
            self.harness.runner.fail_next.add(self.any_rid())
        elif choice < 0.51:
            self.harness.flush()
        elif choice < 0.55:
            self.pin()
        elif choice < 0.65 and self.without_grammar:
            self.finish_grammar(str(self.pick(["", "", "the schema has no root"])))
        elif choice < 0.67 and self.harness.answers:
            rid = str(self.pick(["unknown", *(rid for rid in self.harness.answers)]))
            if rid not in self.without_grammar:  # it has its grammar already, or none
                self.harness.scheduler.handle(
                    GrammarReady(rid, str(self.pick(["", "late"]))), self.harness.now_s
                )
                self.harness.collect()
        else:
            for _ in range(int(self.pick([1, 1, 3, 10, 30]))):
                self.harness.step()

    def submit(self) -> None:
        """A request, or siblings."""
        if self.rng.random() < 0.4:
            tail = self.rng.integers(1, VOCAB_SIZE, self.rng.integers(0, 7))
            prompt = [*BASE[: self.rng.integers(1, 81)], *tail]
        else:
            prompt = list(self.rng.integers(1, VOCAB_SIZE, self.rng.integers(1, self.pick([7, 31, 91]))))
        count = int(self.pick([1, 1, 1, 2, 4]))
        grammar = self.grammar() if self.rng.random() < 0.4 else None
        message = {
            "group": f"g{len(self.harness.answers)}" if count > 1 else "",
            "priority": int(self.pick([0, 0, 1, 7, -3])),
            "lora_id": str(self.pick(["", "", "a", "b", "c"])),
            "tenant": str(self.pick(["", "t1", "t2"])),
            "needs_grammar": bool(self.rng.random() < (0.05 if grammar is None else 0.3)),
            "queue_timeout_s": self.pick([None] * 6 + [0.05]),
            "timeout_s": self.pick([None] * 6 + [0.1]),
            "keep_s": self.pick([None, None, 0.0, 0.1, 5.0]),
        }
        sampling = {
            "logprobs": self.pick([None] * 6 + [0]),
            "temperature": self.pick([0.0, 1.0]),
            "top_k": int(self.pick([-1, -1, 5])),
            "stop_token_ids": self.pick([()] * 4 + [(5, 17)]),
            "prompt_logprobs": self.pick([None] * 6 + [0]),
            "ignore_eos": bool(self.rng.random() < 0.5),
            "extra_key": str(self.pick(["", "", "salt"])),
        }
        if message["lora_id"]:
            self.harness.load_adapter(str(message["lora_id"]))
        weights = self.harness.weights[str(message["lora_id"] or "")]
        for _ in range(count):
            prompt = [int(token) for token in prompt]
            sampling["max_new_tokens"] = int(self.pick([1, 2, 5, 20, 40, 100]))
            rid = self.harness.submit(
                prompt=prompt,
                message=message,
                grammar=grammar,
                delivered=(
                    self.delivered(prompt, sampling, grammar, weights) if self.rng.random() < 0.2 else ()
                ),
                **sampling,
            )
            if message["needs_grammar"] and self.harness.answers[rid].finish is None:
                self.without_grammar.append(rid)

    def grammar(self) -> ToyGrammar:
        """Any grammar, also one that fails."""
        free_until = int(self.pick([0, 0, 0, 3]))
        begin, length = int(self.rng.integers(0, 12)), int(self.rng.integers(1, 14))
        return ToyGrammar(
            seed=int(self.rng.integers(1000)),
            length=int(self.pick([1, 2, 7, 30, 200])),
            ends_early=bool(self.rng.random() < 0.3),
            free_until=free_until,
            forced=((begin, begin + length), (begin + 20, begin + 40)) if self.rng.random() < 0.6 else (),
            fault=str(self.pick([""] * 8 + FAULTS)),
            fault_at=int(self.rng.integers(free_until, free_until + 12)),
        )

    def delivered(
        self, prompt: list[int], sampling: dict[str, Any], grammar: ToyGrammar | None, weights: int
    ) -> Sequence[int]:
        """The beginning of an answer; all of it only if its grammar is then complete."""
        params = {
            key: sampling[key] for key in ("max_new_tokens", "stop_token_ids", "ignore_eos")
        }  # those that change an answer
        harness = self.harness
        tokens, kind = expected_output(
            prompt, SamplingParams(**params), harness.eos, VOCAB_SIZE, harness.memory, grammar, weights
        )
        most = len(tokens) - 1
        if grammar is not None and (kind is FinishKind.ERROR or len(tokens) == grammar.length):
            most = min(most + 1, sampling["max_new_tokens"] - 1)
        return tokens[: int(self.rng.integers(most + 1))] if most > 0 else ()

    def pin(self) -> None:
        ids = np.array(BASE[: self.rng.integers(1, 61)], dtype=np.int32).tobytes()
        self.harness.scheduler.handle(
            Call(1, PinPrefix(ids, float(self.pick([0, 0.1, 5.0])))), self.harness.now_s
        )
        self.harness.scheduler.take_call_answers()
        self.harness.scheduler.audit()

    def finish_grammar(self, error: str) -> None:
        rid = self.without_grammar.pop(int(self.rng.integers(len(self.without_grammar))))
        self.harness.scheduler.handle(GrammarReady(rid, error), self.harness.now_s)
        self.harness.collect()

    def drain(self) -> None:
        """Nobody comes any more: everybody is answered within a bound, nothing stays, and nothing is stuck."""
        while self.without_grammar:
            self.finish_grammar("")
        scheduler = self.harness.scheduler
        for _ in range(MOST_STEPS):
            in_flight = bool(self.harness.in_flight)
            if self.harness.step() is not None or in_flight:
                continue
            scheduler.on_idle()
            assert not scheduler.report(self.harness.now_s).stalled
            if not scheduler.num_unfinished:
                self.harness.check_answers()
                assert not self.harness.runner.rows
                assert self.harness.pages().held == 0
                return
            self.harness.now_s = max(self.harness.now_s, scheduler.wake_s() or 0.0)
        raise AssertionError(f"not idle after {MOST_STEPS} steps: {list(self.harness.last_pass.lines())}")

    def any_rid(self) -> str:
        return f"r{self.rng.integers(len(self.harness.answers))}"

    def pick(self, values: list[Any]) -> Any:
        return values[int(self.rng.integers(len(values)))]


def live(harness: Harness, seed: int, num_acts: int) -> None:
    """A life of so many acts, to the end."""
    life = Life(harness, seed)
    for _ in range(num_acts):
        life.act()
    life.drain()


def live_with_drafts(config: dict[str, Any], right: float | None, seed: int, num_acts: int) -> None:
    """The same with a share of right drafts; None: the scheduler proposes them."""

    def next_token(known: Sequence[int]) -> int:
        """The model's wish: without its adapter, the grammar, and the tokens that are masked."""
        return (remembered(list(known), config["memory"]) >> 7) % VOCAB_SIZE

    with nullcontext() if right is None else proposing(next_token, right):
        live(Harness(**config), seed, num_acts)


@settings(max_examples=examples(120), deadline=None)
@given(config=configs(), right=RIGHT, seed=st.integers(0, 2**32), num_acts=one_of(20, 60))
def test_any_life_under_any_settings(config, right, seed, num_acts):
    live_with_drafts(config, right, seed, num_acts)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_acts", [60, 120])
@settings(max_examples=750, deadline=None)
@given(config=configs(), right=RIGHT, seed=st.integers(0, 2**32))
def test_many_long_lives(config, right, seed, num_acts):
    live_with_drafts(config, right, seed, num_acts)
