// Puts the parts of the page together.

import { Chat } from "./chat/chat.js";
import { $, count, make, modelLabel } from "./dom.js";
import { History } from "./history/history.js";
import { Store } from "./history/store.js";
import { icon } from "./icons.js";
import { KeyDialog } from "./key_dialog.js";
import { LivePanel } from "./panels/live_panel.js";
import { Settings } from "./panels/settings.js";
import { SettingsPanel } from "./panels/settings_panel.js";
import { Server } from "./server.js";
import { Compare } from "./texts/compare.js";
import { startTheme } from "./theme.js";

const EXAMPLES = [
  ["bulb", "Explain an idea", "Explain what a key-value cache does in a language model, for somebody who can program."],
  ["code", "Write code", "Write a Python function that finds the longest common prefix of a list of strings, with a test."],
  ["sum", "Solve a problem", "A train travels 180 km in 2.5 hours. What is its average speed? Show the formula."],
  ["table", "Make a table", "Compare three sorting algorithms in a table: name, worst case, memory, stable or not."],
];

for (const node of document.querySelectorAll("[data-icon]")) node.prepend(icon(node.dataset.icon));
startTheme($("#theme"));

const server = new Server(showState), keys = new KeyDialog(server), settings = new Settings();
const model = { name: "Model", maxContext: null, seesImages: false, choice: null };
const store = new Store({
  onProblem: (text) => { $("#problem").textContent = text; $("#problem").hidden = !text; },
  onChange: () => { history.draw(); chat.refresh(); },
});
const chat = new Chat(server, keys, store, settings, model);
const history = new History(store, chat, (system) => {
  if (settings.system && settings.system !== system) return false;
  settings.set("system", system);
  settingsPanel.redraw();
  return true;
});
const panels = {
  settings: { box: $("#settings"), opener: $("#open-settings") },
  live: { box: $("#live"), opener: $("#open-live") },
};
const live = new LivePanel(panels.live.box, server, keys);
const settingsPanel = new SettingsPanel(panels.settings.box, settings, showNumChanged);

function showNumChanged() {
  const number = settings.numChanged;
  $("span", panels.settings.opener).textContent = number ? `Settings (${number})` : "Settings";
}

function showState(isUp) {
  $("#state").className = `dot ${isUp ? "up" : "down"}`;
  $("#state").setAttribute("aria-label", isUp ? "The server answers" : "The server does not answer");
  $("#state").title = isUp ? "The server answers." : "The server does not answer.";
}

// One panel is open at a time; `null` closes both.
function openPanel(name) {
  for (const [each, { box, opener }] of Object.entries(panels)) {
    const isOpen = each === name;
    box.hidden = !isOpen;
    opener.setAttribute("aria-expanded", String(isOpen));
  }
  document.body.classList.toggle("with-panel", name !== null);
  live.open(name === "live");
}

for (const [name, { box, opener }] of Object.entries(panels)) {
  opener.addEventListener("click", () => openPanel(box.hidden ? name : null));
}
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || $("#keys").open) return;
  const open = Object.values(panels).find(({ box }) => !box.hidden);
  if (chat.isAnswering) chat.stop();
  else if (open) { openPanel(null); open.opener.focus(); }
  else if (history.isOver) history.show(false);
});

$("#examples").append(...EXAMPLES.map(([name, title, text]) => make("button", { type: "button",
  onclick: () => { chat.composer.put(text); chat.composer.send(); } }, icon(name), make("strong", {}, title), make("span", {}, text))));

// A model that makes vectors or scores has no conversation, and no settings of answers.
function showCompare({ task, embedding_size: size, max_model_len: maxLen }) {
  panels.settings.opener.hidden = $("#open-history").hidden = $("#history").hidden = true;
  $("#facts").textContent = [size && `vectors of ${count(size)} numbers`, maxLen && `texts of at most ${count(maxLen)} tokens`]
    .filter(Boolean).join(" · ");
  new Compare(server, keys, { name: model.name, task, embeddingSize: size ?? 0 }).show();
}

// The model and its adapters; one of them answers.
function showModels([base, ...adapters]) {
  Object.assign(model, { name: base.id, maxContext: base.max_model_len ?? null });
  $("#model").textContent = document.title = modelLabel(model.name);
  $("#model").title = model.name;
  $("#facts").textContent = model.maxContext ? `${count(model.maxContext)} tokens of context` : "";
  const choice = $("#choice");
  choice.hidden = !adapters.length;
  choice.replaceChildren(make("option", { value: "" }, "no adapter"), ...adapters.map(({ id }) => make("option", { value: id }, id)));
  choice.addEventListener("change", () => { model.choice = choice.value || null; });
}

async function start() {
  showNumChanged();
  settingsPanel.show(null);
  chat.composer.focus();
  try {
    const { data } = await keys.withKey(() => server.get("v1/models"));
    showModels(data);
    if ((data[0].task ?? "generate") !== "generate") showCompare(data[0]);
    else {
      model.seesImages = (await server.post("api/show", {})).capabilities?.includes("vision") ?? false;
      await chat.restore();
      const old = store.takeOld();
      if (old.length) await chat.begin(old);
      await history.draw();
      settingsPanel.show(await server.get("openapi.json"));
    }
  } catch (error) {
    $("#status").textContent = error.message;
    showState(false);
  }
  server.watch();
  document.documentElement.dataset.ready = "1";
}

start();
