// The branches of a conversation as a tree: a row for each run of messages between two forks.

import {byId, el} from "./dom.js";
import {focusOn} from "./tokens.js";

const KEPT = "deltic.branches";
const LABEL = 80; // characters
const DEEPEST = 12; // levels that are indented

const closed = new Set(); // ids of the first messages of rows whose branches are hidden

// The runs below a message: [{nodes, branches}].
export function runs(talk, parent = null) {
  const below = new Map();
  for (const node of Object.values(talk.nodes).sort((a, b) => a.at - b.at)) {
    below.set(node.parent, [...(below.get(node.parent) ?? []), node]);
  }
  const run = (first) => {
    const nodes = [first];
    for (let next = below.get(first.id); next?.length === 1; next = below.get(next[0].id)) nodes.push(next[0]);
    return {nodes, branches: (below.get(nodes.at(-1).id) ?? []).map(run)};
  };
  return (below.get(parent) ?? []).map(run);
}

// Shows the tree where there is more than one branch, or where the shown one goes on. choose(node): shows a branch.
export function showTree(talk, running, choose) {
  const tree = byId("tree");
  const focused = tree.contains(document.activeElement);
  const found = runs(talk);
  const rows = found.flatMap((run) => rowsOf(run, 1, talk, running, choose));
  const ends = countEnds(found);
  byId("branches").hidden = ends < 2 && found.every(({nodes}) => nodes.at(-1).id === talk.leaf);
  byId("branch-count").textContent = `${ends} ${ends === 1 ? "branch" : "branches"}`;
  tree.replaceChildren(...rows);
  const current = rows.findLast((row) => row.classList.contains("path")) ?? rows[0];
  if (current) current.tabIndex = 0;
  if (focused) current?.focus();
  current?.scrollIntoView({block: "nearest"});
}

const countEnds = (found) => found.reduce((sum, {branches}) => sum + (branches.length ? countEnds(branches) : 1), 0);

function rowsOf(run, level, talk, running, choose) {
  const [first] = run.nodes;
  const open = !closed.has(first.id);
  const on = onPath(talk, first);
  const last = run.nodes.some((node) => node.id === talk.leaf);
  const again = () => showTree(talk, running, choose);
  const row = el(".branch", {class: `branch${on ? " path" : ""}${run.nodes.includes(running) ? " running" : ""}`,
    role: "treeitem", tabindex: -1, "aria-level": level, "aria-selected": String(last), "data-id": first.id,
    "aria-expanded": run.branches.length ? String(open) : null, onclick: () => choose(first)},
    el("span.twist", {"aria-hidden": "true", onclick: (event) => {
      if (!run.branches.length) return;
      event.stopPropagation();
      fold(first.id, open);
      again();
    }}, run.branches.length ? "›" : "·"),
    el("span.label", {}, labelOf(first)), el("span.count", {}, String(run.nodes.length)));
  row.style.setProperty("--level", Math.min(level, DEEPEST));
  row.fold = (hide) => {
    fold(first.id, hide);
    again();
    focusOn(byId("tree"), byId("tree").querySelector(`[data-id="${first.id}"]`));
  };
  return [row, ...(open ? run.branches.flatMap((branch) => rowsOf(branch, level + 1, talk, running, choose)) : [])];
}

function fold(id, hide) {
  if (hide) closed.add(id);
  else closed.delete(id);
}

function onPath(talk, wanted) {
  for (let node = talk.nodes[talk.leaf]; node; node = talk.nodes[node.parent]) if (node === wanted) return true;
  return false;
}

// The beginning of a message; of an answer that continues another one, from the token on that was chosen.
function labelOf(node) {
  const attached = node.files ? "A file" : node.images ? "A picture" : "…";
  const whole = node.begun ? `… ${node.tokens.slice(node.begun - 1).map(([, text]) => text).join("")}`
    : node.content || node.reasoning || node.calls?.[0]?.name || attached;
  const text = whole.slice(0, 4 * LABEL).replace(/\s+/g, " ").trim();
  return `${node.role === "tool" ? `${node.name}: ` : ""}${text.length > LABEL ? `${text.slice(0, LABEL)}…` : text}`;
}

function pressed(event) {
  const row = event.target.closest(".branch");
  if (!row || event.altKey || event.ctrlKey || event.metaKey) return;
  const rows = [...byId("tree").children];
  const at = rows.indexOf(row);
  const level = (other) => Number(other?.getAttribute("aria-level") ?? 0);
  const parent = rows.slice(0, at).findLast((other) => level(other) < level(row));
  const expanded = row.getAttribute("aria-expanded");
  const moves = {ArrowDown: rows[at + 1], ArrowUp: rows[at - 1], Home: rows[0], End: rows.at(-1),
    ArrowRight: level(rows[at + 1]) > level(row) ? rows[at + 1] : null, ArrowLeft: parent};
  if (event.key === "Enter" || event.key === " ") row.click();
  else if (event.key === "ArrowRight" && expanded === "false") row.fold(false);
  else if (event.key === "ArrowLeft" && expanded === "true") row.fold(true);
  else if (Object.hasOwn(moves, event.key)) focusOn(byId("tree"), moves[event.key] ?? row);
  else return;
  event.preventDefault();
  event.stopPropagation();
}

// Opens the tree, with the keys on the branch that is shown.
export function toTree() {
  if (byId("branches").hidden) return;
  byId("branches").open = true;
  byId("tree").querySelector("[tabindex='0']")?.focus();
}

// open: unless the browser has kept something else.
export function bindTree(open) {
  const box = byId("branches");
  box.open = (localStorage.getItem(KEPT) ?? (open ? "open" : "closed")) === "open";
  box.addEventListener("toggle", () => localStorage.setItem(KEPT, box.open ? "open" : "closed"));
  byId("tree").addEventListener("keydown", pressed);
}
