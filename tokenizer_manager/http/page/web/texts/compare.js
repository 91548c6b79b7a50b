// `Compare`: takes the place of the chat for a model that makes vectors or scores: a text, others, and how near they are.

import { $, count, make } from "../dom.js";
import { nearest } from "./nearest.js";

const NUMBERS_SHOWN = 6;

export class Compare {
  // `model` has name, task ("embed" or "score") and embeddingSize.
  constructor(server, keys, model) {
    Object.assign(this, { server, keys, model });
    this.isEmbedder = model.task === "embed";
    this.first = make("textarea", { id: "first-text", rows: 2, required: true, value: "How do I bake bread?" });
    this.others = make("textarea", { id: "other-texts", rows: 5, required: true,
      value: "Knead flour, water, salt and yeast.\nThe oven must be hot before the loaf goes in.\nThe train leaves at noon." });
    this.submit = make("button", { type: "submit", className: "first", id: "compare" }, "Compare");
    this.status = make("p", { role: "status", className: "hint", id: "compare-status" });
    this.result = make("div", { id: "compare-result", className: "wide", "aria-live": "polite" });
    const words = this.isEmbedder
      ? `This model turns a text into a vector of ${count(model.embeddingSize)} numbers; texts of similar meaning have vectors that point the same way.`
      : "This model scores how relevant a text is to a query.";
    this.node = make("form", { className: "compare", onsubmit: (event) => { event.preventDefault(); this.#compare(); } },
      make("p", { className: "lead" }, "Compare texts."),
      make("p", { className: "note" }, words, " It does not chat. Programs use ",
        make("code", {}, this.isEmbedder ? "POST /v1/embeddings" : "POST /v1/rerank"), "; see the ",
        make("a", { href: "docs" }, "API"), "."),
      make("label", { htmlFor: "first-text" }, this.isEmbedder ? "Text" : "Query"), this.first,
      make("label", { htmlFor: "other-texts" }, this.isEmbedder ? "Compare it with (one text per line)" : "Texts (one per line)"),
      this.others, make("div", { className: "row" }, this.status, this.submit), this.result);
  }

  // Takes the place of the conversation.
  show() {
    $("main").replaceChildren(make("div", { id: "scroller", tabIndex: -1 }, this.node));
    const skip = $(".skip");
    skip.href = "#first-text";
    skip.textContent = "Skip to the text field";
    this.first.focus();
  }

  async #compare() {
    const others = this.others.value.split("\n").map((text) => text.trim()).filter(Boolean);
    if (!others.length || !this.first.value.trim()) { this.status.textContent = "Both fields need a text."; return; }
    this.submit.disabled = true;
    this.status.textContent = "The model computes…";
    const began = performance.now();
    try {
      const { ranked, vector } = await this.keys.withKey(() => this.#ask(this.first.value.trim(), others));
      this.status.textContent = `${count(others.length + 1)} texts in ${Math.round(performance.now() - began)} ms.`;
      this.#draw(ranked, vector);
    } catch (error) {
      this.status.textContent = "";
      this.result.replaceChildren(make("p", { className: "error", role: "alert" }, error.message));
    } finally {
      this.submit.disabled = false;
    }
  }

  async #ask(first, others) {
    const model = this.model.name;
    if (!this.isEmbedder) {
      const { results } = await this.server.post("v1/rerank", { model, query: first, documents: others });
      return { ranked: results.map(({ index, relevance_score }) => ({ text: others[index], score: relevance_score })) };
    }
    const { data } = await this.server.post("v1/embeddings", { model, input: [first, ...others], encoding_format: "float" });
    const [vector, ...rest] = data.map(({ embedding }) => embedding);
    return { ranked: nearest(vector, rest).map(({ index, score }) => ({ text: others[index], score })), vector };
  }

  #draw(ranked, vector) {
    const rows = ranked.map(({ text, score }) => make("tr", {}, make("td", { className: "mono" }, score.toFixed(3)),
      make("td", {}, make("meter", { min: 0, max: 1, value: Math.max(0, Math.min(1, score)), "aria-label": "score" })), make("td", {}, text)));
    const head = make("tr", {}, ...[this.isEmbedder ? "Similarity" : "Score", "", "Text"].map((text) => make("th", { scope: "col" }, text)));
    this.result.replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)),
      ...(vector ? [make("p", { className: "hint mono" },
        `vector of the text: [${vector.slice(0, NUMBERS_SHOWN).map((number) => number.toFixed(4)).join(", ")}, …]`)] : []));
  }
}
