// `Composer`: the field for a message, with its files: by the button, dropped, or pasted. A long paste becomes a file.

import { $, count, iconButton, make } from "../dom.js";
import { icon } from "../icons.js";
import { dataUrlOf, isImage, thumbnail } from "./image.js";

const LONG_PASTE = 4000;  // characters
const MAX_CHARS = 2_000_000;

export class Composer {
  #field = $("#question");
  #list = $("#attached");
  #files = [];

  // `onSend({ content, attachments })`, `readPdf(file)` gives the text of a PDF file, `seesImages()` whether the model
  // does, `say(text)` shows a problem.
  constructor({ onSend, readPdf, seesImages, say }) {
    Object.assign(this, { onSend, readPdf, seesImages, say });
    $("#composer").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    $("#attach").addEventListener("click", () => $("#files").click());
    $("#files").addEventListener("change", (event) => { this.attach(event.target.files); event.target.value = ""; });
    this.#field.addEventListener("input", () => this.#fit());
    this.#field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    this.#field.addEventListener("paste", (event) => this.#paste(event));
    for (const kind of ["dragover", "dragleave", "drop"]) addEventListener(kind, (event) => this.#drag(event));
  }

  send() {
    const content = this.#field.value.trim();
    if ((!content && !this.#files.length) || this.isBusy) return;
    this.onSend({ content, ...(this.#files.length ? { attachments: this.#files } : {}) });
    this.#files = [];
    this.#showFiles();
    this.put("");
  }

  // While an answer arrives, the button stops it.
  setBusy(busy) {
    this.isBusy = busy;
    $("#stop").hidden = !busy;
    $("#send").hidden = busy;
    if (!busy && document.activeElement === document.body) this.focus();
  }

  focus() { this.#field.focus(); }

  put(text) {
    this.#field.value = text;
    this.#fit();
  }

  async attach(files) {
    for (const file of [...files]) {  // the field's list is emptied meanwhile
      try {
        if (isImage(file) && !this.seesImages()) throw new Error("this model sees no images. It reads text and PDF files.");
        this.#add(isImage(file) ? { name: file.name, image: await dataUrlOf(file) } : { name: file.name, text: await this.#textOf(file) });
      } catch (error) {
        this.say(`${file.name}: ${error.message}`);
      }
    }
    this.focus();
  }

  async #textOf(file) {
    if (file.type === "application/pdf" || file.name.toLowerCase().endsWith(".pdf")) {
      this.say(`Reading ${file.name}…`);
      const text = await this.readPdf(file);
      this.say("");
      return text;
    }
    if (file.size > 4 * MAX_CHARS) throw new Error("this file is too large.");
    let text;
    try {
      text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    } catch {
      text = "\0";
    }
    if (text.includes("\0")) throw new Error(`this is no text. The model reads text and PDF files${this.seesImages() ? ", and sees images" : ""}.`);
    if (text.length > MAX_CHARS) throw new Error("this file is too large.");
    return text;
  }

  #add(file) {
    this.#files = [...this.#files, file];
    this.#showFiles();
  }

  #showFiles() {
    this.#list.hidden = !this.#files.length;
    this.#list.replaceChildren(...this.#files.map((each) => make("li", {},
      each.image ? thumbnail(each, "small") : icon("file"), make("span", {}, each.name),
      each.image ? null : make("span", { className: "hint" }, `${count(each.text.length)} characters`),
      iconButton("close", `Remove ${each.name}`, () => {
        this.#files = this.#files.filter((other) => other !== each);
        this.#showFiles();
        this.focus();
      }))));
  }

  #paste(event) {
    const { files } = event.clipboardData, text = event.clipboardData.getData("text/plain");
    if (files.length && !text) {
      event.preventDefault();
      this.attach(files);
    } else if (text.length > LONG_PASTE) {
      event.preventDefault();
      const number = this.#files.filter((each) => each.name.startsWith("Pasted text")).length + 1;
      this.#add({ name: `Pasted text ${number}`, text });
    }
  }

  // A file that is dropped anywhere goes with the message, and does not take the page's place.
  #drag(event) {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    document.body.classList.toggle("dropping", event.type === "dragover");
    if (event.type === "drop") this.attach(event.dataTransfer.files);
  }

  #fit() {
    const field = this.#field;
    field.style.height = "auto";
    field.style.height = `${Math.min(field.scrollHeight + 2, innerHeight * 0.4)}px`;
  }
}
