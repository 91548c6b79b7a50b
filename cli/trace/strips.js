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
