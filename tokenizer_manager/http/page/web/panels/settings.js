// `Settings`: what the reader set for the answers, kept in this browser; the body of a request is made of it.

import { recall, remember } from "../dom.js";

const STORE = "engine.settings";

// The fields that the page offers. Kind, default, range and description come from the API's own document.
export const NUMBERS = { temperature: "Temperature", top_p: "Top p", top_k: "Top k", min_p: "Min p", max_tokens: "Longest answer", seed: "Seed",
  repetition_penalty: "Repetition penalty", frequency_penalty: "Frequency penalty", presence_penalty: "Presence penalty" };
// Values of the first four; what a preset does not name is the model's default.
export const PRESETS = {
  "Model's defaults": {},
  Precise: { temperature: "0" },
  Balanced: { temperature: "0.7", top_p: "0.9" },
  Creative: { temperature: "1.1", top_p: "0.95", min_p: "0.05" },
};
const OF_PRESETS = ["temperature", "top_p", "top_k", "min_p"];
export const FORMS = { text: "Text", json: "A JSON object", schema: "JSON of a schema" };
export const EFFORTS = ["none", "minimal", "low", "medium", "high"];

export class Settings {
  values = {};

  constructor() {
    try {
      this.values = JSON.parse(recall("localStorage", STORE) ?? "{}") ?? {};
    } catch {
      // damaged: the defaults
    }
  }

  get system() { return (this.values.system ?? "").trim(); }
  get(name) { return this.values[name] ?? ""; }

  set(name, text) {
    if (text === "") delete this.values[name];
    else this.values[name] = text;
    remember("localStorage", STORE, JSON.stringify(this.values));
  }

  usePreset(name) { for (const field of OF_PRESETS) this.set(field, PRESETS[name][field] ?? ""); }
  hasPreset(name) { return OF_PRESETS.every((field) => this.get(field) === (PRESETS[name][field] ?? "")); }

  reset() {
    this.values = {};
    remember("localStorage", STORE, null);
  }

  get numChanged() { return Object.keys(this.values).length; }

  // The fields of a request that are not at their defaults.
  body() {
    const body = {};
    for (const name of Object.keys(NUMBERS)) {
      if (this.get(name) === "") continue;
      const value = Number(this.get(name));
      if (!Number.isFinite(value)) throw new Error(`${name} is ${JSON.stringify(this.get(name))}, but it must be a number; change it in the settings.`);
      body[name] = value;
    }
    const stop = this.get("stop").split("\n").filter((line) => line !== "");
    if (stop.length) body.stop = stop;
    if (this.get("reasoning_effort")) body.reasoning_effort = this.get("reasoning_effort");
    const tools = toolsOf(this.get("tools"));
    if (tools.length) body.tools = tools;
    if (tools.length && this.get("tool_choice")) body.tool_choice = this.get("tool_choice");
    if (this.get("form") === "json") body.response_format = { type: "json_object" };
    if (this.get("form") === "schema") {
      const schema = schemaOf(this.get("schema"));
      if (schema === null) throw new Error("The answer shall be JSON of a schema, but there is no schema; enter one in the settings.");
      body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
    }
    return body;
  }
}

// The definitions of tools: a list or one, in OpenAI's form or the function alone.
export function toolsOf(text) {
  const parsed = parse(text, "The tools in the settings are");
  if (parsed === null) return [];
  return (Array.isArray(parsed) ? parsed : [parsed]).map((each) => {
    if (each?.type === "function" && each.function) return each;
    if (each?.name) return { type: "function", function: each };
    throw new Error("The tools must be JSON objects with a name and parameters, or OpenAI's form with type and function; mend them in the settings.");
  });
}

export const schemaOf = (text) => parse(text, "The JSON schema in the settings is");

// The value of a text; null if it is empty. `subject` begins the error.
function parse(text, subject) {
  if (!text.trim()) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${subject} not JSON: ${error.message}.`);
  }
}
