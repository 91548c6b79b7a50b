// `KeyDialog`: asks for the API key or the admin key.

import { $ } from "./dom.js";

export class KeyDialog {
  #dialog = $("#keys");
  #field = $("#key");
  #answer = null;

  constructor(server) {
    this.server = server;
    $("#keys-form").addEventListener("submit", (event) => { event.preventDefault(); this.#close(this.#field.value.trim()); });
    $("#keys-cancel").addEventListener("click", () => this.#close(""));
    this.#dialog.addEventListener("cancel", (event) => { event.preventDefault(); this.#close(""); });
  }

  // Whether a key was given. `admin`: the key that shows the requests of others.
  async ask({ admin = false } = {}) {
    if (this.#answer) return false;
    $("#keys-title").textContent = admin ? "Admin key" : "API key";
    $("#keys-why").textContent = this.server.hasKey({ admin })
      ? "The server does not accept this key. Check it, or ask the person who runs the server."
      : admin ? "The list of requests is for the person who runs this server." : "This server needs a key. The person who runs it can give you one.";
    this.#field.value = "";
    this.#dialog.showModal();
    this.#field.focus();
    const key = await new Promise((answer) => { this.#answer = answer; });
    this.#answer = null;
    if (key) this.server.useKey(key, { admin });
    return key !== "";
  }

  // Runs `action`, and again after each key that was asked for.
  async withKey(action) {
    for (;;) {
      try {
        return await action();
      } catch (error) {
        if (!error.wantsKey || !(await this.ask())) throw error;
      }
    }
  }

  #close(key) {
    this.#dialog.close();
    this.#answer?.(key);
  }
}
