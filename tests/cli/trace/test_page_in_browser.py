"""The page in a real browser; see `tests/browser.py`."""

from __future__ import annotations

import html
import json
import re
import struct
import zlib
from collections import Counter
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from engine.cli.trace import html as page
from engine.cli.trace.html import Origin, render_page
from engine.cli.trace.story import SpanKind
from engine.cli.trace.timeline import read_timeline
from engine.scheduler.records.decision_log import Arrived, DecisionRecord, PassRecord
from engine.scheduler.records.verdict import AddReqResult, Reason, Verdict

SIZE = (1600, 1000)
CSS = (Path(__file__).parents[3] / "cli" / "trace" / "page.css").read_text(encoding="utf-8")

pytestmark = pytest.mark.slow


@pytest.fixture
def browse(tmp_path, browser):
    """Open a page; returns its document after the script ran, and where the screenshot is."""

    def open_page(timeline, fragment="", script="0"):
        file, shot = tmp_path / "page.html", tmp_path / "page.png"
        file.write_text(render_page(timeline, Origin("decisions.log")), encoding="utf-8")
        tab = browser.open(f"{file.as_uri()}#{fragment}", size=SIZE)
        tab.wait("document.documentElement.dataset.ready")
        tab.screenshot(shot)
        tab.run(script)
        document = tab.run("document.documentElement.outerHTML")
        assert tab.problems == []
        assert tab.urls == [file.as_uri()]
        tab.close()
        return document, shot

    return open_page


def root_attributes(dom):
    """The `data-` attributes that the script left on the root element."""
    (tag,) = re.findall(r"<html[^>]*>", dom)
    return {name: html.unescape(value) for name, value in re.findall(r'data-([a-z-]+)="([^"]*)"', tag)}


def pixels(path):
    """How often each color occurs in a PNG of 8-bit RGB or RGBA."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, packed, width, height, channels = 8, b"", 0, 0, 0
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colour_type, _, _, interlaced = struct.unpack(">IIBBBBB", body)
            assert (depth, interlaced) == (8, 0)
            channels = {2: 3, 6: 4}[colour_type]
        elif kind == b"IDAT":
            packed += body
        at += 12 + length
    assert (width, height) == SIZE
    raw, stride = zlib.decompress(packed), width * channels
    colors: Counter[bytes] = Counter()
    above = bytearray(stride)
    for y in range(height):
        start = y * (stride + 1)
        above = unfilter(raw[start], raw[start + 1 : start + 1 + stride], above, channels)
        colors.update(bytes(above[x : x + 3]) for x in range(0, stride, channels))
    return colors


def unfilter(kind, line, above, channels):
    """Undo a PNG line filter."""
    result = bytearray(line)
    if kind == 2:
        return bytearray((a + b) & 255 for a, b in zip(line, above, strict=True))
    for x in range(len(result)) if kind else ():
        left = result[x - channels] if x >= channels else 0
        if kind == 1:
            guess = left
        elif kind == 3:
            guess = (left + above[x]) // 2
        else:
            corner = above[x - channels] if x >= channels else 0
            estimate = left + above[x] - corner
            guess = min((left, above[x], corner), key=lambda each: abs(estimate - each))
        result[x] = (result[x] + guess) & 255
    return result


def palette(theme):
    """The page's colors by name."""
    block = CSS[CSS.index(':root[data-theme="dark"] {') :] if theme == "dark" else CSS
    block = block[: block.index("}")]
    return {name: bytes.fromhex(code) for name, code in re.findall(r"--([a-z-]+): #([0-9a-f]{6});", block)}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_small_log_is_drawn_in_the_colors_of_its_legend(browse, sample_engine, theme):
    timeline = read_timeline(sample_engine(num_requests=40, num_pages=160).records())

    dom, shot = browse(timeline, f"theme={theme}")

    found = root_attributes(dom)
    assert (found["ready"], found["requests"], found["rows"]) == ("1", "40", "40")
    assert found["passes"] == str(len(timeline.passes))
    assert "error" not in found
    assert "<title>Scheduler trace · decisions.log</title>" in dom
    colors, expected = pixels(shot), palette(theme)
    assert len(colors) > 100
    assert colors.most_common(1)[0][0] in (expected["surface"], expected["page"])
    for name, at_least in {
        "prefill": 1500,
        "decode": 10_000,
        "wait-memory": 500,
        "wait-compute": 100,
        "wait-shared": 150,
        "kv-held": 10_000,
        "kv-evictable": 500,
        "step": 5000,
    }.items():
        # the swatches of the legend have at most 144 pixels, the thin ones of waits 80
        assert colors[expected[name]] > at_least, (name, colors[expected[name]])


def test_a_large_log_is_drawn_in_as_many_rows_as_requests_at_a_time(browse, sample_engine):
    timeline = read_timeline(sample_engine(num_requests=5000, num_pages=600, requests_per_s=9).records())

    dom, shot = browse(timeline)

    found = root_attributes(dom)
    assert (found["ready"], found["requests"]) == ("1", "5000")
    assert "error" not in found
    assert 10 < int(found["rows"]) < 1000
    assert pixels(shot)[palette("light")["decode"]] > 10_000


def test_a_coarser_page_is_drawn_and_says_so(browse, sample_engine, monkeypatch):
    monkeypatch.setattr(page, "MAX_SPANS", 250)
    timeline = read_timeline(sample_engine(num_requests=40, num_pages=160).records())

    dom, shot = browse(timeline)

    found = root_attributes(dom)
    assert (found["ready"], found["rows"]) == ("1", "40")
    assert "error" not in found
    assert "are drawn as one, in the color of the longest" in dom
    assert pixels(shot)[palette("light")["wait-memory"]] > 500


def test_a_pinned_request_tells_its_story_with_the_sums(browse, sample_engine):
    timeline = read_timeline(sample_engine(num_requests=40, num_pages=160).records())
    story = next(each for each in timeline.requests if each.marks and each.message)
    refusal = next(span for span in story.spans if span.reason is Reason.NO_KV)

    dom, _shot = browse(timeline, f"axis=pass&request={story.rid}")

    assert root_attributes(dom)["pinned"] == story.rid
    (details,) = re.findall(r'<aside id="details">(.*?)</aside>', dom, re.DOTALL)
    text = html.unescape(re.sub(r"<[^>]+>", "\n", details))
    assert story.rid in text
    assert "Was aborted. the client closed the stream" in text
    assert "NO_KV: KV memory is short" in text
    assert f"need {refusal.need:,}, have {refusal.have:,}" in text
    assert f"{story.output_len:,} of at most {story.max_new_tokens:,} tokens" in text


USER = """
const at = (name, x, y, more) => new PointerEvent(name, { clientX: x, clientY: y, button: 0, bubbles: true, ...more });
const press = (key) => document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const later = (action) => new Promise((done) => setTimeout(() => { action(); done(); }, 60));
const note = (name) => { draw(); root.dataset[name] = `${view.x0.toFixed(3)} ${view.x1.toFixed(3)} ${rows.length}`; };
chart.setPointerCapture = () => {};  // there is no real pointer
(async () => {
  await later(() => note("whole"));
  const wheel = (more) => new WheelEvent("wheel", { clientX: 250, clientY: 400, cancelable: true, ...more });
  await later(() => { for (let i = 0; i < 8; i++) chart.dispatchEvent(wheel({ deltaY: -120 })); });
  await later(() => note("zoomed"));
  const drag = ["pointerdown", "pointermove", "pointerup"];
  await later(() => drag.forEach((name, i) => chart.dispatchEvent(at(name, 800 - 100 * i, 400))));
  await later(() => note("dragged"));
  await later(() => { press("0"); press("t"); press("r"); press("w"); });
  await later(() => { press("]"); press("ArrowDown"); press("PageUp"); press("["); press("-"); press("ArrowLeft"); });
  await later(() => { press("0"); press("t"); press("r"); press("w"); });
  await later(() => note("back"));
  search.value = R.rid[5].slice(4, 12);
  await later(() => search.dispatchEvent(new Event("input")));
  root.dataset.found = found.children[0].textContent;
  await later(() => search.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" })));
  draw();  // frames do not come by themselves in every headless mode
  const frame = chart.getBoundingClientRect(), wait = R.begin[5], row = rowOf(5);
  const x = (place(spanStart(wait)) + place(spanEnd(wait))) / 2;
  const y = rowTop(row) + rowHeight / 2;
  await later(() => chart.dispatchEvent(at("pointermove", frame.left + 1 + x, frame.top + 1 + y)));
  root.dataset.tip = tip.hidden ? "" : tip.innerText;
  await later(() => ["pointerdown", "pointerup"].forEach((name) => chart.dispatchEvent(at(name, 700, 900))));
  root.dataset.clicked = document.querySelector("#details h2").textContent;
  press("Escape");
  await later(() => { root.dataset.closed = String(document.querySelector("#details").hidden); });
})();
"""


def test_zoom_drag_keys_search_hover_and_click(browse, sample_engine):
    timeline = read_timeline(sample_engine(num_requests=30, num_pages=100).records())
    story = timeline.requests[5]
    refusal = story.spans[0]
    assert refusal.kind is SpanKind.WAIT and refusal.num_verdicts

    dom, _shot = browse(timeline, script=USER)

    found = root_attributes(dom)
    assert "error" not in found
    views = {
        name: [float(part) for part in found[name].split()] for name in ("whole", "zoomed", "dragged", "back")
    }
    whole, zoomed, dragged = views["whole"], views["zoomed"], views["dragged"]
    assert zoomed[1] - zoomed[0] < (whole[1] - whole[0]) / 3
    assert zoomed[2] < whole[2] == 30  # requests that were not there then have no row
    assert dragged[1] - dragged[0] == pytest.approx(zoomed[1] - zoomed[0], abs=0.002)
    assert dragged[0] > zoomed[0]
    assert views["back"] == whole
    assert found["found"] == story.rid
    assert found["tip"].startswith(story.rid)
    assert f"need {refusal.need:,}, have {refusal.have:,}" in found["tip"]
    assert re.fullmatch(r"Pass \d+", found["clicked"])
    assert found["closed"] == "true"


def test_hostile_ids_are_shown_as_text(browse):
    evil = "</script><img src=x onerror=document.documentElement.dataset.owned=1><b>\u202egnp"
    records: list[DecisionRecord] = [
        Arrived(1.0, evil, 8, 4, tenant="<script>document.documentElement.dataset.owned=1</script>"),
        PassRecord(
            1.1,
            1,
            num_waiting=1,
            verdicts=[Verdict(evil, AddReqResult.NO_TOKEN, Reason.NO_KV, need=9, have=8)],
            notes=["<svg onload=document.documentElement.dataset.owned=1>"],
        ),
        PassRecord(1.2, 2),
    ]

    # the fragment has the id as the page shows it: without the character that would turn the text around
    dom, _shot = browse(
        read_timeline(records), "request=" + "".join(f"%{byte:02x}" for byte in evil.encode())
    )

    found = root_attributes(dom)
    assert found["ready"] == "1"
    assert "owned" not in found
    assert "error" not in found
    assert found["pinned"] == evil.replace("\u202e", "·")
    assert "<img" not in dom
    assert "&lt;/script&gt;&lt;img" in dom


IDLE_S = 60.0
COLORS_BETWEEN = """
(() => {
  draw();
  const scale = window.devicePixelRatio || 1, names = {};
  const right = Math.min(place(squeezed(P.start[END + 1])), box.right);
  const middle = (place(squeezed(P.end[END])) + right) / 2;
  STRIPS.forEach((strip, index) => {
    const found = new Set(), top = stripTop(index) + 3, height = box.strip - 6;
    const [x, y, tall] = [Math.round(middle * scale) - 4, Math.round(top * scale), Math.round(height * scale)];
    const data = pen.getImageData(x, y, 8, tall).data;
    for (let i = 0; i < data.length; i += 4) found.add(`${data[i]},${data[i + 1]},${data[i + 2]},${data[i + 3]}`);
    names[strip.title] = found.size === 1 ? [...found][0] : "several";
  });
  root.dataset.between = JSON.stringify(names);
  const texts = [], write = pen.fillText.bind(pen);
  pen.fillText = (text, ...rest) => { texts.push(text); write(text, ...rest); };
  draw();
  root.dataset.texts = JSON.stringify(texts);
})();
"""


@pytest.fixture
def two_bursts(sample_engine):
    """A timeline with a minute of idle time, and the last pass before it."""
    first = list(sample_engine(num_requests=8, num_pages=160, seed=1).records())
    second = [
        msgspec.structs.replace(record, now_s=record.now_s + IDLE_S)
        for record in sample_engine(num_requests=8, num_pages=160, seed=2).records()
    ]
    num_passes = sum(isinstance(record, PassRecord) for record in first)
    return read_timeline([*first, *second]), num_passes - 1


# In the whole view a burst is a few pixels wide, so that many passes share one; near its end they do not.
@pytest.mark.parametrize(("shown", "near"), [(True, False), (True, True), (False, False)])
def test_nothing_is_drawn_in_idle_time(browse, two_bursts, shown, near):
    timeline, end = two_bursts
    at = timeline.passes.end_s[end] - timeline.origin_s
    part = f"&from={at - 0.5}&to={at + 1}" if near else ""
    script = COLORS_BETWEEN.replace("END", str(end))

    dom, _shot = browse(timeline, ("idle=shown" + part) if shown else "", script=script)

    found = root_attributes(dom)
    assert "error" not in found
    assert found["cuts"] == ("0" if shown else "1")
    between = json.loads(found["between"])
    assert len(set(between.values())) == 1, between
    if shown:
        assert between["Running"] == "0,0,0,0"
    else:
        assert "idle" in " ".join(json.loads(found["texts"]))


def test_the_default_view_spends_its_width_on_the_passes_and_a_key_shows_the_idle_time(browse, two_bursts):
    timeline, _end = two_bursts
    script = """
    const width = (from, to) => place(squeezed(to)) - place(squeezed(from));
    const part = () => (width(P.start[0], P.end[P.size - 1]) - width(...idle[0])) / (box.right - box.left);
    draw(); root.dataset.busy = String(part());
    document.dispatchEvent(new KeyboardEvent("keydown", { key: "i", bubbles: true })); draw();
    root.dataset.shown = String(part());
    root.dataset.back = String(stretched(squeezed(31.25)));
    document.querySelector("#cut").click(); draw();
    root.dataset.again = String(part());
    """
    dom, _shot = browse(timeline, script=script)
    attributes = root_attributes(dom)
    found = {name: float(attributes[name]) for name in ("busy", "shown", "again", "back")}
    assert found["busy"] > 0.9
    assert found["shown"] < 0.2
    assert found["again"] == pytest.approx(found["busy"])
    assert found["back"] == pytest.approx(31.25)


def test_a_log_without_long_idle_time_is_not_cut(browse, sample_engine):
    dom, _shot = browse(read_timeline(sample_engine(num_requests=40, num_pages=160).records()))
    assert root_attributes(dom)["cuts"] == "0"
    assert re.search(r'<button[^>]* id="cut"[^>]* hidden', dom)


@pytest.mark.parametrize("rows", ["each", "packed"])
def test_every_lane_has_a_name(browse, two_bursts, rows):
    timeline, end = two_bursts
    script = f'choose("rows", "{rows}");' + COLORS_BETWEEN.replace("END", str(end))
    dom, _shot = browse(timeline, script=script)
    found = root_attributes(dom)
    texts = json.loads(found["texts"])
    if rows == "each":
        assert found["rows"] == str(len(timeline.requests))
        names = [re.sub("….*", "", text) for text in texts]
        assert all(any(name and story.rid.startswith(name) for name in names) for story in timeline.requests)
    else:
        names = [text for text in texts if re.match(r"\d+ requests|gen-", text)]
        assert len(names) >= int(found["rows"])


def test_labels_of_neighboring_gaps_do_not_overlap(browse, sample_engine):
    bursts = [
        msgspec.structs.replace(record, now_s=record.now_s + IDLE_S * burst)
        for burst in range(12)
        for record in sample_engine(num_requests=2, num_pages=160, seed=burst).records()
    ]
    dom, _shot = browse(read_timeline(bursts))

    found = root_attributes(dom)
    labels = json.loads(found["idle-labels"])
    assert found["cuts"] == "11"
    assert 2 <= len(labels) < 11
    assert all(left[1] < right[0] for left, right in pairwise(labels))
