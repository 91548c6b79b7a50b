// `MessageView`: one message of the conversation on the page.

import { button, copyButton, make } from "../dom.js";
import { callView } from "./call_view.js";
import { Markdown } from "./markdown.js";

export class MessageView {
  // `acts`: onEdit(message, text), onRegenerate(message), onResult(call, text), resultOf(call), modelName().
  constructor(message, acts) {
    this.message = message;
    this.acts = acts;
    this.isAnswer = message.role === "assistant";
    this.heading = make("h2", {}, this.isAnswer ? acts.modelName() : "You");
    this.tools = make("div", { className: "tools" });
    this.body = make("div", { className: "body" });
    this.node = make("article", { className: `message ${message.role}` },
      make("div", { className: "head" }, this.heading, this.tools), this.body);
    if (this.isAnswer) this.#makeAnswer();
    else this.#makeQuestion();
  }

  #makeQuestion() {
    this.body.replaceChildren(make("p", { className: "plain" }, this.message.content));
    this.tools.replaceChildren(copyButton(() => this.message.content, "Copy your message"),
      button("Edit", () => this.edit(), { className: "quiet", "aria-label": "Edit your message" }));
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
    this.markdown = new Markdown(this.text);
    this.calls = make("div");
    this.end = make("div", { className: "end" });
    this.body.append(this.reasoning, this.text, this.calls, this.end);
    this.show(this.message);
    this.finish();
  }

  // What has arrived so far. Reasoning is open until the answer begins, unless the reader moved it.
  show({ content, reasoning, tool_calls: calls }) {
    if (reasoning) {
      this.reasoning.hidden = false;
      this.thought.textContent = reasoning;
    }
    // A JSON answer is no Markdown; its strings have no raw line breaks, so none of its lines ends the code block.
    this.markdown.show(this.message.json && content ? `\`\`\`json\n${content}\n\`\`\`` : content ?? "");
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

  // The answer is complete: what can be done with it, its note and its figures.
  finish({ isLast = false } = {}) {
    const { message, acts } = this;
    this.node.classList.remove("arriving");
    if (message.tool_calls?.length) {
      this.calls.replaceChildren(...message.tool_calls.map((call) =>
        callView(call, { result: acts.resultOf(call), onResult: isLast ? (text) => acts.onResult(call, text) : null })));
    }
    this.tools.replaceChildren(copyButton(() => message.content, "Copy the answer"), ...(isLast
      ? [button("Regenerate", () => acts.onRegenerate(message), { className: "quiet", "aria-label": "Regenerate the answer" })] : []));
    this.end.replaceChildren(...[
      message.note && make("p", { className: "note" }, message.note),
      message.footer && make("p", { className: "figures" }, message.footer)].filter(Boolean));
  }
}

// An error in the server's words, with a button to try again.
export function errorView(error, onRetry) {
  const facts = [error.status ? `status ${error.status}` : null, error.code, error.param && `field ${error.param}`,
    error.retryAfter && `try again in ${error.retryAfter} s`].filter(Boolean).join(" · ");
  return make("div", { className: "error", role: "alert" }, make("p", {}, error.message),
    facts && make("p", { className: "figures" }, facts), button("Try again", onRetry));
}
