"""Special tokens from every file that names them: the reading of transformers, and no named token is lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as CoreTokenizer

from engine.models.hf.special_tokens import STANDARD_NAMES, read_eos_ids, read_special_tokens
from engine.models.tokenizer.tokenizer import Tokenizer
from engine.runtime.errors import ConfigError

ADDED: Final = ("<a>", "<b>", "<c>")
PLAIN: Final = ("</s>", "<sep>")
"""In the vocabulary, but not among the added tokens."""
TEXT: Final = "one <a> two</s>three <b><sep> <c> four"
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a model folder: byte-level tokens, three added ones with the ids 0 to 2, two plain ones after them."""

    def folder(config: Any = None, token_map: Any = None) -> Path:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        names = [*ADDED, *PLAIN, *alphabet]
        core = CoreTokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        core.add_tokens([AddedToken(name, special=name != "<c>", normalized=False) for name in ADDED])
        core.save(str(tmp_path / "tokenizer.json"))
        for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", token_map)):
            (tmp_path / name).unlink(missing_ok=True)
            if content is not None:
                (tmp_path / name).write_text(json.dumps({"tokenizer_class": "TokenizersBackend"} | content))
        return tmp_path

    return folder


def theirs(folder: Path) -> Any:
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


DECODER: Final = {
    "added_tokens_decoder": {
        str(i): {"content": name, "special": name != "<c>", "normalized": False}
        for i, name in enumerate(ADDED)
    }
}
VALUES: Final = (None, "<a>", "<b>", {"content": "<c>", "lstrip": False}, "</s>")


@pytest.mark.parametrize("name", STANDARD_NAMES)
@pytest.mark.parametrize("decoder", [{}, DECODER], ids=["", "decoder"])
def test_a_token_in_two_files_is_that_of_transformers(
    write: Write, name: str, decoder: dict[str, Any]
) -> None:
    for in_config, in_map in itertools.product(VALUES, VALUES):
        typed = in_config | {"__type": "AddedToken"} if isinstance(in_config, dict) else in_config
        folder = write({name: typed} | decoder, {name: in_map})
        found = Tokenizer.from_folder(folder)
        if in_config is None and in_map is not None and decoder:
            # transformers drops it; a template with this token would lose it
            assert found.special_tokens[name] == (in_map if isinstance(in_map, str) else in_map["content"])
            continue
        if in_config is not None and in_map is None:
            assert found.special_tokens[name] in str(in_config)
            continue
        reference = theirs(folder)
        assert found.special_tokens.get(name) == reference.special_tokens_map.get(name), (in_config, in_map)
        assert found.encode(TEXT) == reference.encode(TEXT, add_special_tokens=False), (in_config, in_map)
        ids = found.encode(TEXT)
        assert found.decode(ids) == reference.decode(ids, skip_special_tokens=True), (in_config, in_map)


def test_tokens_of_different_files_are_all_there(write: Write) -> None:
    folder = write({"eos_token": "<a>"}, {"bos_token": "<b>", "sep_token": {"content": "<sep>"}})

    found = Tokenizer.from_folder(folder)

    assert found.special_tokens == {"eos_token": "<a>", "bos_token": "<b>", "sep_token": "<sep>"}
    assert (found.bos_token_id, found.eos_token_ids) == (1, (0,))


@pytest.mark.parametrize(
    "config",
    [
        {"image_token": "<b>"},
        {"extra_special_tokens": {"image_token": "<b>", "boi": "<sep>"}},
        {"extra_special_tokens": ["<sep>"]},
        {
            "additional_special_tokens": [
                "<sep>",
                {"content": "</s>", "special": True, "__type": "AddedToken"},
            ]
        },
        {"additional_special_tokens": ["<sep>"], "extra_special_tokens": ["</s>"]},
        {"added_tokens_decoder": {"3": {"content": "</s>", "special": True, "lstrip": True}}},
        {"added_tokens_decoder": {"4": {"content": "<sep>", "special": False}}},
        {"added_tokens_decoder": {"2": {"content": "<c>", "special": True, "normalized": False}}},
        {"added_tokens_decoder": {"261": {"content": "<new>", "special": True}}},
    ],
    ids=json.dumps,
)
def test_all_ways_to_list_a_token(write: Write, config: dict[str, Any]) -> None:
    folder = write(config)
    reference = theirs(folder)

    found = Tokenizer.from_folder(folder)

    text = TEXT + " <new>"
    ids = found.encode(text)
    assert ids == reference.encode(text, add_special_tokens=False)
    assert found.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert found.special_tokens.items() >= reference.special_tokens_map.items()


def test_a_listed_token_with_an_id_that_it_cannot_get_is_reported(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write({"added_tokens_decoder": {"9999": {"content": "<new>", "special": True}}})
    assert Tokenizer.from_folder(folder).token_to_id("<new>") is None
    assert "the token '<new>' with the id 9999 is not in tokenizer.json" in caplog.text


@pytest.mark.parametrize(
    ("config", "token_map", "expected"),
    [
        ({}, {}, ()),
        ({"eos_token": "<b>"}, None, (1,)),  # the id is in tokenizer.json
        ({}, {"eos_token": "<b>"}, (1,)),
        (DECODER, {"eos_token": "<a>"}, (0,)),
        (DECODER | {"eos_token": "<a>"}, {"eos_token": "<b>"}, (0,)),
        ({"eos_token": "<a>"}, {"eos_token": "<b>"}, (1,)),
        ({"eos_token": "unknown"}, None, ()),
    ],
)
def test_the_end_of_an_answer(write: Write, config: Any, token_map: Any, expected: tuple[int, ...]) -> None:
    folder = write(config, token_map)
    assert read_eos_ids(folder, 300) == expected
    assert Tokenizer.from_folder(folder).eos_token_ids == expected
    assert read_eos_ids(folder, 0) == ()


def test_a_damaged_file_is_named(write: Write) -> None:
    folder = write({"eos_token": "<a>"})
    (folder / "special_tokens_map.json").write_text("[")
    with pytest.raises(ConfigError, match=r"special_tokens_map\.json: not valid JSON"):
        read_special_tokens(folder)
    (folder / "special_tokens_map.json").unlink()
    (folder / "tokenizer.json").write_text('{"added_tokens": [')
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not valid JSON"):
        read_eos_ids(folder, 300)
