// `Store`: conversations in the browser's database. Each message is a record of its own that names the one before it, so
// that tabs only ever add: what two of them add at one place are branches.

import { recall, remember } from "../dom.js";

const NAME = "engine", VERSION = 1, CONVERSATIONS = "conversations", MESSAGES = "messages";
const OLD = "engine.conversation";  // the one conversation of earlier versions, in localStorage

const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

// The channel to the other tabs; without one where the browser does not allow it.
function openChannel() {
  try {
    return new BroadcastChannel(NAME);
  } catch {
    return { postMessage() {} };
  }
}

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export class Store {
  #database = null;
  #channel = openChannel();

  // `onProblem(text)`: something is not kept, "" when it is again; `onChange()`: this or another tab has changed the list.
  constructor({ onProblem, onChange }) {
    Object.assign(this, { onProblem, onChange });
    this.#channel.onmessage = () => this.onChange();
  }

  #open() {
    return this.#database ??= new Promise((resolve, reject) => {
      const request = indexedDB.open(NAME, VERSION);
      request.onupgradeneeded = () => {
        request.result.createObjectStore(CONVERSATIONS, { keyPath: "id" });
        request.result.createObjectStore(MESSAGES, { keyPath: "id" }).createIndex("conversation", "conversation");
      };
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => reject(request.error);
    });
  }

  // Runs `act(conversations, messages)` in one transaction; its value, or `otherwise` if the database does not work.
  async #run(mode, act, otherwise) {
    try {
      const transaction = (await this.#open()).transaction([CONVERSATIONS, MESSAGES], mode);
      const ended = new Promise((resolve, reject) => {
        transaction.oncomplete = resolve;
        transaction.onabort = () => reject(transaction.error ?? new DOMException("", "QuotaExceededError"));
      });
      ended.catch(() => {});  // `act` may fail before it is awaited
      const value = await act(transaction.objectStore(CONVERSATIONS), transaction.objectStore(MESSAGES));
      await ended;
      if (mode === "readwrite") { this.onProblem(""); this.#channel.postMessage(""); this.onChange(); }
      return value;
    } catch (error) {
      this.onProblem(error?.name === "QuotaExceededError"
        ? "The storage of this browser is full: this conversation is no longer kept. Export it, or delete others."
        : `This browser does not keep conversations (${error?.message || error?.name}). Export what you need.`);
      return otherwise;
    }
  }

  async list() {
    const all = await this.#run("readonly", (conversations) => done(conversations.getAll()), []);
    return all.sort((a, b) => b.updated - a.updated);
  }

  // A conversation with its messages; null if it was deleted.
  read(id) {
    return this.#run("readonly", async (conversations, messages) => {
      const [about, all] = await Promise.all([done(conversations.get(id)), done(messages.index("conversation").getAll(id))]);
      return about ? { about, messages: all } : null;
    }, null);
  }

  // Adds records, or replaces those with the same id. Whether it could.
  write(about, messages = []) {
    return this.#run("readwrite", (conversations, kept) => {
      conversations.put(about);
      for (const each of messages) kept.put(each);
      kept.transaction.commit();  // now: the page may be about to close
      return true;
    }, false);
  }

  // Deletes a conversation; what `write` needs to bring it back.
  remove(id) {
    return this.#run("readwrite", async (conversations, messages) => {
      const [about, all] = await Promise.all([done(conversations.get(id)), done(messages.index("conversation").getAll(id))]);
      conversations.delete(id);
      for (const each of all) messages.delete(each.id);
      return { about, messages: all };
    }, null);
  }

  // The ids of the conversations that have a text in their title or in a message.
  async find(text) {
    const wanted = text.toLowerCase(), has = (value) => (value ?? "").toLowerCase().includes(wanted);
    return this.#run("readonly", async (conversations, messages) => {
      const [titles, texts] = await Promise.all([done(conversations.getAll()), done(messages.getAll())]);
      return new Set([...titles.filter((each) => has(each.title)).map((each) => each.id),
        ...texts.filter((each) => has(each.content)).map((each) => each.conversation)]);
    }, new Set());
  }

  // The messages that an earlier version kept; [] if there are none.
  takeOld() {
    try {
      const old = JSON.parse(recall("localStorage", OLD) ?? "[]");
      remember("localStorage", OLD, null);
      return Array.isArray(old) ? old.filter((each) => typeof each?.role === "string") : [];
    } catch {
      return [];  // damaged
    }
  }
}
