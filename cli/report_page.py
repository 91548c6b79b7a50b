"""`ReportPage`: measured or simulated runs side by side as one HTML file with pictures: no network, no script.

A page is a title, charts and a table:

    page = ReportPage("A against B", "chat on 2 x h200")
    page.distribution("Time to first token", {"A": ttft_ms_of_a, "B": ttft_ms_of_b}, unit="ms")
    page.lines("Throughput", {"A": [(1.0, 80.0), (2.0, 150.0)]}, x="requests/s offered", y="tok/s")
    page.bars("Output", {"A": 80.0, "B": 95.0}, unit="tok/s")
    page.table(["", "A", "B"], [["TTFT P50, ms", "12", "14"]])
    page.write(Path("report.html"))

Charts are SVG. All text is escaped, and the content security policy of the page allows nothing but its style.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ..runtime.errors import ConfigError

WIDTH: Final = 560
HEIGHT: Final = 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 10, 40
_MAX_POINTS: Final = 200
_NUM_COLORS: Final = 8
_LOG_FROM: Final = 30.0
"""An axis of a distribution is logarithmic when its largest value is this many times its smallest one."""

_STYLE: Final = """
:root { color-scheme: light dark; --page: #fbfbfa; --card: #fff; --ink: #1d1f21; --muted: #63676c; --line: #dfe1e3;
  --c0: #1f6fb5; --c1: #d2613b; --c2: #2f8f6b; --c3: #8a5fbf; --c4: #b8860b; --c5: #c2417e; --c6: #4b7d8c;
  --c7: #7a7a7a; }
@media (prefers-color-scheme: dark) { :root { --page: #141618; --card: #1a1d20; --ink: #e6e7e8; --muted: #a0a5ab;
  --line: #33383d; --c0: #4f9ee3; --c1: #e2764f; --c2: #4fb58c; --c3: #b08ae0; --c4: #d9a441; --c5: #e27bab;
  --c6: #7fb2c2; --c7: #a5a5a5; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 20px 24px 40px; background: var(--page); color: var(--ink);
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
h1 { font-size: 20px; margin: 0; } h2 { font-size: 14px; margin: 0 0 4px; }
p { margin: 4px 0; color: var(--muted); } .note { max-width: 100ch; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr)); gap: 16px;
  margin: 16px 0; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px;
  min-width: 0; }
svg { width: 100%; height: auto; display: block; } text { fill: var(--muted); font-size: 11px; }
.value { fill: var(--ink); } .grid { stroke: var(--line); } .axis { stroke: var(--muted); }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
ul { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 0 0 4px; padding: 0; }
li { color: var(--muted); overflow-wrap: anywhere; }
i { display: inline-block; width: 16px; height: 3px; margin-right: 6px; vertical-align: middle; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; } td, th { padding: 3px 14px 3px 0; text-align: right;
  border-bottom: 1px solid var(--line); white-space: nowrap; } td:first-child, th:first-child { text-align: left; }
th { color: var(--muted); font-weight: 600; }
""" + "".join(
    f"polyline.s{n} {{ stroke: var(--c{n}); }} rect.s{n}, circle.s{n} {{ fill: var(--c{n}); }} "
    f"i.s{n} {{ background: var(--c{n}); }}\n"
    for n in range(_NUM_COLORS)
)

Points = Sequence[tuple[float, float]]


class _Axis(NamedTuple):
    """A scale from values to pixels."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.is_log:
            low, high, at = math.log(low), math.log(high), math.log(max(value, self.low))
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """About five round values."""
        if self.is_log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            digits = (1, 2, 5) if last - first <= 3 else (1,)
            values = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
            return [value for value in values if self.low <= value <= self.high]
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        rough = span / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
        first = math.ceil(self.low / step)
        return [step * number for number in range(first, int(self.high / step) + 1)]


class ReportPage:
    """See the module. Names of series have the same color in all charts of a page."""

    def __init__(self, title: str, subtitle: str = "", notes: Sequence[str] = ()) -> None:
        """`notes`: sentences under the title."""
        self._title = title
        self._head = [subtitle, *notes]
        self._cards: list[str] = []
        self._tables: list[str] = []
        self._series: list[str] = []

    def distribution(self, title: str, samples: Mapping[str, Sequence[float]], unit: str = "ms") -> None:
        """Draw how many percent of the samples are at most a value, one curve per series; NaN is left out.

        Evenly spaced quantiles may be given instead of samples.
        """
        kept = {name: sorted(v for v in values if not math.isnan(v)) for name, values in samples.items()}
        curves = {name: _cumulative(values) for name, values in kept.items() if values}
        lows = [points[0][0] for points in curves.values()]
        high = max((points[-1][0] for points in curves.values()), default=0.0)
        is_log = bool(lows) and min(lows) > 0 and high / min(lows) > _LOG_FROM
        labels = {
            name: f"{name}: P50 {_short(_quantile(values, 0.5))}, P99 {_short(_quantile(values, 0.99))} {unit}"
            for name, values in kept.items()
            if values
        }
        self._draw(title, curves, unit, "% of requests", labels, is_log=is_log, top=100.0)

    def lines(self, title: str, curves: Mapping[str, Points], x: str, y: str) -> None:
        """Draw a line per series, from its points; `x`, `y`: names of the axes with their units."""
        kept = {name: sorted(points) for name, points in curves.items() if points}
        self._draw(title, kept, x, y, {name: name for name in kept}, has_dots=True)

    def bars(self, title: str, values: Mapping[str, float], unit: str = "") -> None:
        """Draw one bar per series."""
        high = max(values.values(), default=0.0) or 1.0
        row_height = 34
        parts = []
        for number, (name, value) in enumerate(values.items()):
            top = number * row_height
            width = max(1.0, value / high * (WIDTH - 110))
            label = f"{_short(value)} {unit}".strip()
            parts.append(
                f'<text x="0" y="{top + 11}">{html.escape(name)}</text>'
                f'<rect class="{self._class(name)}" x="0" y="{top + 15}" width="{width:.1f}" height="12" rx="2">'
                f"<title>{html.escape(f'{name}: {label}')}</title></rect>"
                f'<text class="value" x="{width + 6:.1f}" y="{top + 25}">{html.escape(label)}</text>'
            )
        self._card(title, "", parts, len(values) * row_height)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table under the charts; the first column is left-aligned."""
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
        )
        self._tables.append(
            f'<section class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></section>'
        )

    def html(self) -> str:
        """The page."""
        head = "".join(f'<p class="note">{html.escape(line)}</p>' for line in self._head if line)
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{html.escape(self._title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
            f"<h1>{html.escape(self._title)}</h1>\n{head}\n<main>\n{''.join(self._cards)}</main>\n"
            f"{''.join(self._tables)}\n</body>\n</html>\n"
        )

    def write(self, path: Path) -> None:
        """Write the page.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            path.write_text(self.html(), encoding="utf-8")
        except OSError as error:
            raise cannot_write(path, error) from None

    # ------------------------------------------------------------ charts

    def _class(self, name: str) -> str:
        if name not in self._series:
            self._series.append(name)
        return f"s{self._series.index(name) % _NUM_COLORS}"

    def _draw(
        self,
        title: str,
        curves: Mapping[str, Points],
        x: str,
        y: str,
        labels: Mapping[str, str],
        *,
        is_log: bool = False,
        has_dots: bool = False,
        top: float = 0.0,
    ) -> None:
        """Add a chart of curves; `top`: the end of the vertical axis, 0: the largest value."""
        points = [point for curve in curves.values() for point in curve]
        if not points:
            return
        xs = [at for at, _ in points]
        low = min(xs) if is_log else min(0.0, *xs)
        across = _Axis(low, max(xs) or 1.0, _LEFT, WIDTH - _RIGHT, is_log)
        up = _Axis(0.0, top or max(value for _, value in points) * 1.05 or 1.0, HEIGHT - _BOTTOM, _TOP)
        parts = []
        for value in up.ticks():
            at = up.at(value)
            parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
                f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_short(value)}</text>'
            )
        for value in across.ticks():
            at = across.at(value)
            parts.append(
                f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'
                f'<text x="{at:.1f}" y="{HEIGHT - _BOTTOM + 15}" text-anchor="middle">{_short(value)}</text>'
            )
        middle = (_TOP + HEIGHT - _BOTTOM) / 2
        parts.append(
            f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{HEIGHT - _BOTTOM}" y2="{HEIGHT - _BOTTOM}"/>'
            f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{html.escape(x)}</text>'
            f'<text x="12" y="{middle}" text-anchor="middle" transform="rotate(-90 12 {middle})">'
            f"{html.escape(y)}</text>"
        )
        for name, curve in curves.items():
            path = " ".join(f"{across.at(one):.1f},{up.at(other):.1f}" for one, other in curve)
            parts.append(
                f'<polyline class="{self._class(name)}" points="{path}">'
                f"<title>{html.escape(labels[name])}</title></polyline>"
            )
            for one, other in curve if has_dots else ():
                text = html.escape(f"{name}: {_short(one)} {x}, {_short(other)} {y}")
                parts.append(
                    f'<circle class="{self._class(name)}" cx="{across.at(one):.1f}" cy="{up.at(other):.1f}" r="3.5">'
                    f"<title>{text}</title></circle>"
                )
        legend = "".join(
            f'<li><i class="{self._class(name)}"></i>{html.escape(labels[name])}</li>' for name in curves
        )
        self._card(title, f"<ul>{legend}</ul>", parts, HEIGHT)

    def _card(self, title: str, legend: str, parts: Sequence[str], height: float) -> None:
        self._cards.append(
            f'<section><h2>{html.escape(title)}</h2>{legend}<svg viewBox="0 0 {WIDTH} {height}" role="img" '
            f'aria-label="{html.escape(title)}">{"".join(parts)}</svg></section>\n'
        )


def check_writable(path: Path) -> None:
    """Check before work that may take minutes that a file for its results can be written.

    Raises:
        ConfigError: the file cannot be written.
    """
    was_there = path.exists()
    try:
        with path.open("ab"):
            pass
        if not was_there:
            path.unlink()
    except OSError as error:
        raise cannot_write(path, error) from None


def cannot_write(path: Path, error: OSError) -> ConfigError:
    """The error for a file that cannot be written."""
    return ConfigError(f"cannot write {path}: {error.strerror}")


def _cumulative(values: Sequence[float]) -> list[tuple[float, float]]:
    """(value, percent of the values up to it) from sorted values, at most `_MAX_POINTS` of them."""
    count = len(values)
    if count == 1:
        return [(values[0], 0.0), (values[0], 100.0)]
    num_points = min(count, _MAX_POINTS)
    indices = [round(number * (count - 1) / (num_points - 1)) for number in range(num_points)]
    return [(values[idx], 100.0 * idx / (count - 1)) for idx in indices]


def _quantile(values: Sequence[float], share: float) -> float:
    """A quantile of sorted values, between two of them in proportion, as numpy's."""
    low, part = divmod(share * (len(values) - 1), 1.0)
    first = values[int(low)]
    return first + part * (values[min(int(low) + 1, len(values) - 1)] - first)


def _short(value: float) -> str:
    """A figure with three significant digits, at least; thousands are separated."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
