from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.detokenizer.incremental import IncrementalDecoder, NoText

PIECES = [b"a", b" b", "é".encode(), b"\xf0\x9f", b"\x98\x80", b"\xe2", b"\x82\xac", b"\xff", b"", b"\n"]


@given(ids=st.lists(st.integers(0, len(PIECES) + 2)), cuts=st.data())
def test_joined_pieces_are_the_decoded_whole_however_the_rows_are_cut(make_tokens, ids, cuts):
    tokens = make_tokens(PIECES)
    decoder = IncrementalDecoder(tokens, skip_special_tokens=True)
    text, rest = "", ids
    while rest:
        num = cuts.draw(st.integers(1, len(rest)))
        text += decoder.push(rest[:num])
        rest = rest[num:]
    text += decoder.flush()

    assert text == b"".join(tokens.token_bytes(i) for i in ids).decode(errors="replace")


def test_a_character_split_across_tokens_appears_with_its_last_byte(make_tokens):
    decoder = IncrementalDecoder(make_tokens([b"x\xf0\x9f", b"\x98", b"\x80y"]), skip_special_tokens=True)

    assert [decoder.push([0]), decoder.push([1]), decoder.push([2])] == ["x", "", "😀y"]
    assert decoder.flush() == ""


def test_a_cut_character_shows_only_when_the_text_ends(make_tokens):
    decoder = IncrementalDecoder(make_tokens([b"\xe2\x82"]), skip_special_tokens=True)

    assert decoder.push([0]) == ""
    assert decoder.flush() == "\ufffd"


def test_bytes_that_cannot_become_a_character_do_not_hold_up_what_follows(make_tokens):
    decoder = IncrementalDecoder(make_tokens([b"\xe2\x82", b"ok"]), skip_special_tokens=True)

    assert decoder.push([0]) == ""
    assert decoder.push([1]) == "\ufffdok"


def test_special_tokens_are_text_only_when_asked_for(make_tokens):
    tokens = make_tokens([b"a", b"b"])
    ids = [0, tokens.tool, 1]

    assert IncrementalDecoder(tokens, skip_special_tokens=True).push(ids) == "ab"
    assert IncrementalDecoder(tokens, skip_special_tokens=False).push(ids) == "a<tool>b"


def test_the_leading_space_of_a_continuation_stays(make_tokens):
    decoder = IncrementalDecoder(make_tokens([b" world"]), skip_special_tokens=True)

    assert decoder.push([0]) == " world"


def test_special_tokens_that_a_parser_needs_are_kept(make_tokens):
    tokens = make_tokens([b"x"])
    decoder = IncrementalDecoder(tokens, skip_special_tokens=True, keep_special_ids=(tokens.tool,))

    assert decoder.push([tokens.tool, 0, tokens.eos]) == "<tool>x"


def test_a_model_that_generates_no_text_has_no_tokens_to_show():
    table = NoText()

    assert (table.token_bytes(5), table.is_special(5)) == (b"", False)
