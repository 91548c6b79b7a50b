// Images of a message: as a data: URL for the server, and as a small canvas for the reader. A canvas is drawn from the
// file's bytes in this page, so its policy needs no source of images but the server.

import { make } from "../dom.js";

const MAX_BYTES = 20 * 2 ** 20;
const SIZES = { small: 48, large: 320 };  // pixels of the longer side

export const isImage = (file) => file.type.startsWith("image/") && file.type !== "image/svg+xml";

export async function dataUrlOf(file) {
  if (file.size > MAX_BYTES) throw new Error("this image is too large; an image has 20 MiB at most.");
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("this file cannot be read."));
    reader.readAsDataURL(file);
  });
}

// `size`: small or large. An image that the browser cannot read stays an empty place with its name.
export function thumbnail({ name, image }, size) {
  const canvas = make("canvas", { className: `thumbnail ${size}`, width: 1, height: 1, role: "img", "aria-label": name, title: name });
  draw(canvas, image, SIZES[size]).catch(() => canvas.classList.add("unread"));
  return canvas;
}

async function draw(canvas, image, size) {
  const bytes = Uint8Array.from(atob(image.slice(image.indexOf(",") + 1)), (each) => each.charCodeAt(0));
  const bitmap = await createImageBitmap(new Blob([bytes]));
  const scale = Math.min(1, size / Math.max(bitmap.width, bitmap.height));
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
}
