// The panel of the engine: figures from /metrics, with plots of the last minutes.

import {metrics} from "./api.js";
import {byId, el, svg} from "./dom.js";
import {Figures, bytes, percent, recently, short} from "./figures.js";
import {statusCard} from "./status.js";

const EVERY = 1000; // milliseconds; after an error five times as many
const RECENT = 60_000; // milliseconds that reuse and first tokens look back
const POINTS = 120;

let timer = null;
let known = []; // figures of the last minute
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
    wait *= 5;
    byId("engine-problem").textContent = error.message;
  }
  clearTimeout(timer);
  if (panelIsOpen()) timer = setTimeout(watch, wait);
}

function show(now) {
  const before = known.at(-1);
  const seconds = before ? (now.at - before.at) / 1000 : 0;
  const last = before && now.kept().since(before);
  const rate = (name) => (seconds ? last.sum(name) / seconds : 0);
  const running = now.sum("requests_running") ?? 0;
  known = [...known, now.kept()].filter(({at}) => now.at - at <= RECENT);
  const oldest = known.length > 1 ? known[0] : null;
  const recent = recently(now, oldest);
  keep("pace", rate("generated_tokens_total"));
  keep("reading", rate("prompt_tokens_computed_total"));
  keep("running", running);
  const status = statusCard(now, oldest);
  byId("engine").classList.toggle("wide", Boolean(status));
  const scrolled = document.querySelector(".status")?.scrollLeft ?? 0;
  byId("engine-figures").replaceChildren(...[status,
    plotted("Generation", series.pace, short(series.pace.at(-1)), "tokens/s"),
    plotted("Prompt processing", series.reading, short(series.reading.at(-1)), "tokens/s"),
    plotted("Running", series.running, String(running), `${running === 1 ? "answer" : "answers"}, ${now.sum("requests_waiting") ?? 0} waiting`),
    reuse(recent.prompts), drafts(now), memory(now), firstToken(recent.first), totals(now)].filter(Boolean));
  if (status) status.scrollLeft = scrolled;
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

function reuse(recent) {
  if (!recent.prompts()) return null;
  const [reused, all] = recent.prompts();
  return card("Prompt tokens", bar("from the cache", reused, all, percent(reused, all)),
    el("p.note", {}, `${short(reused)} reused, ${short(all - reused)} read`));
}

function drafts(now) {
  const places = now.sums("drafted_tokens_total", "position").filter(([, drafted]) => drafted > 0);
  if (!places.length) return null;
  const accepted = new Map(now.sums("accepted_tokens_total", "position"));
  return card("Accepted drafts", places.map(([place, drafted]) => bar(`token ${place}`, accepted.get(place) ?? 0, drafted,
    percent(accepted.get(place) ?? 0, drafted))));
}

function memory(now) {
  const tiers = now.tiers().map((tier) => {
    const [used, budget] = now.memory(tier);
    return bar(tier, used, budget || used, budget ? `${bytes(used)} of ${bytes(budget)}` : bytes(used));
  });
  const pools = [["pages", "K/V pages"], ["slots", "state slots"]].map(([name, label]) => {
    const [used, size] = [now.sum(`cache_${name}_used`), now.sum(`cache_${name}`)];
    return size ? bar(label, used, size, `${short(used)} of ${short(size)}`) : null;
  });
  return card("Cache", ...tiers, ...pools);
}

function firstToken(recent) {
  if (!recent.firstToken(1)) return null;
  return card("First token", el("dl", {}, el("dt", {}, "half of the requests"), el("dd", {}, recent.firstToken(0.5)),
    el("dt", {}, "95 of 100"), el("dd", {}, recent.firstToken(0.95))));
}

function totals(now) {
  const rows = [["answers", "requests_finished_total"], ["failed", "requests_failed_total"],
    ["tokens written", "generated_tokens_total"], ["steps", "steps_total"], ["preemptions", "preemptions_total"]];
  return card("Since the start", el("dl", {}, rows.filter(([, name]) => now.sum(name) !== undefined).map(([label, name]) =>
    [el("dt", {}, label), el("dd", {}, now.sum(name).toLocaleString("en"))]).flat()));
}
