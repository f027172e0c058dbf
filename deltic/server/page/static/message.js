// How a message looks. A view is made once for each message, and shown again while its answer grows.

import {codeBlock, coloured} from "./code.js";
import {button, copy, el, icon, toast} from "./dom.js";
import {Growing} from "./markdown.js";
import {TokenView, inspected} from "./tokens.js";

const ENDS = {length: "The answer reached its limit of tokens.", stopped: "Stopped."};

// The view of a message: {root, show(running)}. versions: {at, of}, which of its siblings it is.
// act: {edit, regenerate, choose, results, branch, inspect, alternative}.
export function messageView(node, versions, act) {
  if (node.role === "user") return userView(node, versions, act);
  if (node.role === "tool") return toolView(node);
  return answerView(node, versions, act);
}

function userView(node, versions, act) {
  const text = el(".bubble", {}, (node.images ?? []).map((url) => el("img", {src: url, alt: "A picture"})),
    (node.files ?? []).map((file) => el("p.file", {}, icon("i-file"), file.name)), node.content);
  const root = el("article.message.user", {"data-id": node.id, "aria-label": "You"}, text,
    el(".actions", {}, pager(node, versions, act), copyButton(() => node.content),
      button("i-edit", "Edit", () => editIn(root, text, node, act))));
  return {root, show: () => {}, edit: () => editIn(root, text, node, act)};
}

function editIn(root, text, node, act) {
  if (root.classList.contains("editing")) return;
  const area = el("textarea", {"aria-label": "Edit the message", rows: 3});
  area.value = node.content;
  const close = () => {
    root.classList.remove("editing");
    form.replaceWith(text);
  };
  const form = el("form.edit", {onsubmit: (event) => {
    event.preventDefault();
    close();
    if (area.value.trim()) act.edit(node, area.value);
  }}, area, el(".row", {}, el("span.note", {}, "The earlier version stays."),
    el("button.quiet", {type: "button", onclick: close}, "Cancel"), el("button.primary", {type: "submit"}, "Send")));
  area.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    if (event.key === "Escape") close();
    else if (event.key === "Enter" && !event.shiftKey) form.requestSubmit();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  root.classList.add("editing");
  text.replaceWith(form);
  area.focus();
}

function toolView(node) {
  return {show: () => {}, root: el("article.message.result", {"data-id": node.id, "aria-label": "Result of a tool"},
    el("details.fold", {}, el("summary", {}, icon("i-tool"), `Result of ${node.name}`), codeBlock(node.content, "json")))};
}

function answerView(node, versions, act) {
  const thought = el(".thought");
  const fold = el("details.fold.thinking", {hidden: true}, el("summary"), thought);
  const content = el(".content");
  const calls = el(".calls");
  const foot = el(".foot");
  const parts = {fold, thinking: new Growing(thought), content: new Growing(content), calls, foot};
  const tokens = new TokenView(node, act);
  const root = el("article.message.answer", {"data-id": node.id, "aria-label": "Answer"}, fold, content, tokens.root, calls,
    foot);
  const show = (running) => {
    root.classList.toggle("running", running);
    root.classList.toggle("inspected", inspected.has(node.id));
    if (inspected.has(node.id)) tokens.show(running);
    root.classList.toggle("empty", !node.content && !node.reasoning && !node.calls.length);
    showThinking(node, parts, running);
    parts.content.show(node.content, !running);
    showCalls(node, parts.calls, running, act);
    foot.replaceChildren(...(running ? [] : footOf(node, versions, act, toggle)));
  };
  const toggle = () => {
    if (!inspected.delete(node.id)) inspected.add(node.id);
    show(false);
    root.querySelector(".inspect").focus();
  };
  return {root, show};
}

function showThinking(node, {fold, thinking}, running) {
  fold.hidden = !node.reasoning;
  if (!node.reasoning) return;
  const busy = running && !node.thought;
  const seconds = ((node.thought ?? node.ended ?? Date.now()) - node.first) / 1000;
  fold.classList.toggle("busy", busy);
  fold.firstChild.replaceChildren(icon("i-think"), busy ? "Thinking…" : `Thought for ${duration(seconds)}`);
  thinking.show(node.reasoning, !running);
}

function showCalls(node, root, running, act) {
  const open = !running && act.results && node.calls.length > 0;
  const key = JSON.stringify([node.calls, open]);
  if (root.dataset.key === key) return;
  root.dataset.key = key;
  const cards = node.calls.map((call) => el("section.call", {}, el("header", {}, icon("i-tool"), el("strong", {}, call.name),
    el("span.note", {}, "tool call")),
    el(".code", {}, el("pre", {tabindex: "0"}, el("code", {}, ...coloured(pretty(call.arguments), "json")))),
    open && el("textarea", {"aria-label": `Result of ${call.name}`, rows: 2,
      placeholder: "What the tool answers, as text or JSON"})));
  const send = () => act.results(node, [...root.querySelectorAll("textarea")].map((area) => area.value));
  root.replaceChildren(...cards, ...(open ? [el(".row", {},
    el("button.primary", {type: "button", onclick: send}, cards.length > 1 ? "Send results" : "Send result"))] : []));
}

function footOf(node, versions, act, toggle) {
  const said = [];
  if (node.error) {
    said.push(el(".problem", {role: "alert"}, icon("i-alert"), el("span", {}, node.error),
      el("button.quiet", {type: "button", onclick: () => act.regenerate(node)}, "Try again")));
  } else if (ENDS[node.finish] && node.usage?.completion_tokens !== 0) said.push(el("p.note", {}, ENDS[node.finish]));
  said.push(el(".actions", {}, pager(node, versions, act), copyButton(() => node.content || JSON.stringify(node.calls)),
    button("i-again", "Regenerate", () => act.regenerate(node)),
    act.branch && !node.calls.length && button("i-branch", "Continue from here", () => act.branch(node)),
    el("button.quiet.inspect", {type: "button", title: "Tokens and their alternatives", "aria-label": "Tokens",
      "aria-pressed": String(inspected.has(node.id)), onclick: toggle}, icon("i-tokens")), figures(node)));
  return said;
}

// What the answer took: tokens, speed, and how much of the prompt was not read again.
function figures(node) {
  const {usage} = node;
  if (!usage) return null;
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const details = usage.completion_tokens_details ?? {};
  const right = details.accepted_prediction_tokens ?? 0;
  const drafted = right + (details.rejected_prediction_tokens ?? 0);
  const seconds = (node.ended - node.first) / 1000;
  const parts = [`${usage.completion_tokens} tokens`];
  if (usage.completion_tokens > 1 && seconds > 0) parts.push(`${Math.round((usage.completion_tokens - 1) / seconds)}/s`);
  if (node.first) parts.push(`first after ${duration((node.first - node.began) / 1000)}`);
  if (drafted) parts.push(`${right} of ${drafted} drafts accepted`);
  return el(".figures", {}, el("span", {}, parts.join(" · ")),
    el("span.reuse", {title: "Tokens of the prompt that the server knew already, and did not read again"},
      el("meter", {min: 0, max: 1, value: usage.prompt_tokens ? cached / usage.prompt_tokens : 0,
        "aria-label": "Tokens of the prompt that were reused"}),
      `${cached} of ${usage.prompt_tokens} reused`));
}

function pager(node, {at, of}, act) {
  if (of < 2) return null;
  return el("span.pager", {}, button("i-left", "Earlier version", () => act.choose(node, at - 1)),
    el("span", {}, `${at + 1} / ${of}`), button("i-right", "Later version", () => act.choose(node, at + 1)));
}

function copyButton(text) {
  return button("i-copy", "Copy", async () => {
    await copy(text());
    toast("Copied.", null, 1.5);
  });
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function duration(seconds) {
  if (seconds < 1) return `${Math.max(1, Math.round(seconds * 1000))} ms`;
  return seconds < 60 ? `${seconds.toFixed(1)} s` : `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}
