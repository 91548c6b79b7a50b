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
