// Pictures that go with the next message: chosen, dropped or pasted, scaled down to what models look at.

import {byId, button, el, toast} from "./dom.js";

const LONGEST = 2048; // pixels of a side
const MOST = 16;

let chosen = [];

export const pictures = () => chosen;

export function clearPictures() {
  chosen = [];
  show();
}

// Takes pictures by every way there is. changed(): called when there are more, or fewer.
export function bindPictures(changed) {
  const file = byId("picture-file");
  const take = async (files) => {
    await addAll(files);
    changed();
  };
  byId("attach").addEventListener("click", () => file.click());
  file.addEventListener("change", async () => {
    await take([...file.files]);
    file.value = "";
  });
  byId("input").addEventListener("paste", (event) => {
    const files = imagesOf(event.clipboardData);
    if (files.length) event.preventDefault();
    take(files);
  });
  addEventListener("dragover", (event) => event.dataTransfer?.types.includes("Files") && event.preventDefault());
  addEventListener("drop", (event) => {
    const files = imagesOf(event.dataTransfer);
    if (event.dataTransfer?.types.includes("Files")) event.preventDefault();
    take(files);
  });
  byId("pictures").addEventListener("removed", changed);
}

const imagesOf = (data) => [...(data?.files ?? [])].filter((file) => file.type.startsWith("image/"));

async function addAll(files) {
  for (const file of files) {
    if (chosen.length >= MOST) {
      toast(`A message takes ${MOST} pictures at most.`);
      break;
    }
    try {
      chosen = [...chosen, await scaled(file)];
    } catch {
      toast(`${file.name || "That"} is no picture that this browser can read.`);
    }
  }
  show();
}

// As a data URL. Through a canvas: turned as it should be, and without what a camera wrote beside it.
async function scaled(file) {
  const image = await createImageBitmap(file);
  const factor = Math.min(1, LONGEST / Math.max(image.width, image.height));
  const canvas = el("canvas", {width: Math.max(1, Math.round(image.width * factor)),
    height: Math.max(1, Math.round(image.height * factor))});
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  image.close();
  return file.type === "image/jpeg" ? canvas.toDataURL("image/jpeg", 0.92) : canvas.toDataURL("image/png");
}

function show() {
  byId("pictures").replaceChildren(...chosen.map((url, index) => el("figure", {},
    el("img", {src: url, alt: `Picture ${index + 1}`}), button("i-close", "Remove the picture", () => {
      chosen = chosen.filter((other) => other !== url);
      show();
      byId("pictures").dispatchEvent(new Event("removed"));
    }))));
  byId("pictures").hidden = !chosen.length;
}
