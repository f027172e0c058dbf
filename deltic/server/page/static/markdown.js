// Markdown as elements. marked's lexer makes tokens; each becomes an element here, and everything that is not known is
// text. No HTML is ever made or read: tags that a model writes are shown as they are.

import {Marked} from "./vendor/marked-18.2.1/marked.esm.js";
import {codeBlock} from "./code.js";
import {el} from "./dom.js";

const DEEPEST = 30; // levels of nesting; what lies deeper is text
const LONGEST_FORMULA = 5000;
const LINKS = ["http:", "https:", "mailto:"];
const ENTITIES = {amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", reg: "®", hellip: "…",
  mdash: "—", ndash: "–", times: "×", divide: "÷", deg: "°", middot: "·", bull: "•", rarr: "→", larr: "←", ge: "≥",
  le: "≤", ne: "≠", plusmn: "±", infin: "∞", eacute: "é", euro: "€", laquo: "«", raquo: "»"};

function formula(name, level, start, patterns) {
  return {name, level, start: (text) => start.exec(text)?.index,
    tokenizer(text) {
      for (const pattern of patterns) {
        const found = pattern.exec(text);
        if (found) return {type: name, raw: found[0], text: found[1].trim(), display: found[0][1] !== "(" &&
          (level === "block" || found[0].startsWith("$$") || found[0].startsWith("\\["))};
      }
    }};
}

const reader = new Marked({gfm: true, breaks: true});
reader.use({extensions: [
  formula("formula", "block", /\$\$|\\\[/, [/^\$\$([^$]+?)\$\$[ \t]*(?:\n|$)/, /^\\\[([\s\S]+?)\\\][ \t]*(?:\n|$)/]),
  // as in pandoc: no space inside of the dollars, no digit behind, so that prices are no formulas
  formula("inlineFormula", "inline", /\$|\\\(|\\\[/, [/^\$\$([^$]+?)\$\$/, /^\$((?=\S)(?:\\.|[^$\\\n])*?[^\s\\])\$(?!\d)/,
    /^\\\(([\s\S]+?)\\\)/, /^\\\[([\s\S]+?)\\\]/]),
]});

// The elements of a whole text.
export function elements(text) {
  return tokensOf(text).map((token) => block(token, 0));
}

// A text that grows: only its last blocks are made again.
export class Growing {
  constructor(root) {
    this.root = root;
    this.reset();
  }

  reset() {
    this.root.replaceChildren();
    this.text = "";
    this.fixed = 0; // characters of the blocks that do not change any more
    this.tail = [];
    this.rest = 0; // not again before this time
  }

  // What takes long is done less often: a paragraph without end must not stop the page.
  show(text, ended) {
    const begun = performance.now();
    if (!ended && begun < this.rest) return;
    this.render(text, ended);
    this.rest = begun + 4 * (performance.now() - begun);
  }

  render(text, ended) {
    const clean = text.replace(/\r\n?/g, "\n");
    if (clean === this.text && !ended) return;
    // what a link refers to may come after it
    if (!clean.startsWith(this.text) || (ended && /^ {0,3}\[[^\]]+\]:/m.test(clean))) this.reset();
    this.text = clean;
    const tokens = tokensOf(clean.slice(this.fixed));
    for (const node of this.tail) node.remove();
    const nodes = tokens.map((token) => block(token, 0));
    this.root.append(...nodes);
    const settled = Math.max(0, tokens.length - 2);
    this.fixed += tokens.slice(0, settled).reduce((sum, token) => sum + token.raw.length, 0);
    this.tail = nodes.slice(settled);
  }
}

function tokensOf(text) {
  try {
    return reader.lexer(text);
  } catch { // nested beyond what the lexer's recursion bears
    return [{type: "plain", raw: text}];
  }
}

const BLOCKS = {
  space: () => document.createTextNode(""),
  def: () => document.createTextNode(""),
  hr: () => el("hr"),
  code: (token) => codeBlock(token.text, token.lang),
  formula: (token) => el(".formula", {}, typeset(token)),
  heading: (token, depth) => el(`h${Math.min(6, token.depth + 1)}`, {}, inlines(token, depth)),
  paragraph: (token, depth) => el("p", {}, inlines(token, depth)),
  text: (token, depth) => el("span", {}, inlines(token, depth)),
  blockquote: (token, depth) => el("blockquote", {}, blocks(token.tokens, depth)),
  list: (token, depth) => el(token.ordered ? "ol" : "ul", {start: token.ordered && token.start !== 1 && token.start},
    token.items.map((item) => el("li", {class: item.task && "task"}, blocks(item.tokens, depth)))),
  table: (token, depth) => el(".table", {}, el("table", {},
    el("thead", {}, el("tr", {}, token.header.map((cell) => cellOf("th", cell, depth)))),
    el("tbody", {}, token.rows.map((row) => el("tr", {}, row.map((cell) => cellOf("td", cell, depth))))))),
};

const INLINES = {
  escape: (token) => token.text,
  text: (token, depth) => (token.tokens ? el("span", {}, inlines(token, depth)) : decoded(token.text)),
  strong: (token, depth) => el("strong", {}, inlines(token, depth)),
  em: (token, depth) => el("em", {}, inlines(token, depth)),
  del: (token, depth) => el("del", {}, inlines(token, depth)),
  codespan: (token) => el("code", {}, token.text),
  br: () => el("br"),
  checkbox: (token) => el("input", {type: "checkbox", disabled: true, checked: token.checked}),
  html: (token) => (/^<br\s*\/?>$/i.test(token.raw) ? el("br") : token.raw),
  inlineFormula: (token) => typeset(token),
  formula: (token) => typeset(token),
  link: (token, depth) => linked(token.href, inlines(token, depth)),
  image: (token) => linked(token.href, [`[image: ${token.text || token.href.slice(0, 80)}]`]), // never fetched
};

function block(token, depth) {
  const make = Object.hasOwn(BLOCKS, token.type) && depth <= DEEPEST && BLOCKS[token.type];
  if (make) return make(token, depth + 1);
  if (token.type === "checkbox") return INLINES.checkbox(token);
  return el("p.plain", {}, token.raw);
}

function blocks(tokens, depth) {
  return tokens.map((token) => block(token, depth));
}

function inlines(token, depth) {
  if (!token.tokens || depth > DEEPEST) return [decoded(token.text ?? token.raw)];
  return token.tokens.map((inner) => (Object.hasOwn(INLINES, inner.type) ? INLINES[inner.type](inner, depth + 1)
    : inner.raw));
}

function cellOf(tag, cell, depth) {
  return el(tag, {class: cell.align && `to-${cell.align}`}, inlines(cell, depth));
}

function linked(href, children) {
  let url;
  try {
    url = new URL(decoded(href));
  } catch {
    return el("span", {}, ...children);
  }
  if (!LINKS.includes(url.protocol)) return el("span.dead", {title: "not a link to the web"}, ...children);
  return el("a", {href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer nofollow"}, ...children);
}

function typeset(token) {
  const shown = el(token.display ? "span.display" : "span");
  try {
    if (token.text.length > LONGEST_FORMULA) throw new RangeError("the formula is too long");
    const tree = katex.__renderToDomTree(token.text, {displayMode: token.display, trust: false, strict: false,
      maxExpand: 300, maxSize: 30, throwOnError: true});
    withoutStyles(tree);
    shown.append(tree.toNode());
    for (const drawing of shown.querySelectorAll("[data-width]")) drawing.style.width = drawing.dataset.width;
    return shown;
  } catch {
    return el("code", {title: "not a formula that can be shown"}, token.raw.trim());
  }
}

// The policy refuses style attributes, by which KaTeX gives some drawings a width; all else it sets by script.
function withoutStyles(node) {
  if (node.attributes?.style) {
    const width = /^width:\s*([\d.]+em)$/.exec(node.attributes.style);
    if (width) node.attributes["data-width"] = width[1];
    delete node.attributes.style;
  }
  node.children?.forEach(withoutStyles);
}

function decoded(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|([a-z]{2,8}));/gi, (whole, decimal, hex, name) => {
    if (name) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : whole;
    const code = decimal ? Number(decimal) : Number.parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : whole;
  });
}
