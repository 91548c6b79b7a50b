"""Granite 3, and Granite 4 without experts and state layers."""

from __future__ import annotations

from typing import Final

from ...fields import Fields
from ...layer_form import LayerForm
from .family import Facts, GGUFFamily


def _granite(fields: Fields, arch: str) -> Facts:
    """Factors that are missing or 0 are those of Llama."""
    key = f"{arch}.rope.scaling.finetuned"
    if not fields.boolean(key, default=True):
        raise fields.error(key, False, "a model without rotary is not supported")

    def factor(name: str) -> float | None:
        return fields.number(f"{arch}.{name}", 0.0, 1e6, default=0.0) or None

    return {
        "query_scale": factor("attention.scale"),
        "form": LayerForm(
            embedding_scale=factor("embedding_scale") or 1.0,
            residual_scale=factor("residual_scale") or 1.0,
            logits_scale=1 / fields.number(f"{arch}.logit_scale", 1e-6, 1e6),
        ),
    }


FAMILIES: Final[dict[str, GGUFFamily]] = {"granite": GGUFFamily("granite", _granite, neighbors=True)}
