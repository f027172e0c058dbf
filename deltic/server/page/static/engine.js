// The panel of the engine: figures from /metrics, with plots of the last minutes.

import {metrics} from "./api.js";
import {byId, el, svg} from "./dom.js";

const EVERY = 1000; // milliseconds; after an error five times as many
const POINTS = 120;

let timer = null;
let before = null;
const series = {pace: [], reading: [], running: []};

export function panelIsOpen() {
  return !byId("engine").hidden;
}

export function togglePanel(open = !panelIsOpen()) {
  byId("engine").hidden = !open;
  byId("engine-button").setAttribute("aria-expanded", String(open));
  clearTimeout(timer);
  if (open) watch();
}

async function watch() {
  let wait = EVERY;
  try {
    if (!document.hidden) show(new Figures(await metrics()));
    byId("engine-problem").textContent = "";
  } catch (error) {
    before = null;
    wait *= 5;
    byId("engine-problem").textContent = error.message;
  }
  clearTimeout(timer);
  if (panelIsOpen()) timer = setTimeout(watch, wait);
}

// Samples in Prometheus' text format.
export class Figures {
  constructor(text) {
    this.at = performance.now();
    this.samples = [];
    for (const line of text.split("\n")) {
      const found = /^deltic_(\w+)(?:\{(.*)\})? (\S+)/.exec(line);
      if (found) this.samples.push({name: found[1], labels: labelsOf(found[2] ?? ""), value: Number(found[3])});
    }
  }

  all(name) {
    return this.samples.filter((sample) => sample.name === name);
  }

  // The sum over all labels; undefined if the server has no such metric.
  sum(name) {
    const found = this.all(name);
    return found.length ? found.reduce((sum, sample) => sum + sample.value, 0) : undefined;
  }
}

function labelsOf(text) {
  return Object.fromEntries(Array.from(text.matchAll(/(\w+)="((?:\\.|[^"\\])*)"/g), ([, name, value]) => [name, value]));
}

function show(now) {
  const seconds = before ? (now.at - before.at) / 1000 : 0;
  const rate = (name) => (seconds ? Math.max(0, (now.sum(name) - before.sum(name)) / seconds) : 0);
  const running = now.sum("requests_running") ?? 0;
  keep("pace", rate("generated_tokens_total"));
  keep("reading", rate("prompt_tokens_computed_total"));
  keep("running", running);
  byId("engine-figures").replaceChildren(
    plotted("Generation", series.pace, short(series.pace.at(-1)), "tokens/s"),
    plotted("Prompt processing", series.reading, short(series.reading.at(-1)), "tokens/s"),
    plotted("Running", series.running, String(running), `${running === 1 ? "answer" : "answers"}, ${now.sum("requests_waiting") ?? 0} waiting`),
    reuse(now), drafts(now), memory(now), firstToken(now), totals(now));
  before = now;
}

function keep(name, value) {
  series[name].push(Number.isFinite(value) ? value : 0);
  if (series[name].length > POINTS) series[name].shift();
}

function card(title, ...children) {
  return el("section.card", {}, el("h3", {}, title), ...children);
}

function plotted(title, values, value, unit) {
  return card(title, el("p.figure", {}, el("strong", {}, value), ` ${unit}`), plot(values));
}

// An area over time, the newest at the right.
function plot(values) {
  const [width, height] = [240, 44];
  const most = Math.max(1, ...values);
  const points = values.map((value, index) => [width - (values.length - 1 - index) * (width / (POINTS - 1)),
    height - 2 - (value / most) * (height - 6)].map((number) => number.toFixed(1)).join(","));
  const first = width - (values.length - 1) * (width / (POINTS - 1));
  return svg("svg", {class: "plot", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img",
    "aria-label": `the last ${values.length} seconds, up to ${short(most)}`},
    svg("line", {x1: 0, x2: width, y1: height - 1, y2: height - 1}),
    svg("polygon", {points: `${first.toFixed(1)},${height} ${points.join(" ")} ${width},${height}`}),
    svg("polyline", {points: points.join(" ")}));
}

function bar(label, part, whole, text) {
  const share = whole > 0 ? Math.min(1, part / whole) : 0;
  return el(".bar", {}, el("span", {}, label), el("span.value", {}, text),
    el("meter", {min: 0, max: 1, value: share, "aria-label": `${label}: ${text}`, title: `${(share * 100).toFixed(1)} %`}));
}

function reuse(now) {
  const [computed, reused] = [now.sum("prompt_tokens_computed_total"), now.sum("prompt_tokens_reused_total")];
  if (reused === undefined) return null;
  return card("Prompt tokens", bar("from the cache", reused, computed + reused, percent(reused, computed + reused)),
    el("p.note", {}, `${short(reused)} reused, ${short(computed)} read`));
}

function drafts(now) {
  const places = now.all("drafted_tokens_total").filter((sample) => sample.value > 0);
  if (!places.length) return null;
  const accepted = now.all("accepted_tokens_total");
  const right = (place) => accepted.find((sample) => sample.labels.position === place)?.value ?? 0;
  return card("Accepted drafts", places.map((sample) => bar(`token ${sample.labels.position}`,
    right(sample.labels.position), sample.value, percent(right(sample.labels.position), sample.value))));
}

function memory(now) {
  const tiers = now.all("cache_bytes").map(({labels, value}) => {
    const budget = now.all("cache_budget_bytes").find((sample) => sample.labels.tier === labels.tier)?.value;
    return bar(labels.tier, value, budget ?? value, budget ? `${bytes(value)} of ${bytes(budget)}` : bytes(value));
  });
  const pools = [["pages", "K/V pages"], ["slots", "state slots"]].map(([name, label]) => {
    const [used, size] = [now.sum(`cache_${name}_used`), now.sum(`cache_${name}`)];
    return size ? bar(label, used, size, `${short(used)} of ${short(size)}`) : null;
  });
  return card("Cache", ...tiers, ...pools);
}

// The median of the histogram, as the bound of the bucket in which it lies.
function firstToken(now) {
  const buckets = now.all("time_to_first_token_seconds_bucket");
  const all = buckets.at(-1)?.value ?? 0;
  if (!all) return null;
  const within = (share) => {
    const at = buckets.findIndex((bucket) => bucket.value >= all * share);
    const bound = Number(buckets[at].labels.le);
    if (!Number.isFinite(bound)) return `> ${buckets[at - 1].labels.le} s`;
    return bound < 1 ? `≤ ${Math.round(bound * 1000)} ms` : `≤ ${bound} s`;
  };
  return card("First token", el("dl", {}, el("dt", {}, "half of the requests"), el("dd", {}, within(0.5)),
    el("dt", {}, "95 of 100"), el("dd", {}, within(0.95))));
}

function totals(now) {
  const rows = [["answers", "requests_finished_total"], ["failed", "requests_failed_total"],
    ["tokens written", "generated_tokens_total"], ["steps", "steps_total"], ["preemptions", "preemptions_total"]];
  return card("Since the start", el("dl", {}, rows.filter(([, name]) => now.sum(name) !== undefined).map(([label, name]) =>
    [el("dt", {}, label), el("dd", {}, now.sum(name).toLocaleString("en"))]).flat()));
}

const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

export function short(number) {
  if (number >= 1e6) return `${(number / 1e6).toFixed(1)}M`;
  if (number >= 1e4) return `${(number / 1e3).toFixed(1)}k`;
  return number >= 10 || Number.isInteger(number) ? Math.round(number).toLocaleString("en") : number.toFixed(1);
}

function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const step = number > 0 ? Math.min(4, Math.floor(Math.log2(number) / 10)) : 0;
  const value = number / 1024 ** step;
  return `${value < 10 && step ? value.toFixed(1) : Math.round(value)} ${units[step]}`;
}
