// The status of several replicas or models: the table of `deltic top`.

import {el} from "./dom.js";
import {bytes, percent, recently, short} from "./figures.js";

// now, before: the figures now and a minute ago. Null for one model on one engine, which the other cards describe.
export function statusCard(now, before) {
  const sources = now.sources();
  if (sources.length < 2) return null;
  const names = ["replica", "model"].filter((name) => new Set(sources.map((source) => source[name])).size > 1);
  const old = new Map(before?.sources().map(({replica, model, figures}) => [`${replica} ${model}`, figures]));
  const rows = sources.map(({replica, model, figures}) =>
    row(names.map((name) => ({replica, model})[name]), figures, old.get(`${replica} ${model}`), now.tiers()));
  const all = names.map((_, index) => (index ? "" : `all ${sources.length}`));
  const head = [...names, "running", "waiting", "tokens/s", "reused", "first token", "p95", ...now.tiers()];
  return el("section.card.status", {}, el("h3", {}, names.includes("replica") ? "Replicas" : "Models"),
    el("table", {}, el("thead", {}, el("tr", {}, head.map((text) => el("th", {scope: "col"}, text)))),
      el("tbody", {}, row(all, now, before, now.tiers()), rows)));
}

function row(names, now, before, tiers) {
  const {prompts, first} = recently(now, before);
  const cells = [short(now.sum("requests_running")), short(now.sum("requests_waiting") ?? 0),
    short(now.sum("generated_tokens_per_second") ?? 0), percent(...(prompts.prompts() ?? [0, 0])),
    first.firstToken(0.5) ?? "–", first.firstToken(0.95) ?? "–",
    ...tiers.map((tier) => now.memory(tier).map(bytes).join(" of "))];
  return el("tr", {}, names.map((name) => el("th", {scope: "row"}, name)), cells.map((text) => el("td", {}, text)));
}
