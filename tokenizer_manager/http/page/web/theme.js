// The colors: as the system has them, light, or dark; the choice is kept in this browser.

import { recall, remember } from "./dom.js";
import { icon } from "./icons.js";

const STORE = "engine.theme";
const NEXT = { auto: "light", light: "dark", dark: "auto" };
const LABELS = { auto: "Colors: as the system", light: "Colors: light", dark: "Colors: dark" };

export function startTheme(opener) {
  let theme = recall("localStorage", STORE);
  if (!(theme in NEXT)) theme = "auto";
  const show = () => {
    document.documentElement.dataset.theme = theme;
    opener.replaceChildren(icon(theme));
    opener.title = LABELS[theme];
    opener.setAttribute("aria-label", LABELS[theme]);
  };
  opener.addEventListener("click", () => {
    theme = NEXT[theme];
    remember("localStorage", STORE, theme);
    show();
  });
  show();
}
