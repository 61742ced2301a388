// Text documents that are attached to the next message: reading, counting tokens, and the list above the message box.

import {countTokens} from "./api.js";
import {$, bytes, element, icon, iconButton, plural, toast} from "./util.js";

const MAX_BYTES = 4 << 20; // the server limits a request to 8 MiB, and escaping can double the size of a text
let attached = []; // [{name, text, tokens}], as in a turn; tokens is null until the server has counted them
let onChange = () => {};

export function onDocumentsChange(act) {
  onChange = act;
}

export const attachedTokens = () => attached.reduce((sum, file) => sum + (file.tokens ?? 0), 0);

// Returns the attached documents and removes them from the message box.
export function takeDocuments() {
  const taken = attached;
  attached = [];
  show();
  return taken;
}

// Returns the size of a document in bytes and tokens.
export const sizeOf = file =>
  `${bytes(file.text.length)}, ` + (file.tokens === null ? "counting tokens" : plural(file.tokens, "token"));

function show() {
  $("documents").hidden = attached.length === 0;
  $("documents").replaceChildren(
    ...attached.map(file =>
      element(
        "li",
        {},
        icon("file"),
        element("span", {class: "name"}, file.name),
        element("span", {class: "dim"}, sizeOf(file)),
        iconButton("close", `Remove ${file.name}`, () => {
          attached = attached.filter(other => other !== file);
          show();
        }),
      ),
    ),
  );
  onChange();
}

async function textOf(file) {
  const size = attached.reduce((sum, other) => sum + other.text.length, file.size);
  if (size > MAX_BYTES)
    throw new Error(`${file.name} is too large: the documents of a message are limited to ${bytes(MAX_BYTES)}.`);
  let text;
  try {
    text = new TextDecoder("utf-8", {fatal: true}).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is not a text file in UTF-8.`);
  }
  if (text.includes("\0")) throw new Error(`${file.name} is not a text file.`);
  return text;
}

export async function attachFiles(files) {
  for (const file of files) {
    try {
      const entry = {name: file.name.slice(0, 200), text: await textOf(file), tokens: null};
      attached.push(entry);
      show();
      entry.tokens = await countTokens(entry.text);
      show();
    } catch (error) {
      toast(error.message + (error.advice ? " " + error.advice : ""));
    }
  }
}

// ---- attach button, drag and drop, paste

$("attach").addEventListener("click", () => $("attach-files").click());
$("attach-files").addEventListener("change", event => {
  attachFiles([...event.target.files]);
  event.target.value = "";
});

const hasFiles = event => event.dataTransfer?.types.includes("Files");
window.addEventListener("dragover", event => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  $("drop-hint").hidden = false;
});
window.addEventListener("dragleave", event => {
  if (!event.relatedTarget) $("drop-hint").hidden = true;
});
window.addEventListener("drop", event => {
  $("drop-hint").hidden = true;
  if (!hasFiles(event)) return;
  event.preventDefault();
  attachFiles([...event.dataTransfer.files]);
});
$("message").addEventListener("paste", event => {
  if (event.clipboardData.files.length === 0) return;
  event.preventDefault();
  attachFiles([...event.clipboardData.files]);
});
