// `Conversation`: the messages, in the form of the API, as a tree: an edit or a new answer is a branch beside the old one.

import { newId } from "../history/store.js";

const MAX_TITLE = 60;

// A message: id, conversation, parent, created, role, content; a question may have attachments, each with a
// name and a text or an image (a data: URL); an answer also has
// model, reasoning, tool_calls, note, footer, json; a result of a tool has tool_call_id.
export class Conversation {
  #all = new Map();
  isKept = true;  // false: another tab deleted it, or the storage was full; the next message takes all others along

  // `kept` is what the store has read; without it, the conversation is new and kept once it has a message.
  constructor(store, kept = null) {
    this.store = store;
    this.about = kept?.about ?? { id: newId(), title: "", updated: 0, leaf: null };
    this.merge(kept?.messages ?? []);
  }

  // Takes messages of another tab in. The branch that is shown stays.
  merge(messages) {
    for (const each of messages) if (!this.#all.has(each.id)) this.#all.set(each.id, each);
  }

  get id() { return this.about.id; }
  get isEmpty() { return this.about.leaf === null; }

  // The messages of the branch that is shown.
  get messages() {
    const path = [];
    for (let each = this.#all.get(this.about.leaf); each; each = this.#all.get(each.parent)) path.unshift(each);
    return path;
  }

  add(fields) {
    const message = Object.assign(fields, { id: newId(), conversation: this.id, parent: this.about.leaf, created: Date.now() });
    this.#all.set(message.id, message);
    this.about.leaf = message.id;
    if (message.role === "user") this.about.title ||= (message.content.trim() || (message.attachments?.[0].name ?? "")).split("\n")[0].slice(0, MAX_TITLE);
    this.keep(message);
    return message;
  }

  async keep(...messages) {
    const changed = this.isKept ? messages : [...this.#all.values()];
    this.about.updated = Date.now();
    this.isKept = true;
    this.isKept = await this.store.write({ ...this.about }, changed.map((each) => ({ ...each }))) && this.isKept;
  }

  // The next message goes beside this one.
  branchAt(message) { this.about.leaf = message.parent; }

  // The messages at the place of one: it, and what edits or new answers put beside it.
  siblings(message) { return this.#children(message.parent); }

  // Shows the branch of a sibling, to its newest end.
  choose(message) {
    let last = message;
    for (let next = last; next; next = this.#children(last.id).at(-1)) last = next;
    this.about.leaf = last.id;
    this.keep();
  }

  #children(parent) {
    return [...this.#all.values()].filter((each) => each.parent === parent).sort((a, b) => a.created - b.created);
  }

  // The result that answers a call; undefined if there is none yet.
  resultOf(call) { return this.messages.find((each) => each.role === "tool" && each.tool_call_id === call.id); }

  // The calls of the last answer that have no result.
  openCalls() {
    const answer = this.messages.findLast((each) => each.role === "assistant");
    return (answer?.tool_calls ?? []).filter((call) => !this.resultOf(call));
  }

  // What is sent to the server.
  sent(system) {
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const each of this.messages) {
      if (each.role === "assistant") {
        const calls = each.tool_calls?.length ? { tool_calls: each.tool_calls } : {};
        messages.push({ role: "assistant", content: each.content, ...calls });
      } else if (each.role === "tool") messages.push({ role: "tool", tool_call_id: each.tool_call_id, content: each.content });
      else messages.push({ role: each.role, content: withFiles(each) });
    }
    return messages;
  }
}

// A question with its files and images, as `engine chat` sends them.
function withFiles({ content, attachments = [] }) {
  const files = attachments.filter(({ image }) => !image), images = attachments.filter(({ image }) => image);
  const text = [content, ...files.map(({ name, text }) => `${name}:\n\`\`\`\n${text.trimEnd()}\n\`\`\``)].filter(Boolean).join("\n\n");
  if (!images.length) return text;
  return [...images.map(({ image }) => ({ type: "image_url", image_url: { url: image } })), ...(text ? [{ type: "text", text }] : [])];
}
