// `MessageView`: one message of the conversation on the page.

import { button, copyButton, count, iconButton, make, modelLabel } from "../dom.js";
import { icon } from "../icons.js";
import { callView } from "./call_view.js";
import { thumbnail } from "./image.js";
import { Rendered } from "./rendered.js";

export class MessageView {
  // `acts`: onEdit(message, text), onRegenerate(message), onContinue(message), onResult(call, text), onBranch(message),
  // siblings(message), resultOf(call), render(text, complete).
  constructor(message, acts) {
    this.message = message;
    this.acts = acts;
    this.isAnswer = message.role === "assistant";
    this.heading = make("h2", {}, this.isAnswer ? (message.model ? modelLabel(message.model) : "Answer") : "You");
    this.tools = make("div", { className: "tools" });
    this.body = make("div", { className: "body" });
    this.node = make("article", { className: `message ${message.role}` },
      make("div", { className: "head" }, this.heading, this.tools), this.body);
    if (this.isAnswer) this.#makeAnswer();
    else this.#makeQuestion();
  }

  #makeQuestion() {
    const { content, attachments = [] } = this.message;
    this.body.replaceChildren(...(content ? [make("p", { className: "plain" }, content)] : []), ...attachments.map(fileView));
    this.#showTools();
  }

  #showTools() {
    const { acts, message } = this;
    this.tools.replaceChildren(...this.#branches(), copyButton(() => message.content, "Copy your message"),
      iconButton("pencil", "Edit your message", () => this.edit()));
  }

  // `< 1/2 >`, where there is more than one branch.
  #branches() {
    const all = this.acts.siblings(this.message), at = all.indexOf(this.message);
    if (all.length < 2 || at < 0) return [];
    const step = (name, label, to) => iconButton(name, label, () => this.acts.onBranch(all[to]), { disabled: !all[to] });
    const kind = this.isAnswer ? "answer" : "version";
    return [make("span", { className: "branches" }, step("left", `Previous ${kind}`, at - 1),
      make("span", { "aria-label": `${kind} ${at + 1} of ${all.length}`, role: "img" }, `${at + 1}/${all.length}`),
      step("right", `Next ${kind}`, at + 1))];
  }

  edit() {
    const field = make("textarea", { value: this.message.content, rows: 3, "aria-label": "Your message" });
    const done = () => { this.#makeQuestion(); this.tools.lastChild.focus(); };
    const form = make("form", { className: "edit" }, field, make("div", { className: "row" },
      button("Cancel", done), make("button", { type: "submit", className: "first" }, "Send again")));
    form.addEventListener("submit", (event) => { event.preventDefault(); if (field.value.trim()) this.acts.onEdit(this.message, field.value); });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); done(); }
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
    this.tools.replaceChildren();
    this.body.replaceChildren(form);
    field.focus();
  }

  #makeAnswer() {
    this.thought = make("div", { className: "thought" });
    this.reasoning = make("details", { className: "reasoning", hidden: true }, make("summary", {}, "Reasoning"), this.thought);
    this.text = make("div", { className: "text" });
    this.rendered = new Rendered(this.text, this.acts.render);
    this.calls = make("div");
    this.end = make("div", { className: "end" });
    this.body.append(this.reasoning, this.text, this.calls, this.end);
    this.show(this.message);
    if (this.message.id) this.settle();
  }

  // A JSON answer is no Markdown; its strings have no raw line breaks, so none of its lines ends the code block. Nothing
  // else does: what has arrived so far is the beginning of what comes.
  #source({ content }) { return this.message.json && content ? `\`\`\`json\n${content}` : content ?? ""; }

  // What has arrived so far. Reasoning is open until the answer begins, unless the reader moved it.
  show({ reasoning, tool_calls: calls, ...rest }) {
    if (reasoning) {
      this.reasoning.hidden = false;
      this.thought.textContent = reasoning;
    }
    this.rendered.grow(this.#source(rest));
    this.calls.replaceChildren(...(calls ?? []).filter(Boolean).map((call) => callView(call)));
  }

  begin() {
    this.node.classList.add("arriving");
    this.reasoning.open = true;
    this.reasoning.addEventListener("click", () => { this.touched = true; }, { once: true });
    this.tools.replaceChildren();
    this.end.replaceChildren();
  }

  closeReasoning() { if (!this.touched) this.reasoning.open = false; }

  // All has arrived: the server renders the whole text. A promise of that.
  settle() {
    this.node.classList.remove("arriving");
    return this.rendered.finish(this.#source(this.message));
  }

  // What can be done with a message, its note and its figures.
  update({ isLast = false } = {}) {
    const { message, acts } = this;
    if (!this.isAnswer) {
      if (!this.body.querySelector("form")) this.#showTools();
      return;
    }
    const results = (message.tool_calls ?? []).map((call) => acts.resultOf(call));
    const shown = JSON.stringify([isLast, message.tool_calls, results.map((result) => result?.content)]);
    if (results.length && shown !== this.callsShown) {  // drawn anew only for a change: a result may be half typed
      this.callsShown = shown;
      this.calls.replaceChildren(...message.tool_calls.map((call, i) =>
        callView(call, { result: results[i], onResult: isLast ? (text) => acts.onResult(call, text) : null })));
    }
    this.tools.replaceChildren(...this.#branches(), copyButton(() => message.content, "Copy the answer"),
      ...(isLast ? [iconButton("again", "Regenerate the answer", () => acts.onRegenerate(message))] : []));
    const goesOn = isLast && message.unfinished && message.content && !message.json && !message.tool_calls?.length;
    this.end.replaceChildren(...[
      message.note && make("p", { className: "note" }, message.note),
      goesOn && make("button", { type: "button", onclick: () => acts.onContinue(message) }, icon("play"), "Continue"),
      message.footer && make("p", { className: "figures" }, message.footer)].filter(Boolean));
  }
}

// A file of a question, folded; an image is open.
function fileView({ name, text, image }) {
  if (image) return thumbnail({ name, image }, "large");
  return make("details", { className: "file" }, make("summary", {}, icon("file"), name,
    make("span", { className: "hint" }, `${count(text.length)} characters`)), make("pre", { tabIndex: 0 }, text));
}

// What a visitor can do about an error, where the server's words are for the person who runs it.
const ADVICE = { context_length_exceeded: "This is too long for the model. Send less, remove a file, or begin a new chat." };

// An error in the server's words, with a button to try again.
export function errorView(error, onRetry) {
  const facts = [error.status && error.status !== 200 ? `status ${error.status}` : null, error.code, error.param && `field ${error.param}`,
    error.retryAfter && `try again in ${error.retryAfter} s`].filter(Boolean).join(" · ");
  return make("div", { className: "error", role: "alert" }, ADVICE[error.code] && make("p", {}, ADVICE[error.code]), make("p", {}, error.message),
    facts && make("p", { className: "figures" }, facts), button("Try again", onRetry));
}
