"""The table of families in `docs/models.md` has each of the engine's own decoders."""

from __future__ import annotations

from pathlib import Path

from engine.models.families.registry import FAMILIES, GGUF_FAMILIES

PAGE = (Path(__file__).parent.parent.parent / "docs" / "models.md").read_text()
ROWS = [line for line in PAGE.split("<!-- families")[1].split("<!-- end")[0].splitlines() if "`" in line]


def test_every_model_type_has_a_row():
    named = {line.split("|")[2].strip(" `") for line in ROWS[2:]}

    assert named == {name for name, family in FAMILIES.items() if not family.is_encoder}


def test_every_architecture_of_files_has_a_row():
    named = {name.strip(" `") for line in ROWS[2:] for name in line.split("|")[3].split(",")}

    assert named - {"no"} == set(GGUF_FAMILIES)


def test_every_structure_that_a_family_names_is_a_module():
    folder = Path(__file__).parent.parent.parent / "model_runner" / "structures"

    assert all((folder / f"{family.structure}.py").exists() for family in FAMILIES.values())
