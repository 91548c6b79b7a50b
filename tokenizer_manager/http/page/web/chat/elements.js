// `elements`: the blocks that the server makes of an answer as nodes. Only these tags and attributes are made; a link keeps
// its address only if it is http, https or mailto, and nothing is loaded.

import { copyButton, make } from "../dom.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const TAGS = new Set("p h3 h4 h5 h6 ul ol li blockquote hr br em strong s code thead tbody tr th td sup span".split(" "));
const MATH_TAGS = new Set(("math mrow mi mn mo ms mtext mspace mfrac msqrt mroot mstyle msub msup msubsup munder mover munderover "
  + "mtable mtr mtd mpadded mphantom menclose mmultiscripts mprescripts").split(" "));
const MATH_ATTRIBUTES = new Set(("display width height depth stretchy fence form separator lspace rspace minsize maxsize mathvariant mathcolor "
  + "mathsize displaystyle scriptlevel linethickness accent accentunder columnalign rowspacing columnspacing").split(" "));
const ADDRESS = /^(https?:\/\/|mailto:)/i;

export const elements = (children) => children.map((child) => typeof child === "string" ? document.createTextNode(child) : element(child));

function element([tag, attributes, ...children]) {
  if (tag === "pre") return codeBlock(elements(children), attributes.language);
  const nodes = elements(children);
  if (tag === "a" && ADDRESS.test(attributes.href)) {
    return make("a", { href: attributes.href, rel: "noopener noreferrer nofollow", target: "_blank" }, ...nodes);
  }
  if (tag === "table") return make("div", { className: "wide", tabIndex: 0, role: "region", "aria-label": "Table" }, make("table", {}, ...nodes));
  if (tag === "input") {
    const checked = attributes.checked === "true";
    return make("input", { type: "checkbox", disabled: true, checked, "aria-label": checked ? "done" : "open" });
  }
  if (MATH_TAGS.has(tag)) {
    const node = document.createElementNS(MATHML, tag);
    for (const [name, value] of Object.entries(attributes)) if (MATH_ATTRIBUTES.has(name)) node.setAttribute(name, value);
    node.append(...nodes);
    return node;
  }
  const node = make(TAGS.has(tag) ? tag : "span", { className: attributes.class, title: attributes.href }, ...nodes);
  if (attributes.start) node.start = Number(attributes.start);
  return node;
}

export function codeBlock(nodes, language = "") {
  const code = make("code", {}, ...nodes);
  const head = make("div", { className: "row" }, make("span", {}, language), copyButton(() => code.textContent, "Copy the code"));
  return make("div", { className: "code" }, head, make("pre", { tabIndex: 0 }, code));
}
