"""`Notes`: the warnings of one request, and the check of fields inside it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from ..schema.field_policy import FieldPolicy, first_warnings
from ..schema.json_body import Body

_TYPE: Final = "type"


def policy_of(fields: Iterable[str], no_effect: Iterable[str] = ()) -> FieldPolicy:
    """The policy of an item with these fields and `type`."""
    names = [(name, Any, None) for name in {_TYPE, *fields}]
    return FieldPolicy(msgspec.defstruct("Item", names), {}, no_effect=no_effect)


class Notes:
    """What is noticed while a request is read."""

    def __init__(self, warnings: list[str], *, strict: bool) -> None:
        """Begin.

        Args:
            warnings: so far.
            strict: refuse unknown fields.
        """
        self._warnings = warnings
        self._strict = strict

    @property
    def warnings(self) -> list[str]:
        """For the answer."""
        return first_warnings(self._warnings)

    def warn(self, *warnings: str) -> None:
        """Add warnings."""
        self._warnings += warnings

    def check(self, policy: FieldPolicy, item: Body, at: str) -> None:
        """Check the fields of an item.

        Raises:
            RequestError: an unknown field, under `--strict`.
        """
        self._warnings += policy.check(item, strict=self._strict, at=at)
