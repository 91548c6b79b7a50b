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
  let low = begin, high = end;  // the first span that ends in view
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spanEnd(middle) < view.x0) low = middle + 1; else high = middle;
  }
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
    bar(Math.max(from, covered), to, y, height, colors[`wait-${runs[low].value}`]);
    covered = Math.max(Math.round(to), Math.round(from) + 1);
  }
}

function drawDecode(span, x0, x1, y, height) {
  bar(x0, x1, y, height, colors.decode);
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
