// `Conversation`: the messages, in the form of the API, kept in this browser.

const STORE = "engine.conversation";

// A message: role, content; an answer also has reasoning, tool_calls, note, footer; a result of a tool has tool_call_id.
export class Conversation {
  messages = [];

  constructor() {
    try {
      const kept = JSON.parse(localStorage.getItem(STORE) ?? "[]");
      if (Array.isArray(kept)) this.messages = kept.filter((each) => each && typeof each.role === "string");
    } catch {
      // damaged or not allowed: an empty conversation
    }
  }

  get isEmpty() { return this.messages.length === 0; }

  add(message) {
    this.messages.push(message);
    this.keep();
    return message;
  }

  // Forgets this message and all after it.
  cutAt(message) {
    const at = this.messages.indexOf(message);
    if (at >= 0) this.messages.length = at;
    this.keep();
  }

  clear() {
    this.messages.length = 0;
    this.keep();
  }

  keep() {
    try {
      if (this.messages.length) localStorage.setItem(STORE, JSON.stringify(this.messages));
      else localStorage.removeItem(STORE);
    } catch {
      // full or not allowed: it lives as long as the page
    }
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
      else messages.push({ role: each.role, content: each.content });
    }
    return messages;
  }
}
