"""Images in the whole scheduler: which tiles are encoded, in which step, and what a request waits for."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from engine.runtime.messages import FinishKind, GenerateRequest, KVHandoff, MediaItem
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import StepPlan
from engine.scheduler.journal.log_file import read_runs
from engine.scheduler.journal.replay import replay
from engine.scheduler.policy.fair import Fair
from engine.scheduler.queries.why import explain
from engine.scheduler.records.verdict import Reason
from engine.scheduler.speculation.speculation import NgramSpeculation

from ..harness import Harness, Image, extend_lens
from ..journal.recorded import finish, record

ROWS = 8  # of a tile


def make(num_tiles: int = 8, **options: Any) -> Harness:
    options.setdefault("num_pages", 200)
    return Harness(num_encoder_rows=num_tiles * ROWS, encoder_tile_rows=ROWS, **options)


def encodes(harness: Harness) -> dict[str, int]:
    """Tiles that were encoded, by image."""
    counts: dict[str, int] = {}
    for (pixels, _), count in harness.runner.num_encodes.items():
        name = pixels.rsplit("/", 1)[1]
        counts[name] = counts.get(name, 0) + count
    return counts


def hits(harness: Harness) -> int:
    return harness.scheduler.report(harness.now_s).totals.encoder_hits


def tiles_of_step(harness: Harness) -> int:
    batch = harness.step()
    assert batch is not None
    return sum(each.num_tiles for each in batch.plan.encodes)


# ---------------------------------------------------------------- what is encoded


def test_a_prefix_with_an_image_needs_no_rows_and_no_encode():
    harness = make()
    prompt = list(range(1, 20))
    harness.submit("a", prompt=prompt, images=[Image("cat", 3, 5)])
    harness.run_until_idle()
    harness.submit("b", prompt=[*prompt, 50, 51], images=[Image("cat", 3, 5)])
    harness.run_until_idle()
    assert encodes(harness) == {"cat": 3} and hits(harness) == 0
    assert harness.answers["b"].rows[-1].usage.cached_tokens >= 40


def test_after_a_hit_that_ends_within_an_image_the_other_tiles_are_encoded():
    harness = make(num_tiles=3, chunked_prefill_size=16)
    harness.submit("a", prompt=[1, 2, 3, 4, 6], images=[Image("cat", 3, 4)])
    assert tiles_of_step(harness) == 2  # tokens 0 to 15
    harness.abort("a")
    harness.submit("b", prompt=[7, 8], images=[Image("dog", 3, 1)], max_new_tokens=1)  # takes all rows
    harness.run_until_idle()
    assert encodes(harness) == {"cat": 2, "dog": 3}
    harness.submit("c", prompt=[1, 2, 3, 4, 6], images=[Image("cat", 3, 4)])
    harness.run_until_idle()
    assert harness.answers["c"].rows[-1].usage.cached_tokens == 16
    assert encodes(harness) == {"cat": 2 + 2, "dog": 3}


def test_an_image_at_another_place_is_read_from_the_encoder_cache():
    harness = make()
    harness.submit("a", prompt=list(range(1, 20)), images=[Image("cat", 3, 5)])
    harness.run_until_idle()
    harness.submit("b", prompt=list(range(30, 49)), images=[Image("cat", 3, 2), Image("cat", 3, 30)])
    harness.run_until_idle()
    assert encodes(harness) == {"cat": 3} and hits(harness) == 6


def test_eight_chats_about_two_images_encode_two():
    harness = make(chunked_prefill_size=-1, max_prefill_tokens=2000, max_model_len=200)
    for number in range(8):
        prompt = [20 + number] * 9  # no common prefix
        harness.submit(prompt=prompt, images=[Image("cat", 2, 3), Image("dog", 2, 21)])
    harness.run_until_idle()
    assert encodes(harness) == {"cat": 2, "dog": 2}


def test_parallel_samples_encode_once_with_and_without_a_prefix_cache():
    for radix_cache in (True, False):
        harness = make(radix_cache=radix_cache)
        for _ in range(3):
            message = {"group": "g"}
            harness.submit(prompt=[1, 2, 3, 4, 6], images=[Image("cat", 3, 2)], message=message)
        harness.run_until_idle()
        assert encodes(harness) == {"cat": 3}


def test_a_retracted_request_finds_its_tiles_again():
    harness = make(chaos="retract=1.0:3", radix_cache=False, chunked_prefill_size=12)
    harness.submit("a", prompt=[1, 2, 3], images=[Image("cat", 3, 2)], max_new_tokens=6)
    harness.run_until_idle()
    assert harness.scheduler.report(0.0).totals.retracted_reqs == 3
    assert encodes(harness) == {"cat": 3}


def test_the_tiles_of_a_failed_step_are_encoded_again():
    harness = make()
    harness.submit("a", prompt=[1, 2, 3], images=[Image("cat", 2, 2)])
    harness.runner.fail_next.add("a")
    harness.run_until_idle()
    harness.submit("b", prompt=[9, 8, 7], images=[Image("cat", 2, 1)])

    def once(plan: StepPlan) -> bool:
        harness.runner.no_memory = lambda plan: False
        return True

    harness.runner.no_memory = once
    harness.run_until_idle()
    assert encodes(harness) == {"cat": 6}
    assert harness.answers["b"].finish is not None and harness.answers["b"].finish.kind is FinishKind.LENGTH


def test_a_tile_that_an_earlier_step_could_not_read_does_not_fail_the_next_request():
    """The rows of an image are wrong since the first request; a second one finds that out."""
    harness = make()
    harness.submit("a", prompt=[1, 2, 3], images=[Image("cat", 2, 2)])
    harness.run_until_idle()
    harness.runner.fail_next.add("b")
    for rid in ("b", "c"):
        harness.submit(rid, prompt=[9, 8, 7], images=[Image("cat", 2, 1)])
        harness.run_until_idle()
    finishes = [harness.answers[rid].finish for rid in ("b", "c")]
    assert [each.kind for each in finishes if each is not None] == [FinishKind.ERROR, FinishKind.LENGTH]
    assert encodes(harness) == {"cat": 4}


# ---------------------------------------------------------------- rows


def test_a_request_waits_until_rows_are_free_and_the_log_says_so():
    harness = make(num_tiles=4)
    harness.submit("a", prompt=[1, 2, 3], images=[Image("cat", 3, 2)], max_new_tokens=8)
    harness.submit("b", prompt=[4, 6, 7], images=[Image("dog", 2, 2)], max_new_tokens=1)
    harness.submit("c", prompt=[8, 9, 10], max_new_tokens=1)
    harness.step()
    verdict = harness.verdicts_about("b")[0]
    assert (verdict.reason, verdict.need, verdict.have) == (Reason.MEDIA_LIMIT, 2 * ROWS, ROWS)
    assert harness.answers["c"].finish is not None, "text needs no rows"
    harness.run_until_idle()
    story = explain(harness.scheduler.decisions, "b")
    assert "the encoder's rows are promised to other images (need 16, have 8)" in story.sentence
    assert "had 2 tiles of its image encoded" in story.sentence
    assert ", 1 image" in story.rows[0][3]
    harness.submit("d", prompt=[9, 6, 7], images=[Image("dog", 2, 2)], max_new_tokens=1)
    harness.run_until_idle()
    assert "found its image encoded" in explain(harness.scheduler.decisions, "d").sentence


def test_what_a_request_needs_and_has():
    """Tiles that it needs and that are idle are not free for its others; a tile that its prefix cuts is needed."""
    harness = make(num_tiles=5, chunked_prefill_size=8)
    cache, by_id = harness.scheduler._parts.encoder_cache, harness.scheduler._requests.by_id
    harness.submit(prompt=[1, 2], images=[Image("cat", 2, 0)])
    harness.run_until_idle()
    harness.submit("a", prompt=[4, 6, 7, 8], images=[Image("elk", 2, 4)])
    harness.submit("b", prompt=[9], images=[Image("cat", 2, 0), Image("dog", 2, 16)])
    harness.step()
    verdict = cache.refusal(by_id["b"], 0)
    assert verdict is not None and (verdict.need, verdict.have) == (2 * ROWS, ROWS)
    verdict = cache.refusal(by_id["b"], 16 + 3)
    assert verdict is None, "cat may go"
    harness.submit("c", prompt=[9], images=[Image("cow", 5, 0)])
    for ready_len, need in ((0, 5), (7, 5), (8, 4)):
        verdict = cache.refusal(by_id["c"], ready_len)
        assert verdict is not None and (verdict.need, verdict.have) == (need * ROWS, 3 * ROWS)
    harness.run_until_idle()


def test_a_chunk_that_ends_with_a_tile_gives_it_back():
    harness = make(num_tiles=1, chunked_prefill_size=8)
    harness.submit("a", prompt_len=20, images=[Image("cat", 1, 0)])
    harness.submit("b", prompt_len=20, images=[Image("dog", 1, 0)])
    harness.step()
    cache, by_id = harness.scheduler._parts.encoder_cache, harness.scheduler._requests.by_id
    assert "cat" in encodes(harness) and cache.refusal(by_id["b"], 0) is None
    harness.run_until_idle()


def test_tiles_of_two_images_are_encoded_apart():
    """The first tile of one and the second one of another get consecutive rows."""
    harness = make(num_tiles=4, chunked_prefill_size=32)
    harness.submit("a", prompt_len=25, images=[Image("cat", 2, 24)])
    assert tiles_of_step(harness) == 1
    harness.abort("a")
    harness.submit("b", prompt=[4, 5, 6], images=[Image("dog", 1, 2), Image("cat", 2, 10)])
    batch = harness.step()
    assert batch is not None
    first, second = batch.plan.encodes
    assert first.first_row + ROWS == second.first_row and second.first_tile == 1
    harness.run_until_idle()


def test_one_part_of_work_is_done_at_once_by_a_step_with_no_other():
    """Its time is not known yet; the chunk that needs it need not wait for the next step."""
    harness = make(target_step_ms=15.0)
    harness.submit("text", prompt_len=6, max_new_tokens=9)
    harness.step()
    harness.submit("a", prompt_len=3, images=[Image("cat", 1, 0)], max_new_tokens=1)
    batch = harness.step()
    assert batch is not None and batch.plan.encodes and [req.rid for req in batch.reqs] == ["a", "text"]
    harness.run_until_idle()


def test_the_checksum_of_a_plan_covers_images():
    harness = make(target_step_ms=15.0)
    harness.submit("a", prompt_len=3, images=[Image("cat", 1, 0)])
    batch = harness.step()
    assert batch is not None and batch.plan.encodes
    without_rows = tuple(replace(each, media=b"") for each in batch.plan.new_reqs)
    plans = [batch.plan, replace(batch.plan, encodes=()), replace(batch.plan, new_reqs=without_rows)]
    assert len({replace(batch, plan=plan).checksum() for plan in plans}) == 3
    harness.run_until_idle()


def test_half_a_tile_is_not_given_away():
    """One tile: its first rows are read by a chunk, the others by the next; meanwhile another image waits."""
    harness = make(num_tiles=1, chunked_prefill_size=8)
    harness.submit("a", prompt=[1, 2, 3], images=[Image("cat", 1, 2)])
    harness.step()
    harness.submit("b", prompt=[4, 6, 7], images=[Image("dog", 1, 2)])
    harness.step()
    assert harness.verdicts_about("b")[0].reason is Reason.MEDIA_LIMIT
    harness.run_until_idle()
    assert encodes(harness) == {"cat": 1, "dog": 1}


def test_rows_are_taken_from_the_background_at_once():
    """One tile, which a line has promised or reads: it gives its rows to another class at once."""
    harness = make(num_tiles=1, chunked_prefill_size=8)
    line = {"background": True}
    harness.submit("a", prompt=list(range(1, 40)), images=[Image("cat", 1, 30)], message=line)
    harness.step()
    harness.submit("b", prompt=[4, 6, 7], images=[Image("dog", 1, 2)])
    harness.step()
    assert [rid for record in harness.scheduler.decisions.passes for rid in record.retracted] == ["a"]
    assert harness.scheduler._parts.requests.by_id["b"].row >= 0
    harness.run_until_idle()


def test_an_image_is_encoded_beside_a_waiting_line():
    """The walk over the background comes second and drops no tile; the runner checks what each position reads."""
    harness = make(max_running_requests=1)
    harness.submit("line", message={"background": True})
    harness.submit("a", prompt_len=6, images=[Image("cat", 1, 2)])
    harness.run_until_idle()
    assert encodes(harness) == {"cat": 1}


def test_images_are_charged_to_the_class_of_their_request(monkeypatch: pytest.MonkeyPatch):
    """A tenant's lines do not delay its other requests under `fair`."""
    counters = []
    for background in (False, True):
        harness = make(schedule_policy="fair")
        policy, target = harness.scheduler._parts.policy, harness.scheduler._parts.target
        assert isinstance(policy, Fair)
        monkeypatch.setattr(target, "tokens_of", lambda pixels: round(100 * pixels))
        harness.submit(prompt_len=20, message={"tenant": "a"})
        harness.run_until_idle()
        before = policy._counters["a"]
        fields = {"tenant": "a", "background": background}
        harness.submit(prompt=[1, 2, 3], images=[Image("cat", 1, 2)], message=fields)
        harness.run_until_idle()
        counters.append(policy._counters["a"] - before)
    assert counters[0] > 100 and counters[1] == 0, counters


def test_an_idle_image_leaves_when_rows_are_short_the_longest_idle_one_first():
    harness = make(num_tiles=3)
    for name in ("cat", "dog", "cow", "cat", "elk", "dog"):
        harness.submit(prompt_len=6, images=[Image(name, 1, 2)])
        harness.run_until_idle()
    assert encodes(harness) == {"cat": 1, "dog": 2, "cow": 1, "elk": 1}


def test_the_report_has_the_rows_by_state():
    harness = make(num_tiles=8)
    harness.submit(prompt_len=6, images=[Image("cat", 2, 2)], max_new_tokens=1)
    harness.run_until_idle()
    harness.submit("a", prompt_len=100, images=[Image("dog", 3, 80)], max_new_tokens=1)
    harness.step()
    figures = harness.scheduler.report(harness.now_s).encoder
    assert (figures.used_rows, figures.cached_rows, figures.total_rows) == (3 * ROWS, 2 * ROWS, 8 * ROWS)
    harness.run_until_idle()


def test_an_aborted_request_gives_its_rows_back():
    harness = make(num_tiles=4, chunked_prefill_size=8)
    harness.submit("a", prompt=[1, 2, 3], images=[Image("cat", 4, 2)])
    harness.step()
    harness.abort("a")
    harness.submit("b", prompt=[1, 2, 3], images=[Image("dog", 4, 2)])
    harness.run_until_idle()
    assert encodes(harness)["dog"] == 4


def test_a_flush_forgets_idle_tiles_and_keeps_those_that_are_needed():
    harness = make(num_tiles=8, chunked_prefill_size=16)
    harness.submit(prompt=[1, 2, 3], images=[Image("cat", 3, 2)])
    harness.run_until_idle()
    harness.submit(prompt=[4, 6, 7], images=[Image("dog", 3, 2)])
    harness.step()
    harness.flush()
    harness.submit(prompt=[1, 2, 3], images=[Image("cat", 3, 2)])
    harness.run_until_idle()
    assert encodes(harness) == {"cat": 6, "dog": 3}


def test_a_model_with_state_layers_reuses_a_prefix_up_to_the_end_of_an_image():
    harness = make(num_checkpoints=8, checkpoint_pages=50)
    for number in range(2):
        harness.submit(prompt=[1, 2, 3, *range(20 + number, 50)], images=[Image("cat", 2, 2)])
        harness.run_until_idle()
    assert [each.rows[-1].usage.cached_tokens for each in harness.answers.values()] == [0, 16]
    assert encodes(harness) == {"cat": 2}


# ---------------------------------------------------------------- steps


def test_while_others_decode_an_image_is_encoded_over_several_steps():
    """50 ms a tile and steps of 10 ms: one tile a step, and the chunk ends before the next one."""
    harness = make(target_step_ms=15.0)
    harness.runner.tile_s = 0.05
    harness.submit("text", prompt_len=6, max_new_tokens=60)
    harness.submit("warm", prompt_len=6, images=[Image("dog", 1, 2)], max_new_tokens=1)
    for _ in range(4):
        harness.step()
    harness.submit("a", prompt=[1, 2, 3], images=[Image("cat", 5, 2)], max_new_tokens=1)
    assert [tiles_of_step(harness) for _ in range(6)] == [1, 1, 1, 1, 1, 0]
    assert harness.answers["a"].finish is not None
    assert harness.answers["text"].finish is None, "the others go on"
    harness.run_until_idle()


@pytest.mark.parametrize(("num_others", "most"), [(0, 1), (1, 3)])
def test_as_many_tiles_share_a_step_as_decodes_take_or_as_the_target_allows(num_others, most):
    """4 ms a tile and 10 ms for decodes, the time of one image; while others wait, the target of 30 ms counts."""
    harness = make(num_tiles=40, target_step_ms=30.0, max_model_len=400, num_pages=100)
    harness.runner.tile_s = 0.004
    harness.runner.step_s = lambda plan: 0.01 + 1e-5 * plan.total_num_scheduled_tokens
    harness.submit("text", prompt_len=6, max_new_tokens=60)
    harness.submit("warm", prompt_len=6, images=[Image("dog", 1, 2)], max_new_tokens=1)
    for _ in range(8):
        harness.step()
    harness.submit("a", prompt=[1, 2, 3], images=[Image("cat", 12, 2)], max_new_tokens=1)
    for number in range(num_others):
        harness.submit(f"b{number}", prompt=[1, 2, 3], images=[Image("cow", 12, 2)], max_new_tokens=1)
    counts = []
    while any(answer.finish is None for rid, answer in harness.answers.items() if rid != "text"):
        counts.append(tiles_of_step(harness))
    assert sum(counts) == 12 * (1 + num_others) and max(counts) == most, counts
    harness.run_until_idle()


def test_steps_with_an_image_take_at_most_twice_as_long_as_plain_ones():
    """An eighth of SmolVLM's rows and parts; costs in ms: 7 of 4 decodes, 0.3 of a token, 5 of a part."""
    harness = Harness(
        num_encoder_rows=72,
        encoder_tile_rows=8,
        encoder_tile_parts=7,
        target_step_ms=50.0,
        page_size=8,
        num_pages=200,
    )
    num_decodes = 4

    def step_s(plan: StepPlan) -> float:
        return 0.007 + 0.0003 * max(0, plan.total_num_scheduled_tokens - num_decodes)

    harness.runner.tile_s, harness.runner.step_s = 7 * 0.005, step_s
    for number in range(num_decodes):
        harness.submit(f"text{number}", prompt_len=30, max_new_tokens=150)
    harness.submit("warm", prompt_len=40, images=[Image("dog", 1, 2)], max_new_tokens=1)
    while harness.answers["warm"].finish is None:
        harness.step()
    for _ in range(8):
        harness.step()
    harness.submit("a", prompt_len=100, images=[Image("cat", 8, 20)], max_new_tokens=1)
    seconds, num_parts = [], 0
    while num_parts < 8 * 7:
        batch = harness.step()
        assert batch is not None and len(batch) - batch.num_extends == num_decodes
        parts = sum(each.num_parts or 7 for each in batch.plan.encodes)
        seconds.append(step_s(batch.plan) + 0.005 * parts)
        num_parts += parts
    *most, longest = sorted(seconds)
    assert max(most) <= 2.1 * 0.007 and longest <= 2.5 * 0.007, [round(1e3 * each, 1) for each in seconds]
    assert len(seconds) < 56 + 20, "parts and tokens share the time"
    harness.run_until_idle()


def test_a_tile_that_takes_longer_than_a_step_is_encoded_in_parts():
    """A tile takes 200 ms in 10 parts; steps are 25 ms long, of which decodes take 5."""
    harness = make(target_step_ms=25.0, encoder_tile_parts=10)
    harness.runner.tile_s, harness.runner.step_s = 0.2, lambda plan: 0.005
    harness.submit("text", prompt_len=6, max_new_tokens=120)
    harness.submit("warm", prompt_len=6, images=[Image("dog", 1, 2)], max_new_tokens=1)
    for _ in range(4):
        harness.step()
    harness.submit("a", prompt_len=9, images=[Image("cat", 3, 5)], max_new_tokens=1)
    harness.submit("later", prompt_len=4, max_new_tokens=1)
    parts = []
    while harness.answers["a"].finish is None:
        batch = harness.step()
        assert batch is not None and batch.reqs[-1].rid == "text", "it decodes in each step"
        parts.append(sum(each.num_parts for each in batch.plan.encodes))
        assert all(each.num_parts for each in batch.plan.encodes)
    assert sum(parts) == 30 and max(parts) == 1, parts
    assert harness.answers["later"].finish is not None
    assert encodes(harness) == {"dog": 1, "cat": 3} and hits(harness) == 0
    harness.run_until_idle()
    assert "had 3 tiles of its image encoded" in explain(harness.scheduler.decisions, "a").sentence


def test_work_on_the_tile_of_a_waiting_request_is_not_lost():
    """Its first page begins with the image, so it starts when the first tile is encoded; an abort leaves the tile."""
    harness = make(target_step_ms=15.0, encoder_tile_parts=6)
    harness.runner.tile_s = 0.3
    harness.submit("text", prompt_len=6, max_new_tokens=90)
    for _ in range(3):
        harness.step()
    harness.submit("a", prompt_len=3, images=[Image("cat", 2, 0)], max_new_tokens=1)
    parts = []
    while not harness.answers.get("b", harness.answers["a"]).rows:
        batch = harness.step()
        assert batch is not None
        parts.append(sum(each.num_parts for each in batch.plan.encodes))
        if len(parts) == 2:
            assert harness.verdicts_about("a")[-1].reason is Reason.ENCODE_TIME
            harness.abort("a")
            harness.submit("b", prompt_len=3, images=[Image("cat", 2, 0)], max_new_tokens=1)
    assert sum(parts) == 12 and parts[:6] == [1] * 6, parts
    harness.run_until_idle()


@pytest.mark.parametrize("page_size", [4, 16])
def test_work_ahead_does_not_evict_that_of_a_request_before(page_size):
    """There are rows for one image, in one or two tiles. When the first one is encoded, there is time to begin another.

    The tokens of a tile take longer than a step may, so no request starts in the step that ends its first tiles.
    """
    num_tiles = 1 if page_size == 4 else 2
    harness = make(num_tiles=num_tiles, page_size=page_size, target_step_ms=15.0, encoder_tile_parts=5)
    harness.runner.tile_s = 0.0125
    harness.runner.step_s = lambda plan: 0.005 + 0.002 * plan.total_num_scheduled_tokens
    harness.submit("text", prompt_len=6, max_new_tokens=120)
    harness.submit("warm", prompt_len=6, images=[Image("dog", 1, 2)], max_new_tokens=1)
    for _ in range(8):
        harness.step()
    harness.flush()  # rows are free at first, so that both requests get some
    for rid in ("cat", "cow"):
        harness.submit(rid, prompt_len=3, images=[Image(rid, num_tiles, 0)], max_new_tokens=1)
    for _ in range(40):
        harness.step()
    assert harness.answers["text"].finish is None
    assert harness.answers["cat"].finish is not None and harness.answers["cow"].finish is not None
    assert encodes(harness)["cat"] == num_tiles
    harness.run_until_idle()


def test_work_on_tiles_is_no_part_of_the_cost_of_decodes():
    """Steps of decodes take 10 ms; some of them also do 50 ms of work on the tile of a waiting request."""
    harness = make(target_step_ms=15.0, encoder_tile_parts=6, speculative="ngram")
    harness.runner.tile_s = 0.3
    harness.submit("text", prompt_len=6, max_new_tokens=30)
    harness.step()
    harness.submit("a", prompt_len=3, images=[Image("cat", 1, 0)], max_new_tokens=1)
    mixed = [harness.step() for _ in range(5)]
    assert all(batch is not None and batch.plan.encodes and not batch.num_extends for batch in mixed)
    parts = harness.scheduler._parts
    assert isinstance(parts.speculation, NgramSpeculation)
    assert parts.speculation._costs.seconds(1, 1) == pytest.approx(0.01)
    assert parts.multi_step._round_s == pytest.approx(0.01)
    harness.run_until_idle()


def test_without_decodes_all_tiles_of_a_chunk_are_encoded_at_once():
    harness = make(target_step_ms=15.0)
    harness.runner.tile_s = 0.05
    harness.submit("a", prompt=[1, 2, 3], images=[Image("cat", 5, 2)], max_new_tokens=1)
    assert tiles_of_step(harness) == 5
    harness.run_until_idle()


def test_a_text_is_not_held_up_by_an_image_that_is_encoded():
    harness = make(target_step_ms=15.0)
    harness.runner.tile_s, harness.runner.step_s = 0.05, lambda plan: 0.001
    harness.submit("text", prompt_len=6, max_new_tokens=60)
    harness.step()
    for name in ("cat", "dog"):
        harness.submit(name, prompt_len=6, images=[Image(name, 4, 0)], max_new_tokens=1)
    harness.submit("later", prompt_len=6, max_new_tokens=1)
    harness.step()
    harness.step()
    assert harness.answers["later"].finish is not None
    assert Reason.ENCODE_TIME in [each.reason for each in harness.verdicts_about("dog")]
    harness.run_until_idle()


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("start", [0, 5, 15])
def test_a_prompt_advances_by_a_page_at_least(page_size, start):
    """Also where a page has the rows of several tiles, of which one fits into the time."""
    harness = make(target_step_ms=15.0, page_size=page_size, num_pages=400 // page_size)
    harness.runner.tile_s = 0.05
    harness.submit("text", prompt_len=6, max_new_tokens=90)
    harness.step()
    harness.submit("a", prompt_len=start + 3, images=[Image("cat", 8, start)], max_new_tokens=1)
    for _ in range(20 if page_size > 1 else 80):
        harness.step()
    assert harness.answers["a"].finish is not None
    harness.run_until_idle()


def test_a_step_that_encodes_is_settled_before_the_next_one():
    harness = make()
    harness.submit("a", prompt=[1, 2, 3], images=[Image("cat", 1, 2)])
    batch = harness.scheduler.next_batch(harness.now_s)
    assert batch is not None and harness.scheduler.needs_result(batch)
    harness.scheduler.settle(batch, harness.runner.launch(batch.plan).wait(), harness.now_s)
    batch = harness.scheduler.next_batch(harness.now_s)
    assert batch is not None and not harness.scheduler.needs_result(batch)


# ---------------------------------------------------------------- refusals, and the log


def test_what_can_never_run_is_refused_at_once():
    harness = make(num_tiles=4)
    harness.submit("a", prompt=[1, 2, 3], images=[Image("cat", 5, 2)])
    harness.submit("b", prompt=[1, 2, 3], images=[Image("cat", 1, 2)], message={"handoff": KVHandoff("7")})
    finish = harness.answers["a"].finish
    assert finish is not None and finish.status == 400 and "5 tiles with 40 rows" in finish.message
    finish = harness.answers["b"].finish
    assert finish is not None and finish.status == 400 and "without bootstrap_room" in finish.message
    text = Harness()
    text.submit("a", prompt=[1, 2, 3], images=[Image("cat", 1, 2)])
    finish = text.answers["a"].finish
    assert finish is not None and "text only" in finish.message


def test_rows_of_tiles_that_alternate_are_placed_in_order_of_positions():
    harness = make()
    rows = array("i", [0, 8, 8, 4, 16, 4, 12, 4, 20, 4, 23, 1]).tobytes()
    item = MediaItem(b"d" * 32, array("i", [1, 25]).tobytes(), "/pixels", (3, 4, 4, 3), rows)
    params = SamplingParams(max_new_tokens=1, seed=1)
    harness.scheduler.handle(
        GenerateRequest("a", array("i", [1] * 30).tobytes(), params, media=(item,)), harness.now_s
    )

    batch = harness.scheduler.next_batch(harness.now_s)

    assert batch is not None
    placed = np.frombuffer(batch.plan.new_reqs[0].media, dtype=np.int32).reshape(-1, 3)
    assert placed[:, :2].tolist() == [[1, 8], [9, 4], [13, 4], [17, 4], [21, 4], [25, 1]]
    first, second = placed[1, 2], placed[2, 2]
    assert placed[3:, 2].tolist() == [first + 4, second + 4, second + 7]


GOOD = MediaItem(b"d" * 32, array("i", [1, ROWS]).tobytes(), "/pixels", (1, 4, 4, 3))


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (MediaItem(b"short", GOOD.runs, "", GOOD.shape), "digest has 5 bytes"),
        (MediaItem(GOOD.digest, b"", "", GOOD.shape), "runs has 0 bytes"),
        (
            MediaItem(GOOD.digest, array("i", [1, 4]).tobytes(), "", GOOD.shape),
            "4 tokens, but its tiles have 8",
        ),
        (MediaItem(GOOD.digest, array("i", [9, 8]).tobytes(), "", GOOD.shape), "within the 12 tokens"),
        (MediaItem(GOOD.digest, array("i", [-1, 8]).tobytes(), "", GOOD.shape), "must follow each other"),
        (
            MediaItem(GOOD.digest, array("i", [4, 4, 1, 4]).tobytes(), "", GOOD.shape),
            "must follow each other",
        ),
        (
            MediaItem(GOOD.digest, array("i", [1, 9, 1, -1]).tobytes(), "", GOOD.shape),
            "must follow each other",
        ),
        (MediaItem(GOOD.digest, GOOD.runs, "", (0, 4, 4, 3)), "shape"),
        (MediaItem(GOOD.digest, GOOD.runs, "", GOOD.shape, b"1234"), "rows has 4 bytes"),
        (
            MediaItem(GOOD.digest, GOOD.runs, "", GOOD.shape, array("i", [0, 7]).tobytes()),
            "its tiles have 7 rows",
        ),
        (
            MediaItem(GOOD.digest, GOOD.runs, "", GOOD.shape, array("i", [1, 8]).tobytes()),
            "within the 8 rows",
        ),
        (
            MediaItem(GOOD.digest, GOOD.runs, "", GOOD.shape, array("i", [-1, 8]).tobytes()),
            "within the 8 rows",
        ),
        (
            MediaItem(GOOD.digest, GOOD.runs, "", GOOD.shape, array("i", [8, 0, 0, 8]).tobytes()),
            "within the 8",
        ),
        (MediaItem(GOOD.digest, GOOD.runs, "", (1, 4)), "shape"),  # type: ignore[arg-type]
        (MediaItem(GOOD.digest, GOOD.runs, 7, GOOD.shape), "pixels"),  # type: ignore[arg-type]
        ("cat", "MediaItem"),
    ],
)
def test_a_wrong_image_is_refused_by_name(item, words):
    harness = make()
    params = SamplingParams(max_new_tokens=1, seed=1)
    ids = array("i", [1] * 12).tobytes()
    for number, each in enumerate((item, GOOD)):
        message = GenerateRequest(f"{number}", ids, params, media=(each,))
        harness.scheduler.handle(message, harness.now_s)
    [rows] = [each.outputs for each in harness.scheduler.take_outputs()]
    assert [row.rid for row in rows] == ["0"]
    assert rows[0].finish is not None and words in rows[0].finish.message, rows[0].finish


@pytest.mark.parametrize(("overlap", "row_pixels"), [(0, 0), (1, 0), (1, 2)])
def test_a_run_with_images_is_replayed_without_pixels(tmp_path: Path, overlap: int, row_pixels: int) -> None:
    path = tmp_path / "decisions.log"
    harness = record(
        path,
        num_encoder_rows=6 * ROWS,
        encoder_tile_rows=ROWS,
        encoder_row_pixels=row_pixels,
        num_pages=40,
        chunked_prefill_size=16,
        target_step_ms=15.0,
        schedule_conservativeness=0.01,
        overlap=overlap,
    )
    harness.runner.tile_s = 0.002 if row_pixels else 0.006
    rng = random.Random(1)
    for _ in range(12):
        name = rng.choice(["cat", "dog", "cow"])
        images = [Image(name, len(name) + (name == "cow"), 3)] if rng.random() < 0.8 else []
        harness.submit(prompt_len=rng.randrange(4, 9), images=images, max_new_tokens=rng.randrange(1, 12))
        harness.step()
    harness.run_until_idle()
    finish(harness)
    records = harness.scheduler.decisions.passes
    assert sum(sum(each.num_tiles.values()) for each in records) == sum(encodes(harness).values()) > 5
    assert any("ENCODES" in line for each in records for line in each.lines())
    (run,) = read_runs(path)
    result = replay(run)
    assert result.is_equal, result.difference


# ---------------------------------------------------------------- images of any size


def any_size(num_blocks: int, **options: Any) -> Harness:
    """An image is one tile, of as many blocks as it has tiles otherwise; the last one is not full."""
    return make(num_blocks, encoder_row_pixels=2, **options)


def test_an_image_of_any_size_is_encoded_once_into_blocks_that_need_not_follow_each_other():
    harness = any_size(6)
    for name, num_blocks in (("one", 1), ("two", 2), ("other", 1)):
        harness.submit(prompt=[1, 2, 3], images=[Image(name, num_blocks, 1)], max_new_tokens=1)
    harness.run_until_idle()
    harness.submit(prompt=[1, 9, 3], images=[Image("two", 2, 2)], max_new_tokens=1)
    harness.submit(
        prompt=[1, 7, 3], images=[Image("four", 4, 1)], max_new_tokens=1
    )  # the two others are evicted
    harness.run_until_idle()

    assert encodes(harness) == {"one": 1, "two": 1, "other": 1, "four": 1}
    assert hits(harness) == 1


@pytest.mark.parametrize("tile_parts", [1, 5])
def test_an_image_is_charged_for_its_pixels(monkeypatch: pytest.MonkeyPatch, tile_parts: int):
    """Also if steps divide the work on it. A block has 32 pixels, and the last one of an image a row of 4 fewer."""
    for num_blocks in (1, 3):
        harness = any_size(3, encoder_tile_parts=tile_parts, target_step_ms=15.0)
        harness.runner.tile_s = 0.05
        pixels: list[float] = []
        monkeypatch.setattr(
            harness.scheduler._parts.target, "tokens_of", lambda num, pixels=pixels: pixels.append(num) or 0
        )
        harness.submit("text", prompt_len=6, max_new_tokens=30)
        harness.step()
        harness.submit(prompt=[1, 2, 3], images=[Image("cat", num_blocks, 1)], max_new_tokens=1)
        harness.run_until_idle()
        assert sum(pixels) == pytest.approx(32 * num_blocks - 4)
        assert len(pixels) >= tile_parts * num_blocks


def test_work_on_an_image_of_several_blocks_is_divided_into_the_parts_of_all():
    """An image takes 50 ms a block, 10 ms a part; steps are 15 ms long, of which decodes take 10."""
    harness = any_size(3, target_step_ms=15.0, encoder_tile_parts=5)
    harness.runner.tile_s, harness.runner.step_s = 0.05, lambda plan: 0.010
    harness.submit("text", prompt_len=6, max_new_tokens=90)
    harness.submit("warm", prompt=[1, 2, 3], images=[Image("dog", 1, 1)], max_new_tokens=1)
    for _ in range(4):
        harness.step()
    harness.submit("a", prompt=[1, 2, 3], images=[Image("cat", 3, 1)], max_new_tokens=1)
    parts = []
    while harness.answers["a"].finish is None:
        batch = harness.step()
        assert batch is not None
        parts += [each.num_parts for each in batch.plan.encodes]
    assert parts == [1] * 15
    harness.run_until_idle()


def test_blocks_of_images_are_promised_together():
    harness = any_size(5)
    harness.submit("a", prompt=[1, 2], images=[Image("three", 3, 1)], max_new_tokens=8)
    harness.submit("b", prompt=[3, 4], images=[Image("wide", 3, 1)], max_new_tokens=1)
    harness.submit("c", prompt=[5, 6], images=[Image("wider", 6, 1)], max_new_tokens=1)
    finish_of_c = harness.answers["c"].finish
    assert (
        finish_of_c is not None
        and "1 tile with 48 rows, and the encoder cache holds 40" in finish_of_c.message
    )

    harness.run_until_idle()

    assert encodes(harness) == {"three": 1, "wide": 1}


# ---------------------------------------------------------------- images that are computed whole


def chunks_of(harness: Harness) -> list[tuple[int, int]]:
    """(start, end) of what each request computes in each step, until nothing is left."""
    found = []
    while (batch := harness.step()) is not None:
        starts, lengths = (
            np.frombuffer(each, dtype=np.int32).tolist()
            for each in (batch.plan.num_computed_tokens, batch.plan.num_scheduled_tokens)
        )
        found += [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    return found


@pytest.mark.parametrize(
    ("chunk_size", "last"), [(4, [(24, 28), (28, 32), (32, 35)]), (12, [(24, 35)])], ids=["page", "chunk"]
)
def test_a_chunk_ends_before_or_after_images_that_are_longer(chunk_size: int, last: list[tuple[int, int]]):
    """Pages have 4 tokens; images are 8 long, at 5 and 15, and no page ends between them."""
    harness = make(images_are_whole=True, chunked_prefill_size=chunk_size)

    images = [Image("cat", 1, 5), Image("dog", 1, 15)]
    harness.submit("a", prompt=list(range(1, 20)), images=images, max_new_tokens=1)

    assert chunks_of(harness) == [(0, 4), (4, 24), *last]


def test_an_image_waits_for_a_step_without_other_prompts():
    harness = make(images_are_whole=True, chunked_prefill_size=12)
    harness.submit("text", prompt=list(range(1, 11)), max_new_tokens=1)
    harness.submit("a", prompt=list(range(21, 30)), images=[Image("cat", 3, 1)], max_new_tokens=1)

    batch = harness.step()
    assert batch is not None and extend_lens(batch) == [10]
    assert chunks_of(harness) == [(0, 28), (28, 33)]
    assert harness.answers["a"].finish is not None


def test_what_an_image_leaves_of_a_step_goes_to_another_prompt():
    """Two prompts share 12 tokens; of the first one a page is before the image, which is longer than the rest."""
    harness = make(images_are_whole=True, chunked_prefill_size=12, max_num_partial_prefills=2)
    harness.submit("a", prompt=[1, 2, 3, 4, 5], images=[Image("cat", 2, 4)], max_new_tokens=1)
    harness.submit("text", prompt=list(range(20, 60)), max_new_tokens=1)

    batch = harness.step()

    assert batch is not None and extend_lens(batch) == [4, 8]


def test_both_of_two_images_without_a_cut_between_them_are_encoded_first():
    """While others decode, work on tiles is divided among steps; the chunk comes when both are there."""
    harness = make(
        2, images_are_whole=True, chunked_prefill_size=8, target_step_ms=11.0, encoder_tile_parts=4
    )
    harness.runner.tile_s = 0.02
    harness.submit("seen", prompt=list(range(1, 9)), images=[Image("cow", 1, 2)], max_new_tokens=1)
    harness.run_until_idle()
    harness.submit("decodes", prompt=list(range(50, 60)), max_new_tokens=100)
    for _ in range(5):
        harness.step()

    images = [Image("cat", 1, 5), Image("dog", 1, 15)]
    harness.submit("a", prompt=list(range(1, 20)), images=images, max_new_tokens=1)
    while harness.answers["a"].finish is None:
        harness.step()

    assert encodes(harness) == {"cow": 1, "cat": 1, "dog": 1}
    assert harness.answers["decodes"].finish is None


def test_the_first_half_of_an_image_is_never_a_hit():
    """The match ends within it because the prompt does, and because the cache has lost the other half."""
    harness = make(images_are_whole=True, num_pages=12, max_model_len=48)
    prompt, images = list(range(1, 12)), [Image("cat", 1, 6)]

    def cached_tokens(rid: str, prompt: list[int]) -> int:
        harness.submit(rid, prompt=prompt, images=images, max_new_tokens=1)
        harness.run_until_idle()
        return harness.answers[rid].rows[-1].usage.cached_tokens

    assert cached_tokens("a", prompt) == 0
    assert cached_tokens("all", prompt) == 16
    assert cached_tokens("short", [*prompt[:6], 30]) == 4  # 12 tokens are cached, and the image goes to 14
    harness.submit(prompt=list(range(40, 79)), max_new_tokens=1)  # takes 10 of the 12 pages
    harness.run_until_idle()
    assert cached_tokens("again", prompt) == 4


def test_a_sample_computes_an_image_at_the_end_of_its_prompt():
    """It copies no page of the other sample that ends within it: the image is 3 long, and pages have 4 tokens."""
    harness = Harness(num_pages=50, num_encoder_rows=12, encoder_tile_rows=3, images_are_whole=True)
    for _ in range(2):
        images = [Image("cat", 1, 8)]
        harness.submit(prompt=list(range(1, 9)), images=images, max_new_tokens=3, message={"group": "g"})

    harness.run_until_idle()

    assert encodes(harness) == {"cat": 1}


def test_the_first_half_of_an_image_on_the_host_is_never_a_hit():
    """The host has the whole image, which goes from 6 to 14; the second prompt of 15 tokens ends after it."""
    harness = make(
        images_are_whole=True,
        num_pages=12,
        max_model_len=48,
        num_host_pages=20,
        cache={"kv_host_size": 1.0},
    )
    harness.submit("a", prompt=list(range(1, 12)), images=[Image("cat", 1, 6)], max_new_tokens=1)
    harness.run_until_idle()
    harness.submit(prompt=list(range(40, 84)), max_new_tokens=1)
    harness.run_until_idle()

    harness.submit("b", prompt=[*range(1, 7), 30], images=[Image("cat", 1, 6)], max_new_tokens=1)
    harness.run_until_idle()

    assert harness.answers["b"].rows[-1].usage.cached_tokens == 4
