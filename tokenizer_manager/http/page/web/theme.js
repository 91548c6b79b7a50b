// The colors: as the system has them, light, or dark; the choice is kept in this browser.

import { icon } from "./icons.js";

const STORE = "engine.theme";
const NEXT = { auto: "light", light: "dark", dark: "auto" };
const LABELS = { auto: "Colors: as the system", light: "Colors: light", dark: "Colors: dark" };

function read() {
  try { return localStorage.getItem(STORE) ?? "auto"; } catch { return "auto"; }
}

export function startTheme(opener) {
  let theme = read() in NEXT ? read() : "auto";
  const show = () => {
    document.documentElement.dataset.theme = theme;
    opener.replaceChildren(icon(theme));
    opener.title = LABELS[theme];
    opener.setAttribute("aria-label", LABELS[theme]);
  };
  opener.addEventListener("click", () => {
    theme = NEXT[theme];
    try { localStorage.setItem(STORE, theme); } catch { /* not allowed: it holds as long as the page */ }
    show();
  });
  show();
}
