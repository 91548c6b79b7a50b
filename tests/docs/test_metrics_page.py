"""`docs/operations.md` lists the metrics that the server exports, and no other."""

from __future__ import annotations

import re
from collections import Counter

from engine.runtime.scheduler_report import SchedulerReport
from engine.runtime.transport.kv_tiers import TierFigures
from engine.runtime.transport.kv_transfer import TransferFigures
from engine.tokenizer_manager.telemetry.metrics import Metrics

from .conftest import DOCS


class NoImages:
    num_taken = num_bytes = num_files = 0
    num_refused: Counter[str] = Counter()  # noqa: RUF012


def test_every_metric_is_in_the_list_once():
    text = (DOCS / "operations.md").read_text()
    listed = text.partition("\n## Metrics\n")[2].partition("\n## ")[0].partition("\n- ")[2]
    names = re.findall(r"`([a-z0-9_]+)(?:\{[a-z_,]+\})?`", listed)
    metrics = Metrics()
    metrics.images = NoImages()
    page = metrics.render(
        SchedulerReport(sent_s=1.0, transfer=TransferFigures(), tiers={"disk": TierFigures(used_bytes=0)})
    )

    assert sorted(names) == sorted(re.findall(r"^# TYPE engine:(\w+) ", page, re.MULTILINE))
