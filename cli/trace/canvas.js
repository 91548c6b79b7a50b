// The canvas: its colors, its size, the division of its height, and the axis.

function readColors() {
  const style = getComputedStyle(root);
  for (const name of ["surface", "ink", "muted", "faint", "line", "grid", "band", "accent", "prefill", "decode", "wait-memory",
    "wait-compute", "wait-queue", "wait-shared", "wait-host", "mark", "failed", "kv-held", "kv-locked", "kv-evictable", "step"]) {
    colors[name] = style.getPropertyValue(`--${name}`).trim();
  }
  colors["wait-queue-line"] = colors.muted;
  colors["decode-line"] = colors.decode;
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const tilePen = tile.getContext("2d");
  tilePen.fillStyle = colors["wait-host"];
  tilePen.fillRect(0, 0, 6, 6);
  tilePen.strokeStyle = colors.surface;
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

// Which rows exist, and how the height is divided: the strips get the height that few rows do not need.
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

// Of a row's requests, in order of time, the first that ends at or after a value of the axis.
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
  drawCuts();
  drawScrollBar();
  drawOverlay();
  root.dataset.rows = String(drawn);
  root.dataset.cuts = String(view.axis === "time" && view.cut ? cuts.length : 0);
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
  const parts = view.axis === "pass" ? [[view.x0, view.x1]] : partsInView();
  for (const [from, to] of parts) for (let k = Math.ceil(from / step); k * step <= to; k++) {
    const x = Math.round(place(view.axis === "pass" ? k * step : squeezed(k * step))) + 0.5;
    pen.strokeStyle = colors.grid;
    line(x, box.rowsTop, x, y);
    pen.fillStyle = colors.muted;
    const text = view.axis === "pass" ? count(k * step) : (k * step).toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
    if (x > box.left + 8 && x < box.right - 10) pen.fillText(text, x, y + 7);
  }
  pen.strokeStyle = colors.line;
  line(box.left, y + 0.5, box.right, y + 0.5);
  pen.textAlign = "left";
  pen.fillStyle = colors.ink;
  pen.font = font(12, 600);
  pen.fillText(view.axis === "time" ? "Time" : "Pass", 14, y + 6);
  const offset = pen.measureText(view.axis === "time" ? "Time " : "Pass ").width;
  pen.fillStyle = colors.faint;
  pen.font = font(11);
  pen.fillText(view.axis === "time" ? "s since the start" : "number", 14 + offset + 2, y + 7);
}

function line(x0, y0, x1, y1) {
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.lineTo(x1, y1);
  pen.stroke();
}
