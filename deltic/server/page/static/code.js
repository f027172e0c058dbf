// Code with colours. Prism splits the text into tokens; its HTML is never used.

import {copy, el} from "./dom.js";

const LONGEST = 40000; // characters; longer code stays plain
const NAMES = {py: "python", js: "javascript", ts: "typescript", sh: "bash", shell: "bash", zsh: "bash", yml: "yaml",
  "c++": "cpp", "c#": "csharp", cs: "csharp", rs: "rust", golang: "go", html: "markup", xml: "markup", rb: "ruby",
  kt: "kotlin", dockerfile: "docker", jsonc: "json", console: "bash"};

export function codeBlock(text, language) {
  const name = /^[\w+#-]{1,20}/.exec(language ?? "")?.[0].toLowerCase() ?? "";
  const copied = el("button.quiet.small", {type: "button", onclick: async () => {
    await copy(text);
    copied.textContent = "Copied";
    setTimeout(() => { copied.textContent = "Copy"; }, 1500);
  }}, "Copy");
  return el("figure.code", {}, el("figcaption", {}, el("span", {}, name || "text"), copied),
    el("pre", {tabindex: "0"}, el("code", {}, ...coloured(text, NAMES[name] ?? name))));
}

export function coloured(text, language) {
  const known = globalThis.Prism?.languages ?? {};
  if (text.length > LONGEST || !Object.hasOwn(known, language) || typeof known[language] === "function") return [text];
  try {
    return Prism.tokenize(text, known[language]).map(nodeOf);
  } catch {
    return [text];
  }
}

function nodeOf(token) {
  if (typeof token === "string") return token;
  const inner = Array.isArray(token.content) ? token.content : [token.content];
  return el(`span.t-${token.type}`, {}, ...inner.map(nodeOf));
}
