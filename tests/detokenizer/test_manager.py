from __future__ import annotations

import codecs
import re
import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.detokenizer.incremental import NoText
from engine.detokenizer.manager import Detokenizer
from engine.runtime.messages import (
    BatchTextOutput,
    BatchTokenOutput,
    Finish,
    FinishKind,
    TextOptions,
    TextOutput,
    TokenOutput,
    Usage,
)
from engine.runtime.sampling_params import RepetitionDetection
from engine.runtime.scheduler_report import SchedulerReport
from engine.runtime.transport.message_base import Logprobs

LENGTH = Finish(FinishKind.LENGTH)
ABORT = Finish(FinishKind.ABORT, message="aborted")
LETTERS = [bytes([ord("a") + i]) for i in range(26)]


def spell(word: str) -> list[int]:
    """Token ids of a word over `LETTERS`."""
    return [ord(char) - ord("a") for char in word]


class Request:
    """One request: writes the scheduler's rows, keeps what the detokenizer makes of them."""

    def __init__(self, detokenizer: Detokenizer, rid: str = "r1", **options: Any) -> None:
        self.rid = rid
        self.rows: list[TextOutput] = []
        self._detokenizer = detokenizer
        self._options: TextOptions | None = TextOptions(**options)
        self._num_tokens = 0

    def row(self, ids: Iterable[int], finish: Finish | None = None, logprobs: Logprobs | None = None):
        ids = list(ids)
        self._num_tokens += len(ids)
        options, self._options = self._options, None
        return TokenOutput(
            rid=self.rid,
            token_ids=struct.pack(f"<{len(ids)}i", *ids),
            usage=Usage(prompt_tokens=3, completion_tokens=self._num_tokens),
            finish=finish,
            options=options,
            logprobs=logprobs,
        )

    def send(self, ids: Iterable[int], finish: Finish | None = None, logprobs: Logprobs | None = None):
        """Send one row on its own; what came out."""
        rows = self._detokenizer.process(BatchTokenOutput([self.row(ids, finish, logprobs)])).outputs
        self.rows += rows
        return rows

    @property
    def text(self) -> str:
        return "".join(row.text for row in self.rows)

    @property
    def token_ids(self) -> list[int]:
        data = b"".join(row.token_ids for row in self.rows)
        return list(struct.unpack(f"<{len(data) // 4}i", data))


@pytest.fixture
def detokenizer(make_tokens) -> Detokenizer:
    """Token i is the i-th letter."""
    return Detokenizer(make_tokens(LETTERS))


def test_rows_become_text_and_the_state_goes_with_the_last(detokenizer):
    request = Request(detokenizer)

    request.send(spell("ab"))
    assert detokenizer.num_live_reqs == 1
    (last,) = request.send(spell("c"), LENGTH)

    assert request.text == "abc"
    assert (last.finish, last.usage.completion_tokens) == (LENGTH, 3)
    assert detokenizer.num_live_reqs == 0


def test_each_request_of_a_batch_has_its_own_options(make_tokens):
    tokens = make_tokens(LETTERS)
    detokenizer = Detokenizer(tokens)
    plain = Request(detokenizer, "plain")
    special = Request(detokenizer, "special", skip_special_tokens=False)
    stopping = Request(detokenizer, "stopping", stop=("b",))
    ids = [0, tokens.tool, 1]

    batch = BatchTokenOutput([plain.row(ids), special.row(ids), stopping.row(ids)])
    rows = detokenizer.process(batch).outputs

    assert [(row.rid, row.text) for row in rows] == [
        ("plain", "ab"),
        ("special", "a<tool>b"),
        ("stopping", "a"),
    ]
    assert [row.finish and row.finish.matched for row in rows] == [None, None, "b"]


def test_the_stop_token_gives_no_text_even_if_special_tokens_do(make_tokens):
    tokens = make_tokens(LETTERS)
    request = Request(Detokenizer(tokens), skip_special_tokens=False)

    request.send([*spell("ab"), tokens.eos], Finish(FinishKind.STOP, matched=tokens.eos))

    assert request.text == "ab"
    assert request.token_ids == [*spell("ab"), tokens.eos]


def test_a_visible_stop_token_gives_no_text(detokenizer):
    request = Request(detokenizer)

    request.send(spell("abz"), Finish(FinishKind.STOP, matched=25))

    assert request.text == "ab"


SHOWN = [{}, {"skip_special_tokens": False}, {"keep_special_ids": (1001,)}]
"""Control tokens are not printed, all are, and the one in question is."""


@pytest.mark.parametrize("shown", SHOWN)
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("stop", [("<tool>",), ("nowhere", "<tool>"), ("bx", "<tool>")])
def test_a_stop_string_that_is_a_control_token_ends_the_text(make_tokens, shown, keeps, num_rows, stop):
    tokens = make_tokens(LETTERS)
    detokenizer = Detokenizer(tokens)
    request = Request(detokenizer, stop=stop, include_stop_str_in_output=keeps, **shown)

    ids = [*spell("ab"), tokens.tool, *spell("cd")]
    for part in [ids] if num_rows == 1 else [[each] for each in ids[:3]]:
        request.send(part)

    assert request.text == ("ab<tool>" if keeps else "ab")
    assert request.token_ids == ids[:3]
    assert request.rows[-1].finish == Finish(FinishKind.STOP, matched="<tool>")
    assert request.rows[-1].usage.completion_tokens == 3
    assert request.rows[-1].ended_by_detokenizer


@pytest.mark.parametrize("shown", SHOWN)
def test_an_end_of_text_that_is_also_a_stop_string_is_reported_as_the_string(make_tokens, shown):
    tokens = make_tokens(LETTERS)
    request = Request(Detokenizer(tokens), stop=("<eos>",), **shown)

    request.send([*spell("ab"), tokens.eos], Finish(FinishKind.STOP, matched=tokens.eos))

    assert request.text == "ab"
    assert request.rows[-1].finish == Finish(FinishKind.STOP, matched="<eos>")
    assert not request.rows[-1].ended_by_detokenizer


def test_a_cut_character_before_a_control_token_is_shown(make_tokens):
    tokens = make_tokens([b"a\xe2\x82"])
    request = Request(Detokenizer(tokens), stop=("<tool>",))

    request.send([0, tokens.tool])

    assert request.text == "a\ufffd"


@pytest.mark.parametrize("finish", [LENGTH, ABORT, Finish(FinishKind.STOP, matched=1000)])
def test_held_back_text_is_flushed_when_the_request_ends(detokenizer, finish):
    request = Request(detokenizer, stop=("stop",))

    request.send(spell("ast"))
    assert request.text == "a"
    request.send(spell("o"), finish)

    assert request.text == "asto"


def test_a_character_that_was_cut_by_the_length_limit_is_marked(make_tokens):
    request = Request(Detokenizer(make_tokens([b"a", b"\xf0\x9f"])))

    request.send([0, 1])
    assert request.text == "a"
    request.send([], LENGTH)

    assert request.text == "a\ufffd"


def test_a_stop_string_cuts_tokens_logprobs_and_usage_behind_the_token_that_completes_it(detokenizer):
    request = Request(detokenizer, stop=("cd",))
    values = np.arange(5, dtype="<f4")
    logprobs = Logprobs(
        token_logprobs=values.tobytes(),
        top_ids=np.arange(10, dtype="<i4").tobytes(),
        top_logprobs=np.arange(10, dtype="<f4").tobytes(),
        top_k=2,
    )

    (row,) = request.send(spell("bcdef"), logprobs=logprobs)

    assert row.text == "b"
    assert row.finish == Finish(FinishKind.STOP, matched="cd")
    assert request.token_ids == spell("bcd")
    assert row.usage == Usage(prompt_tokens=3, completion_tokens=3)
    assert np.frombuffer(row.logprobs.token_logprobs, "<f4").tolist() == [0, 1, 2]
    assert np.frombuffer(row.logprobs.top_ids, "<i4").tolist() == [0, 1, 2, 3, 4, 5]
    assert np.frombuffer(row.logprobs.top_logprobs, "<f4").tolist() == [0, 1, 2, 3, 4, 5]


def test_a_stop_string_may_begin_and_end_inside_tokens(make_tokens):
    request = Request(Detokenizer(make_tokens([b"one E", b"ND two", b"three"])), stop=("END",))

    request.send([0])
    (row,) = request.send([1, 2])

    assert request.text == "one "
    assert request.token_ids == [0, 1]
    assert row.usage.completion_tokens == 2


def test_the_matched_string_stays_on_request(detokenizer):
    request = Request(detokenizer, stop=("cd",), include_stop_str_in_output=True)

    request.send(spell("bc"))
    request.send(spell("de"))

    assert request.text == "bcd"


def test_a_stop_string_wins_over_the_length_limit_reached_with_the_same_token(detokenizer):
    request = Request(detokenizer, stop=("cd",))

    (row,) = request.send(spell("bcd"), LENGTH)

    assert row.finish == Finish(FinishKind.STOP, matched="cd")
    assert not row.ended_by_detokenizer  # the scheduler has ended it, too
    assert detokenizer.num_live_reqs == 0


def test_rows_behind_an_own_stop_are_swallowed_until_the_scheduler_has_let_go(detokenizer):
    request = Request(detokenizer, stop=("b",))

    request.send(spell("ab"))
    late = [*request.send(spell("c")), *request.send([], ABORT)]

    assert [row.ended_by_detokenizer for row in request.rows] == [True]
    assert late == []
    assert request.text == "a"
    assert detokenizer.num_live_reqs == 0


def test_an_abort_leaves_no_state_behind(detokenizer):
    queued, running = Request(detokenizer, "queued"), Request(detokenizer, "running")
    running.send(spell("a"))

    (ended,) = running.send([], ABORT)
    unknown = TokenOutput("never seen", b"", Usage(3, 0), finish=ABORT)
    rows = detokenizer.process(BatchTokenOutput([unknown])).outputs
    queued.send([], ABORT)

    assert ended.finish == ABORT
    assert [row.finish for row in rows] == [ABORT]
    assert detokenizer.num_live_reqs == 0


def test_trouble_with_one_request_ends_only_that_one(make_tokens):
    tokens = make_tokens(LETTERS)
    detokenizer = Detokenizer(tokens)
    tokens.bytes_of[7] = None  # joining it raises TypeError
    bad, good = Request(detokenizer, "bad"), Request(detokenizer, "good")

    rows = detokenizer.process(BatchTokenOutput([bad.row([7]), good.row(spell("a"))])).outputs

    assert [row.rid for row in rows] == ["bad", "good"]
    assert [row.ended_by_detokenizer for row in rows] == [True, False]
    assert (rows[0].finish and rows[0].finish.kind, rows[1].text) == (FinishKind.ERROR, "a")
    assert bad.send(spell("b")) == []
    bad.send([], ABORT)
    good.send([], LENGTH)
    assert detokenizer.num_live_reqs == 0


def test_a_row_of_an_unknown_request_is_answered_with_an_error(detokenizer):
    row = TokenOutput("lost", struct.pack("<i", 1), Usage(3, 7))

    (answer,) = detokenizer.process(BatchTokenOutput([row])).outputs

    assert answer.finish is not None
    assert answer.finish.kind is FinishKind.ERROR


def test_reports_pass_with_the_number_of_texts(detokenizer):
    report = SchedulerReport(sent_s=1.0, num_running_reqs=7)

    assert detokenizer.handle(report) == report
    Request(detokenizer).send(spell("a"))
    assert detokenizer.handle(report) == replace(report, detokenizer_reqs=1)


def test_nothing_is_sent_for_a_batch_without_news(detokenizer):
    request = Request(detokenizer, stop=("b",))
    request.send(spell("b"))

    assert detokenizer.handle(BatchTokenOutput([request.row(spell("c"))])) is None


PIECES: Sequence[bytes] = [b"a", b"b", b"ab", b"ba", "é".encode(), b"\xf0\x9f", b"\x98\x80", b"\xff", b""]


@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=30),
    stop=st.lists(st.text("abé😀", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(0, 100), max_size=8),
)
def test_the_answer_does_not_depend_on_how_tokens_are_cut_into_rows(make_tokens, ids, stop, cuts):
    """Deltas joined are the whole text up to the stop string; tokens end with the one that completes it."""
    detokenizer = Detokenizer(make_tokens(PIECES))
    request = Request(detokenizer, stop=tuple(stop))
    bounds = [0, *sorted(cut % len(ids) for cut in cuts), len(ids)]
    for start, end in pairwise(bounds):
        request.send(ids[start:end], LENGTH if end == len(ids) else None)

    whole = b"".join(PIECES[i] for i in ids).decode(errors="replace")
    found = [s for s in stop if s in whole]
    last = request.rows[-1]
    assert last.finish is not None
    assert last.usage.completion_tokens == len(request.token_ids)
    if not found:
        assert (request.text, last.finish, request.token_ids) == (whole, LENGTH, ids)
        return
    end = min(whole.index(s) + len(s) for s in found)
    matched = max((s for s in stop if whole[:end].endswith(s)), key=len)
    assert last.finish == Finish(FinishKind.STOP, matched=matched)
    assert request.text == whole[: end - len(matched)]
    assert request.token_ids == ids[: len(request.token_ids)]
    before = codecs.getincrementaldecoder("utf-8")("replace").decode(
        b"".join(PIECES[i] for i in request.token_ids[:-1])
    )
    assert not any(s in before for s in stop)


# ---------------------------------------------------------------- regular expressions and repetitions


@given(
    word=st.text("abcd", min_size=1, max_size=24),
    pattern=st.sampled_from(["ab+c", "(ab|cd){2}", "[^a]{3}", "^ba", "d.*d", "(?i)AA"]),
    cuts=st.lists(st.integers(0, 100), max_size=5),
    delivered=st.integers(0, 5),
)
def test_a_regular_expression_ends_the_text_after_its_first_match(
    make_tokens, word, pattern, cuts, delivered
):
    end = next((n for n in range(1, len(word) + 1) if re.search(pattern, word[:n])), None)
    num = min(delivered, len(word) - 1 if end is None else end - 1)
    ids, rest = struct.pack(f"<{num}i", *spell(word[:num])), spell(word[num:])
    request = Request(Detokenizer(make_tokens(LETTERS)), stop_regex=(pattern,), delivered_ids=ids)
    bounds = [0, *sorted(cut % len(rest) for cut in cuts), len(rest)]
    for start, stop in pairwise(bounds):
        request.send(rest[start:stop], LENGTH if stop == len(rest) else None)

    last = request.rows[-1]
    if end is None:
        assert (request.text, last.finish) == (word[num:], LENGTH)
    else:
        assert (request.text, last.finish) == (word[num:end], Finish(FinishKind.STOP, matched=pattern))
        assert request.token_ids == spell(word[num:end])


def test_the_match_that_ends_first_wins_and_a_repetition_leaves_no_bytes_behind(make_tokens):
    request = Request(Detokenizer(make_tokens([b"xaby"])), stop_regex=("b", "a"))
    request.send([0])
    assert (request.text, request.rows[-1].finish) == ("xa", Finish(FinishKind.STOP, matched="a"))
    wanted = RepetitionDetection(max_pattern_size=1, min_count=2)
    request = Request(Detokenizer(make_tokens([b"\xc3"])), repetition_detection=wanted)
    request.send([0, 0])
    assert request.text == "\ufffd\ufffd"


def test_a_match_within_a_token_cuts_its_text(make_tokens):
    request = Request(Detokenizer(make_tokens([b"xaby"])), stop_regex=("b",), stop=("zz",))
    request.send([0])
    assert (request.text, request.rows[-1].finish) == ("xab", Finish(FinishKind.STOP, matched="b"))


def repeats(ids: list[int], wanted: RepetitionDetection) -> bool:
    """vLLM's `check_sequence_repetition`."""
    for size in range(max(1, wanted.min_pattern_size), wanted.max_pattern_size + 1):
        if size * wanted.min_count <= len(ids):
            end = ids[-size:]
            if ids[-size * wanted.min_count :] == end * wanted.min_count:
                return True
    return False


@given(
    ids=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    sizes=st.tuples(st.integers(0, 4), st.integers(1, 5)).filter(lambda sizes: sizes[0] <= sizes[1]),
    count=st.integers(2, 4),
    delivered=st.integers(0, 3),
)
def test_an_answer_that_repeats_itself_ends_where_vllm_ends_it(make_tokens, ids, sizes, count, delivered):
    wanted = RepetitionDetection(max_pattern_size=sizes[1], min_pattern_size=sizes[0], min_count=count)
    end = next((n for n in range(1, len(ids) + 1) if repeats(ids[:n], wanted)), None)
    num = min(delivered, len(ids) - 1 if end is None else end - 1)
    data = struct.pack(f"<{num}i", *ids[:num])
    request = Request(
        Detokenizer(make_tokens(LETTERS)), repetition_detection=wanted, delivered_ids=data, stop=("zz",)
    )
    request.send(ids[num:], LENGTH)

    expected = LENGTH if end is None else Finish(FinishKind.STOP, matched="repetition_detected")
    assert request.rows[-1].finish == expected
    assert request.token_ids == ids[num:end]
    assert request.text == "".join("abc"[i] for i in ids[num:end])


# ---------------------------------------------------------------- requests that were begun before


def test_the_text_of_delivered_tokens_is_not_sent_again(make_tokens):
    detokenizer = Detokenizer(make_tokens([b"a", "é".encode()[:1], "é".encode()[1:]]))
    request = Request(
        detokenizer, delivered_ids=struct.pack("<2i", 0, 1)
    )  # the beginning of a character is held back
    request.send([2])
    request.send([0], LENGTH)

    assert request.text == "éa"


def test_a_stop_string_may_begin_in_delivered_tokens(detokenizer):
    request = Request(detokenizer, stop=("stop",), delivered_ids=struct.pack("<4i", *spell("oast")))
    request.send(spell("op"))

    assert request.text == ""
    assert request.rows[-1].finish == Finish(FinishKind.STOP, matched="stop")


@given(data=st.data())
def test_text_goes_on_wherever_it_was_cut(data, make_tokens):
    pieces = [b"a", b"b", "é".encode()[:1], "é".encode()[1:], b"ab", "東".encode()]
    table = make_tokens(pieces)
    ids = data.draw(st.lists(st.integers(0, len(pieces) - 1), min_size=1))
    cut = data.draw(st.integers(0, len(ids) - 1))
    stop = tuple(data.draw(st.lists(st.sampled_from(["aab", "bé", "ba"]), max_size=2)))
    whole = Request(Detokenizer(table), stop=stop)
    for token_id in ids[:cut]:
        whole.send([token_id])
    if whole.rows and whole.rows[-1].finish is not None:
        return  # it has ended before the cut
    begin = whole.text
    rest = Request(Detokenizer(table), stop=stop, delivered_ids=struct.pack(f"<{cut}i", *ids[:cut]))
    for token_id in ids[cut:-1]:
        whole.send([token_id])
        rest.send([token_id])
    whole.send(ids[-1:], LENGTH)
    rest.send(ids[-1:], LENGTH)

    assert begin + rest.text == whole.text
    assert rest.rows[-1].finish == whole.rows[-1].finish


def test_one_that_joins_late_drops_rows_of_requests_it_has_not_seen_begin(make_tokens):
    detokenizer = Detokenizer(make_tokens(LETTERS), after_restart=True)
    old = Request(detokenizer, "old")
    old.row([1])  # the first row went to the one before it
    new = Request(detokenizer, "new")

    assert old.send([2]) == []
    new.send([3])
    assert old.send([4], LENGTH) == []  # or its client would take it for the end, with tokens missing
    new.send([5], LENGTH)

    assert new.text == "df"
    assert detokenizer.num_live_reqs == 0


def test_a_vector_is_passed_on_as_it_is_by_a_detokenizer_without_tokens():
    detokenizer = Detokenizer(NoText())
    usage, finish, vector = Usage(3, 0), Finish(FinishKind.STOP), struct.pack("<2f", 0.5, -1.0)

    batch = detokenizer.process(
        BatchTokenOutput([TokenOutput("r1", b"", usage, finish, TextOptions(), vector=vector)])
    )

    assert batch.outputs == [TextOutput("r1", "", b"", usage, finish, vector=vector)]
    assert detokenizer.num_live_reqs == 0


@pytest.mark.parametrize("after_restart", [False, True])
def test_rows_of_progress_pass_without_a_state(after_restart: bool):
    detokenizer = Detokenizer(NoText(), after_restart=after_restart)
    usage = Usage(prompt_tokens=9, completion_tokens=0, processed_tokens=4)
    answer = detokenizer.handle(BatchTokenOutput([TokenOutput("r1", b"", usage)]))
    assert answer == BatchTextOutput([TextOutput("r1", "", b"", usage)])
    assert detokenizer.num_live_reqs == 0
