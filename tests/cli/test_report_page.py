"""The page of pictures: complete, without network, and safe with any name."""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from engine.cli.report_page import ReportPage
from engine.runtime.errors import ConfigError


def charts_of(page: ReportPage) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page.html(), re.DOTALL)]


def points_of(chart: ElementTree.Element) -> list[list[tuple[float, float]]]:
    lines = (line.attrib["points"].split() for line in chart.iter("polyline"))
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in line)] for line in lines]


def test_a_distribution_is_a_curve_per_series():
    page = ReportPage("a", "b", ["a note"])
    page.distribution("TTFT", {"A": [3.0, 1.0, math.nan, 2.0], "B": [4.0] * 5}, unit="ms")
    (chart,) = charts_of(page)
    first, second = points_of(chart)
    assert [x for x, _ in first] == sorted(x for x, _ in first)
    assert (first[0][1], first[-1][1]) == (210.0, 10.0)  # 0 and 100 %
    assert {x for x, _ in second} == {546.0}  # the largest value, at the right end
    assert "A: P50 2, P99 2.98 ms" in page.html()
    assert "B: P50 4, P99 4 ms" in page.html()


def test_a_wide_range_has_a_logarithmic_axis():
    page = ReportPage("a")
    page.distribution("TTFT", {"A": [1.0, 10.0, 100.0]})
    (chart,) = charts_of(page)
    (curve,) = points_of(chart)
    assert curve[1][0] - curve[0][0] == pytest.approx(curve[2][0] - curve[1][0], abs=0.2)


@pytest.mark.parametrize("values", [[], [5.0], [0.0, 0.0], [0.0, 1e-9], [1e9, 3.0, 7.0], [math.nan]])
def test_any_values_make_a_page(values):
    page = ReportPage("a")
    page.distribution("d", {"A": values, "B": [1.0, 2.0]})
    page.lines("l", {"A": [(value, value) for value in values if not math.isnan(value)]}, "x", "y")
    page.bars("b", {str(n): value for n, value in enumerate(values) if not math.isnan(value)})
    assert "nan" not in page.html()
    assert charts_of(page)


def test_many_samples_stay_small():
    page = ReportPage("a")
    page.distribution("d", {"A": [float(n) for n in range(100_000)]})
    assert len(page.html()) < 20_000


def test_names_have_one_color_and_no_markup():
    page = ReportPage("<script>alert(1)</script>", "a & b", ["<b>"])
    name = '"><script>alert(2)</script>'
    page.lines("rate", {"A": [(1.0, 2.0)], name: [(1.0, 3.0), (2.0, 4.0)]}, "requests/s", "tok/s")
    page.bars("tok/s", {name: 5.0, "A": 6.0})
    page.table(["", name], [["<i>", "1"]])
    text = page.html()
    assert "<script" not in text
    assert "<b>" not in text
    assert "http" not in text.replace("http-equiv", "")
    lines, bars = charts_of(page)
    assert [line.attrib["class"] for line in lines.iter("polyline")] == ["s0", "s1"]
    assert [bar.attrib["class"] for bar in bars.iter("rect")] == ["s1", "s0"]
    assert "default-src 'none'" in text


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path):
    page = ReportPage("a")
    page.write(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page.html()
    with pytest.raises(ConfigError, match="cannot write .*: No such file or directory"):
        page.write(tmp_path / "none" / "page.html")
