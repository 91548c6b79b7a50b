// `Chat`: sends the conversation, shows the answer as it arrives, and lets the reader stop, regenerate and edit.

import { $, save } from "../dom.js";
import { Answer } from "./answer.js";
import { errorView, MessageView } from "./message_view.js";

const PATH = "v1/chat/completions";
const NEAR_END = 80;  // pixels: a reader who is this near to the end follows the answer

export class Chat {
  #views = new Map();
  #abort = null;
  #running = null;  // until the answer has ended, and is a message of the conversation
  #error = null;
  #question = $("#question");
  #list = $("#messages");
  #scroller = $("#scroller");

  // `model` has name and maxContext.
  constructor(server, keys, conversation, settings, model) {
    Object.assign(this, { server, keys, conversation, settings, model });
    this.acts = {
      modelName: () => model.name,
      resultOf: (call) => conversation.resultOf(call) ?? null,
      onEdit: (message, text) => this.#askAgain(message, text),
      onRegenerate: (message) => this.#askAgain(message),
      onResult: (call, text) => this.#takeResult(call, text),
    };
    $("#composer").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    $("#stop").addEventListener("click", () => this.stop());
    $("#clear").addEventListener("click", () => this.clear());
    $("#export").addEventListener("click", () => this.export());
    this.#question.addEventListener("input", () => this.#fitQuestion());
    this.#question.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    this.#draw();
  }

  get isAnswering() { return this.#abort !== null; }

  async send() {
    const text = this.#question.value.trim();
    if (!text || this.isAnswering) return;
    this.#question.value = "";
    this.#fitQuestion();
    this.conversation.add({ role: "user", content: text });
    await this.#answer();
  }

  stop() { this.#abort?.abort(); }

  async clear() {
    this.stop();
    await this.#running;
    this.conversation.clear();
    this.#error = null;
    this.#draw();
    this.#say("The conversation was deleted.");
    this.#question.focus();
  }

  export() {
    const { messages } = this.conversation;
    const body = { model: this.model.name, ...this.settings.body(), messages: this.conversation.sent(this.settings.system) };
    const figures = messages.filter((each) => each.footer).map((each) => each.footer);
    save("conversation.json", JSON.stringify({ ...body, figures }, null, 2), "application/json");
  }

  // ------------------------------------------------------------ one answer

  #answer() { return this.#running = this.#askServer(); }

  async #askServer() {
    let body;
    this.#error = null;
    try {
      body = { ...this.settings.body(), messages: this.conversation.sent(this.settings.system), stream: true,
        stream_options: { include_usage: true, continuous_usage_stats: true } };
    } catch (error) {  // of a field that does not hold JSON
      this.#fail(error);
      return;
    }
    const message = { role: "assistant", content: "", ...(body.response_format ? { json: true } : {}) }, view = new MessageView(message, this.acts);
    this.#abort = new AbortController();
    this.#draw();
    this.#list.append(view.node);
    view.begin();
    this.#setBusy(true);
    const answer = await this.#receive(body, message, view);
    this.#abort = null;
    if (!answer.isEmpty) this.conversation.add(message);
    else view.node.remove();
    this.#setBusy(false);
    this.#draw();
    if (!this.#error) this.#say(message.note || "The answer is complete.");
  }

  // Fills the message while the answer arrives; errors are shown.
  async #receive(body, message, view) {
    let answer = new Answer(), wanted = 0;
    const show = () => {
      wanted = 0;
      const follows = this.#isNearEnd();
      Object.assign(message, { content: answer.text, reasoning: answer.reasoning, tool_calls: answer.calls });
      if (answer.text) view.closeReasoning();
      view.show(message);
      if (follows) this.#scrollToEnd();
    };
    let stopped = false;
    this.#scrollToEnd();
    try {
      await this.keys.withKey(async () => {
        answer = new Answer();
        for await (const event of this.server.stream(PATH, body, this.#abort.signal)) {
          answer.add(event);
          wanted ||= requestAnimationFrame(show);
        }
      });
    } catch (error) {
      if (error.name === "AbortError") stopped = true;
      else this.#error = error;
    }
    cancelAnimationFrame(wanted);
    show();
    if (!answer.reasoning) delete message.reasoning;
    message.tool_calls = stopped || this.#error ? [] : answer.calls.filter(Boolean);
    if (!message.tool_calls.length) delete message.tool_calls;
    message.note = stopped ? "Stopped." : answer.note(this.model.maxContext);
    message.footer = answer.footer(this.model.maxContext);
    return answer;
  }

  // Without `text`, the answer is made again; with it, the question is replaced and answered.
  async #askAgain(message, text) {
    if (this.isAnswering) return;
    this.conversation.cutAt(message);
    if (text !== undefined) this.conversation.add({ role: "user", content: text });
    await this.#answer();
  }

  // The last result that was missing continues the conversation.
  async #takeResult(call, content) {
    if (this.isAnswering || this.conversation.resultOf(call)) return;
    this.conversation.add({ role: "tool", tool_call_id: call.id, content });
    if (this.conversation.openCalls().length) this.#draw();
    else await this.#answer();
  }

  // ------------------------------------------------------------ the page

  #draw() {
    const shown = this.conversation.messages.filter((each) => each.role === "user" || each.role === "assistant");
    const last = this.isAnswering ? null : shown[shown.length - 1];
    for (const [message, view] of this.#views) {
      if (!shown.includes(message)) { view.node.remove(); this.#views.delete(message); }
    }
    for (const message of shown) {
      let view = this.#views.get(message);
      if (!view) this.#views.set(message, view = new MessageView(message, this.acts));
      if (view.isAnswer) view.finish({ isLast: message === last });
    }
    const nodes = shown.map((message) => this.#views.get(message).node);
    if (this.#error) nodes.push(errorView(this.#error, () => this.#answer()));
    this.#list.replaceChildren(...nodes);
    $("#empty").hidden = nodes.length > 0;
    $("#clear").hidden = $("#export").hidden = this.conversation.isEmpty;
    this.#scrollToEnd();
  }

  #fail(error) {
    this.#error = error;
    this.#draw();
  }

  #setBusy(busy) {
    this.#list.setAttribute("aria-busy", String(busy));  // a reader hears the whole answer, not each word
    $("#stop").hidden = !busy;
    $("#send").hidden = busy;
    if (busy) this.#say("The model answers…");
    else { this.#say(""); if (document.activeElement === document.body) this.#question.focus(); }
  }

  #say(text) { $("#status").textContent = text; }

  #fitQuestion() {
    const field = this.#question;
    field.style.height = "auto";
    field.style.height = `${Math.min(field.scrollHeight + 2, innerHeight * 0.4)}px`;
  }

  #isNearEnd() {
    const box = this.#scroller;
    return box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END;
  }

  #scrollToEnd() { this.#scroller.scrollTop = this.#scroller.scrollHeight; }
}
