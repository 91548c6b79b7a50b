"""Offsets of tokens: where a token is in the text, the text from its offset on begins with it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as CoreTokenizer

from engine.detokenizer.manager import Detokenizer
from engine.models.tokenizer.tokenizer import Tokenizer
from engine.runtime.messages import BatchTokenOutput, Finish, FinishKind, TextOptions, TokenOutput, Usage
from engine.tokenizer_manager.http.token_logprobs import (
    AnswerPlacement,
    PlacedLogprob,
    TokenLogprob,
    prompt_offsets,
)

LENGTH = Finish(FinishKind.LENGTH)


class Pieces:
    """Ids 0, 1, ... are these pieces; 100 and 101 are control tokens."""

    PIECES = (b"a", b" b", "é".encode(), b"\xf0\x9f", b"\x98\x80", b"\xe2", b"\xff", b"", b"\n", b"ab")
    SPECIAL: ClassVar = {100: b"<s>", 101: b"</s>"}

    def token_bytes(self, token_id: int) -> bytes:
        return self.SPECIAL.get(token_id) or self.PIECES[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id in self.SPECIAL


IDS = st.lists(st.sampled_from([*range(len(Pieces.PIECES)), *Pieces.SPECIAL]), max_size=24)
STOPS = st.sampled_from([(), ("ab",), (" b", "aa"), ("</s>",), ("é\n",), ("a<s>",), ("😀",)])


class Answer:
    """An answer as the detokenizer and the placement make it, row by row."""

    def __init__(self, ids: Sequence[int], cuts: Sequence[int], **options: Any) -> None:
        table = Pieces()
        settings = TextOptions(**options)
        detokenizer = Detokenizer(table)
        placement = AnswerPlacement(
            table,
            skip_special_tokens=settings.skip_special_tokens,
            keep_special_ids=settings.keep_special_ids,
            has_stop_strings=bool(settings.stop),
        )
        self.text = ""
        self.placed: list[PlacedLogprob] = []
        self.finish: Finish | None = None
        self.in_time = True
        places = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
        if len(places) == 1:
            places.append(len(ids))
        for begin, end in pairwise(places):
            row = TokenOutput(
                rid="r",
                token_ids=struct.pack(f"<{end - begin}i", *ids[begin:end]),
                usage=Usage(0, end),
                finish=LENGTH if end == len(ids) else None,
                options=settings if begin == 0 else None,
            )
            for output in detokenizer.process(BatchTokenOutput([row])).outputs:
                entries = [TokenLogprob(i, -1.0, []) for (i,) in struct.iter_unpack("<i", output.token_ids)]
                self.text += output.text
                self.finish = output.finish
                self.placed += placement.add(entries, output.text, output.finish)
                if settings.stop and self.finish is None:
                    self.in_time &= all(placed.offset < len(self.text) for placed in self.placed)


@given(IDS, st.lists(st.integers(0, 30), max_size=6), STOPS, st.booleans(), st.sampled_from([(), (101,)]))
def test_the_text_from_an_offset_on_begins_with_the_token(ids, cuts, stop, skips, kept):
    answer = Answer(ids, cuts, stop=stop, skip_special_tokens=skips, keep_special_ids=kept)
    stopped = answer.finish is not None and answer.finish.kind is FinishKind.STOP

    assert answer.in_time  # nothing is sent of a token that may be part of a stop string
    offsets = [offset for _, offset in answer.placed]
    assert offsets == sorted(offsets)
    if stopped:
        assert all(offset < len(answer.text) for offset in offsets)
    else:
        assert [entry.token_id for entry, _ in answer.placed] == list(ids)
    for entry, offset in answer.placed:
        shown = not skips or entry.token_id in kept or entry.token_id not in Pieces.SPECIAL
        token = Pieces().token_bytes(entry.token_id)
        if shown and _is_text(token):
            wanted = token.decode()
            rest = answer.text[offset:]
            # A replacement character may stand before it, for bytes that this token has shown to be no character.
            rest = rest.lstrip("\ufffd")
            assert rest.startswith(wanted) or (stopped and wanted.startswith(rest))


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def byte_level() -> Tokenizer:
    """Bytes, merged a little; BOS is added."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)} | {"ab": 256, "Ġb": 257}
    core = CoreTokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("Ġ", "b")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return _with_bos(core)


def sentence_piece() -> Tokenizer:
    """As Llama 2: a space before the text, bytes for unknown characters; BOS is added."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    vocab |= {piece: 300 + i for i, piece in enumerate(["▁", "a", "b", "▁a", "▁b", "ab", "é"])}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b")]
    core = CoreTokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_bos(core)


def _with_bos(core: CoreTokenizer) -> Tokenizer:
    core.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    bos = core.token_to_id("<s>")
    core.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", bos)])
    return Tokenizer(core, special_tokens={"bos_token": "<s>"}, bos_token_id=bos, chat_templates={})


TOKENIZERS = {"byte_level": byte_level(), "sentence_piece": sentence_piece()}
TEXTS = st.lists(
    st.sampled_from(["a", "b", " ", "ab", "é", "😀", "<s>", "</s>", "\n", "x"]), min_size=1, max_size=12
)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(parts=TEXTS, as_ids=st.booleans(), skips=st.booleans())
def test_a_prompts_tokens_are_found_in_its_text(name, parts, as_ids, skips):
    tokenizer, text = TOKENIZERS[name], "".join(parts)
    ids = tokenizer.encode(text)
    if as_ids:
        text = tokenizer.decode(ids, skip_special_tokens=skips)
    offsets = prompt_offsets(text, ids, tokenizer, skipped=as_ids and skips)

    assert len(offsets) == len(ids)
    assert offsets == sorted(offsets)
    reached = 0
    for token_id, offset in zip(ids, offsets, strict=True):
        token = tokenizer.token_bytes(token_id)
        if _is_text(token) and not tokenizer.is_special(token_id):
            shown = token.decode()
            if not text.startswith(shown, offset):
                assert name == "sentence_piece" and shown.startswith(" ")  # its space before a text
                shown = shown.removeprefix(" ")
            assert text.startswith(shown, offset)
            reached = offset + len(shown)
    if _is_text(tokenizer.token_bytes(ids[-1])) and not tokenizer.is_special(ids[-1]):
        assert reached == len(text)


@pytest.mark.parametrize(
    ("text", "ids", "skipped", "offsets"),
    [
        ("a b", [100, 0, 1], False, [0, 0, 1]),  # an added BOS
        ("<s>a", [100, 100, 0], False, [0, 3, 3]),  # one added, one written
        ("a</s>a", [0, 101, 0], False, [0, 1, 5]),
        ("aa", [0, 101, 0], True, [0, 1, 1]),
        ("a😀a", [0, 3, 4, 0], False, [0, 1, 1, 2]),  # a character of two tokens
        ("b", [1], False, [0]),  # a space that is not in the text
        ("aXXXa", [0, 0], False, [0, 4]),  # a part that no token has
        ("zz", [0, 0], False, [0, 0]),
        ("", [0], False, [0]),
    ],
)
def test_offsets_of_prompts(text: str, ids: list[int], skipped: bool, offsets: list[int]):
    assert prompt_offsets(text, ids, Pieces(), skipped=skipped) == offsets
