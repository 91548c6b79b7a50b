// Describes what is under the pointer.

const pointer = { x: -1, y: -1, inside: false, drag: null };

// The request under a point; -1 if none. The label of a row selects its request, too.
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

// The reasons that passes gave to the requests they did not look at, most frequent first: [index or -1, how often].
function sharedReasons(first, last) {
  const counts = new Map();
  for (let p = first; p <= last; p++) counts.set(P.restReason[p], (counts.get(P.restReason[p]) || 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]);
}

const NOT_SEEN = ["WAITING", "no pass has looked at it", "queue"];
const reasonOf = (index) => index >= 0 ? data.reasons[index] : NOT_SEEN;

// A span as lines of text. A wait without its own verdict is described for `pass`, or as a sum if that is -1.
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
      if (verdict.reasons > 1) lines.push([`longest of ${count(verdict.reasons)} merged waits`, "quiet"]);
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
    lines.push([`after ${count(verdict.prefix)} computed tokens; output reserved ${count(verdict.output)}`, "quiet"]);
    lines.push([`need ${count(verdict.need)}, have ${count(verdict.have)}`, "quiet"]);
  } else {
    let steps = 0;
    for (let p = first; p <= last; p++) steps += P.decodes[p] > 0;
    lines.push([`Decode: ${plural(steps, "token")}`, "sum"]);
    const stalled = last - first + 1 - steps;
    if (stalled) lines.push([`stalled in ${plural(stalled, "pass")}, which computed prompts or nothing`, "quiet"]);
  }
  return lines;
}

function requestTip(r, span) {
  const lines = [[R.rid[r]]];
  if (span < 0) {
    const value = valueAt(pointer.x), begin = shown[r];
    if (value < extents.from[r] || value > extents.to[r]) return null;
    if (begin < R.begin[r + 1] && value < spanStart(begin)) lines.push(["Arrived; no pass has looked at it yet"]);
    else lines.push(["Keeps its row; nothing is computed for it"]);
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
