"""`takes_settings`: makes the fields of a command's dataclass parameters its options.

`def serve(target: TargetSettings, workload: WorkloadSettings)` gets one option per field; the dataclasses carry help
and defaults, and several commands share a group of options.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Flatten a command's dataclass parameters into keyword parameters that typer understands."""
    groups: dict[str, type[Any]] = {
        name: hint
        for name, hint in get_type_hints(command).items()
        if isinstance(hint, type) and dataclasses.is_dataclass(hint)
    }
    parameters = [
        parameter for name, parameter in inspect.signature(command).parameters.items() if name not in groups
    ]
    hints = get_type_hints(command, include_extras=True)
    annotations = {parameter.name: hints[parameter.name] for parameter in parameters}
    for group in groups.values():
        field_hints = get_type_hints(group, include_extras=True)
        for field in dataclasses.fields(group):
            annotations[field.name] = field_hints[field.name]
            parameters.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=field.default,
                    annotation=field_hints[field.name],
                )
            )

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        for name, group in groups.items():
            names = [field.name for field in dataclasses.fields(group)]
            values[name] = group(**{field_name: values.pop(field_name) for field_name in names})
        command(**values)

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = annotations
    return wrapper
