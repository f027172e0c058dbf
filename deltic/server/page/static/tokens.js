// The tokens of an answer, and the ones that the model could have written in their place.
// A token is [id, text, logprob, alternatives]; alternatives are the most probable tokens: [[id, text, logprob], ...].

import {el} from "./dom.js";

const MOST = 8192; // tokens of an answer that are kept
const ASKED = {logprobs: true, top_logprobs: 5, return_tokens_as_token_ids: true};
const PREFIX = "token_id:";
const LOW = 0.5; // probabilities below which a token is marked
const RARE = 0.1;

export const inspected = new Set(); // ids of the answers whose tokens are shown

// Adds what a request needs to get tokens, and those that the answer begins with.
export function askForTokens(body, node) {
  return {...body, ...ASKED, ...(node.tokens ? {prefix_token_ids: node.tokens.map(([id]) => id)} : {})};
}

// Keeps the tokens of a chunk, as the API returns them.
export function keepTokens(node, scored) {
  node.tokens ??= [];
  for (const one of scored.slice(0, Math.max(0, MOST - node.tokens.length))) {
    node.tokens.push([...entry(one), (one.top_logprobs ?? []).map(entry)]);
  }
}

const entry = ({token, logprob, bytes}) => [Number(token.slice(PREFIX.length)), textOf(bytes), logprob];

// A token may end within a character: then its bytes are shown.
function textOf(bytes) {
  try {
    return new TextDecoder("utf-8", {fatal: true, ignoreBOM: true}).decode(new Uint8Array(bytes));
  } catch {
    return bytes.map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
  }
}

// The view of an answer's tokens. act: {alternative(node, index, token), inspect(node)}.
export class TokenView {
  constructor(node, act) {
    this.node = node;
    this.act = act;
    this.thought = 0;
    this.root = el(".tokens", {role: "group", "aria-label": "Tokens of the answer"});
    this.root.addEventListener("click", (event) => this.#open(event.target.closest(".token")));
    this.root.addEventListener("keydown", (event) => this.#pressed(event));
  }

  // Adds the tokens that are new.
  show(running) {
    const tokens = this.node.tokens ?? [];
    const thought = tokens.findLastIndex(([, text]) => text === "</think>");
    for (let at = this.root.children.length; at < tokens.length; at++) this.root.append(this.#token(tokens[at], at));
    if (!tokens.length && !running) this.root.replaceChildren(this.#missing());
    for (; this.thought <= thought; this.thought++) this.root.children[this.thought].classList.add("thinking");
  }

  #token([, text, logprob], at) {
    const chance = Math.exp(logprob);
    const mark = chance < RARE ? ".rare" : chance < LOW ? ".low" : "";
    const begun = at === this.node.begun - 1 ? ".chosen" : "";
    return el(`span.token${mark}${begun}`, {role: "button", tabindex: at ? -1 : 0, "aria-haspopup": "dialog",
      title: percent(logprob)}, text.replaceAll("\n", "⏎\n") || "∅");
  }

  #missing() {
    return el("p.note", {}, "This answer came without alternatives. ", el("button.quiet.small", {type: "button",
      onclick: () => this.act.inspect(this.node)}, "Ask for them from now on, and answer again"));
  }

  #pressed(event) {
    const token = event.target.closest(".token");
    if (!token || event.altKey || event.ctrlKey || event.metaKey) return;
    const all = this.root.children;
    const next = {ArrowRight: token.nextElementSibling, ArrowDown: token.nextElementSibling, Home: all[0],
      ArrowLeft: token.previousElementSibling, ArrowUp: token.previousElementSibling, End: all[all.length - 1]};
    if (Object.hasOwn(next, event.key)) focusOn(this.root, next[event.key] ?? token);
    else if (event.key === "Enter" || event.key === " ") this.#open(token);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  #open(token) {
    if (!token) return;
    focusOn(this.root, token);
    const at = [...this.root.children].indexOf(token);
    openMenu(token, this.node.tokens[at], (chosen) => this.act.alternative(this.node, at, chosen));
  }
}

// Makes one of the children the one that Tab reaches.
export function focusOn(root, child) {
  for (const other of root.querySelectorAll("[tabindex='0']")) other.tabIndex = -1;
  child.tabIndex = 0;
  child.focus();
}

function openMenu(anchor, [id, text, logprob, tops], choose) {
  const rows = tops.some(([other]) => other === id) ? tops : [...tops, [id, text, logprob]];
  const buttons = rows.map((row) => alternative(row, row[0] === id, () => {
    menu.hidePopover();
    choose(row);
  }));
  const menu = el(".alternatives", {popover: "auto", role: "dialog", "aria-label": `Alternatives to ${visible(text)}`},
    el("p.note", {}, "Continue from here with"), ...buttons);
  menu.addEventListener("toggle", (event) => event.newState === "closed" && menu.remove());
  menu.addEventListener("keydown", (event) => {
    const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
    if (step) buttons[(buttons.indexOf(document.activeElement) + step + buttons.length) % buttons.length].focus();
    else if (event.key !== "Escape") return;
    else menu.hidePopover();
    event.preventDefault();
    event.stopPropagation();
  });
  document.body.append(menu);
  menu.showPopover();
  place(menu, anchor.getClientRects()[0]);
  buttons[0].focus();
}

function alternative([, text, logprob], chosen, onclick) {
  const kind = `button.alternative${chosen ? ".current" : ""}`;
  return el(kind, {type: "button", onclick, "aria-current": chosen && "true"},
    el("code", {}, visible(text)), el("meter", {min: 0, max: 1, value: Math.exp(logprob), "aria-label": "Probability"}),
    el("span", {}, percent(logprob)));
}

// Below the token, or above it where there is no room, and within the window.
function place(menu, box) {
  const {width, height} = menu.getBoundingClientRect();
  const below = box.bottom + 6 + height <= innerHeight;
  menu.style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
  menu.style.top = `${Math.max(8, below ? box.bottom + 6 : box.top - height - 6)}px`;
}

function visible(text) {
  const shown = text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  return shown.trim() === shown ? shown || "∅" : shown.replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));
}

function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  return share < 0.1 ? "< 0.1 %" : `${share < 10 ? share.toFixed(1) : Math.round(share)} %`;
}
