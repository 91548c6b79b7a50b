"""The PromQL expressions in `deploy/`, and the names of metrics in them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any, Final

import promql_parser

from .places import DEPLOY, documents

_GRAFANA: Final = {"$__rate_interval": "5m", "$job": "a", "$model": "a", "$instance": "a"}
"""What Grafana puts in place of its variables."""


@functools.cache
def rules() -> list[dict[str, Any]]:
    """Every rule, recording or alerting."""
    [found] = documents("prometheus/rules.yaml")
    return [rule for group in found["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    """The dashboard."""
    found = json.loads((DEPLOY / "grafana/engine.json").read_text())
    assert isinstance(found, dict)
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """Each expression with the place where it is."""
    for rule in rules():
        yield rule.get("record") or rule["alert"], rule["expr"]
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], with_values(target["expr"])
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            selector = re.fullmatch(r"label_values\((.*), \w+\)", variable["query"]["query"])
            assert selector, variable
            yield variable["name"], with_values(selector[1])


def with_values(expression: str) -> str:
    """An expression of Grafana with values in place of its variables."""
    for name, value in _GRAFANA.items():
        expression = expression.replace(name, value)
    return expression


def metric_names(expression: str) -> set[str]:
    """The names of metrics in an expression.

    Raises:
        ValueError: it is not PromQL.
    """
    return {match[1] for match in _SELECTOR.finditer(promql_parser.parse(expression).prettify())}


_SELECTOR: Final = re.compile(r"(?<![\w:\"])([a-z]\w*(?::\w+)+|up)(?=\s*[{\[)\s]|$)")
"""A name in a formatted expression: ours have a colon, and labels and functions have none."""
