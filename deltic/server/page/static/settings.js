// What the next requests ask for, kept in the browser.

import {apiKey, keepApiKey} from "./api.js";
import {byId, toast} from "./dom.js";

const KEPT = "deltic.settings";
const DEFAULTS = {system: "", thinking: "", temperature: "", top_p: "", max_tokens: "", seed: "", tools: "",
  alternatives: ""};
let sent = ""; // the model that requests name
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const EXAMPLE = [{type: "function", function: {name: "get_weather", description: "The weather of a city",
  parameters: {type: "object", properties: {city: {type: "string"}}, required: ["city"]}}}];

export const settings = {...DEFAULTS, ...read()};

function read() {
  try {
    return JSON.parse(localStorage.getItem(KEPT) ?? "{}");
  } catch {
    return {};
  }
}

// What the prompt of a request depends on, beside its messages; what is empty is left to the server.
export function prompted() {
  const given = {system: settings.system, ...(sent ? {model: sent} : {})};
  if (settings.thinking) given.enable_thinking = settings.thinking === "on";
  const tools = toolsOf(settings.tools);
  if (tools.length) given.tools = tools;
  return given;
}

// The other fields that follow from the settings.
export function sampled() {
  const given = NUMBERS.filter((name) => settings[name] !== "");
  return Object.fromEntries(given.map((name) => [name, Number(settings[name])]));
}

export const wantsTokens = () => settings.alternatives === "on";

export function askForAlternatives() {
  settings.alternatives = "on";
  localStorage.setItem(KEPT, JSON.stringify(settings));
}

// The model of the next requests, which is kept where there is a choice.
export function chooseModel(name, several) {
  sent = name;
  if (!several) return;
  settings.model = name;
  localStorage.setItem(KEPT, JSON.stringify(settings));
}

function toolsOf(text) {
  const tools = text.trim() ? JSON.parse(text) : [];
  if (!Array.isArray(tools)) throw new TypeError("tools are a list");
  return tools;
}

export function openSettings() {
  const form = byId("settings-form");
  for (const name of Object.keys(DEFAULTS)) form.elements[name].value = settings[name];
  form.elements.key.value = apiKey();
  byId("settings").showModal();
}

// changed: called when the settings were, with whether the key was among them.
export function bindSettings(changed) {
  const form = byId("settings-form");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const problem = problemOf(form);
    byId("settings-problem").textContent = problem;
    if (problem) return;
    for (const name of Object.keys(DEFAULTS)) settings[name] = form.elements[name].value;
    localStorage.setItem(KEPT, JSON.stringify(settings));
    const other = form.elements.key.value !== apiKey();
    if (other) keepApiKey(form.elements.key.value.trim());
    byId("settings").close();
    changed(other);
    toast("Settings are kept in this browser.", null, 2);
  });
  byId("settings-reset").addEventListener("click", () => {
    for (const [name, value] of Object.entries(DEFAULTS)) form.elements[name].value = value;
  });
  byId("tools-example").addEventListener("click", () => {
    form.elements.tools.value = JSON.stringify(EXAMPLE, null, 1);
  });
}

function problemOf(form) {
  try {
    toolsOf(form.elements.tools.value);
    return "";
  } catch (error) {
    return `Tools must be JSON, a list as in the API: ${error.message}`;
  }
}
