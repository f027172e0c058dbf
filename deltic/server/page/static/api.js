// The server's API. Paths are relative to the page's own server; the key, if there is one, lies in the browser only.

const KEY = "deltic.key";

export class Problem extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const apiKey = () => localStorage.getItem(KEY) ?? "";

export function keepApiKey(key) {
  if (key) localStorage.setItem(KEY, key);
  else localStorage.removeItem(KEY);
}

async function ask(path, options = {}) {
  const headers = {...options.headers};
  if (apiKey()) headers.authorization = `Bearer ${apiKey()}`;
  let response;
  try {
    response = await fetch(path, {...options, headers});
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "The server cannot be reached.");
  }
  if (response.ok) return response;
  const body = await response.text();
  let message = `The server answered with status ${response.status}.`;
  try {
    message = JSON.parse(body).error.message;
  } catch { /* not the server's own words */ }
  throw new Problem(response.status, message);
}

// The models that are served: [{id, max_model_len}].
export async function models() {
  return (await (await ask("v1/models")).json()).data;
}

// Figures of the engine, as Prometheus reads them.
export async function metrics() {
  return (await ask("metrics", {cache: "no-store"})).text();
}

// The chunks of an answer, as they come.
export async function* chat(body, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST", signal, headers: {"content-type": "application/json"},
    body: JSON.stringify({...body, stream: true, stream_options: {include_usage: true}}),
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Problem(500, chunk.error.message);
    yield chunk;
  }
  throw new Problem(0, "The connection ended before the answer did.");
}

// The data of server-sent events; comments are dropped.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const parts = (rest + value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
    }
  }
}
