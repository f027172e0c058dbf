// Figures from /metrics, as `deltic top` (deltic/cli/top.py) reads them.

const COUNTERS = /_(total|bucket)$/;
const KEPT = /^(requests_running|generated_tokens_total|prompt_tokens_\w+|time_to_first_token_seconds_bucket)$/;

// Samples in Prometheus' text format.
export class Figures {
  constructor(text = "") {
    this.at = performance.now();
    this.samples = [];
    for (const line of text.split("\n")) {
      const found = /^deltic_(\w+)(?:\{(.*)\})? (\S+)/.exec(line);
      if (found) this.samples.push({key: line.slice(0, line.lastIndexOf(" ")), name: found[1],
        labels: labelsOf(found[2] ?? ""), value: Number(found[3])});
    }
  }

  with(samples) {
    const found = new Figures();
    return Object.assign(found, {at: this.at, samples});
  }

  // The samples with these labels.
  only(labels) {
    const wanted = Object.entries(labels);
    return this.with(this.samples.filter((sample) => wanted.every(([name, value]) => sample.labels[name] === value)));
  }

  // What `since` needs later: with 100 replicas a minute of all samples would be a million objects.
  kept() {
    return this.with(this.samples.filter(({name}) => KEPT.test(name)));
  }

  // What counters have counted since then. If one is lower now, all have begun again.
  since(before) {
    const old = new Map(before.samples.filter(({name}) => COUNTERS.test(name)).map(({key, value}) => [key, value]));
    const gained = this.samples.map((sample) => ({...sample, value: sample.value - (old.get(sample.key) ?? 0)}));
    return gained.some(({key, value}) => old.has(key) && value < 0) ? this : this.with(gained);
  }

  // A Figures for each model of each replica, with the labels that name it.
  sources() {
    const found = new Map();
    for (const sample of this.samples) {
      const {replica, model} = sample.labels;
      const key = JSON.stringify([replica, model]);
      if (!found.has(key)) found.set(key, {replica, model, samples: []});
      found.get(key).samples.push(sample);
    }
    return [...found.values()].map(({replica, model, samples}) => ({replica, model, figures: this.with(samples)}))
      .filter(({figures}) => figures.sum("requests_running") !== undefined);
  }

  all(name) {
    return this.samples.filter((sample) => sample.name === name);
  }

  // The sum over all labels; undefined if the server has no such metric.
  sum(name) {
    const found = this.all(name);
    return found.length ? found.reduce((sum, sample) => sum + sample.value, 0) : undefined;
  }

  // [value of the label, sum of its samples], in the order of the page.
  sums(name, label) {
    const found = new Map();
    for (const {labels, value} of this.all(name)) found.set(labels[label], (found.get(labels[label]) ?? 0) + value);
    return [...found];
  }

  // [prompt tokens from the cache, all]; undefined if the server has no such metric.
  prompts() {
    const [computed, reused] = [this.sum("prompt_tokens_computed_total"), this.sum("prompt_tokens_reused_total")];
    return reused === undefined ? undefined : [reused, computed + reused];
  }

  // The time within which this share of the requests had their first token, as the bound of the bucket of the histogram.
  firstToken(share) {
    const buckets = this.sums("time_to_first_token_seconds_bucket", "le");
    const all = buckets.at(-1)?.[1] ?? 0;
    if (!all) return undefined;
    const at = buckets.findIndex(([, count]) => count >= all * share);
    const bound = Number(buckets[at][0]);
    if (!Number.isFinite(bound)) return `> ${buckets[at - 1][0]} s`;
    return bound < 1 ? `≤ ${Math.round(bound * 1000)} ms` : `≤ ${bound} s`;
  }

  // [used, budget] in bytes of a tier of the cache.
  memory(tier) {
    return ["cache_bytes", "cache_budget_bytes"].map((name) => this.only({tier}).sum(name) ?? 0);
  }

  tiers() {
    return this.sums("cache_bytes", "tier").map(([tier]) => tier);
  }
}

// The figures of the last minute for what had requests in it, else those since the start.
export function recently(now, before) {
  const last = before ? now.since(before) : now;
  return {prompts: last.prompts()?.[1] ? last : now, first: last.firstToken(1) ? last : now};
}

function labelsOf(text) {
  return Object.fromEntries(Array.from(text.matchAll(/(\w+)="((?:\\.|[^"\\])*)"/g), ([, name, value]) => [name, value]));
}

export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

export function short(number) {
  if (number >= 1e6) return `${(number / 1e6).toFixed(1)}M`;
  if (number >= 1e4) return `${(number / 1e3).toFixed(1)}k`;
  return number >= 10 || Number.isInteger(number) ? Math.round(number).toLocaleString("en") : number.toFixed(1);
}

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const step = number > 0 ? Math.min(4, Math.floor(Math.log2(number) / 10)) : 0;
  const value = number / 1024 ** step;
  return `${value < 10 && step ? value.toFixed(1) : Math.round(value)} ${units[step]}`;
}
