// `callView`: a call of a tool as a block, with a field for the result.

import { button, make } from "../dom.js";
import { codeBlock } from "./elements.js";

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text || "{}"), null, 2);
  } catch {
    return text;  // cut or still arriving
  }
}

// `result` is the message that answers the call; without one, `onResult` gets the text that the user enters.
export function callView(call, { result = null, onResult = null } = {}) {
  const name = call.function.name || "…";
  const node = make("section", { className: "call", "aria-label": `Call of ${name}` },
    make("h3", {}, "Calls ", make("code", {}, name)), codeBlock([pretty(call.function.arguments)], "json"));
  if (result) {
    node.append(make("h3", {}, "Result"), make("pre", { className: "result", tabIndex: 0 }, result.content));
  } else if (onResult) {
    const field = make("textarea", { rows: 2, placeholder: "What the tool returns", "aria-label": `Result of ${name}` });
    const form = make("form", { className: "result-form" }, field,
      make("div", { className: "row" }, button("Use the result", () => onResult(field.value), { type: "submit" })));
    form.addEventListener("submit", (event) => event.preventDefault());
    node.append(form);
  }
  return node;
}
