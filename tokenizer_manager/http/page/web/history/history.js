// `History`: the list of conversations: new, search, rename, delete with undo, export and import.

import { $, button, iconButton, make, recall, remember, toast } from "../dom.js";

const PLAIN_ROLES = ["user", "assistant", "tool"];
const WIDE = matchMedia("(min-width: 861px)");
const STORE = "engine.history";  // "closed" if the reader closed the list in a wide window

export class History {
  #box = $("#history");
  #opener = $("#open-history");
  #search = $("#search");
  #items = $("#conversations");
  #drawn = 0;

  // `useSystem(text)` takes the system prompt of an imported file; whether it is used.
  constructor(store, chat, useSystem) {
    Object.assign(this, { store, chat, useSystem });
    this.#opener.addEventListener("click", () => this.show(this.#box.hidden));
    $("#new").addEventListener("click", () => this.#go(() => chat.begin()));
    $("#export").addEventListener("click", () => { try { chat.export(); } catch (error) { chat.say(error.message); } });
    $("#import").addEventListener("click", () => $("#import-file").click());
    $("#import-file").addEventListener("change", (event) => { this.import(event.target.files[0]); event.target.value = ""; });
    this.#search.addEventListener("input", () => this.draw());
    WIDE.addEventListener("change", () => this.show(WIDE.matches));
    this.show(WIDE.matches && recall("localStorage", STORE) !== "closed", { keeps: false });
  }

  get isOver() { return !this.#box.hidden && !WIDE.matches; }

  show(isOpen, { keeps = true } = {}) {
    this.#box.hidden = !isOpen;
    this.#opener.setAttribute("aria-expanded", String(isOpen));
    if (keeps && WIDE.matches) remember("localStorage", STORE, isOpen ? "open" : "closed");
    if (keeps && !WIDE.matches) (isOpen ? $("#new") : this.#opener).focus();
  }

  async draw() {
    const number = ++this.#drawn, wanted = this.#search.value.trim();
    const [all, found] = await Promise.all([this.store.list(), wanted ? this.store.find(wanted) : null]);
    if (number !== this.#drawn || this.#items.querySelector("form")) return;  // a newer list comes, or a title is edited
    const shown = found ? all.filter((each) => found.has(each.id)) : all;
    const open = this.chat.conversation.id, focused = document.activeElement?.closest?.("#conversations li")?.dataset.id;
    this.#items.replaceChildren(...shown.map((each) => this.#item(each, each.id === open)));
    $("#no-conversations").hidden = shown.length > 0;
    $("#no-conversations").textContent = wanted ? "No conversation has this text." : "Conversations are kept in this browser, and listed here.";
    if (focused) $(`#conversations li[data-id="${focused}"] button`)?.focus();
  }

  #item(about, isOpen) {
    const title = about.title || "Untitled";
    const open = button(title, () => this.#go(() => this.chat.open(about.id)), { className: "title", title: `${title}\n${new Date(about.updated).toLocaleString()}` });
    if (isOpen) open.setAttribute("aria-current", "true");
    const node = make("li", {}, open, iconButton("pencil", `Rename ${title}`, () => this.#rename(about, node)),
      iconButton("trash", `Delete ${title}`, () => this.#delete(about)));
    node.dataset.id = about.id;
    return node;
  }

  async #go(act) {
    if (!WIDE.matches) this.show(false);
    await act();
    await this.draw();
  }

  #rename(about, node) {
    const field = make("input", { value: about.title, "aria-label": "Title" });
    const form = make("form", {}, field);
    let isEnded = false;  // the field loses the focus when it goes
    const end = async (title) => {
      if (isEnded) return;
      isEnded = true;
      form.remove();
      if (title && title !== about.title) {
        if (about.id === this.chat.conversation.id) this.chat.conversation.about.title = title;
        await this.store.write({ ...about, title });
      }
      await this.draw();
      $(`#conversations li[data-id="${about.id}"] button`)?.focus();
    };
    form.addEventListener("submit", (event) => { event.preventDefault(); end(field.value.trim()); });
    field.addEventListener("keydown", (event) => { if (event.key === "Escape") { event.stopPropagation(); end(""); } });
    field.addEventListener("blur", () => end(field.value.trim()));
    node.replaceChildren(form);
    field.select();
  }

  async #delete(about) {
    const isOpen = about.id === this.chat.conversation.id;
    if (isOpen) await this.chat.begin();
    const removed = await this.store.remove(about.id);
    if (!removed) return;
    toast(`“${about.title || "Untitled"}” was deleted.`, async () => {
      await this.store.write(removed.about, removed.messages);
      if (isOpen) await this.chat.open(about.id);
      await this.draw();
    });
    await this.draw();
    $("#toast button").focus();
  }

  // An exported conversation, or any body of /v1/chat/completions.
  async import(file) {
    if (!file) return;
    try {
      const { messages, model, models } = JSON.parse(await file.text());
      if (!Array.isArray(messages) || !messages.every((each) => typeof each?.role === "string")) throw new Error("it has no list of messages");
      const kept = messages.filter(({ role }) => PLAIN_ROLES.includes(role)).map(({ role, content, tool_calls, tool_call_id }) => ({ role,
        content: textOf(content), ...imagesOf(content), ...(tool_calls?.length ? { tool_calls } : {}), ...(tool_call_id ? { tool_call_id } : {}) }));
      kept.filter(({ role }) => role === "assistant").forEach((answer, i) => {
        const name = Array.isArray(models) ? models[i] : model;
        if (typeof name === "string" && name) answer.model = name;
      });
      const system = messages.filter(({ role }) => role === "system" || role === "developer").map(({ content }) => textOf(content)).join("\n\n");
      await this.#go(() => this.chat.begin(kept));
      const isUsed = !system || this.useSystem(system);
      this.chat.say(`${file.name} was imported.${isUsed ? "" : " Its system prompt is not used, because the settings have one."}`);
    } catch (error) {
      this.chat.say(`${file.name} cannot be imported: ${error.message}`);
    }
  }
}

// The text of a message's content, which may be a list of parts.
const textOf = (content) => typeof content === "string" ? content : (content ?? []).map((part) => part?.text).filter(Boolean).join("\n");

// Its images, as attachments.
function imagesOf(content) {
  const urls = Array.isArray(content) ? content.map((part) => part?.image_url?.url ?? part?.image_url).filter((url) => typeof url === "string") : [];
  return urls.length ? { attachments: urls.map((image, i) => ({ name: `image ${i + 1}`, image })) } : {};
}
