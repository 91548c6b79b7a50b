// `Markdown`: shows a growing text as Markdown. Only the blocks that changed are made again, so that a long answer stays
// quick while it arrives.

import { copyButton, make } from "../dom.js";
import { inline } from "./inline.js";

const MAX_DEPTH = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*?))?\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,8})([-*+]|\d{1,9}[.)])(\s+)(.*)$/;
const DIVIDER = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

export class Markdown {
  #blocks = [];

  constructor(box) { this.box = box; }

  show(text) {
    const blocks = blocksOf(text);
    let same = 0;
    while (same < blocks.length && same < this.#blocks.length && blocks[same] === this.#blocks[same].source) same++;
    for (const { node } of this.#blocks.splice(same)) node.remove();
    for (const source of blocks.slice(same)) {
      const node = make("div", { className: "block" }, ...render(source.split("\n"), 0));
      this.#blocks.push({ source, node });
      this.box.append(node);
    }
  }
}

// The text in pieces that can be rendered one by one: paragraphs, whole lists, whole code blocks.
function blocksOf(text) {
  const blocks = [];
  let lines = [], fence = null, blank = false;
  const end = () => { if (lines.length) blocks.push(lines.join("\n")); lines = []; };
  for (const line of text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n")) {
    const edge = FENCE.exec(line);
    if (fence) {
      lines.push(line);
      if (edge && edge[1].startsWith(fence) && line.trim() === edge[1]) fence = null;
      continue;
    }
    if (!line.trim()) { blank = true; lines.length && lines.push(line); continue; }
    const goesOn = ITEM.test(lines[0] ?? "") && (ITEM.test(line) || line.startsWith("  "));
    if (blank && !goesOn) end();
    blank = false;
    if (edge && !goesOn) { if (lines.length) end(); fence = edge[1]; }
    lines.push(line);
  }
  end();
  return blocks;
}

function render(lines, depth) {
  const nodes = [];
  let at = 0;
  if (depth > MAX_DEPTH) return [make("p", {}, lines.join("\n"))];
  while (at < lines.length) {
    const line = lines[at], fence = FENCE.exec(line), heading = HEADING.exec(line);
    if (!line.trim()) at++;
    else if (fence) {
      let to = at + 1;
      while (to < lines.length && !(lines[to].trim().startsWith(fence[1]) && !lines[to].trim().replaceAll(fence[1][0], ""))) to++;
      nodes.push(codeBlock(lines.slice(at + 1, to).join("\n"), fence[2]));
      at = to + 1;
    } else if (heading) {
      nodes.push(make(`h${Math.min(heading[1].length + 2, 6)}`, {}, ...inline(heading[2] ?? "")));
      at++;
    } else if (RULE.test(line)) {
      nodes.push(make("hr"));
      at++;
    } else if (QUOTE.test(line)) {
      let to = at;
      while (to < lines.length && lines[to].trim()) to++;
      nodes.push(make("blockquote", {}, ...render(lines.slice(at, to).map((each) => each.replace(QUOTE, "")), depth + 1)));
      at = to;
    } else if (ITEM.test(line)) at = list(lines, at, depth, nodes);
    else if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) at = table(lines, at, nodes);
    else {
      let to = at + 1;
      while (to < lines.length && lines[to].trim() && !begins(lines[to])) to++;
      nodes.push(make("p", {}, ...inline(lines.slice(at, to).map((each) => each.trimStart()).join("\n"))));
      at = to;
    }
  }
  return nodes;
}

const begins = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);

function list(lines, at, depth, nodes) {
  const [, , marker] = ITEM.exec(lines[at]), ordered = /\d/.test(marker);
  const node = make(ordered ? "ol" : "ul");
  if (ordered && parseInt(marker, 10) !== 1) node.start = parseInt(marker, 10);
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || RULE.test(lines[at]) || /\d/.test(item[2]) !== ordered) break;
    const width = item[1].length + item[2].length + Math.min(item[3].length, 4), inner = [item[4]];
    for (at++; at < lines.length; at++) {
      const line = lines[at], indent = line.length - line.trimStart().length;
      if (!line.trim()) inner.push("");
      else if (indent >= width || (indent >= 2 && indent > item[1].length)) inner.push(line.slice(Math.min(indent, width)));
      else if (inner[inner.length - 1] !== "" && !begins(line)) inner.push(line.trimStart());
      else break;
    }
    const children = render(inner, depth + 1);
    // one paragraph alone is shown without its distances
    node.append(make("li", {}, ...(children[0]?.tagName === "P" ? [...children[0].childNodes, ...children.slice(1)] : children)));
    if (!lines[at]?.trim()) break;
  }
  nodes.push(node);
  return at;
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((each) => each.trim().replaceAll("\\|", "|"));

function table(lines, at, nodes) {
  const row = (line, tag) => make("tr", {}, ...cells(line).map((text) => make(tag, {}, ...inline(text))));
  const head = make("thead", {}, row(lines[at], "th")), body = make("tbody");
  for (at += 2; at < lines.length && lines[at].trim() && lines[at].includes("|"); at++) body.append(row(lines[at], "td"));
  nodes.push(make("div", { className: "wide", tabIndex: 0, role: "region", "aria-label": "Table" }, make("table", {}, head, body)));
  return at;
}

export function codeBlock(text, language = "") {
  const code = make("code", {}, text);
  const head = make("div", { className: "row" }, make("span", {}, language), copyButton(() => text, "Copy the code"));
  return make("div", { className: "code" }, head, make("pre", { tabIndex: 0 }, code));
}
