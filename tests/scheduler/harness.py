"""`Harness`: a scheduler with a FakeRunner, driven step by step, every promise checked after each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from engine.runtime.adapter_spec import AdapterSpec
from engine.runtime.config.engine_config import CacheConfig, SchedulerConfig
from engine.runtime.feasibility import Capacity
from engine.runtime.media import runs_of
from engine.runtime.messages import (
    AbortRequest,
    AdapterDone,
    AdapterRead,
    Call,
    Delivered,
    Finish,
    FinishKind,
    FlushCache,
    FlushCacheDone,
    GenerateRequest,
    HintAction,
    HintDone,
    HintSession,
    LoadAdapter,
    MediaItem,
    Pause,
    PauseDone,
    PauseMode,
    Resume,
    TokenOutput,
    UnloadAdapter,
    Usage,
)
from engine.runtime.pooling import PoolingParams
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import ForwardMode, GetMasks, TokenMasks, no_masks
from engine.scheduler.batch import ScheduleBatch
from engine.scheduler.grammar.mask_filler import Clock, MaskFiller, MaskMeter, StepMasks, no_clock
from engine.scheduler.memory.pages import PageAllocator
from engine.scheduler.prefix_cache.base import PrefixCache
from engine.scheduler.prefix_cache.radix_cache import RadixCache
from engine.scheduler.records.decision_log import DecisionLog, PassRecord, RefusedToken
from engine.scheduler.records.verdict import AddReqResult, Reason, Verdict
from engine.scheduler.scheduler import Scheduler

from .fake_runner import (
    PLACEHOLDER,
    FakeRunner,
    Launched,
    expected_output,
    expected_overruled,
    expected_vector,
    ints,
    row_value,
)
from .grammar.toy_matcher import ToyGrammar, ToyMatchers

VOCAB_SIZE = 97
PAUSE_ID = 4000


class Pages(NamedTuple):
    """The terms of the page equation."""

    free: int
    cached: int
    held: int


class Image(NamedTuple):
    """An image of a prompt; images with the same name are equal."""

    name: str
    num_tiles: int
    position: int

    @property
    def pixels(self) -> str:
        return f"/pixels/{self.name}"


def extend_lens(batch: ScheduleBatch) -> list[int]:
    """Tokens of each extend of a step."""
    return ints(batch.plan.num_scheduled_tokens)[: batch.num_extends]


class Answer:
    """What came back for one request."""

    def __init__(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        delivered: Sequence[int] = (),
        pooling: PoolingParams | None = None,
        weights: int = 0,
    ) -> None:
        self.pooling = pooling
        self.weights = weights
        self.prompt = prompt
        self.sampling = sampling
        self.rows: list[TokenOutput] = []
        self._tokens, self._num_read = list(delivered), 0
        self.num_delivered = len(delivered)

    @property
    def tokens(self) -> list[int]:
        for row in self.rows[self._num_read :]:
            self._tokens += ints(row.token_ids)
        self._num_read = len(self.rows)
        return list(self._tokens)

    @property
    def finish(self) -> Finish | None:
        return self.rows[-1].finish if self.rows else None


class NotingMasks(MaskFiller):
    """Lets the runner know which requests still have their row when it gets masks."""

    def __init__(self, scheduler: Scheduler, runner: FakeRunner) -> None:
        super().__init__(VOCAB_SIZE, scheduler._parts.memory.pool)
        self.scheduler = scheduler
        self.runner = runner

    def fill(self, batch: ScheduleBatch, clock: Clock = no_clock) -> TokenMasks | None:
        self.runner.here = self.scheduler.rows_still_here(batch).tolist()
        return super().fill(batch, clock)

    def fill_unchecked(self, batch: ScheduleBatch, clock: Clock = no_clock) -> TokenMasks | None:
        self.runner.here = self.scheduler.rows_still_here(batch).tolist()
        return super().fill_unchecked(batch, clock)


class Harness:
    """See the module."""

    def __init__(
        self,
        *,
        page_size: int = 4,
        num_pages: int = 64,
        max_model_len: int = 512,
        max_running_requests: int = 8,
        num_host_pages: int = 0,
        kv_token_bytes: int = 1024,
        num_checkpoints: int = 0,
        checkpoint_pages: int = 0,
        num_stages: int = 1,
        num_encoder_rows: int = 0,
        encoder_tile_rows: int = 0,
        encoder_row_pixels: int = 0,
        encoder_tile_parts: int = 1,
        images_are_whole: bool = False,
        radix_cache: bool = True,
        overlap: int = 0,
        memory: int | None = None,
        eos: Sequence[int] = (0,),
        cache: dict[str, Any] | None = None,
        decisions: DecisionLog | None = None,
        records_blocks: bool = False,
        **config: Any,
    ) -> None:
        config.setdefault("chunked_prefill_size", 64)
        self.capacity = Capacity(
            max_model_len,
            num_pages,
            page_size,
            max_running_requests,
            VOCAB_SIZE,
            num_host_pages=num_host_pages,
            kv_token_bytes=kv_token_bytes,
            num_adapter_slots=config.get("max_loras_per_batch", 8),
            num_checkpoints=num_checkpoints,
            checkpoint_pages=checkpoint_pages,
            num_stages=num_stages,
            num_encoder_rows=num_encoder_rows,
            encoder_tile_rows=encoder_tile_rows,
            encoder_row_pixels=encoder_row_pixels,
            encoder_tile_parts=encoder_tile_parts,
            images_are_whole=images_are_whole,
        )
        self.store_ids: dict[str, int] = {}  # of loaded adapters, by fingerprint
        self.weights: dict[str, int] = {"": 0}  # fingerprint -> a number: what is loaded again is the same
        self._num_loaded = 0
        self.adapter_answers: dict[int, AdapterDone] = {}
        self.eos = frozenset(eos)
        self.memory = memory
        self.matchers = ToyMatchers()
        self.refused: dict[int, list[RefusedToken]] = {}  # of steps in flight
        self.scheduler = Scheduler(
            SchedulerConfig(overlap=bool(overlap), **config),
            CacheConfig(radix_cache=radix_cache, **(cache or {})),
            self.capacity,
            self.eos,
            decisions,
            matchers=self.matchers,
            records_blocks=records_blocks,
        )
        self.runner = FakeRunner(
            num_pages, page_size, max_model_len, self.eos, VOCAB_SIZE, num_host_pages, memory
        )
        self.runner.tile_rows, self.runner.tile_parts = encoder_tile_rows, encoder_tile_parts
        self.runner.has_states = checkpoint_pages > 0
        self.runner.caches_on_host = (cache or {}).get("kv_host_size", 0.0) > 0
        if config.get("speculative", "off") != "off":
            self.runner.max_drafts = config.get("speculative_num_draft_tokens", 8)
        self._fake_runner = self.runner  # `runner` may become one around it
        self.runner.grammars = self.matchers.grammars
        self.mask_meter = MaskMeter(lambda: self.now_s)
        core, runner = self.scheduler, self.runner
        core.masks = NotingMasks(core, runner)
        core.new_masks = lambda: NotingMasks(core, runner)  # type: ignore[method-assign]
        self.overlap = overlap  # steps that are launched ahead of the one being settled
        self.in_flight: list[tuple[ScheduleBatch, Launched]] = []
        self.answers: dict[str, Answer] = {}
        self.flushes: list[FlushCacheDone] = []
        self.pauses: list[PauseDone] = []
        self.now_s = 100.0
        self._burst_id = self._num_rounds = 0
        self.has_news: Callable[[], bool] = lambda: False  # asked between two rounds of a burst
        self.rng = np.random.default_rng(0)

    # ------------------------------------------------------------ input

    def submit(
        self,
        rid: str | None = None,
        *,
        prompt: list[int] | None = None,
        prompt_len: int = 8,
        extra_key: str = "",
        ignore_eos: bool = True,
        delivered: Sequence[int] = (),
        usage: Usage | None = None,
        message: dict[str, Any] | None = None,
        grammar: ToyGrammar | None = None,
        pooling: PoolingParams | None = None,
        images: Sequence[Image] = (),
        **sampling: Any,
    ) -> str:
        """Send a request; a random prompt unless one is given. With `delivered` tokens it was begun elsewhere.

        A `grammar` is ready, unless the message says `needs_grammar`. `images` are put into the prompt at their
        positions, each of which counts the placeholders of those before.
        """
        rid = rid if rid is not None else f"r{len(self.answers)}"
        if prompt is None:
            prompt = [int(token) for token in self.rng.integers(1, VOCAB_SIZE, prompt_len)]
        sampling.setdefault("max_new_tokens", 4 if pooling is None else 1)
        params = SamplingParams(ignore_eos=ignore_eos, seed=1, **sampling)
        ids, fields = np.array(prompt, dtype=np.int32).tobytes(), {"pooling": pooling, **(message or {})}
        if fingerprint := fields.get("lora_id", ""):
            self.load_adapter(fingerprint)
        if images:
            prompt, ids, fields["media"] = self.with_images(prompt, images)
            self._fake_runner.images[rid] = prompt
            if self.capacity.images_are_whole:
                runs = [run for item in fields["media"] for run in runs_of(item)]
                self._fake_runner.whole[rid] = [(start, start + length) for start, length in runs]
        self.answers[rid] = Answer(prompt, params, delivered, pooling, self.weights.get(fingerprint, 0))
        if grammar is not None:
            self.matchers.grammars[rid] = grammar
            fields["grammar"] = grammar.use
        if delivered:
            output_ids = np.array(delivered, dtype=np.int32).tobytes()
            fields["delivered"] = Delivered(output_ids, usage or Usage(len(prompt), len(delivered)))
        self.scheduler.handle(GenerateRequest(rid, ids, params, extra_key=extra_key, **fields), self.now_s)
        self.collect()
        return rid

    def image_rows(self, num_tiles: int) -> int:
        """Rows of an image of so many tiles; of any size it is one tile of so many blocks, the last one not full."""
        num_rows = num_tiles * self.capacity.encoder_tile_rows
        return max(1, num_rows - 1) if self.capacity.encoder_row_pixels else num_rows

    def with_images(
        self, prompt: list[int], images: Sequence[Image]
    ) -> tuple[list[int], bytes, tuple[MediaItem, ...]]:
        """A prompt with the values of images, the ids that are sent for it, and its images."""
        values, ids, media = list(prompt), list(prompt), []
        for image in images:
            num_rows, side = self.image_rows(image.num_tiles), self.capacity.encoder_row_pixels
            shape = (1, side, num_rows * side, 3) if side else (image.num_tiles, 4, 4, 3)
            values[image.position : image.position] = [
                row_value(image.pixels, row) for row in range(num_rows)
            ]
            ids[image.position : image.position] = [PLACEHOLDER] * num_rows
            runs = np.array([image.position, num_rows], dtype=np.int32).tobytes()
            digest = image.name.ljust(32, ".").encode()
            media.append(MediaItem(digest, runs, image.pixels, shape))
        return values, np.array(ids, dtype=np.int32).tobytes(), tuple(media)

    def load_adapter(self, fingerprint: str, *, read: bool = True) -> int:
        """Load an adapter unless it is loaded, and let it be read; returns its store id."""
        if fingerprint not in self.store_ids:
            self._num_loaded += 1
            self.store_ids[fingerprint] = store_id = self._num_loaded
            self._fake_runner.weights_of[store_id] = self.weights.setdefault(fingerprint, store_id)
            spec = AdapterSpec(f"name of {fingerprint}", "", fingerprint, 8, 0)
            self.scheduler.handle(Call(store_id, LoadAdapter(store_id, spec)), self.now_s)
            if read:
                self.scheduler.handle(AdapterRead(store_id), self.now_s)
            self.collect()
        return self.store_ids[fingerprint]

    def unload_adapter(self, fingerprint: str) -> None:
        store_id = self.store_ids.pop(fingerprint)
        self.scheduler.handle(Call(1000 + store_id, UnloadAdapter(store_id)), self.now_s)
        self.collect()
        self.scheduler.audit()

    def abort(self, rid: str, reason: str = "aborted by request") -> None:
        self.scheduler.handle(AbortRequest(rid, reason), self.now_s)
        self.collect()
        self.scheduler.audit()

    def hint(self, session: str, action: HintAction, ttl_s: float = 0.0) -> HintDone:
        self.scheduler.handle(Call(2000, HintSession(session, action, ttl_s)), self.now_s)
        [done] = self.scheduler.take_call_answers()
        self.scheduler.audit()
        assert isinstance(done.answer, HintDone)
        return done.answer

    def flush(self, *, device: bool = True, tier: bool = True, host: bool = True) -> FlushCacheDone:
        self.scheduler.handle(Call(len(self.flushes) + 1, FlushCache(device, tier, host)), self.now_s)
        self.collect()
        self.scheduler.audit()
        return self.flushes[-1]

    def pause(self, mode: PauseMode) -> int:
        """Pause, and run until that is answered; returns the steps with tokens on the way."""
        num_steps = 0
        self.begin_pause(mode)
        for _ in range(10_000):
            busy = bool(self.in_flight)
            batch = self.step()
            num_steps += batch is not None and batch.plan.mode is not ForwardMode.IDLE
            if batch is None and not busy:
                self.scheduler.on_idle()
                self.deliver()
                self.collect()
                if self.pauses:
                    assert self.pauses.pop().paused and not self.in_flight
                    return num_steps
                self.now_s = max(self.now_s, self.scheduler.wake_s() or 0.0)
        raise AssertionError("the pause was not answered")

    def begin_pause(self, mode: PauseMode) -> None:
        """Ask for a pause."""
        self.scheduler.handle(Call(PAUSE_ID, Pause(mode)), self.now_s)

    def resume(self) -> None:
        """Go on after a pause."""
        self.scheduler.handle(Call(PAUSE_ID, Resume()), self.now_s)
        self.collect()
        assert not self.pauses.pop().paused and not self.pauses

    # ------------------------------------------------------------ steps

    def step(self) -> ScheduleBatch | None:
        """One turn of an event loop; with overlap, the step before is settled after this one is launched."""
        self.now_s += 0.01
        before, num_records = self.scheduler.report(self.now_s), self.scheduler.decisions.num_records
        queued: int | None = before.num_queue_reqs
        batch = self.scheduler.next_batch(self.now_s)
        new = self.scheduler.decisions.since(num_records)
        passes = [each for each in new if isinstance(each, PassRecord)]
        if self.scheduler.report(self.now_s).totals.timed_out_reqs > before.totals.timed_out_reqs:
            queued = None  # some left before the pass
        if before.transfer is not None or before.tiers:
            queued = None  # some of them wait for the KV of their prompt, which no pass decides about
        self.check_verdicts(passes, queued)
        if batch is not None and passes:
            self.check_record(passes[-1], batch)
        self.scheduler.audit()
        self.check_wants()
        if passes:
            self.check_classes(passes[-1], batch)
        if batch is not None:
            may_continue = partial(self.may_continue, batch)
            masks: GetMasks = no_masks
            refused: list[RefusedToken] = []
            if batch.has_grammar:
                masks = step_masks = StepMasks(self.scheduler.masks, batch, self.settle_all, self.mask_meter)
                refused = step_masks.refused
            launched = self.runner.launch(batch.plan, may_continue, masks)
            self.refused[batch.plan.step_id] = refused
            self.in_flight.append((batch, launched))
        idle = batch is None or batch.plan.mode is ForwardMode.IDLE
        if batch is not None and (batch.num_drafts or batch.plan.encodes):
            idle = idle or self.scheduler.needs_result(batch)
        while self.in_flight and (len(self.in_flight) > self.overlap or idle):
            self.settle()
            if batch is None:
                break
        self.collect()
        return batch

    def may_continue(self, batch: ScheduleBatch, next_token_ids: bytes) -> bool:
        """What a pipeline says between two rounds of a burst, each of which takes what the runner will say."""
        assert not self.overlap, "a burst beside another step"
        if self._burst_id != batch.plan.step_id:
            self._burst_id, self._num_rounds = batch.plan.step_id, 0
        self._num_rounds += 1
        seconds = self._num_rounds * self._fake_runner.step_s(batch.plan)
        return not self.has_news() and self.scheduler.may_continue(
            batch, next_token_ids, self._num_rounds, seconds
        )

    def settle_all(self) -> None:
        """What a pipeline does before the masks of a step."""
        while self.in_flight:
            self.settle()

    def settle(self) -> None:
        """Settle the oldest step in flight."""
        batch, launched = self.in_flight.pop(0)
        result = launched.wait()
        self.scheduler.settle(batch, result, self.now_s, self.refused.pop(batch.plan.step_id, ()))
        self.collect()
        self.scheduler.audit()

    def run_until_idle(self, max_steps: int = 10_000) -> list[ScheduleBatch]:
        """Step until nothing is left, then check that nothing stays behind; returns the steps that had tokens."""
        batches = []
        for _ in range(max_steps):
            busy = bool(self.in_flight)
            batch = self.step()
            if batch is not None:
                if batch.plan.mode is not ForwardMode.IDLE:
                    batches.append(batch)
            elif not busy:
                self.scheduler.on_idle()
                if self.deliver():
                    continue
                if self.scheduler.num_unfinished and (wake_s := self.scheduler.wake_s()) is not None:
                    self.now_s = max(self.now_s, wake_s)
                    continue
                self.check_answers()
                assert not self.runner.rows, "the runner keeps rows of requests that have left"
                return batches
        raise AssertionError(f"not idle after {max_steps} steps: {self.scheduler.report(self.now_s)}")

    def deliver(self) -> bool:
        """Let the scheduler have news from outside; False: there are none."""
        return False

    @property
    def last_pass(self) -> PassRecord:
        return self.scheduler.decisions.last

    def verdicts_about(self, rid: str) -> list[Verdict]:
        """Every verdict of its own that the log still has about a request, oldest first."""
        passes = self.scheduler.decisions.passes
        verdicts = [verdict for record in passes for verdict in (*record.verdicts, *record.continued)]
        return [verdict for verdict in verdicts if verdict.rid == rid]

    # ------------------------------------------------------------ for tests that break the accounting

    @property
    def allocator(self) -> PageAllocator:
        return self.scheduler._parts.ledger._allocator

    @property
    def prefix_cache(self) -> PrefixCache:
        return self.scheduler._parts.ledger._cache

    # ------------------------------------------------------------ output

    def collect(self) -> None:
        for done in self.scheduler.take_call_answers():
            if isinstance(done.answer, FlushCacheDone):
                self.flushes.append(done.answer)
            elif isinstance(done.answer, PauseDone):
                self.pauses.append(done.answer)
            elif isinstance(done.answer, AdapterDone):
                assert done.call_id not in self.adapter_answers, "a call is answered twice"
                self.adapter_answers[done.call_id] = done.answer
        for message in self.scheduler.take_outputs():
            assert len({row.rid for row in message.outputs}) == len(message.outputs), (
                "two rows of one request"
            )
            for row in message.outputs:
                answer = self.answers[row.rid]
                assert answer.finish is None, f"{row.rid} was finished already"
                assert (row.options is not None) == (not answer.rows), "options belong to the first row"
                answer.rows.append(row)
                refused = row.finish is not None and row.finish.status == 400
                assert row.usage.completion_tokens == len(answer.tokens) or refused
                assert row.usage.prompt_tokens == len(answer.prompt)

    def pages(self) -> Pages:
        report = self.scheduler.report(self.now_s)
        held, cached = report.kv.used_tokens, report.kv.cached_tokens
        free = report.kv.total_tokens - held - cached
        return Pages(*(tokens // self.capacity.page_size for tokens in (free, cached, held)))

    # ------------------------------------------------------------ promises

    def check_verdicts(self, records: list[PassRecord], queued: int | None) -> None:
        """In each pass every waiting request has exactly one verdict.

        Args:
            queued: how many waited before the first pass; None if nobody knows.
        """
        for record in records:
            rids = [verdict.rid for verdict in record.verdicts]
            assert len(set(rids)) == len(rids)
            assert len(rids) + record.num_rest + record.num_grammar == record.num_waiting
            assert (record.rest_reason is None) == (record.num_rest == 0)
            if queued is not None:
                # before admission in mixed steps, after it in others; and those of a failed step before the pass
                came_back = sum(each.cause != "device memory" for each in record.retractions)
                assert record.num_waiting in (queued, queued + came_back)
                admitted = sum(verdict.result is AddReqResult.CONTINUE for verdict in record.verdicts)
                queued += came_back - admitted
        assert queued in (None, self.scheduler.report(self.now_s).num_queue_reqs)

    def check_wants(self) -> None:
        """Only requests that wait want a prefix of the cache, and groups of requests for labels."""
        if isinstance(self.prefix_cache, RadixCache):
            parts = self.scheduler._parts
            wanting = {req.seq for req in (*parts.requests.waiting, *parts.requests.background)}
            wanting |= {group.seq for group in parts.memory.kv.label_groups._groups.values()}
            assert self.prefix_cache._wants._by_seq.keys() <= wanting

    def check_classes(self, record: PassRecord, batch: ScheduleBatch | None) -> None:
        """No interactive request waits for a row or for pages that one of the background has.

        Where the arithmetic is more than this, interactive requests run, or compute their prompts, in the same pass.
        """
        parts = self.scheduler._parts
        background = {req.rid for req in parts.requests.background_with_row}
        by_rid = {rid: req for rid, req in parts.requests.by_id.items() if not req.background}
        lacking = [
            verdict
            for verdict in record.verdicts
            if verdict.reason in (Reason.NO_ROW, Reason.NO_KV) and verdict.rid in by_rid
        ]
        if not lacking:
            return
        admitted = {each.rid for each in record.verdicts if each.result is AddReqResult.CONTINUE}
        assert not admitted - by_rid.keys(), "one of the background starts while another request lacks memory"
        computes = batch is not None and any(not req.background for req in batch.reqs[: batch.num_extends])
        if any(each.reason is Reason.NO_ROW for each in lacking):
            assert not background or computes or any(not req.background for req in parts.requests.partial)
        runs = any(not req.background for req in parts.requests.with_row)
        assert runs or not background, "those of the background keep the memory that another request lacks"

    def check_record(self, record: PassRecord, batch: ScheduleBatch) -> None:
        """What the decision log says of a pass is what the runner was told."""
        told = {
            each.rid: each.extend_len
            for each in (*record.continued, *record.verdicts)
            if each.result is AddReqResult.CONTINUE
        }
        rids = [req.rid for req in batch.reqs[: batch.num_extends]]
        assert told == dict(zip(rids, extend_lens(batch), strict=True))
        assert record.num_decodes == len(batch.reqs) - batch.num_extends
        assert record.mode is batch.plan.mode

    def check_answers(self) -> None:
        """Each request was answered once, with the tokens it gets when it runs alone."""
        for rid, answer in self.answers.items():
            assert answer.finish is not None, f"{rid} was never answered"
            if answer.finish.status == 400:
                assert not any(row.token_ids for row in answer.rows)
                continue
            if answer.pooling is not None:
                self.check_vector(rid, answer)
                continue
            grammar = self.matchers.grammars.get(rid)
            tokens, kind = expected_output(
                answer.prompt, answer.sampling, self.eos, VOCAB_SIZE, self.memory, grammar, answer.weights
            )
            num_right = len(answer.tokens)
            if answer.finish.kind in (FinishKind.STOP, FinishKind.LENGTH):
                assert (answer.tokens, answer.finish.kind) == (tokens, kind), rid
                self.check_overruled(rid, answer, grammar)
            elif grammar is not None and "the grammar cannot continue" in answer.finish.message:
                # the token at which the grammar failed may have been sampled without a mask
                assert answer.finish.kind is FinishKind.ERROR and grammar.fault, (rid, answer.finish)
                assert grammar.fault_at <= num_right <= grammar.fault_at + 1, rid
                num_right = grammar.fault_at
            assert answer.tokens[:num_right] == tokens[:num_right], rid

    def check_vector(self, rid: str, answer: Answer) -> None:
        """A pooling request has one row, with the vector of its prompt if it has not failed."""
        (row,) = answer.rows
        assert row.finish is not None and not row.token_ids, rid
        assert row.finish.kind in (FinishKind.STOP, FinishKind.ERROR, FinishKind.ABORT), rid
        answered = row.finish.kind is FinishKind.STOP
        assert row.vector == (expected_vector(answer.prompt, answer.weights) if answered else b""), rid

    def check_overruled(self, rid: str, answer: Answer, grammar: ToyGrammar | None) -> None:
        """The usage of a whole answer counts what its grammar refused, once."""
        usage = answer.rows[-1].usage.grammar
        if grammar is None or grammar.fault:
            assert grammar is not None or usage is None, rid
            return
        expected = expected_overruled(
            answer.prompt,
            answer.sampling,
            self.eos,
            answer.tokens,
            grammar,
            self.memory,
            start=answer.num_delivered,
            weights=answer.weights,
        )
        assert usage is not None, rid
        assert usage.overruled_tokens == len(expected), rid
        assert usage.first_overruled == (expected[0] if expected else None), rid
