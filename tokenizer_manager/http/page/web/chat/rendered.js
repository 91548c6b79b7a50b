// `Rendered`: a text as Markdown. The server renders its finished blocks; the block that still grows is shown as text, and
// so is everything that the server cannot render.

import { make } from "../dom.js";
import { elements } from "./elements.js";

const INTERVAL_MS = 250;
let queue = Promise.resolve();  // of the whole page: one text after the other

export class Rendered {
  #blocks = make("div", { className: "blocks" });
  #tail = make("div", { className: "plain" });
  #version = 0;
  #done = 0;  // characters that are rendered
  #text = "";
  #asked = { length: 0, at: 0, waits: false };
  #timer = 0;

  // `render(text, complete)` asks the server.
  constructor(box, render) {
    Object.assign(this, { box, render });
    box.append(this.#blocks, this.#tail);
  }

  // The text so far.
  grow(text) {
    if ("rendered" in this.box.dataset || !text.startsWith(this.#text)) this.#reset();  // after a whole text, its last block grows again
    delete this.box.dataset.rendered;
    this.#text = text;
    this.#showTail(text.slice(this.#done));
    this.#schedule();
  }

  // Ask for the blocks of new lines, at the earliest INTERVAL_MS after the last question; also if no text comes any more.
  #schedule() {
    if (this.#asked.waits || this.#timer || this.#text.lastIndexOf("\n") < this.#asked.length) return;
    const pause = Math.max(INTERVAL_MS - (performance.now() - this.#asked.at), 0);
    this.#timer = setTimeout(() => { this.#timer = 0; this.#renderFinished(); }, pause);
  }

  #cancel() {
    clearTimeout(this.#timer);
    this.#timer = 0;
  }

  // The whole text.
  async finish(text) {
    const version = ++this.#version;
    delete this.box.dataset.rendered;
    if (this.#text !== text) this.grow(text);
    this.#cancel();
    if (text.trim()) {
      const answer = queue = queue.then(() => this.render(text, true)).catch(() => null);
      const rendered = await answer;
      if (version !== this.#version) return;
      if (rendered) {
        this.#blocks.replaceChildren(...elements(rendered.blocks));
        this.#showTail("");
      }
    }
    this.box.dataset.rendered = "";
  }

  async #renderFinished() {
    const text = this.#text.slice(this.#done), version = this.#version;
    const asked = this.#asked = { length: this.#text.length, at: performance.now(), waits: true };
    const rendered = await this.render(text, false).catch(() => null);
    asked.waits = false;
    if (version !== this.#version) return;
    this.#schedule();
    if (!rendered?.num_lines) return;
    let end = 0;
    for (let line = 0; line < rendered.num_lines; line++) end = text.indexOf("\n", end) + 1 || text.length;
    this.#blocks.append(...elements(rendered.blocks));
    this.#done += end;
    this.#showTail(this.#text.slice(this.#done));
  }

  #reset() {
    this.#cancel();
    this.#version++;
    this.#done = 0;
    this.#asked = { length: 0, at: 0, waits: false };
    this.#blocks.replaceChildren();
  }

  #showTail(text) {
    this.#tail.textContent = text.trimStart();
    this.#tail.classList.toggle("mono", /^(```|~~~)/.test(text.trimStart()));
  }
}
