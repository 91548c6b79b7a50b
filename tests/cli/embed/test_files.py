"""The lines that `engine embed` and `engine rerank` read, and the forms of the vectors."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest

from engine.cli.embed.backend import in_options
from engine.cli.embed.files import WRITERS, read_texts
from engine.runtime.errors import ConfigError, RequestError

VECTORS = np.array([[0.1, -2.5e-8, 3.0], [1 / 3, 0.0, -1.0]], dtype=np.float32)


@pytest.fixture
def file_of(tmp_path):
    def write(content: bytes, name: str = "notes.txt") -> str:
        (tmp_path / name).write_bytes(content)
        return str(tmp_path / name)

    return write


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\r\nb", ["a", "b"]),
        (b"a\n\n \n\n", ["a"]),
        (b"\xef\xbb\xbfa\n", ["a"]),
        ("a\u2028b\x0cc\n".encode(), ["a\u2028b\x0cc"]),
        (b"  a  \n", ["  a  "]),
    ],
)
def test_a_line_is_a_text(file_of, content, texts):
    assert read_texts([file_of(content)], null=False, skip_empty=False).texts == texts


def test_texts_of_several_lines_end_with_a_nul_byte(file_of):
    found = read_texts([file_of(b"a\nb\0c\0")], null=True, skip_empty=False)
    assert found.texts == ["a\nb", "c"]
    assert found.places[1].startswith("text 2 of ")


def test_files_follow_each_other_and_lines_are_counted_in_each(file_of):
    one, other = file_of(b"a\nb\n", "one"), file_of(b"c\n", "other")
    found = read_texts([one, other], null=False, skip_empty=False)
    assert found.texts == ["a", "b", "c"]
    assert found.places[2] == f"line 1 of {other}"
    assert found.numbers == [1, 2, 1]


def test_an_empty_line_is_an_error_unless_it_is_left_out(file_of):
    path = file_of(b"a\n\nb\n")
    with pytest.raises(RequestError, match=f"^line 2 of {path} is empty.*--skip-empty"):
        read_texts([path], null=False, skip_empty=False)
    found = read_texts([path], null=False, skip_empty=True)
    assert (found.texts, found.numbers, found.num_skipped) == (["a", "b"], [1, 3], 1)


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_no_text_is_an_error(file_of, content):
    with pytest.raises(RequestError, match=r"there is no text: .*notes.txt is empty"):
        read_texts([file_of(content)], null=False, skip_empty=True)


def test_what_cannot_be_read_is_named(file_of, tmp_path):
    with pytest.raises(ConfigError, match="gone cannot be read: No such file"):
        read_texts([str(tmp_path / "gone")], null=False, skip_empty=False)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_texts([str(tmp_path)], null=False, skip_empty=False)
    with pytest.raises(ConfigError, match="is not UTF-8 text: byte 0xff at position 2"):
        read_texts([file_of(b"a\n\xff")], null=False, skip_empty=False)


@pytest.mark.parametrize(
    ("message", "start", "told"),
    [
        (
            "input[1] has 9 tokens and the model takes 4; shorten it, send truncate_prompt_tokens, or",
            2,
            "line 4 of ",
        ),
        ("the input has 9 tokens", 1, "line 2 of "),
        ("documents[0] has 9 tokens", 3, "line 4 of "),
        ("pair[1] has 9 tokens", 0, "line 2 of "),
        ("input_type is 'x'", 0, "input_type is "),
        ("input[99] has 9 tokens", 0, "input[99] has "),
        ("dimensions is 3", 0, "dimensions is "),
    ],
)
def test_errors_name_the_line_instead_of_the_number(file_of, message, start, told):
    texts = read_texts([file_of(b"a\nb\nc\nd\n")], null=False, skip_empty=False)
    located = texts.located(RequestError(message), in_options(message), start)
    assert str(located).startswith(told)
    assert "truncate_prompt_tokens" not in str(located)


def test_fixes_are_options():
    assert in_options("raise max_model_len if") == "raise --max-model-len if"


# ---------------------------------------------------------------- forms


def written(form, *parts):
    out = io.BytesIO()
    texts = ["a", 'b "q" ü']
    WRITERS[form](out, 2, ((texts[part], VECTORS[part]) for part in parts or (slice(0, 2),)))
    return out.getvalue()


def test_npy_is_read_by_numpy_whatever_the_parts():
    whole = written("npy")
    assert written("npy", slice(0, 1), slice(1, 2)) == whole
    read = np.load(io.BytesIO(whole))
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, VECTORS)


def test_an_npy_that_was_cut_short_is_no_file():
    out = io.BytesIO()
    WRITERS["npy"](out, 2, [(["a"], VECTORS[:1])])
    with pytest.raises(ValueError, match=r"cannot reshape|EOF"):
        np.load(io.BytesIO(out.getvalue()))


def test_json_lines_have_the_text_and_the_same_float32():
    rows = [json.loads(line) for line in written("jsonl").decode().splitlines()]
    assert [row["text"] for row in rows] == ["a", 'b "q" ü']
    np.testing.assert_array_equal(np.array([row["embedding"] for row in rows], dtype=np.float32), VECTORS)


def test_csv_has_the_same_float32():
    read = np.loadtxt(io.BytesIO(written("csv")), delimiter=",", dtype=np.float32)
    np.testing.assert_array_equal(read, VECTORS)


def test_a_table_shows_beginnings_and_similarities(capsys):
    written("table")
    out = capsys.readouterr().out
    assert "2 vectors of 3 numbers" in out
    assert "0.100, -0.000, 3.000" in out
    assert "similarity" in out and "-0.94" in out


def test_a_table_of_many_texts_is_cut(capsys):
    WRITERS["table"](io.BytesIO(), 100, [(["[bold]x"] * 10, np.ones((10, 2), np.float32))] * 10)
    out = capsys.readouterr().out
    assert "and 80 more" in out and "similarity" not in out and "[bold]x" in out
