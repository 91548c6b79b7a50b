// Makes elements. Text reaches the page only as text nodes, never as markup: the page's policy forbids the other way.

import { icon } from "./icons.js";

export const $ = (selector, within = document) => within.querySelector(selector);

// `make("button", { type: "button", onclick: act, ariaLabel: "Copy" }, "Copy")`. Names with a dash are attributes, all
// others are properties; a child that is null or false is left out.
export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name.includes("-") || name === "role") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function button(text, act, properties = {}) {
  return make("button", { type: "button", onclick: act, ...properties }, text);
}

// A button that is an icon; `label` is its name, also for the mouse.
export function iconButton(name, label, act, properties = {}) {
  return make("button", { type: "button", onclick: act, className: "quiet", title: label, "aria-label": label, ...properties }, icon(name));
}

// Writes to the clipboard; on pages without https there is no clipboard interface, and a selection serves.
async function copyText(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // not allowed: the other way
    }
  }
  const field = make("textarea", { value: text, className: "unseen", "aria-hidden": "true" });
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}

// A button that copies, and says so for a moment.
export function copyButton(textOf, label) {
  const node = iconButton("copy", label, async () => {
    const done = await copyText(textOf());
    node.replaceChildren(icon(done ? "check" : "close"));
    node.title = done ? "Copied" : "Not copied";
    setTimeout(() => { node.replaceChildren(icon("copy")); node.title = label; }, 1500);
  });
  return node;
}

// A line at the foot of the page for some seconds, with a button that takes a deed back.
export function toast(text, onUndo) {
  const box = $("#toast");
  const hide = () => { clearTimeout(Number(box.dataset.timer)); box.hidden = true; };
  hide();
  box.replaceChildren(make("span", {}, text), button("Undo", () => { hide(); onUndo(); }), iconButton("close", "Dismiss", hide));
  box.hidden = false;
  box.dataset.timer = String(setTimeout(hide, 15000));
}

export function save(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

// A value of `localStorage` or `sessionStorage`; null also where the browser does not allow them.
export function recall(storage, name) {
  try {
    return window[storage].getItem(name);
  } catch {
    return null;
  }
}

// Keeps a value there, or removes it with null; it holds as long as the page where they are full or not allowed.
export function remember(storage, name, value) {
  try {
    if (value === null) window[storage].removeItem(name);
    else window[storage].setItem(name, value);
  } catch {
    // as said
  }
}

// The name of a model without the folder and the ending of a file.
export const modelLabel = (id) => id.replace(/^.*\//, "").replace(/\.gguf$/i, "") || id;

export const count = (value) => Number(value).toLocaleString("en-US");

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const whole = Math.floor(value), minutes = Math.floor(whole / 60);
  return minutes < 60 ? `${minutes} min ${whole % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
