"""Rules and dashboard: valid PromQL, about metrics that a server exports, each alert with a runbook."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from engine.runtime.scheduler_report import SchedulerReport
from engine.tokenizer_manager.telemetry.metrics import Metrics

from .places import DEPLOY, documents
from .promql import dashboard, expressions, metric_names, rules

OPERATIONS = DEPLOY.parent / "docs/operations.md"


@functools.cache
def exported() -> dict[str, set[str]]:
    """The samples on the page of a server, with their labels."""
    metrics = Metrics("m", {"version": "1", "commit": ""})
    metrics.http_responses.add("200")
    metrics.finished_reqs.add("stop")
    report = SchedulerReport(sent_s=1.0, policy="fcfs", waiting_by_reason={"no_kv": 1})
    report = replace(report, drafts={"ngram 1": 2}, accepted_drafts={"ngram 1": 1})
    page = metrics.render(report, replicas=[(report, True)] * 2)
    samples = [each for family in text_string_to_metric_families(page) for each in family.samples]
    return {each.name: set(each.labels) for each in samples}


def test_the_names_in_an_expression_are_found():
    assert metric_names('rate(a:b_total{le="x"}[5m]) / up + max by (c) (d:e:f)') == {
        "a:b_total",
        "up",
        "d:e:f",
    }
    with pytest.raises(ValueError, match="."):
        metric_names("rate(a:b[5m]")


@pytest.mark.parametrize(("place", "expression"), list(expressions()))
def test_every_expression_is_about_metrics_that_exist(place, expression):
    known = {*exported(), *(rule["record"] for rule in rules() if "record" in rule), "up"}
    names = metric_names(expression)
    assert names
    assert names <= known


@pytest.mark.parametrize(("place", "expression"), list(expressions()))
def test_every_label_is_one_of_the_metric(place, expression):
    """In selectors and groupings; job and instance are Prometheus'."""
    groups = re.findall(r"by \(([\w, ]+)\)", expression)
    matchers = re.findall(r"\{([^}]*)\}", expression)
    used = {label.strip() for group in groups for label in group.split(",")}
    used |= {name for text in matchers for name in re.findall(r"(\w+)\s*[=!]", text)}
    labels = set.union(*(exported().get(name, {"model_name"}) for name in metric_names(expression)))
    assert used <= labels | {"job", "instance", "commit", "version"}


def test_every_alert_has_its_place_in_the_runbook():
    alerts = [rule for rule in rules() if "alert" in rule]
    headings = re.findall(r"^### (Engine\w+)$", OPERATIONS.read_text(), re.MULTILINE)
    assert [rule["alert"] for rule in alerts] == headings
    for rule in alerts:
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]


def test_the_rule_of_the_operator_has_the_same_groups():
    [rule] = documents("kubernetes/prometheusrule.yaml")
    [file] = documents("prometheus/rules.yaml")
    assert rule["spec"] == file, "copy the groups of deploy/prometheus/rules.yaml into prometheusrule.yaml"


def test_every_alert_is_tested():
    [tests] = documents("prometheus/rules.test.yaml")
    tested = {each["alertname"] for test in tests["tests"] for each in test.get("alert_rule_test", [])}
    untested = {"EngineTimeToFirstTokenHigh", "EngineTimePerTokenHigh"}  # as EngineQueueTimeHigh
    assert {rule["alert"] for rule in rules() if "alert" in rule} - tested == untested


def test_the_panels_of_the_dashboard_fit_and_have_targets():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in own) < 24
        assert not own & cells, panel["title"]
        cells |= own
        assert panel["type"] == "row" or panel["targets"], panel["title"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian: prometheus)")
def test_promtool_accepts_rules_and_configuration(tmp_path):
    key = tmp_path / "api-key"
    key.write_text("key\n")
    config = tmp_path / "prometheus.yaml"
    text = (DEPLOY / "prometheus/prometheus.yaml").read_text()
    config.write_text(text.replace("/run/secrets/api-key", str(key)))
    shutil.copy(DEPLOY / "prometheus/rules.yaml", tmp_path)
    commands: list[list[str | Path]] = [
        ["promtool", "check", "config", config],
        ["promtool", "check", "rules", DEPLOY / "prometheus/rules.yaml"],
        ["promtool", "test", "rules", DEPLOY / "prometheus/rules.test.yaml"],
    ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
