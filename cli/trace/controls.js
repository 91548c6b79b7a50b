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
