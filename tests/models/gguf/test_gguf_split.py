"""Models in several GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engine.models.gguf.gguf_file import GGUFFile
from engine.models.gguf.gguf_split import parts_of, whole_name
from engine.models.source import resolve_source
from engine.runtime.errors import ConfigError


@pytest.fixture
def split(write_gguf: Callable[..., Path], tmp_path: Path) -> Path:
    """Three parts, as llama.cpp's gguf-split writes them; the first has the metadata."""
    for part in range(3):
        own = {"split.no": part, "split.count": 3, "split.tensors.count": 3}
        metadata = {"general.name": "split", **own} if part == 0 else own
        tensors = {f"t{part}": np.full((2, 4), float(part), np.float32)}
        write_gguf(tmp_path / f"m-0000{part + 1}-of-00003.gguf", metadata, tensors)
    return tmp_path / "m-00001-of-00003.gguf"


def test_the_tensors_of_all_parts_are_read(split: Path) -> None:
    file = GGUFFile(split)
    assert len(file.paths) == 3
    assert [file.read(f"t{part}").tolist() for part in range(3)] == [
        [[float(part)] * 4] * 2 for part in range(3)
    ]
    assert file.metadata["general.name"] == "split"


def test_a_folder_or_the_first_part_is_the_model(split: Path) -> None:
    for model in (split.parent, split):
        source = resolve_source(str(model))
        assert (source.path, source.name) == (str(split), "m")


def test_links_to_blobs_find_their_parts_beside_them(split: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for number, path in enumerate(sorted(tmp_path.glob("*.gguf"))):
        blob = path.rename(tmp_path / f"blob{number}")
        (snapshot / path.name).symlink_to(blob)
    assert set(GGUFFile(snapshot / split.name).tensors) == {"t0", "t1", "t2"}


def test_a_later_part_names_the_first(split: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"is a later part of a split model; give the first one, m-00001-of-00003"
    ):
        GGUFFile(split.with_name("m-00002-of-00003.gguf"))


def test_a_later_part_under_the_name_of_the_first_is_refused(split: Path) -> None:
    split.with_name("m-00002-of-00003.gguf").replace(split)
    with pytest.raises(ConfigError, match="is a later part of a split model"):
        GGUFFile(split)


def test_a_missing_part_is_named(split: Path) -> None:
    split.with_name("m-00003-of-00003.gguf").unlink()
    with pytest.raises(
        ConfigError, match=r"1 of 3 parts are missing, first m-00003-of-00003\.gguf; put them into"
    ):
        GGUFFile(split)


def test_a_later_part_says_that_the_first_is_missing(split: Path) -> None:
    split.unlink()
    with pytest.raises(ConfigError, match=r"give the first one, m-00001-of-00003\.gguf, which is missing"):
        GGUFFile(split.with_name("m-00002-of-00003.gguf"))


def test_parts_in_another_order_are_refused(split: Path) -> None:
    second, third = (split.with_name(f"m-0000{number}-of-00003.gguf") for number in (2, 3))
    third.rename(split.with_name("other"))
    second.rename(third)
    split.with_name("other").rename(second)
    with pytest.raises(ConfigError, match=r"m-00002.*: holds part 3 of 3, by its name it is part 2 of 3"):
        GGUFFile(split)


@pytest.mark.parametrize(
    ("own", "held"),
    [
        ({"split.no": 1, "split.count": 4}, "part 2 of 4"),
        ({}, "no part of a split model"),
        ({"split.no": "1", "split.count": 3}, "no part of a split model"),
    ],
)
def test_a_part_of_another_model_is_refused(
    split: Path, write_gguf: Callable[..., Path], own: dict[str, object], held: str
) -> None:
    write_gguf(split.with_name("m-00002-of-00003.gguf"), own, {"t1": np.zeros((2, 4), np.float32)})
    with pytest.raises(ConfigError, match=f"holds {held}, by its name it is part 2 of 3"):
        GGUFFile(split)


def test_another_number_of_tensors_is_refused(split: Path, write_gguf: Callable[..., Path]) -> None:
    tensors = {name: np.zeros((2, 4), np.float32) for name in ("t1", "more")}
    write_gguf(split.with_name("m-00002-of-00003.gguf"), {"split.no": 1, "split.count": 3}, tensors)
    with pytest.raises(
        ConfigError, match=r"the parts hold 4 tensors, split\.tensors\.count is 3; a part is of"
    ):
        GGUFFile(split)


def test_other_names_are_refused(split: Path) -> None:
    with pytest.raises(ConfigError, match=r"its name must end with -00001-of-00003\.gguf"):
        GGUFFile(split.rename(split.with_name("m.gguf")))


def test_a_tensor_twice_is_refused(split: Path, write_gguf: Callable[..., Path]) -> None:
    path = split.with_name("m-00002-of-00003.gguf")
    write_gguf(path, {"split.no": 1, "split.count": 3}, {"t0": np.zeros((2, 4), np.float32)})
    with pytest.raises(ConfigError, match="tensor 't0' is in an earlier part, too"):
        GGUFFile(split)


@pytest.mark.parametrize("count", [[1, 2], 100_000, "3", 2.0])
def test_a_damaged_count(write_gguf: Callable[..., Path], tmp_path: Path, count: object) -> None:
    path = tmp_path / "m-00001-of-00003.gguf"
    write_gguf(path, {"split.count": count}, {})
    with pytest.raises(ConfigError, match=r"split\.count is .*, expected a number of parts"):
        GGUFFile(path)


def test_the_name_of_a_model() -> None:
    assert [whole_name("m-00001-of-00003.gguf"), whole_name("m.gguf"), whole_name("m")] == ["m", "m", "m"]
    assert [whole_name("m-00001-of-00003.GGUF"), whole_name("a/m.GGUF")] == ["m", "a/m"]


def test_the_parts_of_a_model_are_found_by_the_name_of_one() -> None:
    first, second = Path("a/m-00001-of-00002.GGUF"), Path("a/m-00002-of-00002.GGUF")
    assert parts_of(first) == parts_of(second) == [first, second]
    assert parts_of(Path("a/m.gguf")) == [Path("a/m.gguf")]
