// Puts the parts of the page together.

import { $, count } from "./dom.js";
import { Chat } from "./chat/chat.js";
import { Conversation } from "./chat/conversation.js";
import { KeyDialog } from "./key_dialog.js";
import { LivePanel } from "./panels/live_panel.js";
import { Settings } from "./panels/settings.js";
import { SettingsPanel } from "./panels/settings_panel.js";
import { Server } from "./server.js";
import { Compare } from "./texts/compare.js";

const server = new Server(), keys = new KeyDialog(server), settings = new Settings();
const model = { name: "Model", maxContext: null };
const chat = new Chat(server, keys, new Conversation(), settings, model);
const panels = {
  settings: { box: $("#settings"), opener: $("#open-settings") },
  live: { box: $("#live"), opener: $("#open-live") },
};
const live = new LivePanel(panels.live.box, server, keys);
const settingsPanel = new SettingsPanel(panels.settings.box, settings, showNumChanged);

function showNumChanged() {
  const number = settings.numChanged;
  panels.settings.opener.textContent = number ? `Settings (${number})` : "Settings";
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
});

// A model that makes vectors or scores has no conversation, and no settings of answers.
function showCompare({ task, embedding_size: size, max_model_len: maxLen }) {
  panels.settings.opener.hidden = true;
  $("#facts").textContent = [size && `vectors of ${count(size)} numbers`, maxLen && `texts of at most ${count(maxLen)} tokens`]
    .filter(Boolean).join(" · ");
  new Compare(server, keys, { name: model.name, task, embeddingSize: size ?? 0 }).show();
}

async function start() {
  showNumChanged();
  settingsPanel.show(null);
  $("#question").focus();
  try {
    const { data } = await keys.withKey(() => server.get("v1/models"));
    Object.assign(model, { name: data[0].id, maxContext: data[0].max_model_len ?? null });
    $("#model").textContent = document.title = model.name;
    $("#facts").textContent = model.maxContext ? `${count(model.maxContext)} tokens of context` : "";
    $("#state").classList.add("up");
    if ((data[0].task ?? "generate") !== "generate") showCompare(data[0]);
    else {
      for (const heading of document.querySelectorAll(".assistant h2")) heading.textContent = model.name;
      settingsPanel.show(await server.get("openapi.json"));
    }
  } catch (error) {
    $("#status").textContent = error.message;
    $("#state").classList.add("down");
  }
  document.documentElement.dataset.ready = "1";
}

start();
