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
  let low = 0, high = cuts.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (cuts[middle][name] <= value) low = middle + 1; else high = middle;
  }
  return cuts[low - 1];
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
  const bottom = box.height - AXIS_HEIGHT;
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
    if (pen.measureText(text).width < Math.max(x1 - x0, 60) + 40) pen.fillText(text, (x0 + x1) / 2, TOP - 24);
    pen.fillText("//", (x0 + x1) / 2, bottom + 7);
  }
}
