// `inline`: the text of one Markdown block as nodes. Only text nodes and a few elements are made; a link keeps its
// address only if it is http, https or mailto, and an image becomes a link, so that nothing is loaded.

import { make } from "../dom.js";

const MAX_DEPTH = 8;
const SPECIAL = /[\\`*_~[!<h\n]/g;
// Sticky: each is tried at one place. The lengths are bounded, so that hostile text cannot make them slow.
const ESCAPE = /\\([\\`*_{}[\]()#+\-.!~|<>])/y;
const CODE = /(`{1,8})(?!`)([^]{0,4000}?[^`])\1(?!`)/y;
const LINK = /!?\[((?:[^[\]\\]|\\.|\[[^[\]]{0,300}\]){0,500})\]\(\s{0,9}<?((?:[^\s()<>]|\([^\s()]{0,300}\)){1,2000})>?(?:\s{1,9}"[^"]{0,300}")?\s{0,9}\)/y;
const ADDRESS = /<?(https?:\/\/[^\s<>"]{1,2000})>?/y;
const STRONG = /(\*\*|__)(?=\S)([^]{0,2000}?\S)\1(?!\1)/y;
const EMPHASIS = /([*_])(?=[^\s*_])([^]{0,2000}?[^\s*_])\1(?![*_\w])/y;
const DELETED = /~~(?=\S)([^]{0,2000}?\S)~~/y;

export function inline(text, depth = 0) {
  const nodes = [];
  let plain = "", at = 0;
  const flush = () => { if (plain) nodes.push(document.createTextNode(plain)); plain = ""; };
  const put = (node) => { flush(); nodes.push(node); };
  const match = (pattern) => { pattern.lastIndex = at; return pattern.exec(text); };

  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(text);
    const stop = next ? next.index : text.length;
    plain += text.slice(at, stop);
    at = stop;
    if (!next) break;
    let found = null;
    const inside = (body) => depth < MAX_DEPTH ? inline(body, depth + 1) : [document.createTextNode(body)];
    const wordBefore = /\w/.test(text[at - 1] ?? "");
    switch (text[at]) {
      case "\\":
        if ((found = match(ESCAPE))) plain += found[1];
        else if (text[at + 1] === "\n") { put(make("br")); at += 2; continue; }
        break;
      case "\n":
        if (plain.endsWith("  ")) { plain = plain.trimEnd(); put(make("br")); } else plain += "\n";
        at++;
        continue;
      case "`":
        if ((found = match(CODE))) put(make("code", {}, found[2].replace(/^ (.*) $/s, "$1")));
        else { const run = /`+/y; run.lastIndex = at; found = run.exec(text); plain += found[0]; }
        break;
      case "[":
      case "!":
        if ((found = match(LINK))) put(link(found[2], inside(found[1] || found[2])));
        break;
      case "<":
      case "h":
        if (!wordBefore && (found = match(ADDRESS))) {
          const address = found[1].replace(/[.,;:!?'")\]]+$/, ""), left = found[0].startsWith("<") ? "" : found[1].slice(address.length);
          put(link(address, [document.createTextNode(address)]));
          plain += left;
        }
        break;
      case "~":
        if ((found = match(DELETED))) put(make("del", {}, ...inside(found[1])));
        break;
      default:
        if (text[at] === "_" && wordBefore) break;
        if ((found = match(STRONG))) put(make("strong", {}, ...inside(found[2])));
        else if ((found = match(EMPHASIS))) put(make("em", {}, ...inside(found[2])));
        else { const run = /[*_]+/y; run.lastIndex = at; found = run.exec(text); plain += found[0]; }
    }
    if (found) at += found[0].length;
    else plain += text[at++];
  }
  flush();
  return nodes;
}

function link(address, children) {
  if (!/^(https?:\/\/|mailto:)/i.test(address)) return make("span", { title: address }, ...children);
  return make("a", { href: address, rel: "noopener noreferrer nofollow", target: "_blank" }, ...children);
}
