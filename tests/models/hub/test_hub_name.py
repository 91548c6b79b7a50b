"""The forms of a name."""

from __future__ import annotations

import pytest

from engine.models.hub.hub_name import BUILT_IN, HubName, parse_hub_name
from engine.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/repo", HubName("org/repo")),
        ("org/repo@main", HubName("org/repo")),
        ("org/repo@v1.0", HubName("org/repo", "v1.0")),
        ("org/repo@refs/pr/1", HubName("org/repo", "refs/pr/1")),
        ("org/repo:Q4_K_M", HubName("org/repo", "main", "Q4_K_M")),
        ("org/repo@v1:BF16/model-BF16", HubName("org/repo", "v1", "BF16/model-BF16")),
        ("Org-1/re.po_2:a.Q4_1.gguf", HubName("Org-1/re.po_2", "main", "a.Q4_1.gguf")),
        ("qwen3-0.6b", HubName(BUILT_IN["qwen3-0.6b"])),
        ("QWEN3-0.6B", HubName(BUILT_IN["qwen3-0.6b"])),
    ],
)
def test_forms(text: str, name: HubName) -> None:
    assert parse_hub_name(text) == name
    assert parse_hub_name(str(name)) == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "repo",
        "repo:Q4_K_M",
        "a/b/c",
        "org/repo@",
        "org/repo:",
        "/org/repo",
        "-o/repo",
        "org/re po",
        "a/b@/x",
    ],
)
def test_other_texts_are_no_names(text: str) -> None:
    assert parse_hub_name(text) is None


@pytest.mark.parametrize("text", ["org/repo@..", "org/repo@a/../b", "org/repo:../x", "org/repo:a/./b"])
def test_no_name_leads_out_of_the_cache(text: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot contain '\.\.'"):
        parse_hub_name(text)


@pytest.mark.parametrize("name", BUILT_IN.values())
def test_built_in_names_lead_to_names_of_the_hub(name: str) -> None:
    assert parse_hub_name(name) == HubName(name)
