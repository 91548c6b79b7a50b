// `SettingsPanel`: the system prompt, sampling settings, tools and the form of answers, each with its default.

import { button, make } from "../dom.js";
import { EFFORTS, FORMS, NUMBERS, schemaOf, toolsOf } from "./settings.js";

const REQUEST = "ChatRequest";
const TOOLS_EXAMPLE = '[{"name": "get_weather", "description": "…", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}]';
const SCHEMA_EXAMPLE = '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}';

export class SettingsPanel {
  // `document` is the API's description; null if it could not be loaded.
  constructor(box, settings, onChange) {
    Object.assign(this, { box, settings, onChange, fields: {} });
  }

  redraw() { this.show(this.document); this.onChange(); }

  show(document) {
    this.document = document;
    this.fields = document?.components?.schemas?.[REQUEST]?.properties ?? {};
    const { settings } = this;
    const reset = button("Reset all", () => { settings.reset(); this.redraw(); this.box.querySelector("textarea").focus(); }, { className: "quiet" });
    this.box.replaceChildren(
      make("div", { className: "row title" }, make("h2", {}, "Settings"), reset),
      this.#text("system", "System prompt", { rows: 3, hint: "Comes before the conversation." }),
      make("fieldset", {}, make("legend", {}, "Sampling"), ...NUMBERS.map((name) => this.#number(name)),
        this.#text("stop", "stop", { rows: 2, hint: "Strings that end the answer, one in a line." }),
        this.#choice("reasoning_effort", "reasoning_effort", { "": "default", ...Object.fromEntries(EFFORTS.map((each) => [each, each])) })),
      make("fieldset", {}, make("legend", {}, "Tools"),
        this.#text("tools", "Definitions, as JSON", { rows: 4, placeholder: TOOLS_EXAMPLE, check: toolsOf, className: "mono" }),
        this.#choice("tool_choice", "tool_choice", { "": "auto (default)", none: "none", required: "required" })),
      make("fieldset", {}, make("legend", {}, "Answer"),
        this.#choice("form", "Form", { "": FORMS.text, json: FORMS.json, schema: FORMS.schema }),
        this.#text("schema", "JSON schema", { rows: 4, placeholder: SCHEMA_EXAMPLE, check: schemaOf, className: "mono" })),
    );
  }

  #number(name) {
    const schema = this.fields[name] ?? {}, range = rangeOf(schema), id = `set-${name}`;
    const whole = kindOf(schema).type === "integer";
    const field = make("input", { id, type: "text", inputMode: whole ? "numeric" : "decimal", autocomplete: "off", value: this.settings.get(name),
      placeholder: defaultOf(schema), "aria-describedby": `${id}-hint` });
    const problem = make("p", { className: "problem", role: "alert", hidden: true });
    const check = () => {
      const wrong = problemOf(name, field.value.trim(), schema);
      problem.textContent = wrong ?? "";
      problem.hidden = !wrong;
      field.setAttribute("aria-invalid", String(Boolean(wrong)));
    };
    field.addEventListener("input", () => { this.settings.set(name, field.value.trim()); check(); this.onChange(); });
    check();
    const hint = [schema.description, range].filter(Boolean).join(" ");
    return make("div", { className: "setting number" }, make("label", { htmlFor: id }, name), field,
      make("p", { className: "hint", id: `${id}-hint` }, hint), problem);
  }

  #text(name, label, { rows, hint = "", placeholder = "", check = null, className = "" }) {
    const id = `set-${name}`;
    const field = make("textarea", { id, rows, placeholder, className, value: this.settings.get(name), spellcheck: !className, "aria-describedby": `${id}-hint` });
    const problem = make("p", { className: "problem", role: "alert", hidden: true });
    const test = () => {
      let wrong = "";
      try { check?.(field.value); } catch (error) { wrong = error.message; }
      problem.textContent = wrong;
      problem.hidden = !wrong;
      field.setAttribute("aria-invalid", String(wrong !== ""));
    };
    field.addEventListener("input", () => { this.settings.set(name, field.value); this.onChange(); });
    field.addEventListener("change", test);
    test();
    return make("div", { className: "setting" }, make("label", { htmlFor: id }, label), field,
      make("p", { className: "hint", id: `${id}-hint`, hidden: !hint }, hint), problem);
  }

  #choice(name, label, options) {
    const id = `set-${name}`;
    const field = make("select", { id }, ...Object.entries(options).map(([value, text]) => make("option", { value }, text)));
    field.value = this.settings.get(name);
    field.addEventListener("change", () => { this.settings.set(name, field.value); this.onChange(); });
    return make("div", { className: "setting number" }, make("label", { htmlFor: id }, label), field);
  }
}

const kindOf = (schema) => (schema.anyOf ?? [schema]).find((each) => each.type === "number" || each.type === "integer") ?? {};
const defaultOf = (schema) => schema.default === null || schema.default === undefined ? "default: none" : `default: ${schema.default}`;
const LARGE = 2 ** 31 - 1;

function rangeOf(schema) {
  const { minimum, exclusiveMinimum, maximum } = kindOf(schema);
  const low = exclusiveMinimum !== undefined ? `above ${exclusiveMinimum}` : minimum !== undefined && minimum > -LARGE ? `${minimum}` : "";
  const high = maximum !== undefined && maximum < LARGE ? `${maximum}` : "";
  if (low && high) return exclusiveMinimum !== undefined ? `${low[0].toUpperCase()}${low.slice(1)}, up to ${high}.` : `From ${low} to ${high}.`;
  return low ? `At least ${low}.` : "";
}

function problemOf(name, text, schema) {
  if (text === "") return null;
  const value = Number(text), { type, minimum, exclusiveMinimum, maximum } = kindOf(schema);
  if (!Number.isFinite(value)) return `${name} must be a number.`;
  if (type === "integer" && !Number.isInteger(value)) return `${name} must be a whole number.`;
  if (minimum !== undefined && value < minimum) return `${name} must be at least ${minimum}.`;
  if (exclusiveMinimum !== undefined && value <= exclusiveMinimum) return `${name} must be above ${exclusiveMinimum}.`;
  if (maximum !== undefined && value > maximum) return `${name} must be at most ${maximum}.`;
  return null;
}
