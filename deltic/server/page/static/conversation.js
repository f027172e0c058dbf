// A conversation is a tree of messages: editing and regenerating add a sibling, so that nothing is ever lost.
// {id, title, created, updated, leaf, nodes: {id: {id, parent, at, role, content, ...}}}
// An answer whose tokens were asked for has `tokens`; `asked`, what its prompt depends on; and `begun`, the number of
// tokens that the request had.

import {freshId} from "./dom.js";
import {keepTokens} from "./tokens.js";

const TITLE = 60;

export function fresh() {
  const now = Date.now();
  return {id: freshId(), title: "", created: now, updated: now, leaf: null, nodes: {}};
}

// Adds a message below `parent` (null: at the start), and makes it the last one.
export function add(talk, parent, message) {
  const node = {id: freshId(), parent, at: Date.now(), ...message};
  talk.nodes[node.id] = node;
  talk.leaf = node.id;
  talk.updated = node.at;
  if (!talk.title && node.role === "user") talk.title = titleOf(node.content) || (node.images ? "A picture" : "A file");
  return node;
}

// The messages from the first to the one with this id.
export function path(talk, end = talk.leaf) {
  const found = [];
  for (let node = talk.nodes[end]; node; node = talk.nodes[node.parent]) found.unshift(node);
  return found;
}

// The versions of a message, oldest first, itself included.
export function versions(talk, node) {
  return children(talk, node.parent);
}

// Shows this version of a message, with what came after it last.
export function choose(talk, node) {
  let below = node;
  for (let next = below; next; next = children(talk, below.id).at(-1)) below = next;
  talk.leaf = below.id;
}

function children(talk, parent) {
  return Object.values(talk.nodes).filter((node) => node.parent === parent).sort((a, b) => a.at - b.at);
}

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > TITLE ? `${line.slice(0, TITLE - 1)}…` : line;
}

// The messages as the API takes them.
export function wire(nodes, system) {
  const messages = system.trim() ? [{role: "system", content: system}] : [];
  for (const node of nodes) {
    if (node.role === "assistant") messages.push(answer(node));
    else if (node.role === "tool") messages.push({role: "tool", tool_call_id: node.call, content: node.content});
    else messages.push({role: node.role, content: shown(node)});
  }
  return messages;
}

// Text, or parts where there are pictures or files. Files: {name, text}, or {name, data} with a data URL.
function shown(node) {
  if (!node.images?.length && !node.files?.length) return node.content;
  const images = (node.images ?? []).map((url) => ({type: "image_url", image_url: {url}}));
  const files = (node.files ?? []).map((file) => file.data
    ? {type: "file", file: {filename: file.name, file_data: file.data}}
    : {type: "text", text: `File ${file.name}:\n\n${file.text}\n\n`});
  const text = node.content ? [{type: "text", text: node.content}] : [];
  return [...images, ...files, ...text];
}

function answer(node) {
  const message = {role: "assistant", content: node.content};
  if (node.reasoning) message.reasoning_content = node.reasoning;
  if (node.calls?.length) {
    message.tool_calls = node.calls.map((call) => ({
      id: call.id, type: "function", function: {name: call.name, arguments: call.arguments}}));
  }
  return message;
}

// Lets an answer grow by a chunk of the stream.
export function grow(node, chunk, now) {
  if (chunk.usage) node.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  if (choice.logprobs?.content) keepTokens(node, choice.logprobs.content);
  if (choice.finish_reason) node.finish = choice.finish_reason;
  const {content, reasoning_content: thought, reasoning, tool_calls: calls} = choice.delta ?? {};
  if (content || thought || reasoning || calls) node.first ??= now;
  if (thought || reasoning) node.reasoning += thought || reasoning;
  if (content || calls) node.thought ??= node.reasoning ? now : null;
  if (content) node.content += content;
  for (const piece of calls ?? []) {
    const call = (node.calls[piece.index] ??= {id: "", name: "", arguments: ""});
    if (piece.id) call.id = piece.id;
    if (piece.function?.name) call.name = piece.function.name;
    if (piece.function?.arguments) call.arguments += piece.function.arguments;
  }
}
