"""`Sampler`: a short document of a written schema, and whether there is one at all.

The document is what an answer needs at least: `max_tokens` below its length is refused. Where a pattern or a
combination of schemas decides, no document is known; that is no error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from .keywords import FORMAT_PATTERNS, FORMAT_SAMPLES, TYPES
from .references import target_of
from .report import Members, Schema, pointer_to
from .unions import type_of

MAX_SAMPLE_BYTES: Final = 16 << 10
MAX_STEPS: Final = 200_000
NAMES_PER_STEP: Final = 16
"""Names of properties that are looked up in the time of a step."""


class Sample(NamedTuple):
    """A document, or why there is none.

    Attributes:
        value: the document, if it is known.
        size: characters of its compact JSON text.
        known: `value` is a document of the schema.
        reason: why no document fits; "" if one may.
        pointer: the place of the reason.
    """

    value: Any = None
    size: int = 0
    known: bool = False
    reason: str = ""
    pointer: str = ""

    @property
    def impossible(self) -> bool:
        """No document fits."""
        return self.reason != ""


_UNKNOWN: Final = Sample()
_ENDLESS: Final = "it contains itself without end, so that no document fits"


class Sampler:
    """Samples of the schemas of one document; after many steps it knows nothing more."""

    def __init__(self, definitions: Mapping[str, Schema], pointers: Mapping[int, str]) -> None:
        """Sample the definitions.

        Args:
            definitions: number -> what `$ref` names.
            pointers: id of a written object -> its place.
        """
        self._num_steps = 0
        self._pointers = pointers
        self._samples = {
            name: Sample(reason=_ENDLESS, pointer=pointers.get(id(schema), ""))
            for name, schema in definitions.items()
        }
        changed = True
        while changed:  # those that come later are needed by earlier ones
            changed = False
            for name in reversed(list(definitions)):
                if self._samples[name].impossible:
                    found = self.sample(definitions[name])
                    changed |= not found.impossible
                    if not found.impossible or self._samples[name].reason == _ENDLESS:
                        self._samples[name] = found

    def sample(self, schema: Schema) -> Sample:
        """A short document of a schema. As deep in recursion as the schema is."""
        self._num_steps += 1
        if self._num_steps > MAX_STEPS:
            return _UNKNOWN
        if isinstance(schema, bool):
            return _of(0) if schema else Sample(reason="the schema is false, so that no value fits")
        pointer = self._pointers.get(id(schema), "")
        parts = list(self._combinations(schema))
        if failed := next((part for part in parts if part.impossible), None):
            return failed
        alone = len(schema) == 1
        if parts:
            return parts[0] if alone else _UNKNOWN
        return self._of_keywords(schema, pointer)

    def _combinations(self, schema: Members) -> Iterator[Sample]:
        if (ref := target_of(schema)) is not None:
            yield self._samples[ref]
        if "anyOf" in schema:
            branches = [self.sample(branch) for branch in schema["anyOf"]]
            if all(branch.impossible for branch in branches):
                yield branches[0]
            elif any(not branch.known and not branch.impossible for branch in branches):
                yield _UNKNOWN
            else:
                yield _shortest(branches)
        if "allOf" in schema:
            branches = [self.sample(branch) for branch in schema["allOf"]]
            yield next((branch for branch in branches if branch.impossible), _UNKNOWN)

    def _of_keywords(self, schema: Members, pointer: str) -> Sample:
        kinds = schema.get("type", TYPES)
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if "const" in schema or "enum" in schema:
            return _listed(schema, kinds, pointer)
        found = [self._of_type(kind, schema, pointer) for kind in kinds]
        if all(each.impossible for each in found):
            return found[0]
        if any(not each.known and not each.impossible for each in found):
            return _UNKNOWN
        return _shortest(found)

    def _of_type(self, kind: str, schema: Members, pointer: str) -> Sample:
        match kind:
            case "null":
                return _of(None)
            case "boolean":
                return _of(True)
            case "integer" | "number":
                return _number(schema, pointer, whole=kind == "integer")
            case "string":
                return _string(schema)
            case "array":
                return self._array(schema, pointer)
            case _:
                return self._object(schema, pointer)

    def _array(self, schema: Members, pointer: str) -> Sample:
        least = schema.get("minItems", 0)
        prefix = schema.get("prefixItems", [])
        parts = [self.sample(item) for item in prefix[:least]]
        num_others = least - len(parts)
        other = self.sample(schema.get("items", True)) if num_others else _UNKNOWN
        for i, part in enumerate(parts):
            if part.impossible:
                return _because(part, pointer_to(pointer, "prefixItems", i), f"item {i} is needed, but")
        if num_others and other.impossible:
            return _because(other, pointer_to(pointer, "items"), f"minItems is {least}, but")
        size = 2 + sum(part.size + 1 for part in parts) + num_others * (other.size + 1)
        is_known = all(part.known for part in parts) and (not num_others or other.known)
        if size > MAX_SAMPLE_BYTES or not is_known:
            return _UNKNOWN
        return Sample([part.value for part in parts] + [other.value] * num_others, size, known=True)

    def _object(self, schema: Members, pointer: str) -> Sample:
        required, listed = schema.get("required", []), schema.get("properties", {})
        self._num_steps += (len(required) + len(listed)) // NAMES_PER_STEP
        needed = set(required)
        order = [
            *(name for name in listed if name in needed),
            *(name for name in required if name not in listed),
        ]
        members: Members = {}
        size, known = 2, schema.get("minProperties", 0) <= len(required)
        for name in order:
            others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
            if name not in listed and others is False:
                reason = f'property "{name[:100]}" is required, but it is not among the properties, and '
                return Sample(reason=reason + "additionalProperties is false", pointer=pointer)
            part = self.sample(listed.get(name, others))
            if part.impossible:
                at = pointer_to(pointer, "properties", name) if name in listed else pointer
                return _because(part, at, f'property "{name[:100]}" is required, but')
            known &= part.known and not (name not in listed and "patternProperties" in schema)
            size += part.size + len(json.dumps(name, ensure_ascii=False)) + 2
            members[name] = part.value
        return Sample(members, size, known=True) if known and size <= MAX_SAMPLE_BYTES else _UNKNOWN


def _of(value: Any) -> Sample:
    return Sample(value, len(json.dumps(value, ensure_ascii=False, separators=(",", ":"))), known=True)


def _shortest(samples: list[Sample]) -> Sample:
    return min((each for each in samples if each.known), key=lambda each: each.size, default=_UNKNOWN)


def _because(cause: Sample, pointer: str, text: str) -> Sample:
    if cause.reason != _ENDLESS and cause.reason.endswith(_ENDLESS):
        return cause  # found on the way around the cycle: it names a place of it already
    return Sample(reason=f"{text} {cause.reason}", pointer=cause.pointer or pointer)


def _listed(schema: Members, kinds: list[str], pointer: str) -> Sample:
    """The shortest of the values of `const` or `enum`."""
    values = [schema["const"]] if "const" in schema else schema["enum"]
    if "number" in kinds:
        kinds = [*kinds, "integer"]
    fitting = [value for value in values if type_of(value) in kinds]
    if not fitting:
        name = "const" if "const" in schema else "enum"
        return Sample(reason=f"no value of {name} has the type {' or '.join(kinds)}", pointer=pointer)
    if schema.keys() - {"const", "enum", "type"} or {"const", "enum"} <= schema.keys():
        return _UNKNOWN
    return _shortest([_of(value) for value in fitting])


def _number(schema: Members, pointer: str, *, whole: bool) -> Sample:
    low = max((schema[name] for name in ("minimum", "exclusiveMinimum") if name in schema), default=-math.inf)
    high = min((schema[name] for name in ("maximum", "exclusiveMaximum") if name in schema), default=math.inf)

    def fits(value: int) -> bool:
        return (
            low <= value <= high
            and value > schema.get("exclusiveMinimum", -math.inf)
            and value < schema.get("exclusiveMaximum", math.inf)
            and ("multipleOf" not in schema or math.remainder(value, schema["multipleOf"]) == 0)
        )

    nearest = 0 if low <= 0 <= high else (math.ceil(low) if low > 0 else math.floor(high))
    step = 1 if nearest >= 0 and low != -math.inf else -1
    near = [nearest, nearest + step, nearest - step]
    if found := next((value for value in near if fits(value)), None):
        return _of(found)
    if fits(0):
        return _of(0)
    if whole and "multipleOf" not in schema and low != -math.inf and high != math.inf:
        return Sample(reason=f"no integer lies between {low} and {high}", pointer=pointer)
    return _UNKNOWN


def _string(schema: Members) -> Sample:
    if "pattern" in schema and schema["pattern"] != FORMAT_PATTERNS.get(schema.get("format", "")):
        return _UNKNOWN
    length = schema.get("minLength", 0)
    if "format" in schema:
        text = FORMAT_SAMPLES[schema["format"]]
        return _of(text) if length <= len(text) <= schema.get("maxLength", len(text)) else _UNKNOWN
    return _of("a" * length) if length <= MAX_SAMPLE_BYTES else _UNKNOWN
