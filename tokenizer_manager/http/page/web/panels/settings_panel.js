// `SettingsPanel`: the system prompt, sampling settings, tools and the form of answers, each with its default.

import { button, make } from "../dom.js";
import { EFFORTS, FORMS, NUMBERS, PRESETS, schemaOf, toolsOf } from "./settings.js";

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
    const effort = { "": "default", ...Object.fromEntries(EFFORTS.map((each) => [each, each])) };
    this.box.replaceChildren(
      make("div", { className: "row title" }, make("h2", {}, "Settings"), reset),
      this.#text("system", "System prompt", { rows: 3, hint: "Comes before the conversation." }),
      make("div", { className: "presets", role: "group", "aria-label": "Presets of the sampling" }, ...Object.keys(PRESETS).map((name) => this.#preset(name))),
      this.#group("Sampling", ["temperature", "top_p", "max_tokens", "seed"], true),
      this.#group("More sampling", ["top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "stop"], false,
        this.#text("stop", "Stop strings", { rows: 2, hint: "They end the answer; one in a line." })),
      this.#group("Reasoning", ["reasoning_effort"], false, this.#choice("reasoning_effort", "Effort", effort)),
      this.#group("Tools", ["tools", "tool_choice"], false,
        this.#text("tools", "Definitions, as JSON", { rows: 4, placeholder: TOOLS_EXAMPLE, check: toolsOf, className: "mono" }),
        this.#choice("tool_choice", "Calls", { "": "auto (default)", none: "none", required: "required" })),
      this.#group("Form of the answer", ["form", "schema"], false,
        this.#choice("form", "Form", { "": FORMS.text, json: FORMS.json, schema: FORMS.schema }),
        this.#text("schema", "JSON schema", { rows: 4, placeholder: SCHEMA_EXAMPLE, check: schemaOf, className: "mono" })),
    );
  }

  // A group that folds; it is open where a value is not the default. The numbers among `names` come first.
  #group(title, names, isOpen, ...more) {
    const open = isOpen || names.some((name) => this.settings.get(name) !== "");
    return make("details", { open }, make("summary", {}, title), ...names.filter((name) => name in NUMBERS).map((name) => this.#number(name)), ...more);
  }

  #preset(name) {
    const act = () => { this.settings.usePreset(name); this.redraw(); this.box.querySelector(".presets [aria-pressed=true]").focus(); };
    return button(name, act, { "aria-pressed": String(this.settings.hasPreset(name)) });
  }

  #showPreset() {
    for (const each of this.box.querySelectorAll(".presets button")) each.setAttribute("aria-pressed", String(this.settings.hasPreset(each.textContent)));
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
    field.addEventListener("input", () => { this.settings.set(name, field.value.trim()); check(); this.#showPreset(); this.onChange(); });
    check();
    const hint = [schema.description, range].filter(Boolean).join(" ");
    return make("div", { className: "setting number" }, make("label", { htmlFor: id, title: name }, NUMBERS[name]), field,
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
