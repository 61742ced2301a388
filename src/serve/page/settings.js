// Settings dialog: system prompt, sampling and tools of a conversation, and the defaults of new conversations.

import {SAMPLING, cleanSettings} from "./tree.js";
import {$, element, small} from "./util.js";

const DEFAULTS = "flatkv-settings";
const fields = new Map(
  SAMPLING.map(({name, label, min, max, step}) => {
    const field = element("input", {
      type: "number",
      min,
      max,
      step: name === "temperature" || step < 1 ? "any" : step,
      placeholder: "default",
      id: "set-" + name,
    });
    $("set-sampling").append(element("label", {}, label, field));
    return [name, field];
  }),
);
let edited = null; // settings that the open dialog changes
let onChange = () => {};

export function defaultSettings() {
  try {
    return cleanSettings(JSON.parse(small.get("localStorage", DEFAULTS)));
  } catch {
    return cleanSettings(null);
  }
}

// Returns an error message, or "" if the text is empty or a JSON array of objects.
function toolsError(text) {
  if (!text.trim()) return "";
  try {
    const value = JSON.parse(text);
    return Array.isArray(value) && value.every(tool => tool?.function?.name)
      ? ""
      : 'Tools: expected a JSON array of {"type": "function", "function": {"name": …}}.';
  } catch (error) {
    return "Tools: " + error.message;
  }
}

// Copies the fields of the dialog to the settings. Returns false and shows an error if a field is invalid.
function readFields() {
  const sampling = {};
  let wrong = "";
  for (const {name, label, min, max} of SAMPLING) {
    const field = fields.get(name);
    if (!field.validity.valid) wrong = `${label}: expected a number from ${min} to ${max}.`;
    else if (field.value !== "") sampling[name] = Number(field.value);
  }
  wrong ||= toolsError($("set-tools").value);
  $("set-error").textContent = wrong;
  if (wrong) return false;
  Object.assign(edited, {system: $("set-system").value, sampling, tools: $("set-tools").value.trim()});
  onChange();
  return true;
}

// Opens the dialog. changed() is called whenever the settings were changed.
export function openSettings(settings, changed) {
  edited = settings;
  onChange = changed;
  $("set-system").value = settings.system;
  $("set-tools").value = settings.tools;
  for (const [name, field] of fields) field.value = settings.sampling[name] ?? "";
  $("set-error").textContent = "";
  $("set-default").textContent = "Use for new conversations";
  $("settings").showModal();
}

$("settings")
  .querySelector("form")
  .addEventListener("submit", event => {
    if (!readFields()) event.preventDefault();
  });
$("settings").addEventListener("cancel", event => {
  if (!readFields()) event.preventDefault();
});
$("set-default").addEventListener("click", () => {
  if (!readFields()) return;
  small.set("localStorage", DEFAULTS, JSON.stringify(edited));
  $("set-default").textContent = "Saved for new conversations";
});
