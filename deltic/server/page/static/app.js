// The page: what is shown, and what its buttons and keys do.

import {Problem, models} from "./api.js";
import {answer, running, settle, stop} from "./answer.js";
import {add, choose, fresh, path, versions} from "./conversation.js";
import {byId, download, el, toast} from "./dom.js";
import {panelIsOpen, togglePanel} from "./engine.js";
import {messageView} from "./message.js";
import {attachments, bindAttachments, clearAttachments} from "./attachments.js";
import {askForAlternatives, bindSettings, chooseModel, openSettings, prompted, settings} from "./settings.js";
import {showList} from "./sidebar.js";
import * as store from "./store.js";
import {inspected} from "./tokens.js";
import {bindTree, showTree, toTree} from "./tree.js";

const NARROW = matchMedia("(max-width: 760px)");
const TOUCH = matchMedia("(pointer: coarse)");
const NEAR = 80; // pixels from the end within which the page follows an answer
// The embedded model answers these right, too (tests/test_page.py asks it).
const IDEAS = ["What is the capital of France?", "What is 7 plus 5?", "Which month comes after March?"];

let talk = fresh();
let views = new Map();
let following = true;

const scroller = byId("scroller");
const thread = byId("thread");
const input = byId("input");

// Showing

function showTalk() {
  const nodes = path(talk);
  views = new Map(nodes.map((node, index) => [node.id, viewOf(node, index === nodes.length - 1)]));
  thread.replaceChildren(...[...views.values()].map((view) => view.root));
  for (const node of nodes) views.get(node.id).show(isRunning(node));
  byId("welcome").hidden = nodes.length > 0;
  document.title = talk.title ? `${talk.title} · deltic` : "deltic";
  byId("title").textContent = talk.title;
  following = true;
  follow();
  showState();
}

function viewOf(node, last) {
  const siblings = versions(talk, node);
  return messageView(node, {at: siblings.indexOf(node), of: siblings.length}, {
    edit: (old, content) => send(content, old.parent, {images: old.images, files: old.files}),
    regenerate: (old) => start(old.parent, old.error ? begunWith(old) : {}),
    choose: (old, index) => showBranch(versions(talk, old)[index]),
    results: last ? sendResults : null,
    branch: last ? null : continueFrom,
    inspect,
    alternative: continueWith,
  });
}

// Shows the branch of a message, with what came after it last.
function showBranch(node) {
  choose(talk, node);
  store.put(talk);
  showTalk();
}

const isRunning = (node) => running.get(talk.id)?.node === node;

function showState() {
  const busy = running.has(talk.id);
  document.body.classList.toggle("busy", busy);
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  byId("send").disabled = nothing();
  showTree(talk, running.get(talk.id)?.node, showBranch);
  showList(talk.id, running, {open, removed, restored: (old) => open(old.id), renamed: showTalk});
}

function grown(changed, node) {
  if (changed === talk && views.has(node.id)) {
    views.get(node.id).show(isRunning(node));
    follow();
  }
  if (!running.has(changed.id)) {
    showState();
    if (node.status === 401) askForKey();
  }
}

function follow() {
  if (following) scroller.scrollTop = scroller.scrollHeight;
  byId("to-end").hidden = following;
}

// Doing

async function send(text, parent = talk.leaf, {images, files} = {}) {
  if (running.has(talk.id)) return;
  const node = add(talk, parent, {role: "user", content: text.trim(), ...(images?.length ? {images} : {}),
    ...(files?.length ? {files} : {})});
  await start(node.id);
}

// more: what an answer has that continues tokens.
async function start(parent, more = {}) {
  if (running.has(talk.id)) return;
  const node = add(talk, parent, {role: "assistant", content: "", reasoning: "", calls: [], ...more});
  if (more.begun) inspected.add(node.id);
  const work = answer(talk, node, grown);
  store.put(talk);
  showTalk();
  await work;
}

function sendResults(node, results) {
  let parent = node.id;
  node.calls.forEach((call, index) => {
    parent = add(talk, parent, {role: "tool", call: call.id, name: call.name, content: results[index]}).id;
  });
  start(parent);
}

const beginning = (node, tokens) => ({tokens, begun: tokens.length, asked: node.asked});
const begunWith = (node) => (node.begun ? beginning(node, node.tokens.slice(0, node.begun)) : {});

// The next message follows this answer, in a branch of its own.
function continueFrom(node) {
  talk.leaf = node.id;
  store.put(talk);
  showTalk();
  input.focus();
}

// Another answer with the same tokens up to one, and this one in its place.
function continueWith(node, index, [id, text, logprob]) {
  const {model} = node.asked;
  if (running.has(talk.id)) toast("Wait for the answer, or stop it.");
  else if (model !== prompted().model) toast(`These tokens are of the model ${model}: choose it first.`);
  else {
    const chosen = [id, text, logprob, node.tokens[index][3]];
    start(node.parent, beginning(node, [...node.tokens.slice(0, index), chosen]));
  }
}

// The answer once more, with tokens, as all later ones.
function inspect(node) {
  if (running.has(talk.id)) return;
  askForAlternatives();
  start(node.parent);
  inspected.add(talk.leaf);
  showTalk();
}

function open(id) {
  talk = store.find(id) ?? fresh();
  location.hash = store.find(id) ? id : "";
  if (NARROW.matches) showSidebar(false);
  showTalk();
}

function newTalk() {
  talk = fresh();
  history.replaceState(null, "", location.pathname);
  if (NARROW.matches) showSidebar(false);
  showTalk();
  input.focus();
}

function removed(id) {
  stop(id);
  if (id === talk.id) newTalk();
  else showState();
}

function submit() {
  const [text, attached] = [input.value, attachments()];
  if (nothing() || running.has(talk.id)) return;
  input.value = "";
  clearAttachments();
  fit();
  if (!talk.leaf) history.replaceState(null, "", `#${talk.id}`);
  send(text, talk.leaf, attached);
}

const nothing = () => !input.value.trim() && !attachments().images.length && !attachments().files.length;

function fit() {
  input.style.height = "auto";
  input.style.height = `${Math.min(input.scrollHeight, innerHeight * 0.4)}px`;
  byId("send").disabled = nothing();
}

function editLast() {
  const last = path(talk).findLast((node) => node.role === "user");
  if (last && !running.has(talk.id)) views.get(last.id).edit();
}

function showSidebar(shown = document.body.classList.contains("no-sidebar")) {
  document.body.classList.toggle("no-sidebar", !shown);
  byId("menu").setAttribute("aria-expanded", String(shown));
}

function nextTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("deltic.theme", root.dataset.theme);
}

function askForKey() {
  openSettings();
  byId("settings-problem").textContent = "The server asks for an API key: it is kept in this browser only.";
  byId("settings-form").elements.key.focus();
}

async function greet() {
  try {
    const found = (await models()).filter((model) => "loaded" in model); // no models of vectors
    const chosen = found.find((model) => model.id === settings.model) ?? found[0];
    byId("model").replaceChildren(...found.map((model) => el("option", {selected: model === chosen}, model.id)));
    showModel(found, chosen);
    byId("model").onchange = () => showModel(found, found.find((model) => model.id === byId("model").value));
  } catch (error) {
    byId("model").replaceChildren(el("option", {}, "no model"));
    if (error instanceof Problem && error.status === 401) askForKey();
    else toast(error.message);
  }
}

function showModel(found, chosen) {
  chooseModel(chosen.id, found.length > 1);
  byId("model").disabled = found.length < 2;
  byId("model").title = chosen.max_model_len ? `context of ${chosen.max_model_len.toLocaleString("en")} tokens`
    : "loaded with the first message";
  byId("model-note").textContent = byId("model").title;
}

// Keys and buttons

const KEYS = {KeyN: newTalk, KeyE: () => togglePanel(), KeyT: nextTheme, KeyB: () => showSidebar(), KeyR: toTree,
  Comma: openSettings};

function pressed(event) {
  const writing = event.target.closest?.("input, textarea, select");
  if (event.altKey && !event.ctrlKey && !event.metaKey && Object.hasOwn(KEYS, event.code)) KEYS[event.code]();
  else if (event.key === "Escape" && running.has(talk.id)) stop(talk.id);
  else if (event.key === "?" && !writing) byId("help").showModal();
  else if (event.key === "/" && !writing) input.focus();
  else return;
  event.preventDefault();
}

function typed(event) {
  if (event.isComposing) return;
  if (event.key === "ArrowUp" && !input.value) editLast();
  else if (event.key === "Enter" && !event.shiftKey && !TOUCH.matches) submit();
  else return;
  event.preventDefault();
}

function bind() {
  const clicks = {new: newTalk, menu: () => showSidebar(), "close-menu": () => showSidebar(false), theme: nextTheme,
    "engine-button": () => togglePanel(), "close-engine": () => togglePanel(false), "settings-button": openSettings,
    "help-button": () => byId("help").showModal(), stop: () => stop(talk.id), send: submit,
    export: () => download("deltic-conversations.json", store.all()), clear: forgetAll,
    "to-end": () => { following = true; follow(); }};
  for (const [id, action] of Object.entries(clicks)) byId(id).addEventListener("click", action);
  document.addEventListener("keydown", pressed);
  input.addEventListener("keydown", typed);
  input.addEventListener("input", fit);
  byId("search").addEventListener("input", showState);
  NARROW.addEventListener("change", () => showSidebar(!NARROW.matches));
  byId("shade").addEventListener("click", () => showSidebar(false));
  scroller.addEventListener("scroll", () => {
    following = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR;
    byId("to-end").hidden = following;
  });
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog || event.target.closest("[data-close]")) dialog.close();
    });
  }
  addEventListener("hashchange", () => location.hash.slice(1) !== talk.id && open(location.hash.slice(1)));
  bindSettings((key) => key && greet());
  bindAttachments(fit);
}

async function forgetAll() {
  const old = store.all();
  for (const id of [...running.keys()]) stop(id);
  await store.clear();
  byId("settings").close();
  newTalk();
  toast(`${old.length} conversations are deleted.`, {label: "Undo", run: async () => {
    for (const one of old) await store.put(one);
    showState();
  }});
}

bind();
byId("ideas").append(...IDEAS.map((text) => el("button.idea", {type: "button", onclick: () => send(text)}, text)));
showSidebar(!NARROW.matches);
bindTree(!NARROW.matches);
settle(await store.load());
if (store.find(location.hash.slice(1))) open(location.hash.slice(1));
else showTalk();
if (!TOUCH.matches) input.focus();
await greet();
document.body.dataset.ready = panelIsOpen() ? "panel" : "chat";
