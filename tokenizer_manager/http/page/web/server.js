// `Server`: the API that the page talks to, its errors in the server's own words, and the keys of this tab.

import { recall, remember } from "./dom.js";

const KEY = "engine.api-key", ADMIN_KEY = "engine.admin-key";

class ServerError extends Error {
  constructor(message, { status = 0, code = null, param = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.param = param;
    this.retryAfter = retryAfter;
  }

  get wantsKey() { return this.status === 401; }
  get wantsAdminKey() { return this.status === 403 && this.code === "admin_key_required"; }
}

const MAX_TRIES = 5, MAX_WAIT_S = 60;  // of a request that a busy server refuses; the seconds in all
const HEALTH_MS = 4000;

export class Server {
  isUp = null;
  isWaiting = false;  // before it asks a busy server again

  // `onState(isUp)`: the server answers, or does not.
  constructor(onState) { this.onState = onState; }

  // Asks from time to time whether the server is there, while the page is seen.
  watch() {
    setInterval(() => this.#look(), HEALTH_MS);
    document.addEventListener("visibilitychange", () => this.#look());
  }

  #look() {
    if (document.hidden) return;
    fetch(new URL("health", document.baseURI), { cache: "no-store" }).then(({ ok }) => this.#setUp(ok), () => this.#setUp(false));
  }

  #setUp(isUp) {
    if (isUp === this.isUp) return;
    this.isUp = isUp;
    this.onState(isUp);
  }

  // `admin` asks with the admin key, if the tab has one.
  async get(path, { admin = false } = {}) {
    return (await this.#send(path, { headers: this.#headers(admin) })).json();
  }

  async post(path, body) {
    const headers = { ...this.#headers(false), "Content-Type": "application/json" };
    return (await this.#send(path, { method: "POST", headers, body: JSON.stringify(body) })).json();
  }

  async upload(path, file) {
    return (await this.#send(path, { method: "POST", headers: this.#headers(false), body: file })).json();
  }

  // The JSON objects of an event stream, until [DONE]. A busy server is asked again when it says; `say(text)` shows it.
  async *stream(path, body, signal, say) {
    const response = await this.#sendPatiently(path, () => ({ method: "POST", body: JSON.stringify(body), signal,
      headers: { ...this.#headers(false), "Content-Type": "application/json" } }), say);
    let finished = false;
    try {
      for await (const data of eventsOf(response.body)) {
        if (data === "[DONE]") { finished = true; return; }
        const event = JSON.parse(data);
        if (event.error) throw errorFrom(event.error, { status: event.error.code === "internal_error" ? 500 : 200 });
        yield event;
      }
    } catch (error) {
      this.#look();
      if (!(error instanceof TypeError)) throw error;
      throw lost();
    }
    this.#look();
    if (!finished) throw new ServerError("The stream broke off before the answer was complete.");
  }

  hasKey({ admin = false } = {}) { return recall("sessionStorage", admin ? ADMIN_KEY : KEY) !== null; }

  useKey(key, { admin = false } = {}) { remember("sessionStorage", admin ? ADMIN_KEY : KEY, key); }

  #headers(admin) {
    const key = (admin && recall("sessionStorage", ADMIN_KEY)) || recall("sessionStorage", KEY);
    return key ? { Authorization: `Bearer ${key}` } : {};
  }

  async #sendPatiently(path, options, say) {
    for (let tries = 1, waited_s = 0; ; tries++) {
      try {
        return await this.#send(path, options());
      } catch (error) {
        const wait_s = Number(error.retryAfter);
        waited_s += wait_s;
        if (![429, 503].includes(error.status) || !(wait_s > 0 && waited_s <= MAX_WAIT_S) || tries === MAX_TRIES) throw error;
        this.isWaiting = true;
        try {
          await pause(wait_s, options().signal, (left) => say(`The server is busy; it is asked again in ${left} s.`));
        } finally {
          this.isWaiting = false;
        }
      }
    }
  }

  async #send(path, options) {
    let response;
    try {
      response = await fetch(new URL(path, document.baseURI), { ...options, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      this.#setUp(false);
      throw lost();
    }
    this.#setUp(true);
    if (!response.ok) throw await errorOf(response);
    return response;
  }
}

// Waits some seconds, of which `tell` is called with each; it ends early, with an error, when the reader stops it.
async function pause(wait_s, signal, tell) {
  for (let left = Math.ceil(wait_s); left > 0; left--) {
    tell(left);
    await new Promise((go) => { setTimeout(go, 1000); signal.addEventListener("abort", go, { once: true }); });
    signal.throwIfAborted();
  }
}

const lost = () => new ServerError("The connection to the server was lost. Check that it runs, then try again.");

async function errorOf(response) {
  const facts = { status: response.status, retryAfter: response.headers.get("Retry-After") };
  const text = await response.text();
  try {
    return errorFrom(JSON.parse(text).error, facts);
  } catch {
    return new ServerError(text.slice(0, 300) || `The server answered with status ${response.status}.`, facts);
  }
}

function errorFrom(error, facts) {
  const fields = typeof error === "string" ? { message: error } : error;
  return new ServerError(fields.message, { ...facts, code: fields.code ?? null, param: fields.param ?? null });
}

async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).replace(/^ /, ""));
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
