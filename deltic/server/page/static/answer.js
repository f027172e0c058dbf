// Answers that are being made: one at a time for each conversation, also of those that are not shown.

import {chat} from "./api.js";
import {grow, path, wire} from "./conversation.js";
import {prompted, sampled, wantsTokens} from "./settings.js";
import * as store from "./store.js";
import {askForTokens} from "./tokens.js";

const SAVE_EVERY = 1000; // milliseconds

export const running = new Map(); // by the conversation's id: {node, abort}

// Streams an answer into the node. shown(talk, node): called when there is something new, ended or not.
export async function answer(talk, node, shown) {
  const stopping = new AbortController();
  running.set(talk.id, {node, abort: () => stopping.abort()});
  node.began = Date.now();
  let saved = node.began;
  let frame = null;
  const later = () => {
    frame = null;
    shown(talk, node);
  };
  try {
    for await (const chunk of chat(request(talk, node), stopping.signal)) {
      grow(node, chunk, Date.now());
      frame ??= requestAnimationFrame(later);
      if (Date.now() - saved > SAVE_EVERY) {
        saved = Date.now();
        store.put(talk);
      }
    }
  } catch (error) {
    if (stopping.signal.aborted) node.finish = "stopped";
    else fail(node, error);
  } finally {
    if (frame) cancelAnimationFrame(frame);
    node.ended = Date.now();
    talk.updated = node.ended;
    running.delete(talk.id);
    await store.put(talk);
    shown(talk, node);
  }
}

// The request for an answer. One that continues tokens has the same prompt as the answer that they are of.
function request(talk, node) {
  const asked = node.asked ?? prompted();
  const {system, ...fields} = asked;
  const body = {...fields, ...sampled(), messages: wire(path(talk, node.parent), system)};
  if (!wantsTokens() && !node.tokens) return body;
  node.asked = asked;
  return askForTokens(body, node);
}

function fail(node, error) {
  node.error = error.message;
  node.status = error.status ?? 0;
}

export function stop(id) {
  running.get(id)?.abort();
}

// What a page that was closed in the middle of an answer has left.
export function settle(talks) {
  for (const talk of talks) {
    for (const node of Object.values(talk.nodes)) {
      if (node.role !== "assistant" || node.ended) continue;
      node.ended = node.thought ?? node.first ?? node.at;
      node.finish = "stopped";
    }
  }
}
