"use strict";
// The data of `html.py`, decoded, and how values are written. All files of the page's script are one script: `html.py`
// concatenates them in the order of its `SCRIPTS`.
//
// Text from clients reaches the page only by fillText or textContent, never as markup.

const root = document.documentElement;
window.addEventListener("error", (event) => { root.dataset.error = String(event.message); });
window.addEventListener("unhandledrejection", (event) => { root.dataset.error = String(event.reason); });

const $ = (selector, within = document) => within.querySelector(selector);
const WAIT = 0, PREFILL = 1;  // a third kind is 2, to decode
const RETRACTED = 0, SWAPPED_OUT = 1;  // a third mark is 2, swapped in
const ON_HOST = 4, HAS_VERDICT = 8;
const VERDICT_SIZE = 9;
const GROUPS = ["memory", "compute", "queue", "shared"];

// Control and direction characters in a client's text would garble the surrounding lines.
const printable = (text) => String(text).replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, "·");
const count = (value) => value.toLocaleString("en-US");
const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : noun.endsWith("s") ? "es" : "s"}`;

function seconds(value, digits = 3) {
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (size < 1) return `${Number((value * 1e3).toPrecision(digits))} ms`;
  if (size < 120) return `${Number(value.toPrecision(digits + 1))} s`;
  const whole = Math.round(value), hours = Math.floor(whole / 3600);
  const rest = `${Math.floor(whole / 60) % 60} min ${whole % 60} s`;
  return hours ? `${hours} h ${rest}` : rest;
}

function element(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

const data = JSON.parse($("#data").textContent);
const P = decodePasses(data.passes);
const R = decodeRequests(data.requests);

function undelta(values) {
  const result = new Float64Array(values.length);
  let sum = 0;
  for (let i = 0; i < values.length; i++) result[i] = sum += values[i];
  return result;
}

function unrun(runs, size) {
  const result = new Int16Array(size);
  for (let i = 0, at = 0; i < runs.length; at += runs[i + 1], i += 2) result.fill(runs[i], at, at + runs[i + 1]);
  return result;
}

function decodePasses(source) {
  const start = undelta(source.start).map((value) => value / 1e6);
  const size = start.length;
  const passes = {
    size,
    start,
    end: start.map((value, i) => value + source.length[i] / 1e6),
    liveUntil: start.map((value, i) => value + source.live[i] / 1e6),
    stepTime: Float64Array.from(source.stepTime, (value) => value / 1e6),
    policies: source.policies,
    notes: new Map(source.notes),
  };
  for (const name of ["stepId", "waiting", "running", "decodes", "prefill", "evicted", "free", "evictable", "locked", "held",
    "kvBefore", "kvAfter", "stepBefore", "stepAfter", "rest"]) passes[name] = undelta(source[name]);
  for (const name of ["restReason", "mode", "policy"]) passes[name] = unrun(source[name], size);
  // Runs of passes in which the shared reason has one color, and of passes in which no request decoded.
  passes.sharedRuns = changes(size, (i) => passes.restReason[i] < 0 ? "queue" : data.reasons[passes.restReason[i]][2]);
  passes.stalls = changes(size, (i) => passes.decodes[i] > 0).filter((run) => !run.value);
  return passes;
}

function changes(size, valueAt) {
  const runs = [];
  for (let i = 0; i < size; i++) {
    const value = valueAt(i);
    if (runs.length && runs[runs.length - 1].value === value) runs[runs.length - 1].last = i;
    else runs.push({ value, first: i, last: i });
  }
  return runs;
}

function decodeRequests(source) {
  const size = source.rid.length, total = source.numSpans.reduce((sum, value) => sum + value, 0);
  const requests = {
    size,
    rid: source.rid.map(printable),
    prompt: source.prompt, maxNew: source.maxNew, priority: source.priority, output: source.output, finish: source.finish,
    tenant: source.tenant, group: source.group, message: source.message,
    arrived: source.arrived.map((value) => value === null ? null : value / 1e6),
    finished: source.finished.map((value) => value === null ? null : value / 1e6),
    begin: new Int32Array(size + 1),  // into the arrays of spans
    flags: new Uint8Array(total), first: new Int32Array(total), last: new Int32Array(total),
    verdict: new Int32Array(total),  // into `numbers`, of the spans that have one
    numbers: Int32Array.from(source.spans),
    marks: new Map(), looks: new Map(),
  };
  const numbers = requests.numbers;
  for (let r = 0, at = 0, span = 0; r < size; r++) {
    requests.begin[r] = span;
    let pass = 0;
    for (let k = 0; k < source.numSpans[r]; k++, span++) {
      requests.flags[span] = numbers[at];
      requests.first[span] = pass + numbers[at + 1];
      requests.last[span] = requests.first[span] + numbers[at + 2];
      pass = requests.last[span] + 1;
      at += 3;
      if (requests.flags[span] & HAS_VERDICT) { requests.verdict[span] = at; at += VERDICT_SIZE; }
    }
    requests.begin[r + 1] = span;
  }
  const push = (map, key, value) => map.has(key) ? map.get(key).push(value) : map.set(key, [value]);
  for (const [r, kind, pass, text] of source.marks) push(requests.marks, r, { kind, pass, text });
  for (const [r, prompt, prefix, miss, differs] of source.looks) push(requests.looks, r, { prompt, prefix, miss, differs });
  return requests;
}

const kindOf = (span) => R.flags[span] & 3;
const onHost = (span) => (R.flags[span] & ON_HOST) !== 0;

function verdictOf(span) {
  if (!(R.flags[span] & HAS_VERDICT)) return null;
  const [reason, verdicts, reasons, prefix, extend, output, need, have, firstHave] =
    R.numbers.subarray(R.verdict[span], R.verdict[span] + VERDICT_SIZE);
  return { reason, verdicts, reasons, prefix, extend, output, need, have, firstHave };
}
