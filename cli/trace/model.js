"use strict";
// The data of `html.py`, decoded; the view, which maps time or passes to pixels and requests to rows; idle time. The files
// of the page are one script: `html.py` concatenates them in the order of its `SCRIPTS`.
//
// Text from clients reaches the page only by fillText or textContent, never as markup.

const root = document.documentElement;
window.addEventListener("error", (event) => { root.dataset.error = String(event.message); });
window.addEventListener("unhandledrejection", (event) => { root.dataset.error = String(event.reason); });

const $ = (selector, within = document) => within.querySelector(selector);
const WAIT = 0, PREFILL = 1;  // a third kind is 2, to decode
const RETRACTED = 0, SWAPPED_OUT = 1;  // a third mark is 2, swapped in
const ON_HOST = 4, HAS_VERDICT = 8;
const VERDICT_SIZE = 9;
const GROUPS = ["memory", "compute", "queue", "shared"];

// Control and direction characters in a client's text would garble the surrounding lines.
const printable = (text) => String(text).replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, "·");
const count = (value) => value.toLocaleString("en-US");
const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : noun.endsWith("s") ? "es" : "s"}`;

function seconds(value, digits = 3) {
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (size < 1) return `${Number((value * 1e3).toPrecision(digits))} ms`;
  if (size < 120) return `${Number(value.toPrecision(digits + 1))} s`;
  const whole = Math.round(value), hours = Math.floor(whole / 3600);
  const rest = `${Math.floor(whole / 60) % 60} min ${whole % 60} s`;
  return hours ? `${hours} h ${rest}` : rest;
}

// The first index from `low` on that is not `before`; those that are come first.
function partition(low, high, before) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (before(middle)) low = middle + 1; else high = middle;
  }
  return low;
}

function element(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

const data = JSON.parse($("#data").textContent);
const P = decodePasses(data.passes);
const R = decodeRequests(data.requests);

function undelta(values) {
  const result = new Float64Array(values.length);
  let sum = 0;
  for (let i = 0; i < values.length; i++) result[i] = sum += values[i];
  return result;
}

function unrun(runs, size) {
  const result = new Int16Array(size);
  for (let i = 0, at = 0; i < runs.length; at += runs[i + 1], i += 2) result.fill(runs[i], at, at + runs[i + 1]);
  return result;
}

function decodePasses(source) {
  const start = undelta(source.start).map((value) => value / 1e6);
  const size = start.length;
  const passes = {
    size,
    start,
    end: start.map((value, i) => value + source.length[i] / 1e6),
    liveUntil: start.map((value, i) => value + source.live[i] / 1e6),
    stepTime: Float64Array.from(source.stepTime, (value) => value / 1e6),
    policies: source.policies,
    notes: new Map(source.notes),
  };
  for (const name of ["stepId", "waiting", "running", "decodes", "prefill", "evicted", "free", "evictable", "locked", "held",
    "kvBefore", "kvAfter", "stepBefore", "stepAfter", "rest"]) passes[name] = undelta(source[name]);
  for (const name of ["restReason", "mode", "policy"]) passes[name] = unrun(source[name], size);
  // Runs of passes in which the shared reason has one color, and of passes in which no request decoded.
  passes.sharedRuns = changes(size, (i) => passes.restReason[i] < 0 ? "queue" : data.reasons[passes.restReason[i]][2]);
  passes.stalls = changes(size, (i) => passes.decodes[i] > 0).filter((run) => !run.value);
  return passes;
}

function changes(size, valueAt) {
  const runs = [];
  for (let i = 0; i < size; i++) {
    const value = valueAt(i);
    if (runs.length && runs[runs.length - 1].value === value) runs[runs.length - 1].last = i;
    else runs.push({ value, first: i, last: i });
  }
  return runs;
}

function decodeRequests(source) {
  const size = source.rid.length, total = source.numSpans.reduce((sum, value) => sum + value, 0);
  const requests = {
    size,
    rid: source.rid.map(printable),
    prompt: source.prompt, maxNew: source.maxNew, priority: source.priority, output: source.output, finish: source.finish,
    tenant: source.tenant, group: source.group, message: source.message,
    arrived: source.arrived.map((value) => value === null ? null : value / 1e6),
    finished: source.finished.map((value) => value === null ? null : value / 1e6),
    begin: new Int32Array(size + 1),  // into the arrays of spans
    flags: new Uint8Array(total), first: new Int32Array(total), last: new Int32Array(total),
    verdict: new Int32Array(total),  // into `numbers`, of the spans that have one
    numbers: Int32Array.from(source.spans),
    marks: new Map(), looks: new Map(),
  };
  const numbers = requests.numbers;
  for (let r = 0, at = 0, span = 0; r < size; r++) {
    requests.begin[r] = span;
    let pass = 0;
    for (let k = 0; k < source.numSpans[r]; k++, span++) {
      requests.flags[span] = numbers[at];
      requests.first[span] = pass + numbers[at + 1];
      requests.last[span] = requests.first[span] + numbers[at + 2];
      pass = requests.last[span] + 1;
      at += 3;
      if (requests.flags[span] & HAS_VERDICT) { requests.verdict[span] = at; at += VERDICT_SIZE; }
    }
    requests.begin[r + 1] = span;
  }
  const push = (map, key, value) => map.has(key) ? map.get(key).push(value) : map.set(key, [value]);
  for (const [r, kind, pass, text] of source.marks) push(requests.marks, r, { kind, pass, text });
  for (const [r, prompt, prefix, miss, differs] of source.looks) push(requests.looks, r, { prompt, prefix, miss, differs });
  return requests;
}

const kindOf = (span) => R.flags[span] & 3;
const onHost = (span) => (R.flags[span] & ON_HOST) !== 0;

function verdictOf(span) {
  if (!(R.flags[span] & HAS_VERDICT)) return null;
  const [reason, verdicts, reasons, prefix, extend, output, need, have, firstHave] =
    R.numbers.subarray(R.verdict[span], R.verdict[span] + VERDICT_SIZE);
  return { reason, verdicts, reasons, prefix, extend, output, need, have, firstHave };
}

// The view: maps time or passes to pixels, and gives each request its row.

const LABEL_WIDTH = 148, RIGHT = 18, TOP = 30, AXIS_HEIGHT = 34, STRIP_GAP = 14;
const MIN_STRIP = 54, MAX_STRIP = 96, MIN_ROWS_HEIGHT = 150, MAX_ROW = 24;
const LABELED_ROW = 9;  // pixels: the lowest row that has room for its name
const STRIPS = [
  { title: "KV pool", unit: "pages", draw: drawMemory },
  { title: "Queue", unit: "requests", draw: (box) => drawLevels(box, P.waiting, "wait-queue-line") },
  { title: "Running", unit: "requests", draw: (box) => drawLevels(box, P.running, "decode-line") },
  { title: "Tokens", unit: "per step", draw: drawTokens },
  { title: "Step time", unit: "", draw: drawStepTime },
];
const view = { axis: "time", x0: 0, x1: 1, rowMode: R.size > 60 ? "packed" : "each", queue: true, cut: true, minRow: 0, scroll: 0, pinned: -1, pinnedPass: -1 };
const chart = $("#chart"), plot = $("#plot"), overlay = $("#overlay"), tip = $("#tip");
const pen = plot.getContext("2d"), over = overlay.getContext("2d");
const box = { width: 0, height: 0, left: LABEL_WIDTH, right: 0, rowsTop: TOP, rowsBottom: 0, strip: MIN_STRIP };
let colors = {}, hatch = null, rows = [], rowHeight = 16;

// Where passes are on the axis: in seconds, without the idle time that is cut, or their numbers.
let startOnAxis = P.start, endOnAxis = P.end, liveOnAxis = P.liveUntil;
const passStart = (p) => view.axis === "time" ? startOnAxis[p] : p;
const passEnd = (p) => view.axis === "time" ? endOnAxis[p] : p + 1;
const liveEnd = (p) => view.axis === "time" ? liveOnAxis[p] : p + 1;  // until then the numbers of a pass hold
const nextStart = (p) => view.axis === "pass" ? p + 1 : p + 1 < P.size ? startOnAxis[p + 1] : endOnAxis[p];
const place = (value) => box.left + (value - view.x0) / (view.x1 - view.x0) * (box.right - box.left);
const valueAt = (x) => view.x0 + (x - box.left) / (box.right - box.left) * (view.x1 - view.x0);
const spanStart = (span) => passStart(R.first[span]);
const spanEnd = (span) => kindOf(span) === WAIT ? nextStart(R.last[span]) : passEnd(R.last[span]);

function axisEnds() {
  if (view.axis === "pass") return [0, P.size];
  const low = squeezed(timeEnds[0]), high = squeezed(timeEnds[1]);
  return [low, high > low ? high : low + 1e-3];
}

// The last pass that begins at or before a value of the axis; -1 if none does.
function passAt(value) {
  return partition(0, P.size, (i) => passStart(i) <= value) - 1;
}

function timeToAxis(value) {
  if (view.axis === "time") return squeezed(value);
  return partition(0, P.size, (i) => P.start[i] < value);
}

// The extent of each request from the span `shown` on: from its arrival, or without the queue from its first chunk, to
// its end. It is cached per axis, because every frame reads all of them. Also the lanes of packed rows: each request is
// in the highest free lane, so the number of lanes is the number of concurrent requests.
const MAX_LANES_WITH_QUEUE = 150;
let extents = null, shown = null, lanes = [], laneOf = null;
function measureRequests() {
  extents = { from: new Float64Array(R.size), to: new Float64Array(R.size) };
  shown = R.begin.slice(0, R.size);
  for (let r = 0; r < R.size; r++) {
    const end = R.begin[r + 1];
    if (!view.queue) while (shown[r] < end && kindOf(shown[r]) === WAIT) shown[r]++;
    const begin = shown[r];
    if (!view.queue && begin === end) { extents.from[r] = Infinity; extents.to[r] = -Infinity; continue; }
    const arrived = R.arrived[r] === null || !view.queue ? Infinity : timeToAxis(R.arrived[r]);
    extents.from[r] = Math.min(arrived, begin < end ? spanStart(begin) : Infinity);
    const finished = R.finished[r] === null || view.axis === "pass" ? -Infinity : timeToAxis(R.finished[r]);
    extents.to[r] = Math.max(begin < end ? spanEnd(end - 1) : extents.from[r], finished);
  }
  lanes = [];
  laneOf = new Int32Array(R.size).fill(-1);
  const ends = [], order = Array.from(extents.from, (_, r) => r).filter((r) => extents.from[r] < Infinity);
  for (const r of order.sort((a, b) => extents.from[a] - extents.from[b])) {
    let lane = 0;
    while (lane < ends.length && ends[lane] > extents.from[r]) lane++;
    if (lane === ends.length) lanes.push([]);
    lanes[lane].push(r);
    laneOf[r] = lane;
    ends[lane] = extents.to[r];
  }
}

function setQueue(on) {
  view.queue = on;
  view.scroll = 0;
  measureRequests();
  redraw();
}

function setCut(on) {
  const from = stretched(view.x0), to = stretched(view.x1), [low, high] = axisEnds(), whole = view.x0 <= low && view.x1 >= high;
  view.cut = on;
  placeOnAxis();
  measureRequests();
  if (whole || view.axis === "pass") fit(); else setView(squeezed(from), squeezed(to));
  redraw();
}

function setView(x0, x1) {
  const [low, high] = axisEnds();
  const smallest = view.axis === "pass" ? 4 : Math.max((high - low) / Math.max(P.size, 50) * 2, 1e-5);
  let width = Math.min(Math.max(x1 - x0, Math.min(smallest, high - low)), (high - low) * 1.02);
  let from = x0 + (x1 - x0 - width) / 2;
  from = Math.max(Math.min(from, high + (high - low) * 0.01 - width), low - (high - low) * 0.01);
  view.x0 = from;
  view.x1 = from + width;
}

function fit() {
  const [low, high] = axisEnds();
  view.minRow = 0;
  view.scroll = 0;
  setView(low - (high - low) * 0.005, high + (high - low) * 0.005);
  redraw();
}

function setAxis(axis) {
  if (axis === view.axis) return;
  const first = Math.max(passAt(view.x0), 0), last = Math.max(passAt(view.x1), 0);
  const [low, high] = axisEnds(), whole = view.x0 <= low && view.x1 >= high;
  view.axis = axis;
  measureRequests();
  if (whole) { const scale = view.minRow; fit(); view.minRow = scale; } else setView(passStart(first), passEnd(last));
  redraw();
}

// Idle time: the parts of the axis in which no pass ran and no request was there. Long ones are cut from the view.

const MIN_SHARE = 0.05;  // of the busy time: a shorter one is not cut
const CUT_SHARE = 0.03, CUTS_SHARE = 0.3;  // width of a cut, and of all, as shares of the busy time

const timeEnds = findTimeEnds();
const idle = findIdle();
const cuts = findCuts();

function findTimeEnds() {
  let low = P.start[0];
  for (let r = 0; r < R.size; r++) {
    if (R.arrived[r] !== null && R.begin[r + 1] > R.begin[r] && R.first[R.begin[r]] === 0) low = Math.min(low, R.arrived[r]);
  }
  return [low, P.end[P.size - 1]];
}

// [from, to] in seconds, in order: what neither a pass nor a request covers.
function findIdle() {
  const busy = [];
  for (let p = 0; p < P.size; p++) busy.push([P.start[p], Math.max(P.end[p], P.liveUntil[p])]);
  for (let r = 0; r < R.size; r++) {
    const begin = R.begin[r], end = R.begin[r + 1] - 1;
    if (end < begin) continue;
    const last = R.last[end], waits = kindOf(end) === WAIT;
    const from = Math.min(R.arrived[r] ?? Infinity, P.start[R.first[begin]]);
    busy.push([from, Math.max(waits && last + 1 < P.size ? P.start[last + 1] : P.end[last], R.finished[r] ?? -Infinity)]);
  }
  const result = [];
  let until = timeEnds[0];
  for (const [from, to] of busy.sort((a, b) => a[0] - b[0])) {
    if (from > until) result.push([until, from]);
    until = Math.max(until, to);
  }
  return result;
}

// The cuts, each with the time it removes and the place of its beginning on the axis.
function findCuts() {
  const busy = timeEnds[1] - timeEnds[0] - idle.reduce((sum, [from, to]) => sum + to - from, 0);
  const long = idle.filter(([from, to]) => to - from > Math.max(busy * MIN_SHARE, 1e-6));
  const width = Math.min(busy * CUT_SHARE, busy * CUTS_SHARE / Math.max(long.length, 1));
  let removed = 0;
  return long.map(([from, to]) => {
    const cut = { from, to, at: from - removed, width };
    removed += to - from - width;
    return cut;
  });
}

// The last cut that begins at or before a value of `name`: its "from" in seconds, or its "at" on the axis.
function cutBefore(name, value) {
  return cuts[partition(0, cuts.length, (i) => cuts[i][name] <= value) - 1];
}

// Seconds to the axis.
function squeezed(time) {
  const cut = view.cut ? cutBefore("from", time) : undefined;
  if (!cut) return time;
  return time < cut.to ? cut.at + (time - cut.from) / (cut.to - cut.from) * cut.width : cut.at + cut.width + time - cut.to;
}

// The axis to seconds.
function stretched(value) {
  const cut = view.cut ? cutBefore("at", value) : undefined;
  if (!cut) return value;
  return value < cut.at + cut.width ? cut.from + (value - cut.at) / cut.width * (cut.to - cut.from) : cut.to + value - cut.at - cut.width;
}

function placeOnAxis() {
  startOnAxis = P.start.map(squeezed);
  endOnAxis = P.end.map(squeezed);
  liveOnAxis = P.liveUntil.map(squeezed);
}

// The parts of the axis between the cuts that are in view, in seconds.
function partsInView() {
  const from = stretched(view.x0), to = stretched(view.x1), parts = [];
  let begin = from;
  for (const cut of view.cut ? cuts : []) {
    if (cut.to <= from || cut.from >= to) continue;
    if (cut.from > begin) parts.push([begin, cut.from]);
    begin = cut.to;
  }
  if (begin < to) parts.push([begin, to]);
  return parts;
}

// A band with torn edges, through rows and strips, and how long it was idle.
function drawCuts() {
  if (view.axis !== "time" || !view.cut) return;
  const bottom = box.height - AXIS_HEIGHT, labels = [];
  for (const cut of cuts) {
    const x0 = Math.max(place(cut.at), box.left), x1 = Math.min(place(cut.at + cut.width), box.right);
    if (x1 <= x0) continue;
    pen.fillStyle = colors.band;
    pen.fillRect(x0, TOP - 10, x1 - x0, bottom - TOP + 10);
    pen.strokeStyle = colors.faint;
    pen.setLineDash([2, 3]);
    for (const x of [x0, x1]) line(Math.round(x) + 0.5, TOP - 10, Math.round(x) + 0.5, bottom);
    pen.setLineDash([]);
    pen.font = font(11);
    pen.fillStyle = colors.muted;
    pen.textAlign = "center";
    pen.textBaseline = "top";
    const text = `idle ${seconds(cut.to - cut.from)}`;
    const half = pen.measureText(text).width / 2, middle = (x0 + x1) / 2;
    // A label that would overlap the one before it appears only after zooming in.
    if (middle - half > (labels.at(-1)?.[1] ?? 0) + 6) {
      pen.fillText(text, middle, TOP - 24);
      labels.push([middle - half, middle + half]);
    }
    pen.fillText("//", middle, bottom + 7);
  }
  root.dataset.idleLabels = JSON.stringify(labels);
}
