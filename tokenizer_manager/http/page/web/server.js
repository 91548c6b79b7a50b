// `Server`: the API that the page talks to, its errors in the server's own words, and the keys of this tab.

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

export class Server {
  // `admin` asks with the admin key, if the tab has one.
  async get(path, { admin = false } = {}) {
    return (await this.#send(path, { headers: this.#headers(admin) })).json();
  }

  async post(path, body) {
    const headers = { ...this.#headers(false), "Content-Type": "application/json" };
    return (await this.#send(path, { method: "POST", headers, body: JSON.stringify(body) })).json();
  }

  // The JSON objects of an event stream, until [DONE].
  async *stream(path, body, signal) {
    const headers = { ...this.#headers(false), "Content-Type": "application/json" };
    const response = await this.#send(path, { method: "POST", headers, body: JSON.stringify(body), signal });
    let finished = false;
    try {
      for await (const data of eventsOf(response.body)) {
        if (data === "[DONE]") { finished = true; return; }
        const event = JSON.parse(data);
        if (event.error) throw errorFrom(event.error, { status: event.error.code === "internal_error" ? 500 : 200 });
        yield event;
      }
    } catch (error) {
      if (error instanceof TypeError) throw lost();
      throw error;
    }
    if (!finished) throw new ServerError("The stream broke off before the answer was complete.");
  }

  useKey(key, { admin = false } = {}) { sessionStorage.setItem(admin ? ADMIN_KEY : KEY, key); }

  #headers(admin) {
    const key = (admin && sessionStorage.getItem(ADMIN_KEY)) || sessionStorage.getItem(KEY);
    return key ? { Authorization: `Bearer ${key}` } : {};
  }

  async #send(path, options) {
    let response;
    try {
      response = await fetch(new URL(path, document.baseURI), { ...options, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw lost();
    }
    if (!response.ok) throw await errorOf(response);
    return response;
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
