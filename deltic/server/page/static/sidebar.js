// The list of conversations.

import {button, byId, download, el, toast} from "./dom.js";
import * as store from "./store.js";

const DAY = 86400000;

// Shows the list. act: {open(id), removed(id), restored(talk)}.
export function showList(current, running, act) {
  const wanted = byId("search").value.trim().toLowerCase();
  const talks = store.all().filter((talk) => !wanted || matches(talk, wanted));
  const rows = [];
  let last = "";
  for (const talk of talks) {
    const when = ageOf(talk.updated);
    if (when !== last) rows.push(el("h2", {}, when));
    last = when;
    rows.push(row(talk, talk.id === current, running.has(talk.id), act));
  }
  if (!rows.length) rows.push(el("p.note", {}, wanted ? "Nothing found." : "Conversations stay in this browser."));
  byId("list").replaceChildren(...rows);
}

function matches(talk, wanted) {
  return talk.title.toLowerCase().includes(wanted)
    || Object.values(talk.nodes).some((node) => node.content.toLowerCase().includes(wanted));
}

function row(talk, current, running, act) {
  const open = el("button.open", {type: "button", "aria-current": current && "true", onclick: () => act.open(talk.id)},
    talk.title || "New chat");
  return el(".talk", {class: `talk${current ? " current" : ""}${running ? " running" : ""}`, "data-id": talk.id}, open,
    button("i-edit", "Rename", () => rename(talk, open, act)),
    button("i-down", "Export", () => download(`${fileName(talk.title)}.json`, talk)),
    button("i-bin", "Delete", async () => {
      await store.remove(talk.id);
      act.removed(talk.id);
      toast(`“${talk.title || "New chat"}” is deleted.`, {label: "Undo", run: async () => {
        await store.put(talk);
        act.restored(talk);
      }});
    }));
}

function rename(talk, open, act) {
  const field = el("input", {"aria-label": "Title", maxlength: 100});
  field.value = talk.title;
  const end = async (keep) => {
    field.onblur = null;
    if (keep && field.value.trim()) {
      talk.title = field.value.trim();
      await store.put(talk);
    }
    act.renamed();
  };
  field.onblur = () => end(true);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") end(true);
    else if (event.key === "Escape") end(false);
    event.stopPropagation();
  });
  open.replaceWith(field);
  field.focus();
}

function fileName(title) {
  return title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 50) || "chat";
}

function ageOf(time) {
  const days = Math.floor((new Date().setHours(0, 0, 0, 0) - new Date(time).setHours(0, 0, 0, 0)) / DAY + 0.5);
  if (days <= 0) return "Today";
  if (days === 1) return "Yesterday";
  return days < 7 ? "Last 7 days" : days < 30 ? "Last 30 days" : "Earlier";
}
