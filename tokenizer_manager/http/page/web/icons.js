// `icon`: line drawings on a grid of 24 by 24, in the color of the text beside them.

const SVG = "http://www.w3.org/2000/svg";
const LINES = {
  menu: "M4 6h16M4 12h16M4 18h16",
  plus: "M12 5v14M5 12h14",
  search: "M10.5 4a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13zM15.5 15.5 20 20",
  pencil: "M5 19l1-4L16 5l3 3L9 18zM14 7l3 3",
  trash: "M5 7h14M10 4h4M7 7l1 13h8l1-13M10.5 10.5v6M13.5 10.5v6",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 13l4 4L19 7",
  again: "M19 12a7 7 0 1 1-2.2-5.1M19 4v4h-4",
  play: "M8 5l11 7-11 7z",
  stop: "M7 7h10v10H7z",
  send: "M12 19V5M6 11l6-6 6 6",
  clip: "M18.5 11.5 12 18a4 4 0 0 1-5.7-5.7l7.2-7.2a2.7 2.7 0 0 1 3.8 3.8l-7 7a1.3 1.3 0 0 1-1.9-1.9l6.2-6.2",
  down: "M12 4v11M7 11l5 5 5-5M5 20h14",
  up: "M12 16V5M7 9l5-5 5 5M5 20h14",
  left: "M14.5 6l-6 6 6 6",
  right: "M9.5 6l6 6-6 6",
  sliders: "M4 7h10M18 7h2M4 17h2M10 17h10M14 5v4M10 15v4",
  pulse: "M3 12h4l3-7 4 14 3-7h4",
  book: "M5 5h6a2 2 0 0 1 2 2v12a2 2 0 0 0-2-2H5zM19 5h-4a2 2 0 0 0-2 2M13 19a2 2 0 0 1 2-2h4V5",
  light: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 3v2M12 19v2M3 12h2M19 12h2M5.6 5.6 7 7M17 17l1.4 1.4M18.4 5.6 17 7M7 17l-1.4 1.4",
  dark: "M19 14.5A8 8 0 0 1 9.500 5a7.500 7.500 0 1 0 9.500 9.500z",
  auto: "M12 4a8 8 0 1 0 0 16 8 8 0 0 0 0-16zM12 4v16M12 8h5M12 12h8M12 16h5",
  file: "M7 3h7l4 4v14H7zM14 3v4h4",
  close: "M6 6l12 12M18 6 6 18",
  bulb: "M9 17h6M10 20h4M9 17c0-3-3-4-3-8a6 6 0 0 1 12 0c0 4-3 5-3 8",
  code: "M9 8l-5 4 5 4M15 8l5 4-5 4",
  sum: "M17 6V5H7l6 7-6 7h10v-1",
  table: "M4 5h16v14H4zM4 10h16M10 5v14",
};

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg"), path = document.createElementNS(SVG, "path");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", LINES[name]);
  svg.append(path);
  return svg;
}
