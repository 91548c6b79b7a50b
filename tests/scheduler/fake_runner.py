"""`FakeRunner`: a model runner without a model, which checks that every token it reads from KV memory is the right one.

Its model is a hash: the "KV" of a position is a hash of all tokens up to it, and the next token is a function of that.
So what a request must generate is known in advance (`expected_output`), whatever the scheduler does to it meanwhile;
and a page that holds other tokens than it should is seen at the first step that reads it. With `memory` the next token
is a function of the last so many alone, so that outputs run into circles, which can be guessed.

A request may have a `ToyGrammar`: each of its rows of logits must have exactly the mask of the answer so far. Or, if
`late` is set, it samples without most masks, and again where the token was not allowed.

With `has_states` a row also has a state, which is exact at one position only: a request must start from the checkpoint
of its prefix, and each of its steps must begin where the last one ended.

A tile of an image is encoded into rows, each of which has a number of its own (`row_value`). Where a prompt has an
image, its tokens are these numbers: `chains` of them is what a request must read.

The vector of a pooling request is the hash of its prompt, see `expected_vector`.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.runtime.messages import FinishKind, Overruled
from engine.runtime.pooling import PoolingParams
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import (
    RUNNER_DRAFT,
    Encode,
    ForwardMode,
    GetMasks,
    GoOn,
    NewReq,
    StepPlan,
    StepResult,
    TokenMasks,
    no_masks,
    to_the_end,
)
from engine.runtime.transport.message_base import Logprobs

from .grammar.toy_matcher import VOCAB_SIZE, ToyGrammar, allowed_by

MASK = (1 << 61) - 1
PLACEHOLDER = 5
GARBAGE = -7


def chain(previous: int, token: int) -> int:
    """The hash of a sequence that is one token longer."""
    return (previous * 1_000_003 + token + 1) & MASK


def row_value(pixels: str, row: int) -> int:
    """Contents of an image's row."""
    return 1000 + zlib.crc32(f"{pixels} {row}".encode())


def chains(tokens: list[int], weights: int = 0) -> list[int]:
    """The hash of each prefix of a sequence, by the model with an adapter."""
    result, value = [], 7 + weights
    for token in tokens:
        value = chain(value, token)
        result.append(value)
    return result


def remembered(tokens: list[int], memory: int | None, weights: int = 0) -> int:
    """What a model that sees the last `memory` tokens alone (None: all) makes of a sequence."""
    return chains(tokens if memory is None else tokens[-memory:], weights)[-1]


def next_token(
    state: int,
    sampling: SamplingParams,
    output_len: int,
    eos: frozenset[int],
    vocab_size: int,
    allowed: frozenset[int] | None = None,
) -> int:
    """The token after a sequence: the next one that is allowed; None: all are.

    End and stop tokens are masked until `min_new_tokens` exist, unless no other token is allowed.
    """
    token = (state >> 7) % vocab_size
    masked = set(sampling.stop_token_ids) | eos if output_len < sampling.min_new_tokens else set()
    if allowed is not None and allowed <= masked:
        masked = set()
    while token in masked or (allowed is not None and token not in allowed):
        token = (token + 1) % vocab_size
    return token


def expected_output(
    prompt: list[int],
    sampling: SamplingParams,
    eos: frozenset[int],
    vocab_size: int,
    memory: int | None = None,
    grammar: ToyGrammar | None = None,
    weights: int = 0,
) -> tuple[list[int], FinishKind]:
    """What a request generates alone. ERROR: its grammar fails after these tokens."""
    state = remembered(prompt, memory, weights)
    output: list[int] = []
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else eos)
    assert sampling.max_new_tokens is not None
    while True:
        allowed = None
        if grammar is not None:
            if grammar.faults_surely and len(output) == grammar.fault_at:
                return output, FinishKind.ERROR
            allowed = grammar.allowed(output)
        token = next_token(state, sampling, len(output), eos, vocab_size, allowed)
        output.append(token)
        if token in stops and len(output) > sampling.min_new_tokens:
            return output, FinishKind.STOP
        if grammar is not None and grammar.is_complete(output):
            return output, FinishKind.STOP
        if len(output) >= sampling.max_new_tokens:
            return output, FinishKind.LENGTH
        state = chain(state, token) if memory is None else remembered([*prompt, *output], memory, weights)


def expected_vector(prompt: list[int], weights: int = 0) -> bytes:
    """The result of a pooling request."""
    return np.int64(chains(prompt, weights)[-1]).tobytes()


def expected_overruled(
    prompt: list[int],
    sampling: SamplingParams,
    eos: frozenset[int],
    output: list[int],
    grammar: ToyGrammar,
    memory: int | None = None,
    start: int = 0,
    weights: int = 0,
) -> list[Overruled]:
    """The tokens of an output, from `start` on, that are there because the grammar refused others."""
    found = []
    for position in range(start, len(output)):
        before = output[:position]
        state = remembered([*prompt, *before], memory, weights)
        wanted = next_token(state, sampling, position, eos, VOCAB_SIZE)
        if not grammar.is_free(position) and wanted not in grammar.accepted(before):
            found.append(Overruled(position, wanted, output[position]))
    return found


@dataclass
class Row:
    """The runner's mirror of one row."""

    sampling: SamplingParams
    prompt_len: int
    tokens: list[int]
    slots: np.ndarray
    sampled: int | None = None  # the token of the last step, when it is beyond `tokens`
    lost: bool = False  # a step of it ran out of memory: what it computes since is garbage, and may be
    states: list[int] = field(default_factory=list)
    adapter_slot: int = 0
    weights: int = 0
    pooling: PoolingParams | None = None
    num_pooled: int = 0  # tokens of the prompt that were computed here, in steps that had memory
    rows_of: dict[int, int] = field(default_factory=dict)  # position -> row of the encoder's buffer
    state_at: tuple[int, int] = (0, 0)  # the first and last position that its next step may begin at


class FakeRunner:
    """See the module. Steps run at launch; results are handed out by `wait`, as with a device that keeps order."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_model_len: int,
        eos: frozenset[int],
        vocab_size: int,
        num_host_pages: int = 0,
        memory: int | None = None,
    ) -> None:
        self.memory = memory
        self.page_size = page_size
        self.max_model_len = max_model_len
        self.eos = eos
        self.vocab_size = vocab_size
        self.num_slots = (num_pages + 1) * page_size
        self.kv = np.full(self.num_slots, -1, dtype=np.int64)
        self.host_kv = np.full((num_host_pages, page_size), -1, dtype=np.int64)
        self.rows: dict[int, Row] = {}
        self.fail_next: set[str] = set()  # rids whose next sampling step reports an error
        self.rids: dict[int, str] = {}
        self.weights_of: dict[int, int] = {}  # store id -> a number for the adapter's weights
        self.adapters: dict[int, int] = {}  # slot -> the same
        self.no_memory: Callable[[StepPlan], bool] = lambda plan: False  # for which steps there is none
        self.has_states = False
        self.max_drafts = 0  # of a request with a state
        self.checkpoints: dict[int, int] = {}  # what the states in them have seen
        self.steps = 0
        self.step_s: Callable[[StepPlan], float] = lambda plan: 0.01
        self.num_rounds = 0  # of bursts
        self.grammars: dict[str, ToyGrammar] = {}
        self.here: list[bool] = []  # which requests of the batch had their row when `masks` returned
        self.late = False
        self.num_masks = 0
        self.caches_on_host = False
        self.tile_rows, self.tile_parts = 0, 1
        self.parts: dict[int, tuple[str, int, int]] = {}  # first row -> image, tile, and its next part
        self.encoded: dict[int, int] = {}  # row of the encoder's buffer -> its value
        self.images: dict[str, list[int]] = {}  # rid -> its prompt with the values of its rows
        self.whole: dict[str, list[tuple[int, int]]] = {}  # rid -> images of which no chunk has a part
        self.tile_s = 0.0  # what a tile, or a block of rows, takes
        self.num_encodes: Counter[tuple[str, int]] = Counter()  # of each tile
        self.swap_s = 0.0  # what every step with swaps says they took
        self.drafts_right: Callable[[], bool] = lambda: True  # of each draft that it makes
        self.draft_s = 0.0  # what each of them takes

    def launch(self, plan: StepPlan, go_on: GoOn = to_the_end, masks: GetMasks = no_masks) -> Launched:
        """Apply a plan in the order that its docstring gives."""
        self.steps += 1
        assert plan.step_id == self.steps
        self.copy_pages(plan)
        for row in ints(plan.finished_rows):
            del self.rows[row]
        for slot, store_id in pairs(plan.adapter_loads):
            assert slot > 0 and store_id > 0
            assert all(row.adapter_slot != slot for row in self.rows.values()), "a slot in use is written"
            self.adapters[slot] = self.weights_of.get(store_id, store_id)
        for new in plan.new_reqs:
            assert new.row not in self.rows, f"row {new.row} is still taken"
            slots = np.full(self.max_model_len, -1, dtype=np.int64)
            prefix = np.frombuffer(new.prefix_loc, dtype=np.int32)
            slots[: len(prefix)] = prefix
            tokens = ints(new.input_ids)
            assert len(prefix) < len(tokens) and min(tokens) >= 0
            rows_of = self.rows_of(new, tokens, len(prefix))
            weights = self.adapters[new.adapter_slot] if new.adapter_slot else 0
            self.rows[new.row] = Row(
                new.sampling,
                new.prompt_len,
                tokens,
                slots,
                states=chains(tokens, weights),
                adapter_slot=new.adapter_slot,
                weights=weights,
                pooling=new.pooling,
                rows_of=rows_of,
            )
            self.rids[new.row] = new.rid
            self.start_state(new, len(prefix))
            self.check_prefix(new.row, len(prefix))
        for update in plan.row_updates:
            loc = np.frombuffer(update.loc, dtype=np.int32)
            mirror = self.rows[update.row].slots
            assert (mirror[update.start : update.start + len(loc)] >= 0).all()
            mirror[update.start : update.start + len(loc)] = loc
            self.check_prefix(update.row, update.start + len(loc))
        self.encode(plan)
        if plan.mode is ForwardMode.IDLE:
            assert not plan.encodes
            assert plan.finished_rows or plan.swap_outs, "a step for nothing"
            assert not plan.total_num_scheduled_tokens and not plan.rows
            return Launched(StepResult(plan.step_id))
        self.check_saves(plan)
        if self.no_memory(plan):
            for _, _, checkpoint in triples(plan.state_saves):
                self.checkpoints[checkpoint] = GARBAGE
            self.kv[ints(plan.out_cache_loc)] = GARBAGE
            for row in ints(plan.rows):
                self.rows[row].lost = True
            for encode in plan.encodes:  # it may have been the encoder that found no memory
                for row in self.rows_to_write(encode):
                    self.encoded[row] = GARBAGE
            return Launched(StepResult(plan.step_id, forward_s=0.01, out_of_memory="tried to allocate 2 GiB"))
        return Launched(self.forward(plan, masks) if plan.num_rounds == 1 else self.burst(plan, go_on, masks))

    def rows_of(self, new: NewReq, tokens: list[int], prefix_len: int) -> dict[int, int]:
        """The rows of a request, by position; puts the values that it must find there into its tokens."""
        rows_of: dict[int, int] = {}
        for position, length, first_row in triples(new.media):
            assert first_row // self.tile_rows == (first_row + length - 1) // self.tile_rows, (
                "rows of two tiles"
            )
            rows_of |= {position + k: first_row + k for k in range(length)}
        wanted = self.images.get(new.rid, [])
        for position, value in enumerate(wanted):
            if value != tokens[position]:
                assert tokens[position] == PLACEHOLDER, "the model gets another token than the prompt has"
                assert position < prefix_len or position in rows_of, f"{new.rid}: no row at {position}"
                tokens[position] = value
        assert not rows_of or max(rows_of) < new.prompt_len
        return rows_of

    def encode(self, plan: StepPlan) -> None:
        """Fill rows with the values of tiles."""
        for encode in plan.encodes:
            assert encode.first_row % self.tile_rows == 0 and encode.num_tiles > 0
            assert encode.first_tile + encode.num_tiles <= encode.shape[0]
            if encode.num_parts:
                of_tile = self.tile_parts * encode.num_blocks
                assert encode.num_tiles == 1 and encode.num_parts < of_tile
                now = (encode.pixels, encode.first_tile, encode.first_part)
                assert not encode.first_part or self.parts[encode.first_row] == now, "another tile's rows"
                next_part = encode.first_part + encode.num_parts
                self.parts[encode.first_row] = (encode.pixels, encode.first_tile, next_part)
                assert next_part <= of_tile
                if next_part < of_tile:
                    for row in self.rows_to_write(encode):
                        self.encoded[row] = GARBAGE
                    continue
            for tile in range(encode.num_tiles):
                self.num_encodes[encode.pixels, encode.first_tile + tile] += 1
            first = encode.first_tile * self.tile_rows
            for number, row in enumerate(self.rows_to_write(encode)):
                self.encoded[row] = row_value(encode.pixels, first + number)

    def rows_to_write(self, encode: Encode) -> list[int]:
        """The rows of its tiles, in order."""
        blocks = ints(encode.blocks) or [
            encode.first_row + n * self.tile_rows for n in range(encode.num_tiles)
        ]
        assert blocks[0] == encode.first_row and (not encode.blocks or encode.num_tiles == 1)
        return [block + n for block in blocks for n in range(self.tile_rows)]

    def start_state(self, new: NewReq, prefix_len: int) -> None:
        """A row begins with the state after its prefix."""
        row = self.rows[new.row]
        row.state_at = prefix_len, prefix_len
        if not self.has_states:
            assert not new.checkpoint
            return
        assert bool(new.checkpoint) == bool(prefix_len), "a prefix without its state"
        if prefix_len:
            assert self.checkpoints[new.checkpoint] == row.states[prefix_len - 1], (
                "the state of another prefix"
            )

    def check_saves(self, plan: StepPlan) -> None:
        """Saves are of rows of the step, distinct, and not into what the step reads."""
        saves = triples(plan.state_saves)
        checkpoints = [checkpoint for _, _, checkpoint in saves]
        assert self.has_states or not saves
        assert len(set(checkpoints)) == len(checkpoints) and 0 not in checkpoints
        assert not {new.checkpoint for new in plan.new_reqs} & set(checkpoints), "written while it is read"
        for row_id, position, _ in saves:
            idx = ints(plan.rows).index(row_id)
            start, length = ints(plan.num_computed_tokens)[idx], ints(plan.num_scheduled_tokens)[idx]
            assert start < position <= start + length + plan.num_rounds - 1
            assert position % self.page_size == 0

    def save_states(self, plan: StepPlan, row_id: int, start: int, stop: int, num_drafts: int) -> None:
        """Move a row's state over the tokens of a step; the one after each draft is kept until the next step."""
        row = self.rows[row_id]
        first, last = row.state_at
        assert first <= start <= last, f"there is a state after {first} to {last} tokens, not after {start}"
        row.state_at = stop, stop + num_drafts
        for saved_row, position, checkpoint in triples(plan.state_saves):
            if saved_row == row_id and start < position <= stop:
                self.checkpoints[checkpoint] = row.states[position - 1]

    def burst(self, plan: StepPlan, go_on: GoOn, masks: GetMasks = no_masks) -> StepResult:
        """A step of decodes, as often as the plan says and `go_on` allows, or until somebody fails."""
        assert plan.mode is ForwardMode.DECODE and not plan.num_drafts and 0 not in plan.samples
        assert len(ints(plan.out_cache_loc)) == plan.num_rounds * len(ints(plan.rows))
        assert len(set(ints(plan.out_cache_loc))) == len(ints(plan.out_cache_loc))
        results = [self.forward(plan.round(0), masks)]
        for number in range(1, plan.num_rounds):
            if results[-1].errors or not go_on(results[-1].next_token_ids):
                break
            results.append(self.forward(plan.round(number), masks))
        token_ids = np.array([ints(result.next_token_ids) for result in results], dtype=np.int32)
        counts = np.full(token_ids.shape[1], len(results), dtype=np.int32)
        self.num_rounds += len(results)
        return StepResult(
            plan.step_id,
            token_ids.T.tobytes(),
            errors=results[-1].errors,
            forward_s=sum(result.forward_s for result in results),
            swap_s=self.swap_s if plan.swap_outs or plan.swap_ins else 0.0,
            num_next_tokens=counts.tobytes() if len(results) > 1 else b"",
        )

    def copy_pages(self, plan: StepPlan) -> None:
        """Out to the host, from page to page, in from the host: in this order."""
        for copies in (pairs(plan.swap_outs), pairs(plan.swap_ins)):
            targets = [target for _, target in copies]
            assert len(set(targets)) == len(targets), "a page is copied to twice in a step"
        pages = self.kv.reshape(-1, self.page_size)
        for page, host_page in pairs(plan.swap_outs):
            self.host_kv[host_page] = pages[page]
        copies = pairs(plan.page_copies)
        targets = [target for _, target in copies]
        assert len(set(targets)) == len(targets) and not set(targets) & {source for source, _ in copies}
        for source, target in copies:
            pages[target] = pages[source]
        for host_page, page in pairs(plan.swap_ins):
            pages[page] = self.host_kv[host_page]
            if not self.caches_on_host:
                self.host_kv[host_page] = -1  # reading it again is a bug

    def forward(self, plan: StepPlan, masks: GetMasks = no_masks) -> StepResult:
        rows, starts = ints(plan.rows), ints(plan.num_computed_tokens)
        lengths, out = ints(plan.num_scheduled_tokens), ints(plan.out_cache_loc)
        samples, num_drafts = list(plan.samples), ints(plan.num_drafts) or [0] * len(rows)
        draft_ids = iter(ints(plan.draft_ids))
        assert len(rows) == len(num_drafts) and sum(num_drafts) == len(ints(plan.draft_ids))
        assert len(rows) == len(starts) == len(lengths) == len(samples)
        assert len(set(rows)) == len(rows), "a row twice in a step"
        assert sum(lengths) == len(out) == plan.total_num_scheduled_tokens > 0
        assert len(set(out)) == len(out), "a slot written twice in a step"
        assert min(out) >= self.page_size and max(out) < self.num_slots, "the dummy page, or no page at all"
        self.check_mode(plan.mode, rows, starts, lengths)
        offset = 0
        drafts_of: list[list[int]] = []
        for idx, (row_id, start, length) in enumerate(zip(rows, starts, lengths, strict=True)):
            row = self.rows[row_id]
            drafts = [next(draft_ids) for _ in range(num_drafts[idx])]
            drafts_of.append(drafts)
            if row.lost:
                self.kv[out[offset : offset + length]] = GARBAGE
                row.slots[start : start + length] = out[offset : offset + length]
                offset += length
                continue
            length -= len(drafts)
            for begin, end in self.whole.get(self.rids[row_id], ()):
                assert not begin < start < end and not begin < start + length < end, "a cut within an image"
            if start + length > len(row.tokens):
                assert start == len(row.tokens) and length == 1 and row.sampled is not None, "no input token"
                row.tokens.append(row.sampled)
                row.states.append(chain(row.states[-1], row.sampled))
                row.sampled = None
            for position in range(start, start + length):
                if position in row.rows_of:
                    value = self.encoded.get(row.rows_of[position])
                    assert value == row.tokens[position], f"{self.rids[row_id]}: another row at {position}"
                self.kv[out[offset]] = row.states[position]
                row.slots[position] = out[offset]
                offset += 1
            self.check_prefix(row_id, start + length)
            if self.has_states:
                assert len(drafts) <= self.max_drafts
                self.save_states(plan, row_id, start, start + length, len(drafts))
            self.make_drafts(row, drafts)
            assert samples[idx] or not drafts
            assert not samples[idx] or start + length == len(row.tokens), "samples before the end"
            row.num_pooled += length
            state = row.states[start + length - 1]
            for position, draft in enumerate(drafts, start + length):
                state = self.kv[out[offset]] = chain(state, draft)
                row.slots[position] = out[offset]
                offset += 1
        if RUNNER_DRAFT in ints(plan.draft_ids):
            made = [1 if draft == RUNNER_DRAFT else draft for drafts in drafts_of for draft in drafts]
            masks.drafted(np.array(made, dtype=np.int32).tobytes())
        runs = self.sample_runs(plan, drafts_of, masks)
        next_ids, prompt_logprobs = [], {}
        errors: dict[int, str] = {}
        vectors = self.vectors(plan, errors)
        logprobs: list[Logprobs | None] = []
        for idx, (row_id, start, length) in enumerate(zip(rows, starts, lengths, strict=True)):
            row = self.rows[row_id]
            if row.lost:
                if samples[idx]:
                    next_ids += runs[idx]
                    logprobs.append(None)
                continue
            if row.sampling.prompt_logprobs is not None:
                first = max(start, row.sampling.prompt_logprobs_start)
                values = np.arange(first + 1, min(start + length, row.prompt_len - 1) + 1, dtype=np.float32)
                if len(values):
                    ranks = values.astype(np.int32)
                    prompt_logprobs[idx] = Logprobs(values.tobytes(), ranks=ranks.tobytes())
            if samples[idx]:
                next_ids += runs[idx]
                wants = row.sampling.logprobs is not None
                positions = len(row.tokens) + 1 + np.arange(-len(runs[idx]), 0, dtype=np.float32)
                logprobs.append(Logprobs(positions.tobytes()) if wants else None)
                if self.rids[row_id] in self.fail_next:
                    self.fail_next.discard(self.rids[row_id])
                    errors[idx] = "logits are not finite"
        num_parts = sum(
            each.num_parts or each.num_tiles * each.num_blocks * self.tile_parts for each in plan.encodes
        )
        encode_s = self.tile_s * num_parts / self.tile_parts
        draft_s = self.draft_s * ints(plan.draft_ids).count(RUNNER_DRAFT)
        return StepResult(
            plan.step_id,
            np.array(next_ids, dtype=np.int32).tobytes(),
            tuple(logprobs) if any(logprobs) else (),
            prompt_logprobs,
            errors,
            forward_s=self.step_s(plan) + encode_s + draft_s,
            encode_s=encode_s,
            draft_s=draft_s,
            swap_s=self.swap_s if plan.swap_outs or plan.swap_ins else 0.0,
            num_next_tokens=np.array([len(run) for run in runs if run], dtype=np.int32).tobytes()
            if plan.num_drafts
            else b"",
            vectors=vectors,
        )

    def vectors(self, plan: StepPlan, errors: dict[int, str]) -> dict[int, bytes]:
        """Results of the pooling requests whose prompt ends in this step; some may fail instead."""
        vectors = {}
        ends = zip(ints(plan.num_computed_tokens), ints(plan.num_scheduled_tokens), strict=True)
        for idx, (row_id, (start, length)) in enumerate(zip(ints(plan.rows), ends, strict=True)):
            row = self.rows[row_id]
            is_end = bool(plan.pools and plan.pools[idx])
            assert is_end == (row.pooling is not None and start + length == len(row.tokens))
            if row.pooling is None:
                continue
            assert not plan.samples[idx], "a pooling request samples"
            if is_end and not row.lost:
                assert len(row.tokens) == row.prompt_len
                assert not row.pooling.all_tokens or row.num_pooled == row.prompt_len, "tokens were skipped"
                if self.rids[row_id] in self.fail_next:
                    self.fail_next.discard(self.rids[row_id])
                    errors[idx] = "the vector is not finite"
                else:
                    vectors[idx] = np.int64(row.states[-1]).tobytes()
        return vectors

    def sample_runs(self, plan: StepPlan, drafts_of: list[list[int]], masks: GetMasks) -> list[list[int]]:
        """Of each request of the step: its next tokens, one more than the drafts that were right."""
        samples = list(plan.samples)
        late = self.late
        if masks is no_masks or not any(samples):
            self.here = [True] * len(samples)
        found = masks.before() if late else masks()
        by_row = self.masks_by_row(found)
        if found is not None:
            masks.unmasked(np.array(self.peek(plan, drafts_of, {}), dtype=np.int64)[found.indices])
        if not late:
            self.check_masks(plan, drafts_of, by_row)
        if late and any(samples):
            peeked = self.peek(plan, drafts_of, by_row)
            after = self.masks_by_row(masks.after(np.array(peeked, dtype=np.int64)))
            assert not set(after) & set(by_row), "a row with two masks"
            counts = [n * (1 + len(drafts)) for n, drafts in zip(samples, drafts_of, strict=True)]
            begins = {0, *np.cumsum(counts).tolist()}
            for (
                row,
                allowed,
            ) in after.items():  # the rows of a request after its first refused one have masks too
                is_first = row in begins or row - 1 not in after
                assert not is_first or peeked[row] not in allowed or len(allowed) == self.vocab_size
            by_row |= after
            self.check_late_masks(plan, drafts_of, by_row, peeked)
        return self.sample_with(plan, drafts_of, by_row)

    def peek(
        self, plan: StepPlan, drafts_of: list[list[int]], by_row: dict[int, frozenset[int]]
    ) -> list[int]:
        """The token that each row of logits samples first."""
        peeked: list[int] = []
        for row_id, drafts, samples in zip(ints(plan.rows), drafts_of, plan.samples, strict=True):
            for k in range(samples * (1 + len(drafts))):
                row = self.rows[row_id]
                token = 1 if row.lost else self.sample(row, by_row.get(len(peeked)), drafts[:k])
                peeked.append(token)
        return peeked

    def sample_with(
        self, plan: StepPlan, drafts_of: list[list[int]], by_row: dict[int, frozenset[int]]
    ) -> list[list[int]]:
        """The runs, with the masks of the rows of logits."""
        rows, samples = ints(plan.rows), list(plan.samples)
        runs: list[list[int]] = []
        first = 0  # row of logits
        for idx, (row_id, drafts) in enumerate(zip(rows, drafts_of, strict=True)):
            row = self.rows[row_id]
            run: list[int] = []
            if row.lost:
                run = [1] * (1 + len(drafts))  # as many as there could be
            elif samples[idx]:
                run = [self.sample(row, by_row.get(first))]
                for position, draft in enumerate(drafts, len(row.tokens)):
                    if draft != run[-1]:
                        break
                    row.tokens.append(draft)
                    row.states.append(chain(row.states[-1], draft))
                    self.check_prefix(row_id, position + 1)
                    run.append(self.sample(row, by_row.get(first + len(run))))
                row.sampled = run[-1]
            runs.append(run)
            first += samples[idx] * (1 + len(drafts))
        return runs

    def sample(self, row: Row, allowed: frozenset[int] | None, drafts: Sequence[int] = ()) -> int:
        """What follows a row's tokens and drafts."""
        state = row.states[-1]
        for draft in drafts:
            state = chain(state, draft)
        if self.memory is not None:
            state = remembered([*row.tokens, *drafts], self.memory, row.weights)
        output_len = len(row.tokens) + len(drafts) - row.prompt_len
        return next_token(state, row.sampling, output_len, self.eos, self.vocab_size, allowed)

    def make_drafts(self, row: Row, drafts: list[int]) -> None:
        """Replace the drafts that a plan leaves to the runner."""
        assert RUNNER_DRAFT not in drafts or drafts == [RUNNER_DRAFT] * len(drafts), "drafts of two kinds"
        for k, draft in enumerate(drafts):
            if draft == RUNNER_DRAFT:
                token = self.sample(row, None, drafts[:k])
                drafts[k] = token if self.drafts_right() else (token + 1) % self.vocab_size

    def masks_by_row(self, found: TokenMasks | None) -> dict[int, frozenset[int]]:
        """The tokens allowed in each row of logits with a mask."""
        if found is None:
            return {}
        indices = found.indices.tolist()
        assert found.indices.dtype == np.int64 and found.bits.dtype == np.int32
        assert sorted(set(indices)) == indices and len(found.bits) == len(indices)
        self.num_masks += len(indices)
        return {row: allowed_by(bits) for row, bits in zip(indices, found.bits, strict=True)}

    def check_late_masks(
        self,
        plan: StepPlan,
        drafts_of: list[list[int]],
        by_row: dict[int, frozenset[int]],
        peeked: list[int],
    ) -> None:
        """A row that counts has the mask of its grammar, or a token that the grammar allows."""
        first = 0
        for idx, (row_id, drafts) in enumerate(zip(ints(plan.rows), drafts_of, strict=True)):
            if not plan.samples[idx]:
                continue
            row, grammar = self.rows[row_id], self.grammars.get(self.rids[row_id])
            for k in range(1 + len(drafts)):
                n, output = first + k, [*row.tokens[row.prompt_len :], *drafts[:k]]
                if grammar is None:
                    assert n not in by_row, "a mask for a row without grammar"
                    continue
                allowed = grammar.allowed(output)
                if not self.here[idx] or row.lost or len(output) == grammar.fault_at or not allowed:
                    break
                assert by_row.get(n, allowed) == allowed
                assert n in by_row or peeked[n] in allowed, (self.rids[row_id], len(output))
                token = self.sample(row, by_row.get(n), drafts[:k])
                if k == len(drafts) or token != drafts[k]:
                    break
            first += 1 + len(drafts)

    def check_masks(
        self, plan: StepPlan, drafts_of: list[list[int]], by_row: dict[int, frozenset[int]]
    ) -> None:
        """The masks are those of the grammars."""
        here = self.here
        unchecked = dict(by_row)
        first = 0
        for idx, (row_id, drafts) in enumerate(zip(ints(plan.rows), drafts_of, strict=True)):
            if not plan.samples[idx]:
                continue
            row, grammar = self.rows[row_id], self.grammars.get(self.rids[row_id])
            num_rows = 1 + len(drafts)
            if grammar is not None and here[idx] and not row.lost:
                output = row.tokens[row.prompt_len :]
                may_have_failed = len(output) == grammar.fault_at
                num_checked = 0 if may_have_failed else num_rows
                for k in range(num_checked):
                    tokens = [*output, *drafts[:k]]
                    allowed = grammar.allowed(tokens)
                    if allowed and not grammar.is_free(len(tokens)):
                        assert by_row[first + k] == allowed, (self.rids[row_id], len(tokens))
                    if k < len(drafts) and drafts[k] not in grammar.accepted(tokens):
                        break  # the runner's; no token of this row equals it
                for k in range(num_rows):
                    unchecked.pop(first + k, None)
            first += num_rows
        assert not unchecked, f"masks for rows without grammar: {sorted(unchecked)}"

    def check_mode(self, mode: ForwardMode, rows: list[int], starts: list[int], lengths: list[int]) -> None:
        """Extends first, then decodes."""
        decodes = [start >= len(self.rows[row].tokens) for row, start in zip(rows, starts, strict=True)]
        assert decodes == sorted(decodes)
        expected = {
            (True, False): ForwardMode.EXTEND,
            (False, True): ForwardMode.DECODE,
            (True, True): ForwardMode.MIXED,
        }
        assert mode is expected[(not all(decodes), any(decodes))]

    def check_prefix(self, row_id: int, length: int) -> None:
        """Everything attention would read must be this request's own tokens."""
        row = self.rows[row_id]
        slots = row.slots[:length]
        assert (slots >= self.page_size).all()
        found, wanted = self.kv[slots], np.array(row.states[:length], dtype=np.int64)
        wrong = np.flatnonzero(found != wanted)
        assert not wrong.size, (
            f"row {row_id}: garbage at positions {wrong[:8].tolist()}, slots {slots[wrong[:8]]}"
        )


class Launched:
    """A step whose result is there already."""

    def __init__(self, result: StepResult) -> None:
        self.result = result

    def wait(self) -> StepResult:
        return self.result


def ints(data: bytes) -> list[int]:
    """int32 bytes as a list."""
    values: list[int] = np.frombuffer(data, dtype=np.int32).tolist()
    return values


def pairs(data: bytes) -> list[tuple[int, int]]:
    """[n, 2] int32 bytes as pairs."""
    return [(int(first), int(second)) for first, second in np.frombuffer(data, dtype=np.int32).reshape(-1, 2)]


def triples(data: bytes) -> list[tuple[int, int, int]]:
    """[n, 3] int32 bytes as triples."""
    return [(int(a), int(b), int(c)) for a, b, c in np.frombuffer(data, dtype=np.int32).reshape(-1, 3)]
