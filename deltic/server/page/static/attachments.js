// What goes with the next message: pictures, scaled down to what models look at; text files, as their text; PDFs, which the
// server reads.

import {byId, button, el, icon, toast} from "./dom.js";

const LONGEST = 2048; // pixels of a side
const MOST = 16;
const MOST_TEXT = 1 << 20; // bytes
const MOST_PDF = 16 << 20;

let chosen = []; // {image} or {file: {name, text}} or {file: {name, data}}

export const attachments = () => ({images: chosen.flatMap((one) => one.image ?? []),
  files: chosen.flatMap((one) => one.file ?? [])});

export function clearAttachments() {
  chosen = [];
  show();
}

// Takes files by every way there is. changed(): called when there are more, or fewer.
export function bindAttachments(changed) {
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
    const files = filesOf(event.clipboardData);
    if (files.length) event.preventDefault();
    take(files);
  });
  addEventListener("dragover", (event) => event.dataTransfer?.types.includes("Files") && event.preventDefault());
  addEventListener("drop", (event) => {
    const files = filesOf(event.dataTransfer);
    if (event.dataTransfer?.types.includes("Files")) event.preventDefault();
    take(files);
  });
  byId("pictures").addEventListener("removed", changed);
}

const filesOf = (data) => [...(data?.files ?? [])];

async function addAll(files) {
  for (const file of files) {
    if (chosen.length >= MOST) {
      toast(`A message takes ${MOST} files at most.`);
      break;
    }
    try {
      chosen = [...chosen, await read(file)];
    } catch (problem) {
      toast(`${file.name || "That"} ${problem.said ?? "cannot be read by this browser."}`);
    }
  }
  show();
}

const refused = (said) => Object.assign(new Error(said), {said});

async function read(file) {
  if (file.type.startsWith("image/")) return {image: await scaled(file)};
  const pdf = file.type === "application/pdf" || /\.pdf$/i.test(file.name);
  if (file.size > (pdf ? MOST_PDF : MOST_TEXT)) throw refused(`has more than ${(pdf ? MOST_PDF : MOST_TEXT) >> 20} MiB.`);
  if (pdf) return {file: {name: file.name, data: await dataUrl(file)}};
  let text;
  try {
    text = new TextDecoder("utf-8", {fatal: true}).decode(await file.arrayBuffer());
  } catch {
    throw refused("is neither a picture, nor text, nor a PDF.");
  }
  if (text.includes("\0")) throw refused("is neither a picture, nor text, nor a PDF.");
  return {file: {name: file.name, text}};
}

function dataUrl(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(`data:application/pdf;base64,${reader.result.split(",")[1] ?? ""}`);
    reader.onerror = failed;
    reader.readAsDataURL(file);
  });
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
  byId("pictures").replaceChildren(...chosen.map((one, index) => el("figure", {},
    one.image ? el("img", {src: one.image, alt: `Picture ${index + 1}`})
      : el(".file", {}, icon("i-file"), one.file.name),
    button("i-close", one.image ? "Remove the picture" : "Remove the file", () => {
      chosen = chosen.filter((other) => other !== one);
      show();
      byId("pictures").dispatchEvent(new Event("removed"));
    }))));
  byId("pictures").hidden = !chosen.length;
}
