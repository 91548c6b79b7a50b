"""Images under random arrivals, aborts, failures, retractions and tiny pools of pages and rows.

The FakeRunner checks at each position of an image that it reads the row of that image; the harness checks the equations
of pages and rows after each step, and each answer.
"""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from engine.runtime.media import reason_against_images
from engine.runtime.step_plan import StepPlan
from tests.feasible import fits
from tests.selection import examples

from ..harness import Harness, Image

TILES = {"one": 1, "three": 3, "five": 5}


class ImagesMachine(RuleBasedStateMachine):
    """Anything may happen at any time."""

    harness: Harness

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16]),
        tile_rows=st.sampled_from([1, 3, 8]),
        row_pixels=st.sampled_from([0, 2]),
        num_pages=st.integers(8, 80),
        max_running_requests=st.integers(1, 6),
        radix_cache=st.booleans(),
        overlap=st.sampled_from([0, 0, 1, 2]),
        phases=st.sampled_from(["mixed", "prefill-first", "decode-first"]),
        schedule_policy=st.sampled_from(["fcfs", "lpm", "priority"]),
        chunked_prefill_size=st.sampled_from([-1, 1, 8, 24]),
        target_step_ms=st.sampled_from([0.0, 0.1, 15.0]),
        tile_s=st.sampled_from([0.0, 0.004, 1.0]),
        tile_parts=st.sampled_from([1, 2, 5]),
        images_are_whole=st.booleans(),
        schedule_conservativeness=st.sampled_from([0.01, 1.0]),
        host=st.sampled_from(
            [
                {},
                {"num_host_pages": 40, "preemption_mode": "swap"},
                {"num_host_pages": 40, "cache": {"kv_host_size": 1.0}},
            ]
        ),
        speculative=st.sampled_from(["off", "ngram", "mtp"]),
        chaos=st.sampled_from([None, None, "retract=0.2:20"]),
    )
    def make(
        self,
        page_size: int,
        tile_rows: int,
        row_pixels: int,
        num_pages: int,
        tile_s: float,
        tile_parts: int,
        images_are_whole: bool,
        host: dict[str, Any],
        **config: Any,
    ) -> None:
        if config["chunked_prefill_size"] == -1 and config["phases"] == "decode-first":
            config["phases"] = "mixed"
        if "cache" in host and not config["radix_cache"]:
            host = {}
        self.harness = Harness(
            page_size=page_size,
            num_pages=max(num_pages // page_size, 3),
            max_model_len=120,
            num_encoder_rows=8 * tile_rows,
            encoder_tile_rows=tile_rows,
            encoder_row_pixels=row_pixels,
            encoder_tile_parts=tile_parts,
            images_are_whole=images_are_whole,
            memory=3 if config["speculative"] != "off" else None,
            **host,
            **config,
        )
        self.harness.runner.tile_s = tile_s
        drafts = random.Random(1)
        self.harness.runner.drafts_right = lambda: drafts.random() < 0.6

    @rule(
        names=st.lists(st.sampled_from([*TILES]), max_size=3),
        before=st.integers(0, 12),
        between=st.integers(0, 4),
        own=st.lists(st.integers(6, 12), max_size=6),
        ends_with_text=st.booleans(),
        max_new_tokens=st.integers(1, 20),
        priority=st.integers(0, 2),
        group=st.sampled_from(["", "", "g"]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
    )
    def submit(
        self,
        names: list[str],
        before: int,
        between: int,
        own: list[int],
        ends_with_text: bool,
        max_new_tokens: int,
        priority: int,
        group: str,
        prompt_logprobs: int | None,
    ) -> None:
        harness, position, images = self.harness, before, []
        for name in names:
            images.append(Image(name, TILES[name], position))
            position += harness.image_rows(TILES[name]) + between
        prompt = [*range(20, 20 + before + between * len(names)), *own]
        if ends_with_text or not (names or prompt):
            prompt.append(1)
        num_tokens = len(prompt) + sum(harness.image_rows(TILES[name]) for name in names)
        _, _, media = harness.with_images(prompt, images)
        expected = fits(num_tokens, max_new_tokens, harness.capacity)
        expected = expected and reason_against_images(media, harness.capacity) is None
        rid = harness.submit(
            prompt=prompt,
            images=images,
            max_new_tokens=max_new_tokens,
            prompt_logprobs=prompt_logprobs,
            message={"priority": priority, "group": f"{group}{names}{before}{own}" if group else ""},
        )
        assert (harness.answers[rid].finish is None) == expected

    @rule(which=st.integers(0, 40))
    def abort(self, which: int) -> None:
        self.harness.abort(f"r{which}")

    @rule(which=st.integers(0, 40))
    def fail(self, which: int) -> None:
        self.harness.runner.fail_next.add(f"r{which}")

    @rule()
    def no_memory(self) -> None:
        """The next step that encodes finds no memory."""

        def once(plan: StepPlan) -> bool:
            if plan.encodes:
                self.harness.runner.no_memory = lambda plan: False
            return bool(plan.encodes)

        self.harness.runner.no_memory = once

    @rule()
    def flush(self) -> None:
        self.harness.flush()

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.runner.no_memory = lambda plan: False
            self.harness.run_until_idle()
            assert self.harness.pages().held == 0


TestImagesMachine = ImagesMachine.TestCase
TestImagesMachine.settings = settings(
    max_examples=examples(120), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
