// `Chat`: shows one conversation, sends it, shows the answer as it arrives, and lets the reader stop, continue, regenerate
// and edit.

import { $, count, recall, remember, save } from "../dom.js";
import { Answer } from "./answer.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { errorView, MessageView } from "./message_view.js";

const PATH = "v1/chat/completions";
const NEAR_END = 80;  // pixels: a reader who is this near to the end follows the answer
const KEEP_MS = 1000;  // between two writes of an answer that arrives
const OPEN = "engine.open";  // the conversation of this tab

export class Chat {
  #views = new Map();
  #abort = null;
  #running = null;  // until the answer has ended, and is a message of the conversation
  #error = null;
  #retry = null;  // asks again for what failed
  #keepPart = null;  // writes the answer that arrives
  #list = $("#messages");
  #scroller = $("#scroller");

  // `model` has name, maxContext, seesImages, and choice: the adapter, or null.
  constructor(server, keys, store, settings, model) {
    Object.assign(this, { server, keys, store, settings, model });
    this.conversation = new Conversation(store);
    this.acts = {
      render: (text, complete) => server.post("page/render", { text, complete }),
      resultOf: (call) => this.conversation.resultOf(call) ?? null,
      siblings: (message) => this.conversation.siblings(message),
      onEdit: (message, text) => this.#askAgain(message, text),
      onRegenerate: (message) => this.#askAgain(message),
      onContinue: (message) => { if (!this.isAnswering) this.#answer(message); },
      onBranch: (message) => this.#showBranch(message),
      onResult: (call, text) => this.#takeResult(call, text),
    };
    this.composer = new Composer({
      onSend: (question) => { this.conversation.add({ role: "user", ...question }); this.#remember(); this.#answer(); },
      readPdf: (file) => this.keys.withKey(() => server.upload("page/pdf", file)).then(({ text }) => text),
      seesImages: () => this.model.seesImages,
      say: (text) => this.say(text),
    });
    $("#stop").addEventListener("click", () => this.stop());
    addEventListener("pagehide", () => this.#keepPart?.());
    this.#draw();
  }

  get isAnswering() { return this.#abort !== null; }

  stop() { this.#abort?.abort(); }

  // ------------------------------------------------------------ which conversation

  // The conversation that this tab showed before a reload.
  async restore() {
    const kept = await this.store.read(recall("sessionStorage", OPEN) ?? "");
    if (kept) await this.#show(new Conversation(this.store, kept));
  }

  async open(id) {
    const kept = await this.store.read(id);
    if (kept) await this.#show(new Conversation(this.store, kept));
  }

  // A new conversation, with the messages of a file if there are some.
  async begin(messages = []) {
    const conversation = new Conversation(this.store);
    for (const each of messages) conversation.add(each);
    await this.#show(conversation);
    this.composer.focus();
  }

  async #show(conversation) {
    this.stop();
    await this.#running;
    this.conversation = conversation;
    this.#remember();
    this.#error = null;
    this.#draw();
    this.say("");
  }

  #remember() { remember("sessionStorage", OPEN, this.conversation.id); }

  // Another tab may have added to this conversation.
  async refresh() {
    const { conversation } = this;
    if (this.isAnswering || conversation.isEmpty) return;
    const kept = await this.store.read(conversation.id);
    if (!kept) conversation.isKept = false;
    if (!kept || this.isAnswering || conversation !== this.conversation) return;
    conversation.merge(kept.messages);
    conversation.about.title = kept.about.title;
    this.#drawTools();
  }

  export() {
    const { messages } = this.conversation;
    const body = { model: this.model.name, ...this.settings.body(), messages: this.conversation.sent(this.settings.system) };
    const figures = messages.filter((each) => each.footer).map((each) => each.footer);
    const models = messages.filter((each) => each.role === "assistant").map((each) => each.model ?? null);
    save("conversation.json", JSON.stringify({ ...body, figures, models }, null, 2), "application/json");
  }

  // ------------------------------------------------------------ one answer

  // With `begun`, an answer that was stopped goes on.
  #answer(begun = null) { return this.#running = this.#askServer(begun); }

  async #askServer(begun) {
    let body;
    this.#error = null;
    this.#retry = () => this.#answer(begun);
    try {
      body = { ...this.settings.body(), messages: this.conversation.sent(this.settings.system), stream: true, return_progress: true,
        stream_options: { include_usage: true, continuous_usage_stats: true } };
    } catch (error) {  // of a field that does not hold JSON
      this.#error = error;
      this.#draw();
      return;
    }
    if (this.model.choice) body.model = this.model.choice;
    if (begun) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
    const message = begun ?? { role: "assistant", content: "", model: this.model.choice ?? this.model.name, ...(body.response_format ? { json: true } : {}) };
    const view = begun ? this.#views.get(begun) : new MessageView(message, this.acts);
    this.#abort = new AbortController();
    this.#draw();
    if (!begun) this.#list.append(view.node);
    view.begin();
    this.#setBusy(true);
    const isEmpty = await this.#receive(body, message, view);
    this.#abort = null;
    let rendered = null;
    if (isEmpty && !begun) view.node.remove();
    else {
      this.#views.set(message, view);
      if (message.id) this.conversation.keep(message);
      else this.conversation.add(message);
      rendered = view.settle();
    }
    this.#setBusy(false);
    this.#draw();
    const at = this.#scroller.scrollTop;
    rendered?.then(() => { if (this.#scroller.scrollTop === at) this.#scrollToEnd(); });  // Markdown is higher than its text
    if (!this.#error) this.say(message.note || "The answer is complete.");
  }

  // Fills the message while the answer arrives; errors are shown. Whether nothing arrived.
  async #receive(body, message, view) {
    const before = message.content;
    let answer = new Answer(), wanted = 0, kept = -Infinity, stopped = false;
    const show = () => {
      wanted = 0;
      const follows = this.#isNearEnd();
      Object.assign(message, { content: before + answer.text, reasoning: answer.reasoning || message.reasoning, tool_calls: answer.calls });
      if (answer.text) view.closeReasoning();
      view.show(message);
      if (follows) this.#scrollToEnd();
      if (performance.now() - kept > KEEP_MS) this.#keepPart();
    };
    this.#keepPart = () => {
      if (!answer.text) return;
      kept = performance.now();
      Object.assign(message, { content: before + answer.text, note: "Interrupted: the page was closed during this answer.", unfinished: true });
      if (message.id) this.conversation.keep(message);
      else this.conversation.add(message);
    };
    this.#scrollToEnd();
    const reading = this.#sayHowLong(() => answer.progress);
    try {
      await this.keys.withKey(async () => {
        answer = new Answer();
        for await (const event of this.server.stream(PATH, body, this.#abort.signal, (text) => this.say(text))) {
          if (answer.add(event)) { clearInterval(reading); this.say("The model answers…"); }
          wanted ||= requestAnimationFrame(show);
          if (answer.loop) break;  // which ends the request
        }
      });
    } catch (error) {
      if (error.name === "AbortError") stopped = true;
      else this.#error = error;
    }
    clearInterval(reading);
    cancelAnimationFrame(wanted);
    kept = performance.now();
    show();
    this.#keepPart = null;
    if (!message.reasoning) delete message.reasoning;
    message.tool_calls = stopped || this.#error || answer.loop ? [] : answer.calls.filter(Boolean);
    if (!message.tool_calls.length) delete message.tool_calls;
    message.unfinished = stopped || this.#error !== null || answer.loop !== null || answer.finishReason === "length";
    message.note = stopped ? "Stopped." : this.#error ? `Interrupted: ${this.#error.message}` : answer.note(this.model.maxContext);
    message.footer = answer.footer(this.model.maxContext);
    return answer.isEmpty;
  }

  // Until the first token, how much of the prompt is read, and the seconds that it has taken.
  #sayHowLong(progress) {
    let past = 0;
    return setInterval(() => {
      if (++past < 2 || this.server.isWaiting) return;
      const read = progress();
      this.say(`${read ? `Reading the prompt: ${count(read.processed)} of ${count(read.total)} tokens` : "The model reads the conversation"}… ${past} s`);
    }, 1000);
  }

  // Without `text`, the answer is made again; with it, the question is asked in another form. Both are branches.
  async #askAgain(message, text) {
    if (this.isAnswering) return;
    const { conversation } = this, { leaf } = conversation.about;
    conversation.branchAt(message);
    if (text !== undefined) conversation.add({ role: "user", content: text, ...(message.attachments ? { attachments: message.attachments } : {}) });
    await this.#answer();
    if (text !== undefined || conversation.about.leaf !== message.parent || conversation !== this.conversation) return;
    conversation.about.leaf = leaf;  // nothing came: the old answer stays
    this.#retry = () => this.#askAgain(message);
    this.#draw();
  }

  #showBranch(message) {
    if (this.isAnswering) return;
    this.#error = null;
    this.conversation.choose(message);
    this.#draw({ scrolls: false });
    this.#views.get(message)?.node.querySelector(".branches button:enabled")?.focus();
  }

  // The last result that was missing continues the conversation.
  async #takeResult(call, content) {
    if (this.isAnswering || this.conversation.resultOf(call)) return;
    this.conversation.add({ role: "tool", tool_call_id: call.id, content });
    if (this.conversation.openCalls().length) this.#draw();
    else await this.#answer();
  }

  // ------------------------------------------------------------ the page

  #shown() { return this.conversation.messages.filter((each) => each.role === "user" || each.role === "assistant"); }

  #draw({ scrolls = true } = {}) {
    const shown = this.#shown();
    for (const [message, view] of this.#views) {
      if (!shown.includes(message)) { view.node.remove(); this.#views.delete(message); }
    }
    for (const message of shown) if (!this.#views.has(message)) this.#views.set(message, new MessageView(message, this.acts));
    this.#drawTools();
    const nodes = shown.map((message) => this.#views.get(message).node);
    if (this.#error) nodes.push(errorView(this.#error, () => this.#retry()));
    this.#list.replaceChildren(...nodes);
    document.body.classList.toggle("empty", !nodes.length);
    $("#empty").hidden = nodes.length > 0;
    if (scrolls) this.#scrollToEnd();
  }

  #drawTools() {
    const shown = this.#shown(), last = this.isAnswering ? null : shown.at(-1);
    for (const message of shown) this.#views.get(message)?.update({ isLast: message === last });
  }

  #setBusy(busy) {
    this.#list.setAttribute("aria-busy", String(busy));  // a reader hears the whole answer, not each word
    this.composer.setBusy(busy);
    this.say(busy ? "The model answers…" : "");
  }

  say(text) { $("#status").textContent = text; }

  #isNearEnd() {
    const box = this.#scroller;
    return box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END;
  }

  #scrollToEnd() { this.#scroller.scrollTop = this.#scroller.scrollHeight; }
}
