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
  return partition(0, members.length, (i) => extents.to[members[i]] < value);
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

// The requests, in rows above the strips.

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
    lastLabel = drawLabel(rows[i], y, lastLabel);
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
  drawRowsTitle();
  pen.strokeStyle = colors.line;
  line(0, bottom + 0.5, box.width, bottom + 0.5);
  if (!rows.length) message("No request was there at this time");
  return drawn;
}

function drawRow(members, y, height) {
  const pinned = view.pinned >= 0 && members.includes(view.pinned) && rowHeight >= 4;
  if (pinned) {
    pen.fillStyle = colors.band;
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
  pen.fillStyle = colors.ink;
  pen.textAlign = "left";
  pen.textBaseline = "middle";
  pen.fillText(shorten(R.rid[r], to - from - 14), from + 7, y + rowHeight / 2 + 0.5);
}

// The name of a row: its request, or how many requests it has in view.
function drawLabel(members, y, lastLabel) {
  const size = Math.min(11, Math.max(rowHeight, 8)), pinned = members.includes(view.pinned);
  if (y - lastLabel < Math.min(14, Math.max(rowHeight, LABELED_ROW)) - 0.01 && !pinned) return lastLabel;
  const middle = Math.max(y + Math.max(rowHeight, 9) / 2, box.rowsTop + 6);
  if (middle > box.rowsBottom - 5) return lastLabel;
  const first = firstIn(members, view.x0);
  let last = first;
  while (last + 1 < members.length && extents.from[members[last + 1]] <= view.x1) last++;
  if (first >= members.length || extents.from[members[first]] > view.x1) return lastLabel;
  pen.font = font(size, pinned ? 650 : 400);
  pen.fillStyle = pinned ? colors.accent : colors.muted;
  pen.textAlign = "left";
  pen.textBaseline = "middle";
  const name = pinned ? R.rid[view.pinned] : last === first ? R.rid[members[first]] : plural(last - first + 1, "request");
  pen.fillText(shorten(name, LABEL_WIDTH - 30), 14, middle);
  return y;
}

function drawRowsTitle() {
  pen.textAlign = "left";
  pen.textBaseline = "top";
  pen.fillStyle = colors.ink;
  pen.font = font(12, 600);
  pen.fillText("Requests", 14, 8);
  const words = [view.rowMode === "packed" ? `up to ${count(rows.length)} at a time` : "", view.queue ? "" : "without the queue"];
  const offset = pen.measureText("Requests ").width;
  pen.fillStyle = colors.faint;
  pen.font = font(11);
  pen.fillText(words.filter(Boolean).join(", "), 14 + offset + 2, 9);
}

function message(text) {
  pen.fillStyle = colors.faint;
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

// A bar with whole-pixel ends, so that neighbors meet exactly; never thinner than a pixel.
function bar(x0, x1, y, height, color) {
  const from = Math.max(Math.round(x0), box.left), to = Math.min(Math.max(Math.round(x1), Math.round(x0) + 1), box.right);
  if (to <= from) return;
  pen.fillStyle = color;
  pen.fillRect(from, y, to - from, height);
}

function drawRequest(r, y, height) {
  const begin = shown[r], end = R.begin[r + 1];
  // Whole pixels, so that thin rows do not flicker.
  const lowerEdge = Math.max(Math.round(y + height), Math.round(y) + 1);
  const thick = height >= 6 ? Math.round(height * 0.72) : lowerEdge - Math.round(y) - (height >= 3 ? 1 : 0);
  const thin = height >= 6 ? Math.max(Math.round(height * 0.3), 2) : thick;
  const thickY = height >= 6 ? Math.round(y + (height - thick) / 2) : Math.round(y), thinY = height >= 6 ? Math.round(y + (height - thin) / 2) : thickY;
  if (begin < end && extents.from[r] < spanStart(begin)) bar(place(extents.from[r]), place(spanStart(begin)), thinY, thin, colors["wait-queue"]);
  const low = partition(begin, end, (i) => spanEnd(i) < view.x0);  // the first span that ends in view
  let covered = -Infinity, strongest = -1;
  for (let span = low; span < end && spanStart(span) <= view.x1; span++) {
    const x0 = place(spanStart(span)), x1 = place(spanEnd(span)), kind = kindOf(span);
    // Many spans on one pixel: compute is drawn over waits.
    const strength = kind === WAIT ? 0 : 1;
    if (Math.max(Math.round(x1), Math.round(x0) + 1) <= covered && strength <= strongest) continue;
    covered = Math.max(Math.round(x1), Math.round(x0) + 1);
    strongest = strength;
    if (kind === WAIT) {
      pen.globalAlpha = height < 2 ? 0.35 : height < 6 ? 0.5 : 1;  // full strength would hide the other spans at this height
      drawWait(span, x0, x1, thinY, thin);
      pen.globalAlpha = 1;
    }
    else if (kind === PREFILL) bar(x0, x1 - x0 > 5 ? x1 - 1 : x1, thickY, thick, colors.prefill);
    else drawDecode(span, x0, x1, thickY, thick);
  }
  const roomy = place(extents.to[r]) - place(extents.from[r]) >= MIN_WIDTH_FOR_SIGNS;
  if (height >= 5 && roomy) drawMarks(r, y, height);
  else for (const mark of R.marks.get(r) || []) {
    const x = Math.round(place(passStart(mark.pass)));
    pen.globalAlpha = 0.6;
    bar(x, x + 1, thickY, thick, colors.mark);
    pen.globalAlpha = 1;
  }
}

function drawWait(span, x0, x1, y, height) {
  if (onHost(span)) { bar(x0, x1, y, height, height >= 3 ? hatch : colors["wait-host"]); return; }
  const verdict = verdictOf(span);
  if (verdict) { bar(x0, x1, y, height, colors[`wait-${data.reasons[verdict.reason][2]}`]); return; }
  const first = R.first[span], last = R.last[span], runs = P.sharedRuns;
  let low = partition(0, runs.length, (i) => runs[i].last < first || nextStart(runs[i].last) < view.x0);
  let covered = -Infinity;
  for (; low < runs.length && runs[low].first <= last; low++) {
    const from = place(passStart(Math.max(runs[low].first, first))), to = place(nextStart(Math.min(runs[low].last, last)));
    if (from > box.right) break;
    if (Math.round(to) <= covered) continue;
    bar(Math.max(from, covered), to, y, height, colors[`wait-${runs[low].value}`]);
    covered = Math.max(Math.round(to), Math.round(from) + 1);
  }
}

function drawDecode(span, x0, x1, y, height) {
  bar(x0, x1, y, height, colors.decode);
  if (height < 4) return;
  const runs = P.stalls;  // in these steps only prompts were computed
  let low = partition(0, runs.length, (i) => runs[i].last < R.first[span] || passEnd(runs[i].last) < view.x0);
  pen.globalAlpha = 0.55;
  for (; low < runs.length && runs[low].first <= R.last[span]; low++) {
    const from = place(passStart(Math.max(runs[low].first, R.first[span]))), to = place(passEnd(Math.min(runs[low].last, R.last[span])));
    if (from > box.right) break;
    if (to - from < 2) continue;
    bar(from, to, y, height, colors.surface);
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
    else bar(x, x + 1, Math.round(middle - size), Math.round(size * 2), colors.mark);
  }
  if (R.finish[r] >= 0 && failed(r)) shape("cross", place(extents.to[r]) + size + 2, middle, size * 0.8);
}

const failed = (r) => ["abort", "error"].includes(data.finishes[R.finish[r]]);

function shape(kind, x, y, size) {
  if (x < box.left - 2 || x > box.right + 8) return;
  pen.beginPath();
  for (const [dx, dy] of SHAPES[kind]) pen.lineTo(x + dx * size, y + dy * size);
  if (kind === "cross") {
    pen.strokeStyle = colors.failed;
    pen.lineWidth = 1.6;
    pen.beginPath();
    pen.moveTo(x - size, y - size); pen.lineTo(x + size, y + size);
    pen.moveTo(x + size, y - size); pen.lineTo(x - size, y + size);
    pen.stroke();
    pen.lineWidth = 1;
    return;
  }
  pen.closePath();
  pen.fillStyle = kind === "out" || kind === "in" || kind === "diamond" ? colors.surface : colors.mark;
  pen.fill();
  pen.strokeStyle = kind === "down" ? colors.surface : colors.mark;
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

// The figures of passes, on the axis of the requests.

function stripTop(index) { return box.rowsBottom + STRIP_GAP + index * (box.strip + STRIP_GAP); }

function drawStrips() {
  STRIPS.forEach((strip, index) => {
    const y = stripTop(index), bottom = y + box.strip;
    const scale = strip.draw({ y, bottom });
    pen.textAlign = "left";
    pen.textBaseline = "top";
    pen.fillStyle = colors.ink;
    pen.font = font(12, 600);
    pen.fillText(strip.title, 14, y);
    pen.fillStyle = colors.faint;
    pen.font = font(11);
    pen.fillText(strip.unit || scale.unit, 14, y + 16);
    pen.textAlign = "right";
    pen.fillStyle = colors.muted;
    pen.fillText(scale.top, box.left - 8, y - 2);
    pen.textBaseline = "bottom";
    pen.fillText("0", box.left - 8, bottom + 2);
    pen.strokeStyle = colors.line;
    line(box.left, bottom + 0.5, box.right, bottom + 0.5);
  });
}

const visiblePasses = () => [Math.max(passAt(view.x0), 0), Math.min(passAt(view.x1), P.size - 1)];

const barGap = () => (box.right - box.left) / (visiblePasses()[1] - visiblePasses()[0] + 1) > 8 ? 1 : 0;

// Calls paint(x0, x1, passes first..last) for each pixel column, or for each pass where they are wider. Passes that begin
// in one column share it; what follows the column, up to `ends` of the last one, belongs to that pass alone. From there to
// the next pass nothing is painted.
function columns(ends, paint) {
  const [first, last] = visiblePasses();
  for (let p = first; p <= last;) {
    const x0 = Math.max(Math.round(place(passStart(p))), box.left);
    let to = p;
    while (to < last && Math.round(place(passStart(to + 1))) <= x0) to++;
    const next = to < last ? Math.round(place(passStart(to + 1))) : Infinity;
    const x1 = Math.min(Math.max(Math.round(place(ends(to))), x0 + 1), next, box.right);
    if (to === p || x1 <= x0 + 1) {
      if (x1 > x0) paint(x0, x1, p, to);
    } else {
      paint(x0, x0 + 1, p, to);
      paint(x0 + 1, x1, to, to);
    }
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
  columns(liveEnd, (x0, x1, first, last) => {
    let at = bottom;
    for (const [name, color] of [["held", "kv-held"], ["locked", "kv-locked"], ["evictable", "kv-evictable"]]) {
      const height = P[name][last] * scale, top = at - height;
      pen.fillStyle = colors[color];
      pen.fillRect(x0, Math.round(top), x1 - x0, Math.round(at) - Math.round(top));
      at = top;
    }
    if (highest(P.evicted, first, last) > 0) {
      pen.fillStyle = colors["wait-memory"];
      pen.fillRect(x0, y - 4, Math.min(Math.max(x1 - x0, 1), 2), 3);
    }
  });
  pen.strokeStyle = colors.line;
  line(box.left, y - 0.5, box.right, y - 0.5);
  return { top: total > 1 ? count(total) : "" };
}

function drawLevels({ y, bottom }, values, color) {
  const top = Math.max(niceTop(highest(values, ...visiblePasses())), 1), scale = (box.strip - 2) / top;
  const edge = colors[color], line = [];
  columns(liveEnd, (x0, x1, first, last) => line.push([x0, x1, bottom - highest(values, first, last) * scale]));
  pen.fillStyle = edge;
  pen.globalAlpha = 0.18;
  for (const [x0, x1, at] of line) pen.fillRect(x0, Math.round(at), x1 - x0, bottom - Math.round(at));
  pen.globalAlpha = 1;
  pen.strokeStyle = edge;
  pen.lineWidth = 1.4;
  pen.lineJoin = "round";
  pen.beginPath();
  let end = -1;
  for (const [x0, x1, at] of line) {
    if (x0 > end) {  // a gap, in which it is 0
      if (end >= 0) pen.lineTo(end, bottom);
      pen.moveTo(x0, bottom);
    }
    pen.lineTo(x0, at);
    pen.lineTo(x1, at);
    end = x1;
  }
  if (end >= 0) pen.lineTo(end, bottom);
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
    pen.fillStyle = colors.decode;
    pen.fillRect(x0, decodeTop, x1 - x0 - gap, bottom - decodeTop);
    pen.fillStyle = colors.prefill;
    pen.fillRect(x0, prefillTop, x1 - x0 - gap, decodeTop - prefillTop);
  });
  return { top: count(top) };
}

function drawStepTime({ bottom }) {
  const top = highest(P.stepTime, ...visiblePasses());
  if (!top) return { top: "", unit: "not in the log" };
  const factor = top < 0.001 ? 1e6 : top < 1 ? 1e3 : 1, nice = niceTop(top * factor), scale = (box.strip - 2) / nice;
  const gap = barGap();
  pen.fillStyle = colors.step;
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
  pen.fillStyle = colors.line;
  pen.beginPath();
  pen.roundRect(box.width - 9, y, 5, size, 2.5);
  pen.fill();
}
