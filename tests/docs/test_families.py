"""The table of families in `docs/models.md` has each of the engine's own decoders."""

from __future__ import annotations

from engine.models.gguf.families.registry import GGUF_FAMILIES
from engine.models.spec.encoder_spec import ENCODER_MODEL_TYPES
from engine.models.spec.model_spec import SUPPORTED_MODEL_TYPES


def test_every_model_type_has_a_row(import_reference):
    rows = import_reference("families").FAMILIES

    assert {row.model_type for row in rows} == set(SUPPORTED_MODEL_TYPES) - set(ENCODER_MODEL_TYPES)


def test_every_architecture_of_files_has_a_row(import_reference):
    rows = import_reference("families").FAMILIES

    assert {family.model_type for family in GGUF_FAMILIES.values()} <= {row.model_type for row in rows}
    assert {row.gguf for row in rows if row.gguf} <= set(GGUF_FAMILIES)
