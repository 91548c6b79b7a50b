"""`docs/cli.md` and `docs/configuration.md` are what the code says, and the table of other engines' names fits it."""

from __future__ import annotations

import re

import pytest

from engine.runtime.config.config_fields import config_fields, setting_names

from .conftest import DOCS

PAGES = ("cli.md", "configuration.md", "migration.md", "models.md")


@pytest.mark.parametrize("name", PAGES)
def test_page_is_current(import_reference, name):
    pages = {path.name: text for path, text in import_reference("generate").pages().items()}

    written = (DOCS / name).read_text(encoding="utf-8")

    assert written == pages[name], f"docs/{name} is not what the code says; run `make docs`"


def test_generator_writes_exactly_these_pages(import_reference):
    assert {path.name for path in import_reference("generate").pages()} == set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_lines_fit_120_columns(name):
    """In bytes: a check with awk counts them."""
    lines = (DOCS / name).read_bytes().splitlines()

    assert [line.decode() for line in lines if len(line) > 120] == []


def test_links_lead_to_headings(import_reference):
    anchor = import_reference("markdown").anchor
    pages = {path.name: path.read_text(encoding="utf-8") for path in DOCS.glob("*.md")}
    headings = {name: re.findall(r"^#+ (.*)$", text, re.MULTILINE) for name, text in pages.items()}
    anchors = {name: [anchor(title) for title in titles] for name, titles in headings.items()}

    for name in PAGES:
        assert len(set(anchors[name])) == len(anchors[name]), "GitHub numbers equal headings"
        for page, target in re.findall(r"\]\(([\w.]*)#([\w-]+)\)", pages[name]):
            assert target in anchors[page or name], f"{name} links to {page}#{target}"


def test_configuration_has_every_setting_and_every_flag():
    text = (DOCS / "configuration.md").read_text(encoding="utf-8")

    assert re.findall(r"^### (\w+)$", text, re.MULTILINE) == list(config_fields())
    assert [s.flag for s in setting_names().values() if f"`{s.flag}`" not in text] == []


def test_names_of_other_engines_belong_to_settings(import_reference):
    unknown = set(import_reference("peer_names").SETTINGS) - set(config_fields())

    assert unknown == set(), "docs/reference/peer_names.py names settings that do not exist"


def test_every_alias_is_a_name_in_another_engine(import_reference):
    peer_names = import_reference("peer_names")
    names = peer_names.SETTINGS
    missing = [
        f"{field.name}: {alias.name}"
        for field in config_fields().values()
        for alias in field.aliases
        if alias.name not in peer_names.EARLIER_NAMES
        if field.name not in names or alias.name not in peer_names.all_names(names[field.name])
    ]

    assert missing == [], "add them to docs/reference/peer_names.py"


def test_names_of_other_benchmarks_belong_to_options(import_reference):
    unknown = set(import_reference("peer_names").BENCH_SERVE) - import_reference("cli_page").options_of(
        "engine bench serve"
    )

    assert unknown == set(), "docs/reference/peer_names.py names options that do not exist"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("page_size", "integer, in [1, 4096]"),
        ("mem_fraction", "number or `auto`, in (0, 1]"),
        ("send_timeout", "number, above 0"),
        ("max_logprobs", "integer, at least 1, at most 1024"),
        ("model", "text"),
        ("api_key", "text, any number of times"),
        ("overload", "one of `refuse`, `queue`"),
    ],
)
def test_type_and_range(import_reference, name, expected):
    assert import_reference("settings").type_text(config_fields()[name]) == expected


def test_every_numeric_setting_has_a_range(import_reference):
    range_text = import_reference("settings").range_text
    numbers = [field for field in config_fields().values() if field.kind in (int, float)]

    assert [field.name for field in numbers if not range_text(field)] == []
