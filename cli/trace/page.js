"use strict";
// Draws the data of `html.py`: rows of requests on one canvas, the figures of passes in strips below, one axis for both.
// Everything that came from outside reaches the page by fillText or textContent, never as markup.

const root = document.documentElement;
window.addEventListener("error", (event) => { root.dataset.error = String(event.message); });
window.addEventListener("unhandledrejection", (event) => { root.dataset.error = String(event.reason); });

const $ = (selector, within = document) => within.querySelector(selector);
const WAIT = 0, PREFILL = 1;  // a third kind is 2, to decode
const RETRACTED = 0, SWAPPED_OUT = 1;  // a third mark is 2, swapped in
const ON_HOST = 4, HAS_VERDICT = 8;
const VERDICT_SIZE = 9;
const GROUPS = ["memory", "compute", "queue", "shared"];

// ------------------------------------------------------------------ text

// Control and direction characters in a client's text would garble the lines around it.
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

function element(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

// ------------------------------------------------------------------ data

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
    stepTime: Float64Array.from(source.stepTime, (value) => value / 1e6),
    policies: source.policies,
    notes: new Map(source.notes),
  };
  for (const name of ["stepId", "waiting", "running", "decodes", "prefill", "evicted", "free", "evictable", "locked", "held",
    "kvBefore", "kvAfter", "stepBefore", "stepAfter", "rest"]) passes[name] = undelta(source[name]);
  for (const name of ["restReason", "mode", "policy"]) passes[name] = unrun(source[name], size);
  // Runs of passes whose shared reason has one colour, and of passes in which nobody decoded.
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

// ------------------------------------------------------------------ axis

const LABEL_WIDTH = 148, RIGHT = 18, TOP = 12, AXIS_HEIGHT = 34, STRIP_GAP = 14;
const MIN_STRIP = 54, MAX_STRIP = 96, MIN_ROWS_HEIGHT = 150, MAX_ROW = 24;
const STRIPS = [
  { title: "KV pool", unit: "pages", draw: drawMemory },
  { title: "Queue", unit: "requests", draw: (box) => drawSteps(box, P.waiting, "wait-queue-line") },
  { title: "Running", unit: "requests", draw: (box) => drawSteps(box, P.running, "decode-line") },
  { title: "Tokens", unit: "per step", draw: drawTokens },
  { title: "Step time", unit: "", draw: drawStepTime },
];
const view = { axis: "time", x0: 0, x1: 1, rowMode: R.size > 60 ? "packed" : "each", queue: true, minRow: 0, scroll: 0, pinned: -1, pinnedPass: -1 };
const chart = $("#chart"), plot = $("#plot"), overlay = $("#overlay"), tip = $("#tip");
const pen = plot.getContext("2d"), over = overlay.getContext("2d");
const box = { width: 0, height: 0, left: LABEL_WIDTH, right: 0, rowsTop: TOP, rowsBottom: 0, strip: MIN_STRIP };
let colours = {}, hatch = null, rows = [], rowHeight = 16;

const passStart = (p) => view.axis === "time" ? P.start[p] : p;
const passEnd = (p) => view.axis === "time" ? P.end[p] : p + 1;
const nextStart = (p) => view.axis === "pass" ? p + 1 : p + 1 < P.size ? P.start[p + 1] : P.end[p];
const place = (value) => box.left + (value - view.x0) / (view.x1 - view.x0) * (box.right - box.left);
const valueAt = (x) => view.x0 + (x - box.left) / (box.right - box.left) * (view.x1 - view.x0);
const spanStart = (span) => passStart(R.first[span]);
const spanEnd = (span) => kindOf(span) === WAIT ? nextStart(R.last[span]) : passEnd(R.last[span]);

function axisEnds() {
  if (view.axis === "pass") return [0, P.size];
  let low = P.start[0], high = P.end[P.size - 1];
  for (let r = 0; r < R.size; r++) {
    if (R.arrived[r] !== null && R.begin[r + 1] > R.begin[r] && R.first[R.begin[r]] === 0) low = Math.min(low, R.arrived[r]);
  }
  return [low, high > low ? high : low + 1e-3];
}

// The last pass that begins at or before a value of the axis; -1 if none does.
function passAt(value) {
  let low = 0, high = P.size;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (passStart(middle) <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
}

function timeToAxis(value) {
  if (view.axis === "time") return value;
  let low = 0, high = P.size;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (P.start[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}

// What is drawn of each request, from the span `shown` on, kept per axis since every frame asks for all of them: from its
// arrival, or without the queue from its first chunk, to its end. And the lanes of packed rows: each request in the
// highest that is free, so that there are as many as requests at a time.
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
    const finished = R.finished[r] === null || view.axis === "pass" ? -Infinity : R.finished[r];
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

// ------------------------------------------------------------------ drawing

function readColours() {
  const style = getComputedStyle(root);
  for (const name of ["surface", "ink", "muted", "faint", "line", "grid", "band", "accent", "prefill", "decode", "wait-memory",
    "wait-compute", "wait-queue", "wait-shared", "wait-host", "mark", "failed", "kv-held", "kv-locked", "kv-evictable", "step"]) {
    colours[name] = style.getPropertyValue(`--${name}`).trim();
  }
  colours["wait-queue-line"] = colours.muted;
  colours["decode-line"] = colours.decode;
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const tilePen = tile.getContext("2d");
  tilePen.fillStyle = colours["wait-host"];
  tilePen.fillRect(0, 0, 6, 6);
  tilePen.strokeStyle = colours.surface;
  tilePen.lineWidth = 1.6;
  for (const shift of [-6, 0, 6]) { tilePen.beginPath(); tilePen.moveTo(shift, 6); tilePen.lineTo(shift + 6, 0); tilePen.stroke(); }
  hatch = pen.createPattern(tile, "repeat");
}

function resize() {
  const scale = window.devicePixelRatio || 1;
  box.width = chart.clientWidth;
  box.height = chart.clientHeight;
  for (const canvas of [plot, overlay]) {
    canvas.width = Math.round(box.width * scale);
    canvas.height = Math.round(box.height * scale);
    canvas.getContext("2d").setTransform(scale, 0, 0, scale, 0, 0);
  }
  box.right = box.width - RIGHT;
  draw();
}

let wanted = false;
function redraw() {
  if (wanted) return;
  wanted = true;
  requestAnimationFrame(() => { wanted = false; draw(); });
}

const inView = (r) => extents.from[r] <= view.x1 && extents.to[r] >= view.x0;

// Which rows there are, and how the height is shared: few rows leave theirs to the strips.
function layoutRows() {
  rows = [];
  if (view.rowMode === "packed") {
    let lowest = -1;
    for (let r = 0; r < R.size; r++) if (laneOf[r] > lowest && inView(r)) lowest = laneOf[r];
    rows = lanes.slice(0, lowest + 1);
  } else {
    for (let r = 0; r < R.size; r++) if (inView(r)) rows.push([r]);
  }
  const space = box.height - AXIS_HEIGHT - TOP - 4, wantedRows = Math.max(rows.length * MAX_ROW + 8, MIN_ROWS_HEIGHT);
  const strip = (space - wantedRows) / STRIPS.length - STRIP_GAP;
  box.strip = Math.floor(Math.min(Math.max(strip, MIN_STRIP), MAX_STRIP));
  box.rowsBottom = box.height - AXIS_HEIGHT - STRIPS.length * (box.strip + STRIP_GAP) - 4;
  const height = box.rowsBottom - box.rowsTop;
  rowHeight = Math.min(Math.max(height / Math.max(rows.length, 1), view.minRow), MAX_ROW);
  const excess = Math.max(rows.length * rowHeight - height, 0);
  view.scroll = Math.min(Math.max(view.scroll, 0), excess);
}

const rowOf = (r) => view.rowMode === "packed" ? laneOf[r] : rows.findIndex((members) => members[0] === r);

// Of a row's requests, in order of time, the first that ends at or behind a value of the axis.
function firstIn(members, value) {
  let low = 0, high = members.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (extents.to[members[middle]] < value) low = middle + 1; else high = middle;
  }
  return low;
}

const font = (size, weight = 400) => `${weight} ${size}px ${getComputedStyle(document.body).fontFamily}`;

function draw() {
  layoutRows();
  pen.clearRect(0, 0, box.width, box.height);
  drawAxis();
  const drawn = drawRows();
  drawStrips();
  drawScrollBar();
  drawOverlay();
  root.dataset.rows = String(drawn);
  root.dataset.ready = "1";
}

function niceStep(range, wanted) {
  const rough = range / Math.max(wanted, 1), power = 10 ** Math.floor(Math.log10(rough));
  for (const factor of [1, 2, 5]) if (factor * power >= rough) return factor * power;
  return 10 * power;
}

function drawAxis() {
  const y = box.height - AXIS_HEIGHT;
  let step = niceStep(view.x1 - view.x0, (box.right - box.left) / 110);
  if (view.axis === "pass") step = Math.max(step, 1);
  pen.font = font(11);
  pen.textBaseline = "top";
  pen.textAlign = "center";
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  for (let k = Math.ceil(view.x0 / step); k * step <= view.x1; k++) {
    const x = Math.round(place(k * step)) + 0.5;
    pen.strokeStyle = colours.grid;
    line(x, box.rowsTop, x, y);
    pen.fillStyle = colours.muted;
    const text = view.axis === "pass" ? count(k * step) : (k * step).toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
    if (x > box.left + 8 && x < box.right - 10) pen.fillText(text, x, y + 7);
  }
  pen.strokeStyle = colours.line;
  line(box.left, y + 0.5, box.right, y + 0.5);
  pen.textAlign = "left";
  pen.fillStyle = colours.ink;
  pen.font = font(12, 600);
  pen.fillText(view.axis === "time" ? "Time" : "Pass", 14, y + 6);
  const offset = pen.measureText(view.axis === "time" ? "Time " : "Pass ").width;
  pen.fillStyle = colours.faint;
  pen.font = font(11);
  pen.fillText(view.axis === "time" ? "s since the start" : "number", 14 + offset + 2, y + 7);
}

function line(x0, y0, x1, y1) {
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.lineTo(x1, y1);
  pen.stroke();
}

const rowTop = (index) => box.rowsTop + index * rowHeight - view.scroll;

function drawRows() {
  pen.save();
  pen.beginPath();
  pen.rect(0, box.rowsTop, box.width, box.rowsBottom - box.rowsTop);
  pen.clip();
  const bottom = box.rowsBottom;
  const height = Math.max(rowHeight, 1);
  let drawn = 0, lastLabel = -Infinity;
  for (let i = Math.max(Math.floor(view.scroll / rowHeight), 0), y = rowHeight >= 1 ? rowTop(i) : box.rowsTop; i < rows.length && y < bottom;) {
    drawRow(rows[i], y, height);
    if (view.rowMode === "each") lastLabel = drawLabel(rows[i][0], y, lastLabel);
    drawn++;
    if (rowHeight >= 1) {
      i++;
      y = rowTop(i);
    } else {  // rows thinner than a pixel: one for each line of pixels
      y++;
      i = Math.floor((y - box.rowsTop + view.scroll) / rowHeight);
    }
  }
  pen.restore();
  if (view.rowMode === "packed") drawPackedTitle();
  pen.strokeStyle = colours.line;
  line(0, bottom + 0.5, box.width, bottom + 0.5);
  if (!rows.length) message("No request was there at this time");
  return drawn;
}

function drawRow(members, y, height) {
  const pinned = view.pinned >= 0 && members.includes(view.pinned) && rowHeight >= 4;
  if (pinned) {
    pen.fillStyle = colours.band;
    const from = view.rowMode === "packed" ? place(extents.from[view.pinned]) - 4 : 0;
    const to = view.rowMode === "packed" ? place(extents.to[view.pinned]) + 4 : box.width;
    pen.fillRect(from, y, to - from, rowHeight);
  }
  let covered = -Infinity;
  for (let i = firstIn(members, view.x0); i < members.length && extents.from[members[i]] <= view.x1; i++) {
    const r = members[i], to = Math.max(Math.round(place(extents.to[r])), Math.round(place(extents.from[r])) + 1);
    if (to <= covered) continue;
    covered = to;
    drawRequest(r, y, height);
    if (view.rowMode === "packed" && rowHeight >= 12) drawNameInside(r, y);
  }
}

function drawNameInside(r, y) {
  const end = R.begin[r + 1] - 1;
  if (end < R.begin[r] || kindOf(end) === WAIT || kindOf(end) === PREFILL) return;
  const from = Math.max(place(spanStart(end)), box.left), to = Math.min(place(spanEnd(end)), box.right);
  if (to - from < 70) return;
  pen.font = font(10.5, r === view.pinned ? 700 : 500);
  pen.fillStyle = colours.ink;
  pen.textAlign = "left";
  pen.textBaseline = "middle";
  pen.fillText(shorten(R.rid[r], to - from - 14), from + 7, y + rowHeight / 2 + 0.5);
}

function drawLabel(r, y, lastLabel) {
  if (y - lastLabel < 14 && r !== view.pinned) return lastLabel;
  const middle = Math.max(y + Math.max(rowHeight, 9) / 2, box.rowsTop + 6);
  if (middle > box.rowsBottom - 5) return lastLabel;
  pen.font = font(11, r === view.pinned ? 650 : 400);
  pen.fillStyle = r === view.pinned ? colours.accent : colours.muted;
  pen.textAlign = "left";
  pen.textBaseline = "middle";
  pen.fillText(shorten(R.rid[r], LABEL_WIDTH - 30), 14, middle);
  return y;
}

function drawPackedTitle() {
  pen.textAlign = "left";
  pen.textBaseline = "top";
  pen.fillStyle = colours.ink;
  pen.font = font(12, 600);
  pen.fillText("Requests", 14, box.rowsTop + 2);
  pen.fillStyle = colours.faint;
  pen.font = font(11);
  pen.fillText(`up to ${count(rows.length)} at a time`, 14, box.rowsTop + 18);
  if (!view.queue) pen.fillText("without the queue", 14, box.rowsTop + 33);
}

function message(text) {
  pen.fillStyle = colours.faint;
  pen.font = font(13);
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.fillText(text, (box.left + box.right) / 2, (box.rowsTop + box.rowsBottom) / 2);
}

const shortened = new Map();
function shorten(text, width) {
  const key = `${pen.font}\n${text}`;
  let result = shortened.get(key);
  if (result === undefined) {
    result = text;
    if (pen.measureText(text).width > width) {
      let size = Math.min(text.length, 60);
      do {
        size--;
        result = `${text.slice(0, Math.ceil(size * 0.6))}…${text.slice(text.length - Math.floor(size * 0.4))}`;
      } while (size > 2 && pen.measureText(result).width > width);
    }
    if (shortened.size > 20000) shortened.clear();
    shortened.set(key, result);
  }
  return result;
}

// A bar with whole-pixel ends, so that neighbours meet exactly; never thinner than a pixel.
function bar(x0, x1, y, height, colour) {
  const from = Math.max(Math.round(x0), box.left), to = Math.min(Math.max(Math.round(x1), Math.round(x0) + 1), box.right);
  if (to <= from) return;
  pen.fillStyle = colour;
  pen.fillRect(from, y, to - from, height);
}

function drawRequest(r, y, height) {
  const begin = shown[r], end = R.begin[r + 1];
  // Whole pixels, or thin rows would shimmer.
  const lowerEdge = Math.max(Math.round(y + height), Math.round(y) + 1);
  const thick = height >= 6 ? Math.round(height * 0.72) : lowerEdge - Math.round(y) - (height >= 3 ? 1 : 0);
  const thin = height >= 6 ? Math.max(Math.round(height * 0.3), 2) : thick;
  const thickY = height >= 6 ? Math.round(y + (height - thick) / 2) : Math.round(y), thinY = height >= 6 ? Math.round(y + (height - thin) / 2) : thickY;
  if (begin < end && extents.from[r] < spanStart(begin)) bar(place(extents.from[r]), place(spanStart(begin)), thinY, thin, colours["wait-queue"]);
  let low = begin, high = end;  // the first span that ends in view
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spanEnd(middle) < view.x0) low = middle + 1; else high = middle;
  }
  let covered = -Infinity, strongest = -1;
  for (let span = low; span < end && spanStart(span) <= view.x1; span++) {
    const x0 = place(spanStart(span)), x1 = place(spanEnd(span)), kind = kindOf(span);
    // Many on one pixel: computing is seen before waiting.
    const strength = kind === WAIT ? 0 : 1;
    if (Math.max(Math.round(x1), Math.round(x0) + 1) <= covered && strength <= strongest) continue;
    covered = Math.max(Math.round(x1), Math.round(x0) + 1);
    strongest = strength;
    if (kind === WAIT) {
      pen.globalAlpha = height < 2 ? 0.35 : height < 6 ? 0.5 : 1;  // as high as the others then, they would outshout them
      drawWait(span, x0, x1, thinY, thin);
      pen.globalAlpha = 1;
    }
    else if (kind === PREFILL) bar(x0, x1 - x0 > 5 ? x1 - 1 : x1, thickY, thick, colours.prefill);
    else drawDecode(span, x0, x1, thickY, thick);
  }
  const roomy = place(extents.to[r]) - place(extents.from[r]) >= MIN_WIDTH_FOR_SIGNS;
  if (height >= 5 && roomy) drawMarks(r, y, height);
  else for (const mark of R.marks.get(r) || []) {
    const x = Math.round(place(passStart(mark.pass)));
    pen.globalAlpha = 0.6;
    bar(x, x + 1, thickY, thick, colours.mark);
    pen.globalAlpha = 1;
  }
}

function drawWait(span, x0, x1, y, height) {
  if (onHost(span)) { bar(x0, x1, y, height, height >= 3 ? hatch : colours["wait-host"]); return; }
  const verdict = verdictOf(span);
  if (verdict) { bar(x0, x1, y, height, colours[`wait-${data.reasons[verdict.reason][2]}`]); return; }
  const first = R.first[span], last = R.last[span], runs = P.sharedRuns;
  let low = 0, high = runs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (runs[middle].last < first || nextStart(runs[middle].last) < view.x0) low = middle + 1; else high = middle;
  }
  let covered = -Infinity;
  for (; low < runs.length && runs[low].first <= last; low++) {
    const from = place(passStart(Math.max(runs[low].first, first))), to = place(nextStart(Math.min(runs[low].last, last)));
    if (from > box.right) break;
    if (Math.round(to) <= covered) continue;
    bar(Math.max(from, covered), to, y, height, colours[`wait-${runs[low].value}`]);
    covered = Math.max(Math.round(to), Math.round(from) + 1);
  }
}

function drawDecode(span, x0, x1, y, height) {
  bar(x0, x1, y, height, colours.decode);
  if (height < 4) return;
  const runs = P.stalls;  // in these steps only prompts were computed
  let low = 0, high = runs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (runs[middle].last < R.first[span] || passEnd(runs[middle].last) < view.x0) low = middle + 1; else high = middle;
  }
  pen.globalAlpha = 0.55;
  for (; low < runs.length && runs[low].first <= R.last[span]; low++) {
    const from = place(passStart(Math.max(runs[low].first, R.first[span]))), to = place(passEnd(Math.min(runs[low].last, R.last[span])));
    if (from > box.right) break;
    if (to - from < 2) continue;
    bar(from, to, y, height, colours.surface);
  }
  pen.globalAlpha = 1;
}

const MIN_WIDTH_FOR_SIGNS = 26;

function drawMarks(r, y, height) {
  const size = Math.min(Math.max(height * 0.36, 3), 5), middle = y + height / 2;
  const looks = R.looks.get(r);
  let last = -Infinity;
  if (looks && looks[0].prefix > 0) {
    for (let span = R.begin[r]; span < R.begin[r + 1]; span++) {
      if (kindOf(span) !== PREFILL) continue;
      last = place(spanStart(span));
      shape("diamond", last, middle, size);
      break;
    }
  }
  for (const mark of R.marks.get(r) || []) {
    const x = place(passStart(mark.pass)), sign = mark.kind === RETRACTED ? "down" : mark.kind === SWAPPED_OUT ? "out" : "in";
    if (x - last >= size) { shape(sign, x, middle, size); last = x; }
    else bar(x, x + 1, Math.round(middle - size), Math.round(size * 2), colours.mark);
  }
  if (R.finish[r] >= 0 && failed(r)) shape("cross", place(extents.to[r]) + size + 2, middle, size * 0.8);
}

const failed = (r) => ["abort", "error"].includes(data.finishes[R.finish[r]]);

function shape(kind, x, y, size) {
  if (x < box.left - 2 || x > box.right + 8) return;
  pen.beginPath();
  for (const [dx, dy] of SHAPES[kind]) pen.lineTo(x + dx * size, y + dy * size);
  if (kind === "cross") {
    pen.strokeStyle = colours.failed;
    pen.lineWidth = 1.6;
    pen.beginPath();
    pen.moveTo(x - size, y - size); pen.lineTo(x + size, y + size);
    pen.moveTo(x + size, y - size); pen.lineTo(x - size, y + size);
    pen.stroke();
    pen.lineWidth = 1;
    return;
  }
  pen.closePath();
  pen.fillStyle = kind === "out" || kind === "in" || kind === "diamond" ? colours.surface : colours.mark;
  pen.fill();
  pen.strokeStyle = kind === "down" ? colours.surface : colours.mark;
  pen.lineWidth = 1.2;
  pen.stroke();
  pen.lineWidth = 1;
}

const SHAPES = {
  diamond: [[0, -1], [1, 0], [0, 1], [-1, 0]],
  down: [[-1, -0.9], [1, -0.9], [0, 1]],
  out: [[-1, -0.9], [1, -0.9], [0, 1]],
  in: [[-1, 0.9], [1, 0.9], [0, -1]],
  cross: [],
};

// ------------------------------------------------------------------ strips

function stripTop(index) { return box.rowsBottom + STRIP_GAP + index * (box.strip + STRIP_GAP); }

function drawStrips() {
  STRIPS.forEach((strip, index) => {
    const y = stripTop(index), bottom = y + box.strip;
    const scale = strip.draw({ y, bottom });
    pen.textAlign = "left";
    pen.textBaseline = "top";
    pen.fillStyle = colours.ink;
    pen.font = font(12, 600);
    pen.fillText(strip.title, 14, y);
    pen.fillStyle = colours.faint;
    pen.font = font(11);
    pen.fillText(strip.unit || scale.unit, 14, y + 16);
    pen.textAlign = "right";
    pen.fillStyle = colours.muted;
    pen.fillText(scale.top, box.left - 8, y - 2);
    pen.textBaseline = "bottom";
    pen.fillText("0", box.left - 8, bottom + 2);
    pen.strokeStyle = colours.line;
    line(box.left, bottom + 0.5, box.right, bottom + 0.5);
  });
}

const visiblePasses = () => [Math.max(passAt(view.x0), 0), Math.min(passAt(view.x1), P.size - 1)];

// Calls paint(x0, x1, passes first..last) for each pixel column, or for each pass where they are wider.
const barGap = () => (box.right - box.left) / (visiblePasses()[1] - visiblePasses()[0] + 1) > 8 ? 1 : 0;

function columns(ends, paint) {
  const [first, last] = visiblePasses();
  for (let p = first; p <= last;) {
    const x0 = Math.max(Math.round(place(passStart(p))), box.left);
    let to = p;
    while (to < last && Math.round(place(passStart(to + 1))) <= x0) to++;
    const x1 = Math.min(Math.max(Math.round(place(ends(to))), x0 + 1), box.right);
    if (x1 > x0) paint(x0, x1, p, to);
    p = to + 1;
  }
}

function highest(values, first, last) {
  let result = 0;
  for (let i = first; i <= last; i++) if (values[i] > result) result = values[i];
  return result;
}

function niceTop(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  for (const factor of [1, 1.5, 2, 3, 4, 5, 6, 8, 10]) if (factor * power >= value * 0.9999) return factor * power;
  return value;
}

function drawMemory({ y, bottom }) {
  const total = highest(P.free.map((value, i) => value + P.evictable[i] + P.locked[i] + P.held[i]), 0, P.size - 1) || 1;
  const scale = box.strip / total;
  columns(nextStart, (x0, x1, first, last) => {
    let at = bottom;
    for (const [name, colour] of [["held", "kv-held"], ["locked", "kv-locked"], ["evictable", "kv-evictable"]]) {
      const height = P[name][last] * scale, top = at - height;
      pen.fillStyle = colours[colour];
      pen.fillRect(x0, Math.round(top), x1 - x0, Math.round(at) - Math.round(top));
      at = top;
    }
    if (highest(P.evicted, first, last) > 0) {
      pen.fillStyle = colours["wait-memory"];
      pen.fillRect(x0, y - 4, Math.min(Math.max(x1 - x0, 1), 2), 3);
    }
  });
  pen.strokeStyle = colours.line;
  line(box.left, y - 0.5, box.right, y - 0.5);
  return { top: total > 1 ? count(total) : "" };
}

function drawSteps({ y, bottom }, values, colour) {
  const top = Math.max(niceTop(highest(values, ...visiblePasses())), 1), scale = (box.strip - 2) / top;
  const edge = colours[colour], line = [];
  columns(nextStart, (x0, x1, first, last) => line.push([x0, x1, bottom - highest(values, first, last) * scale]));
  pen.fillStyle = edge;
  pen.globalAlpha = 0.18;
  for (const [x0, x1, at] of line) pen.fillRect(x0, Math.round(at), x1 - x0, bottom - Math.round(at));
  pen.globalAlpha = 1;
  pen.strokeStyle = edge;
  pen.lineWidth = 1.4;
  pen.lineJoin = "round";
  pen.beginPath();
  for (const [x0, x1, at] of line) { pen.lineTo(x0, at); pen.lineTo(x1, at); }
  pen.stroke();
  pen.lineWidth = 1;
  return { top: count(top), y };
}

function drawTokens({ bottom }) {
  const sums = P.prefill.map((value, i) => value + P.decodes[i]);
  const top = niceTop(highest(sums, ...visiblePasses())), scale = (box.strip - 2) / top, gap = barGap();
  columns(passEnd, (x0, x1, first, last) => {
    let best = first;
    for (let i = first; i <= last; i++) if (sums[i] > sums[best]) best = i;
    if (!sums[best]) return;
    const decodeTop = Math.round(bottom - P.decodes[best] * scale), prefillTop = Math.round(bottom - sums[best] * scale);
    pen.fillStyle = colours.decode;
    pen.fillRect(x0, decodeTop, x1 - x0 - gap, bottom - decodeTop);
    pen.fillStyle = colours.prefill;
    pen.fillRect(x0, prefillTop, x1 - x0 - gap, decodeTop - prefillTop);
  });
  return { top: count(top) };
}

function drawStepTime({ bottom }) {
  const top = highest(P.stepTime, ...visiblePasses());
  if (!top) return { top: "", unit: "not in the log" };
  const factor = top < 0.001 ? 1e6 : top < 1 ? 1e3 : 1, nice = niceTop(top * factor), scale = (box.strip - 2) / nice;
  const gap = barGap();
  pen.fillStyle = colours.step;
  columns(passEnd, (x0, x1, first, last) => {
    const height = Math.round(highest(P.stepTime, first, last) * factor * scale);
    pen.fillRect(x0, bottom - height, x1 - x0 - gap, height);
  });
  return { top: count(nice), unit: { 1: "s", 1e3: "ms", 1e6: "µs" }[factor] };
}

function drawScrollBar() {
  const height = box.rowsBottom - box.rowsTop, total = rows.length * rowHeight;
  if (total <= height + 0.5) return;
  const size = Math.max(height * height / total, 24);
  const y = box.rowsTop + view.scroll / (total - height) * (height - size);
  pen.fillStyle = colours.line;
  pen.beginPath();
  pen.roundRect(box.width - 9, y, 5, size, 2.5);
  pen.fill();
}

// ------------------------------------------------------------------ pointer

const pointer = { x: -1, y: -1, inside: false, drag: null };

// The request under a point; -1 if none. The label of a row stands for its request, too.
function requestAt(x, y) {
  if (y < box.rowsTop || y >= box.rowsBottom) return -1;
  const members = rows[Math.floor((y - box.rowsTop + view.scroll) / rowHeight)];
  if (!members) return -1;
  if (view.rowMode === "each") return members[0];
  const value = valueAt(x), margin = valueAt(3) - valueAt(0), i = firstIn(members, value - margin);
  return i < members.length && extents.from[members[i]] <= value + margin && x >= box.left ? members[i] : -1;
}

// The span at a place; thin ones are found within two pixels.
function spanAt(r, x) {
  let best = -1, distance = 2.5;
  for (let span = shown[r]; span < R.begin[r + 1]; span++) {
    const x0 = place(spanStart(span)), x1 = place(spanEnd(span));
    if (x0 > x + 3) break;
    const away = Math.max(x0 - x, x - x1, 0);
    if (away < distance || (away === 0 && distance === 0 && kindOf(span) !== WAIT)) { best = span; distance = away; }
  }
  return best;
}

function drawOverlay() {
  over.clearRect(0, 0, box.width, box.height);
  if (view.pinnedPass >= 0) {
    const x0 = place(passStart(view.pinnedPass)), x1 = Math.max(place(passEnd(view.pinnedPass)), x0 + 1);
    over.fillStyle = colours.accent;
    over.globalAlpha = 0.2;
    if (x1 > box.left && x0 < box.right) over.fillRect(Math.max(x0, box.left), box.rowsTop, x1 - Math.max(x0, box.left), box.height - AXIS_HEIGHT - box.rowsTop);
    over.globalAlpha = 1;
  }
  if (view.pinned >= 0 && rowHeight < 4) {
    const index = rowOf(view.pinned), y = rowTop(index);
    if (index >= 0 && inView(view.pinned)) { over.fillStyle = colours.accent; over.fillRect(box.left - 10, y - 1, 8, 3); }
  }
  if (!pointer.inside || pointer.drag || pointer.x < box.left || pointer.x > box.right) { tip.hidden = true; return; }
  over.strokeStyle = colours.faint;
  over.setLineDash([3, 3]);
  over.beginPath();
  over.moveTo(Math.round(pointer.x) + 0.5, box.rowsTop);
  over.lineTo(Math.round(pointer.x) + 0.5, box.height - AXIS_HEIGHT);
  over.stroke();
  over.setLineDash([]);
  const r = requestAt(pointer.x, pointer.y);
  if (r >= 0 && rowHeight >= 4) {
    over.fillStyle = colours.accent;
    over.globalAlpha = 0.12;
    const from = view.rowMode === "packed" ? Math.max(place(extents.from[r]) - 3, box.left) : 0;
    const to = view.rowMode === "packed" ? Math.min(place(extents.to[r]) + 3, box.width) : box.width;
    over.fillRect(from, rowTop(rowOf(r)), to - from, rowHeight);
    over.globalAlpha = 1;
  }
  const pass = passAt(valueAt(pointer.x));
  const lines = r >= 0 ? requestTip(r, spanAt(r, pointer.x)) : pass >= 0 && pointer.y > box.rowsBottom ? passTip(pass) : null;
  if (!lines) { tip.hidden = true; return; }
  tip.replaceChildren(...lines.map(([text, className], i) => element(i ? "p" : "b", text, className)));
  tip.hidden = false;
  const width = tip.offsetWidth, height = tip.offsetHeight;
  tip.style.left = `${pointer.x + 16 + width > box.width - 6 ? Math.max(pointer.x - width - 14, 4) : pointer.x + 16}px`;
  tip.style.top = `${Math.max(Math.min(pointer.y + 14, box.height - height - 6), 4)}px`;
}

const when = (value) => `${value.toLocaleString("en-US", { minimumFractionDigits: 3, maximumFractionDigits: 3 })} s`;
const passWords = (first, last) => first === last ? `pass ${count(first)}` : `passes ${count(first)} to ${count(last)}`;

// The reasons that passes gave to all they did not look at, most frequent first: [index or -1, how often].
function sharedReasons(first, last) {
  const counts = new Map();
  for (let p = first; p <= last; p++) counts.set(P.restReason[p], (counts.get(P.restReason[p]) || 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]);
}

const NOT_SEEN = ["WAITING", "no pass has looked at it", "queue"];
const reasonOf = (index) => index >= 0 ? data.reasons[index] : NOT_SEEN;

// What a span means, line by line. A wait without a verdict of its own is told for `pass`, or in sum where that is -1.
function spanWords(span, pass = -1) {
  const kind = kindOf(span), verdict = verdictOf(span), first = R.first[span], last = R.last[span];
  const lines = [];
  if (kind === WAIT) {
    lines.push([onHost(span) ? "Swapped out: its KV memory is on the host" : verdict ? "Waits" : "Waits, not looked at", "sum"]);
    if (verdict) {
      const why = reasonOf(verdict.reason);
      lines.push([`${why[0]}: ${why[1]}`]);
      const moved = verdict.firstHave !== verdict.have && verdict.verdicts > 1 ? ` (${count(verdict.firstHave)} at first)` : "";
      if (verdict.need || verdict.have) lines.push([`need ${count(verdict.need)}, have ${count(verdict.have)}${moved}`, "sum"]);
      if (verdict.extend) lines.push([`cached ${count(verdict.prefix)}, to compute ${count(verdict.extend)}, output ${count(verdict.output)} tokens`, "quiet"]);
      if (verdict.reasons > 1) lines.push([`longest of ${count(verdict.reasons)} waits drawn together`, "quiet"]);
    } else if (pass >= 0) {
      const at = Math.min(Math.max(pass, first), last), why = reasonOf(P.restReason[at]);
      lines.push([`${why[0]}: ${why[1]}`]);
      if (P.rest[at] > 1) lines.push([`one of ${count(P.rest[at])} in pass ${count(at)}`, "quiet"]);
    } else {
      for (const [index, times] of sharedReasons(first, last).slice(0, 4)) {
        lines.push([`${reasonOf(index)[0]} in ${plural(times, "pass")}: ${reasonOf(index)[1]}`]);
      }
    }
  } else if (kind === PREFILL) {
    const several = verdict.verdicts > 1 ? ` in ${count(verdict.verdicts)} chunks` : "";
    lines.push([`Prefill: ${plural(verdict.extend, "token")}${several}`, "sum"]);
    lines.push([`${data.reasons[verdict.reason][0]}: ${data.reasons[verdict.reason][1]}`]);
    lines.push([`behind ${count(verdict.prefix)} tokens that exist; output reserved ${count(verdict.output)}`, "quiet"]);
    lines.push([`need ${count(verdict.need)}, have ${count(verdict.have)}`, "quiet"]);
  } else {
    let steps = 0;
    for (let p = first; p <= last; p++) steps += P.decodes[p] > 0;
    lines.push([`Decode: ${plural(steps, "token")}`, "sum"]);
    const stalled = last - first + 1 - steps;
    if (stalled) lines.push([`stood still in ${plural(stalled, "pass")}, which computed prompts or nothing`, "quiet"]);
  }
  return lines;
}

function requestTip(r, span) {
  const lines = [[R.rid[r]]];
  if (span < 0) {
    const value = valueAt(pointer.x), begin = shown[r];
    if (value < extents.from[r] || value > extents.to[r]) return null;
    if (begin < R.begin[r + 1] && value < spanStart(begin)) lines.push(["Arrived; no pass has looked at it yet"]);
    else lines.push(["Holds its place; nothing is computed for it"]);
    return lines;
  }
  lines.push(...spanWords(span, passAt(valueAt(pointer.x))));
  const from = P.start[R.first[span]], to = kindOf(span) !== WAIT ? P.end[R.last[span]] : R.last[span] + 1 < P.size ? P.start[R.last[span] + 1] : P.end[R.last[span]];
  lines.push([`${when(from)}, for ${seconds(to - from)} · ${passWords(R.first[span], R.last[span])}`, "quiet"]);
  return lines;
}

function passFigures(p) {
  const figures = [["Step", P.stepId[p] ? `${count(P.stepId[p])}, ${data.modes[P.mode[p]].toLowerCase()}` : "none"]];
  if (P.policies[P.policy[p]]) figures.push(["Policy", printable(P.policies[P.policy[p]])]);
  if (P.stepTime[p]) figures.push(["Step time", seconds(P.stepTime[p])]);
  figures.push(["Tokens", `${count(P.prefill[p])} prefill + ${count(P.decodes[p])} decode`]);
  figures.push(["Waiting, running", `${count(P.waiting[p])}, ${count(P.running[p])}`]);
  const total = P.held[p] + P.locked[p] + P.evictable[p] + P.free[p];
  if (total) figures.push(["KV pages", `held ${count(P.held[p])}, locked ${count(P.locked[p])}, evictable ${count(P.evictable[p])}, free ${count(P.free[p])}`]);
  if (P.evicted[p]) figures.push(["Evicted", plural(P.evicted[p], "page")]);
  if (P.kvBefore[p] >= 0) figures.push(["KV budget", `${count(P.kvBefore[p])} → ${count(P.kvAfter[p])} tokens`]);
  if (P.stepBefore[p] >= 0) figures.push(["Step budget", `${count(P.stepBefore[p])} → ${count(P.stepAfter[p])} tokens`]);
  return figures;
}

function passTip(p) {
  const lines = [[`Pass ${count(p)} at ${when(P.start[p])}`], ...passFigures(p).map(([name, value]) => [`${name}: ${value}`])];
  if (P.restReason[p] >= 0 && P.rest[p]) lines.push([`${plural(P.rest[p], "request")} not looked at: ${data.reasons[P.restReason[p]][1]}`, "quiet"]);
  for (const note of P.notes.get(p) || []) lines.push([printable(note), "sum"]);
  return lines;
}

// ------------------------------------------------------------------ details

const details = $("#details");
const MAX_STORY = 300;

function showDetails(title, lead, facts, items) {
  $("h2", details).textContent = title;
  $(".lead", details).textContent = lead;
  $("dl", details).replaceChildren(...facts.flatMap(([name, value]) => [element("dt", name), element("dd", value)]));
  $("ol", details).replaceChildren(...items);
  details.scrollTop = 0;
  if (details.hidden) { details.hidden = false; resize(); } else redraw();
}

function unpin() {
  view.pinned = view.pinnedPass = -1;
  root.removeAttribute("data-pinned");
  if (!details.hidden) { details.hidden = true; resize(); } else redraw();
}

function storyItem(colour, at, lines, jump) {
  const item = element("li");
  const dot = element("i");
  dot.style.background = colour;
  item.append(dot, element("b", lines[0]), " ", element("span", at));
  for (const text of lines.slice(1)) item.append(element("p", text));
  if (jump) { item.className = "jump"; item.addEventListener("click", jump); }
  return item;
}

function pinRequest(r) {
  view.pinned = r;
  view.pinnedPass = -1;
  root.dataset.pinned = R.rid[r];
  const begin = R.begin[r], end = R.begin[r + 1];
  const facts = [];
  const fact = (name, value) => facts.push([name, value]);
  if (R.prompt[r] >= 0) fact("Prompt", plural(R.prompt[r], "token"));
  const looks = R.looks.get(r) || [];
  if (looks.length) fact("Cached", `${count(looks[0].prefix)} of ${count(looks[0].prompt)} tokens`);
  if (R.maxNew[r] >= 0) fact("Output", `${count(R.output[r])} of at most ${count(R.maxNew[r])} tokens`);
  else if (R.output[r]) fact("Output", plural(R.output[r], "token"));
  if (R.arrived[r] !== null) fact("Arrived", when(R.arrived[r]));
  let firstCompute = -1, firstToken = -1;
  for (let span = begin; span < end && firstToken < 0; span++) {
    if (kindOf(span) === PREFILL && firstCompute < 0) firstCompute = P.start[R.first[span]];
    if (kindOf(span) === 2) firstToken = P.start[R.first[span]];
  }
  if (R.arrived[r] !== null && firstCompute >= 0) fact("Waited at first", seconds(Math.max(firstCompute - R.arrived[r], 0)));
  if (R.arrived[r] !== null && firstToken >= 0) fact("Until its first decode", seconds(Math.max(firstToken - R.arrived[r], 0)));
  if (R.arrived[r] !== null && R.finished[r] !== null) fact("In all", seconds(R.finished[r] - R.arrived[r]));
  if (R.priority[r]) fact("Priority", String(R.priority[r]));
  if (R.tenant[r]) fact("Tenant", printable(R.tenant[r]));
  if (R.group[r]) fact("Group", printable(R.group[r]));

  const items = [];
  for (let span = begin; span < end; span++) {
    const words = spanWords(span).map(([text]) => text), kind = kindOf(span), verdict = verdictOf(span);
    const group = reasonOf(verdict ? verdict.reason : sharedReasons(R.first[span], R.last[span])[0][0])[2];
    const colour = kind === PREFILL ? colours.prefill : kind === 2 ? colours.decode : colours[onHost(span) ? "wait-host" : `wait-${group}`];
    const last = R.last[span], from = P.start[R.first[span]], to = kind === WAIT && last + 1 < P.size ? P.start[last + 1] : P.end[last];
    items.push([from, storyItem(colour, `at ${when(from)}, ${seconds(to - from)}`, words, () => jumpTo(spanStart(span), spanEnd(span)))]);
  }
  for (const mark of R.marks.get(r) || []) {
    items.push([P.start[mark.pass] - 1e-9, storyItem(colours.mark, `at ${when(P.start[mark.pass])}`, [printable(mark.text).replace(/^./, (c) => c.toUpperCase())])]);
  }
  for (const look of looks) {
    const at = items.find(([, item]) => item.textContent.startsWith("Prefill"));
    const text = [`Prefix cache: ${count(look.prefix)} of ${count(look.prompt)} tokens`, data.misses[look.miss]];
    if (look.differs > look.prefix) text.push(`first differing token: position ${count(look.differs)}`);
    items.push([at && look === looks[0] ? at[0] - 2e-9 : Infinity, storyItem(colours.surface, "", text)]);
    if (look !== looks[0]) items.pop();
  }
  items.sort((a, b) => a[0] - b[0]);
  const nodes = items.slice(0, MAX_STORY).map(([, item]) => item);
  if (items.length > MAX_STORY) nodes.push(element("li", `… and ${count(items.length - MAX_STORY)} more; zoom in to see each`));
  let lead = "Had not ended when the log did.";
  if (R.finish[r] >= 0) lead = { stop: "Ended at a stop token or stop string.", length: "Ended at its length limit.", abort: "Was aborted.", error: "Ended with an error." }[data.finishes[R.finish[r]]];
  if (R.message[r]) lead += ` ${printable(R.message[r])}`;
  showDetails(R.rid[r], lead, facts, nodes);
}

function pinPass(p) {
  view.pinned = -1;
  view.pinnedPass = p;
  root.dataset.pinned = `pass ${p}`;
  const items = (P.notes.get(p) || []).map((note) => storyItem(colours.mark, "", [printable(note)]));
  let lead = `At ${when(P.start[p])}.`;
  if (P.restReason[p] >= 0 && P.rest[p]) lead += ` ${plural(P.rest[p], "waiting request")} not looked at: ${data.reasons[P.restReason[p]][1]}.`;
  showDetails(`Pass ${count(p)}`, lead, passFigures(p), items);
}

function jumpTo(from, to) {
  const margin = Math.max((to - from) * 0.6, (view.x1 - view.x0) * 0.002);
  setView(from - margin, to + margin);
  redraw();
}

function select(r) {
  if (extents.from[r] === Infinity) choose("queue", true);
  const from = extents.from[r], to = extents.to[r];
  if (R.size > 40 || from < view.x0 || to > view.x1) setView(from - (to - from) * 0.25, to + (to - from) * 0.25);
  pinRequest(r);
  layoutRows();
  const index = rowOf(r), height = box.rowsBottom - box.rowsTop;
  if (rowTop(index) < box.rowsTop || rowTop(index + 1) > box.rowsBottom) view.scroll = index * rowHeight - height / 2;
  redraw();
}

// ------------------------------------------------------------------ input

function position(event) {
  const frame = chart.getBoundingClientRect();
  pointer.x = event.clientX - frame.left - 1;
  pointer.y = event.clientY - frame.top - 1;
  pointer.inside = true;
}

function zoom(factor, x = (box.left + box.right) / 2) {
  const at = valueAt(Math.min(Math.max(x, box.left), box.right));
  setView(at - (at - view.x0) * factor, at + (view.x1 - at) * factor);
  redraw();
}

function scaleRows(factor, y = box.rowsTop) {
  const at = (y - box.rowsTop + view.scroll) / rowHeight;
  view.minRow = Math.min(rowHeight * factor, MAX_ROW);
  layoutRows();
  view.scroll = at * rowHeight - (y - box.rowsTop);
  redraw();
}

chart.addEventListener("wheel", (event) => {
  event.preventDefault();
  position(event);
  const amount = event.deltaMode === 1 ? 30 : 1, dy = event.deltaY * amount, dx = event.deltaX * amount;
  if (event.ctrlKey) scaleRows(Math.exp(-dy * 0.002), pointer.y);
  else if (event.shiftKey) { view.scroll += dy || dx; redraw(); }
  else if (Math.abs(dx) > Math.abs(dy)) pan(dx);
  else zoom(Math.exp(dy * 0.0018), pointer.x);
}, { passive: false });

function pan(pixels) {
  const shift = pixels / (box.right - box.left) * (view.x1 - view.x0);
  setView(view.x0 + shift, view.x1 + shift);
  redraw();
}

chart.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  position(event);
  chart.setPointerCapture(event.pointerId);
  pointer.drag = { x: pointer.x, y: pointer.y, moved: false };
});
chart.addEventListener("pointermove", (event) => {
  const { x, y } = pointer;
  position(event);
  if (!pointer.drag) { drawOverlay(); return; }
  if (Math.abs(pointer.x - pointer.drag.x) + Math.abs(pointer.y - pointer.drag.y) > 4) pointer.drag.moved = true;
  if (!pointer.drag.moved) return;
  chart.classList.add("dragging");
  view.scroll -= pointer.y - y;
  pan(x - pointer.x);
});
chart.addEventListener("pointerup", (event) => {
  const drag = pointer.drag;
  pointer.drag = null;
  chart.classList.remove("dragging");
  if (!drag || drag.moved) return;
  position(event);
  const r = requestAt(pointer.x, pointer.y), pass = passAt(valueAt(pointer.x));
  if (r >= 0) pinRequest(r);
  else if (pointer.y > box.rowsBottom && pointer.x > box.left && pass >= 0) pinPass(pass);
  else unpin();
});
chart.addEventListener("pointercancel", () => { pointer.drag = null; chart.classList.remove("dragging"); });
chart.addEventListener("pointerleave", () => { pointer.inside = false; drawOverlay(); });
chart.addEventListener("dblclick", fit);

const search = $("#search"), found = $("#found");
const MAX_FOUND = 8;

function findRequests(text) {
  const wantedText = text.trim().toLowerCase(), results = [];
  if (!wantedText) return results;
  for (const test of [(rid) => rid === wantedText, (rid) => rid.startsWith(wantedText), (rid) => rid.includes(wantedText)]) {
    for (let r = 0; r < R.size && results.length < MAX_FOUND; r++) {
      if (test(R.rid[r].toLowerCase()) && !results.includes(r)) results.push(r);
    }
  }
  return results;
}

function listFound() {
  const results = findRequests(search.value);
  found.hidden = !search.value.trim();
  found.replaceChildren(...results.map((r, i) => {
    const item = element("li", R.rid[r]);
    if (i === 0) item.setAttribute("aria-selected", "true");
    item.addEventListener("pointerdown", (event) => { event.preventDefault(); found.hidden = true; select(r); });
    return item;
  }));
  if (!results.length) found.append(element("li", "No request has this in its id", "none"));
}

search.addEventListener("input", listFound);
search.addEventListener("blur", () => { found.hidden = true; });
search.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { found.hidden = true; chart.focus(); }
  if (event.key !== "Enter") return;
  const [r] = findRequests(search.value);
  if (r === undefined) return;
  found.hidden = true;
  select(r);
  chart.focus();
});

const KEYS = {
  ArrowLeft: () => pan(-80), ArrowRight: () => pan(80),
  ArrowUp: () => { view.scroll -= 40; redraw(); }, ArrowDown: () => { view.scroll += 40; redraw(); },
  PageUp: () => { view.scroll -= 300; redraw(); }, PageDown: () => { view.scroll += 300; redraw(); },
  "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7),
  "[": () => scaleRows(1 / 1.3), "]": () => scaleRows(1.3),
  0: fit,
  t: () => choose("axis", view.axis === "time" ? "pass" : "time"),
  r: () => choose("rows", view.rowMode === "packed" ? "each" : "packed"),
  w: () => choose("queue", !view.queue),
  "/": () => search.focus(),
  "?": () => $("#help").showModal(),
  Escape: unpin,
};
document.addEventListener("keydown", (event) => {
  if (event.target instanceof HTMLInputElement || event.ctrlKey || event.metaKey || event.altKey || $("#help").open) return;
  const action = KEYS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});

function choose(name, value) {
  if (name === "axis") setAxis(value);
  else if (name === "queue") setQueue(value);
  else { view.rowMode = value; view.scroll = 0; redraw(); }
  showChoices();
}

function showChoices() {
  for (const button of document.querySelectorAll("[data-axis]")) button.setAttribute("aria-pressed", String(button.dataset.axis === view.axis));
  for (const button of document.querySelectorAll("[data-rows]:not(html)")) button.setAttribute("aria-pressed", String(button.dataset.rows === view.rowMode));
  $("#queue").setAttribute("aria-pressed", String(view.queue));
}

for (const button of document.querySelectorAll("button[data-axis]")) button.addEventListener("click", () => choose("axis", button.dataset.axis));
for (const button of document.querySelectorAll("button[data-rows]")) button.addEventListener("click", () => choose("rows", button.dataset.rows));
$("#queue").addEventListener("click", () => choose("queue", !view.queue));
$("#fit").addEventListener("click", fit);
$("#help-button").addEventListener("click", () => $("#help").showModal());
$("#close").addEventListener("click", unpin);

// ------------------------------------------------------------------ head of the page

function drawLegend() {
  const swatch = (colour, text, className) => {
    const item = element("span"), box = element("i", undefined, className);
    box.style.background = colour;
    item.append(box, text);
    return item;
  };
  const symbol = (kind, text) => {
    const item = element("span"), ns = "http://www.w3.org/2000/svg", svg = document.createElementNS(ns, "svg");
    svg.setAttribute("viewBox", "-1.2 -1.2 2.4 2.4");
    const path = document.createElementNS(ns, "path");
    path.setAttribute("d", kind === "cross" ? "M-0.8 -0.8L0.8 0.8M0.8 -0.8L-0.8 0.8" : `M${SHAPES[kind].map((point) => point.join(" ")).join("L")}Z`);
    path.setAttribute("fill", kind === "down" ? colours.mark : "none");
    path.setAttribute("stroke", kind === "cross" ? colours.failed : colours.mark);
    path.setAttribute("stroke-width", "0.28");
    svg.append(path);
    item.append(svg, text);
    return item;
  };
  const waits = { memory: "waits for KV memory", compute: "for token budget", shared: "for a prefix, grammar or adapter", queue: "for its turn" };
  $("#legend").replaceChildren(
    swatch(colours.prefill, "prefill"), swatch(colours.decode, "decode (pale: stands still)"),
    ...GROUPS.map((group) => swatch(colours[`wait-${group}`], waits[group], "thin")),
    swatch(colours["wait-host"], "on the host", "thin"),
    symbol("diamond", "cache hit"), symbol("down", "retracted"), symbol("out", "swapped out"), symbol("in", "swapped in"), symbol("cross", "failed or aborted"),
    element("hr"),
    swatch(colours["kv-held"], "KV held by requests"), swatch(colours["kv-locked"], "cached, in use"), swatch(colours["kv-evictable"], "cached, evictable"),
    swatch(colours["wait-memory"], "evictions", "thin"),
  );
}

function drawFacts() {
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const marks = [...R.marks.values()].flat(), prefill = sum(P.prefill), duration = P.end[P.size - 1] - P.start[0];
  const looked = [...R.looks.values()].map((looks) => looks[0]), prompt = sum(looked.map((look) => look.prompt));
  const facts = [[R.size === 1 ? "request" : "requests", count(R.size)], [P.size === 1 ? "pass" : "passes", count(P.size)], ["duration", seconds(duration)],
    ["prefill tokens", count(prefill)], ["decode tokens", count(sum(P.decodes))]];
  if (prompt) facts.push(["prompt tokens from the cache", `${(100 * sum(looked.map((look) => look.prefix)) / prompt).toFixed(1)} %`]);
  facts.push(["retractions", count(marks.filter((mark) => mark.kind === RETRACTED).length)]);
  const swaps = marks.filter((mark) => mark.kind === SWAPPED_OUT).length;
  if (swaps) facts.push(["swaps", count(swaps)]);
  facts.push(["evicted pages", count(sum(P.evicted))], ["longest queue", count(highest(P.waiting, 0, P.size - 1))]);
  $("#facts").replaceChildren(...facts.map(([name, value]) => {
    const item = element("div");
    item.append(element("dt", name), element("dd", value));
    return item;
  }));
}

function applyColours() {
  readColours();
  drawLegend();
  if (box.width) redraw();
}

function start() {
  const options = new URLSearchParams(location.hash.slice(1));
  if (["light", "dark"].includes(options.get("theme"))) root.dataset.theme = options.get("theme");
  $("#source").textContent = printable(data.source);
  $("#left-out").textContent = printable(data.leftOut);
  $("#left-out").hidden = !data.leftOut;
  if (options.get("axis") === "pass") view.axis = "pass";
  root.dataset.requests = String(R.size);
  root.dataset.passes = String(P.size);
  measureRequests();
  if (view.rowMode === "packed" && lanes.length > MAX_LANES_WITH_QUEUE) { view.queue = false; measureRequests(); }
  applyColours();
  drawFacts();
  const [low, high] = axisEnds();
  const from = Number(options.get("from") ?? low), to = Number(options.get("to") ?? high);
  setView(from - (to - from) * 0.005, to + (to - from) * 0.005);
  showChoices();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyColours);
  new ResizeObserver(resize).observe(chart);
  resize();
  const pinned = options.get("request");
  if (pinned !== null) {
    const r = R.rid.indexOf(printable(pinned));
    if (r >= 0) select(r);
  }
}

start();
