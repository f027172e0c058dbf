// Elements without HTML: whatever a text says, it becomes a text node.

// el("p.note", {title: "x", onclick: f}, "text", child): null and false are left out, among attributes and children.
export function el(what, attributes = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  const node = document.createElement(tag || "div");
  if (classes.length) node.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// One of the drawings at the top of index.html.
export function icon(name) {
  return svg("svg", {class: "icon", "aria-hidden": "true"}, svg("use", {href: `#${name}`}));
}

export function button(name, label, onclick, kind = "quiet") {
  return el(`button.${kind}`, {type: "button", title: label, "aria-label": label, onclick}, icon(name));
}

export const byId = (id) => document.getElementById(id);

// randomUUID is missing where a page comes over plain http from another machine
export function freshId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = el("textarea.off-screen");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

export function download(name, data) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(data, null, 1)], {type: "application/json"}));
  const link = el("a", {href: url, download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

let toasts;

// A line at the bottom for some seconds, perhaps with a button.
export function toast(text, action = null, seconds = 6) {
  toasts ??= document.body.appendChild(el(".toasts", {role: "status"}));
  const line = el(".toast", {}, text, action && el("button", {type: "button", onclick: () => {
    line.remove();
    action.run();
  }}, action.label));
  toasts.append(line);
  setTimeout(() => line.remove(), seconds * 1000);
}
