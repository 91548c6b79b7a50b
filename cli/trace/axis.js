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
  let low = 0, high = P.size;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (passStart(middle) <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
}

function timeToAxis(value) {
  if (view.axis === "time") return squeezed(value);
  let low = 0, high = P.size;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (P.start[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
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
