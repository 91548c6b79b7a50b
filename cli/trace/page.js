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
    over.fillStyle = colors.accent;
    over.globalAlpha = 0.2;
    if (x1 > box.left && x0 < box.right) over.fillRect(Math.max(x0, box.left), box.rowsTop, x1 - Math.max(x0, box.left), box.height - AXIS_HEIGHT - box.rowsTop);
    over.globalAlpha = 1;
  }
  if (view.pinned >= 0 && rowHeight < 4) {
    const index = rowOf(view.pinned), y = rowTop(index);
    if (index >= 0 && inView(view.pinned)) { over.fillStyle = colors.accent; over.fillRect(box.left - 10, y - 1, 8, 3); }
  }
  if (!pointer.inside || pointer.drag || pointer.x < box.left || pointer.x > box.right) { tip.hidden = true; return; }
  over.strokeStyle = colors.faint;
  over.setLineDash([3, 3]);
  over.beginPath();
  over.moveTo(Math.round(pointer.x) + 0.5, box.rowsTop);
  over.lineTo(Math.round(pointer.x) + 0.5, box.height - AXIS_HEIGHT);
  over.stroke();
  over.setLineDash([]);
  const r = requestAt(pointer.x, pointer.y);
  if (r >= 0 && rowHeight >= 4) {
    over.fillStyle = colors.accent;
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

// The pinned request or pass, with all its spans and figures.

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

function storyItem(color, at, lines, jump) {
  const item = element("li");
  const dot = element("i");
  dot.style.background = color;
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
  if (R.arrived[r] !== null && firstCompute >= 0) fact("Queue time", seconds(Math.max(firstCompute - R.arrived[r], 0)));
  if (R.arrived[r] !== null && firstToken >= 0) fact("Time to first decode", seconds(Math.max(firstToken - R.arrived[r], 0)));
  if (R.arrived[r] !== null && R.finished[r] !== null) fact("Total time", seconds(R.finished[r] - R.arrived[r]));
  if (R.priority[r]) fact("Priority", String(R.priority[r]));
  if (R.tenant[r]) fact("Tenant", printable(R.tenant[r]));
  if (R.group[r]) fact("Group", printable(R.group[r]));

  const items = [];
  for (let span = begin; span < end; span++) {
    const words = spanWords(span).map(([text]) => text), kind = kindOf(span), verdict = verdictOf(span);
    const group = reasonOf(verdict ? verdict.reason : sharedReasons(R.first[span], R.last[span])[0][0])[2];
    const color = kind === PREFILL ? colors.prefill : kind === 2 ? colors.decode : colors[onHost(span) ? "wait-host" : `wait-${group}`];
    const last = R.last[span], from = P.start[R.first[span]], to = kind === WAIT && last + 1 < P.size ? P.start[last + 1] : P.end[last];
    items.push([from, storyItem(color, `at ${when(from)}, ${seconds(to - from)}`, words, () => jumpTo(spanStart(span), spanEnd(span)))]);
  }
  for (const mark of R.marks.get(r) || []) {
    items.push([P.start[mark.pass] - 1e-9, storyItem(colors.mark, `at ${when(P.start[mark.pass])}`, [printable(mark.text).replace(/^./, (c) => c.toUpperCase())])]);
  }
  for (const look of looks) {
    const at = items.find(([, item]) => item.textContent.startsWith("Prefill"));
    const text = [`Prefix cache: ${count(look.prefix)} of ${count(look.prompt)} tokens`, data.misses[look.miss]];
    if (look.differs > look.prefix) text.push(`first differing token: position ${count(look.differs)}`);
    items.push([at && look === looks[0] ? at[0] - 2e-9 : Infinity, storyItem(colors.surface, "", text)]);
    if (look !== looks[0]) items.pop();
  }
  items.sort((a, b) => a[0] - b[0]);
  const nodes = items.slice(0, MAX_STORY).map(([, item]) => item);
  if (items.length > MAX_STORY) nodes.push(element("li", `… and ${count(items.length - MAX_STORY)} more; zoom in to see each`));
  let lead = "Had not ended at the end of the log.";
  if (R.finish[r] >= 0) lead = { stop: "Ended at a stop token or stop string.", length: "Ended at its length limit.", abort: "Was aborted.", error: "Ended with an error." }[data.finishes[R.finish[r]]];
  if (R.message[r]) lead += ` ${printable(R.message[r])}`;
  showDetails(R.rid[r], lead, facts, nodes);
}

function pinPass(p) {
  view.pinned = -1;
  view.pinnedPass = p;
  root.dataset.pinned = `pass ${p}`;
  const items = (P.notes.get(p) || []).map((note) => storyItem(colors.mark, "", [printable(note)]));
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

// Mouse, keys, search and buttons.

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
  i: () => choose("cut", !view.cut),
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
  else if (name === "cut") setCut(value);
  else { view.rowMode = value; view.scroll = 0; redraw(); }
  showChoices();
}

function showChoices() {
  for (const button of document.querySelectorAll("[data-axis]")) button.setAttribute("aria-pressed", String(button.dataset.axis === view.axis));
  for (const button of document.querySelectorAll("[data-rows]:not(html)")) button.setAttribute("aria-pressed", String(button.dataset.rows === view.rowMode));
  $("#queue").setAttribute("aria-pressed", String(view.queue));
  $("#cut").setAttribute("aria-pressed", String(view.cut));
}

for (const button of document.querySelectorAll("button[data-axis]")) button.addEventListener("click", () => choose("axis", button.dataset.axis));
for (const button of document.querySelectorAll("button[data-rows]")) button.addEventListener("click", () => choose("rows", button.dataset.rows));
$("#queue").addEventListener("click", () => choose("queue", !view.queue));
$("#cut").hidden = cuts.length === 0;
$("#cut").addEventListener("click", () => choose("cut", !view.cut));
$("#fit").addEventListener("click", fit);
$("#help-button").addEventListener("click", () => $("#help").showModal());
$("#close").addEventListener("click", unpin);

// The head of the page, and the first drawing.

function drawLegend() {
  const swatch = (color, text, className) => {
    const item = element("span"), box = element("i", undefined, className);
    box.style.background = color;
    item.append(box, text);
    return item;
  };
  const symbol = (kind, text) => {
    const item = element("span"), ns = "http://www.w3.org/2000/svg", svg = document.createElementNS(ns, "svg");
    svg.setAttribute("viewBox", "-1.2 -1.2 2.4 2.4");
    const path = document.createElementNS(ns, "path");
    path.setAttribute("d", kind === "cross" ? "M-0.8 -0.8L0.8 0.8M0.8 -0.8L-0.8 0.8" : `M${SHAPES[kind].map((point) => point.join(" ")).join("L")}Z`);
    path.setAttribute("fill", kind === "down" ? colors.mark : "none");
    path.setAttribute("stroke", kind === "cross" ? colors.failed : colors.mark);
    path.setAttribute("stroke-width", "0.28");
    svg.append(path);
    item.append(svg, text);
    return item;
  };
  const waits = { memory: "waits for KV memory", compute: "for token budget", shared: "for a prefix, grammar or adapter", queue: "for its turn" };
  $("#legend").replaceChildren(
    swatch(colors.prefill, "prefill"), swatch(colors.decode, "decode (pale: stalled)"),
    ...GROUPS.map((group) => swatch(colors[`wait-${group}`], waits[group], "thin")),
    swatch(colors["wait-host"], "on the host", "thin"),
    symbol("diamond", "cache hit"), symbol("down", "retracted"), symbol("out", "swapped out"), symbol("in", "swapped in"), symbol("cross", "failed or aborted"),
    element("hr"),
    swatch(colors["kv-held"], "KV held by requests"), swatch(colors["kv-locked"], "cached, in use"), swatch(colors["kv-evictable"], "cached, evictable"),
    swatch(colors["wait-memory"], "evictions", "thin"),
    ...(cuts.length ? [swatch(colors.band, "cut: no request was there", "cut")] : []),
  );
}

function drawFacts() {
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const marks = [...R.marks.values()].flat(), prefill = sum(P.prefill), duration = P.end[P.size - 1] - P.start[0];
  const looked = [...R.looks.values()].map((looks) => looks[0]), prompt = sum(looked.map((look) => look.prompt));
  const facts = [[R.size === 1 ? "request" : "requests", count(R.size)], [P.size === 1 ? "pass" : "passes", count(P.size)], ["duration", seconds(duration)],
    ["prefill tokens", count(prefill)], ["decode tokens", count(sum(P.decodes))]];
  const idleTime = sum(idle.map(([from, to]) => to - from));
  if (cuts.length) facts.splice(3, 0, ["idle", seconds(idleTime)]);
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

const darkScheme = matchMedia("(prefers-color-scheme: dark)");

function applyColors() {
  const asked = new URLSearchParams(location.hash.slice(1)).get("theme");
  root.dataset.theme = ["light", "dark"].includes(asked) ? asked : darkScheme.matches ? "dark" : "light";
  readColors();
  drawLegend();
  if (box.width) redraw();
}

function start() {
  const options = new URLSearchParams(location.hash.slice(1));
  $("#source").textContent = printable(data.source);
  $("#left-out").textContent = printable(data.leftOut);
  $("#left-out").hidden = !data.leftOut;
  if (options.get("axis") === "pass") view.axis = "pass";
  view.cut = options.get("idle") !== "shown";
  placeOnAxis();
  root.dataset.requests = String(R.size);
  root.dataset.passes = String(P.size);
  measureRequests();
  if (view.rowMode === "packed" && lanes.length > MAX_LANES_WITH_QUEUE) { view.queue = false; measureRequests(); }
  applyColors();
  drawFacts();
  const [low, high] = axisEnds();
  const placed = (name, end) => options.has(name) ? (view.axis === "pass" ? Number(options.get(name)) : squeezed(Number(options.get(name)))) : end;
  const from = placed("from", low), to = placed("to", high);
  setView(from - (to - from) * 0.005, to + (to - from) * 0.005);
  showChoices();
  darkScheme.addEventListener("change", applyColors);
  new ResizeObserver(resize).observe(chart);
  resize();
  const pinned = options.get("request");
  if (pinned !== null) {
    const r = R.rid.indexOf(printable(pinned));
    if (r >= 0) select(r);
  }
}

start();
