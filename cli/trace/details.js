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
  let lead = "Had not ended at the end of the log.";
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
