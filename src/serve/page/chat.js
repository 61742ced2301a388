// The chat: list of conversations, the open conversation and the message box.

import {generate, runOf, stopRun} from "./answers.js";
import {attachedTokens, onDocumentsChange, takeDocuments} from "./documents.js";
import {defaultSettings, openSettings} from "./settings.js";
import {deleteConversation, listConversations, loadConversation, onOtherTab, openStore, saveConversation} from "./store.js";
import {clearThread, redraw, scrollToEnd, setActions, showThread} from "./thread.js";
import {addTurn, choose, importConversation, newConversation, pathOf, removeLastTurn, toMarkdown} from "./tree.js";
import {$, download, element, icon, integer, small, toast} from "./util.js";

const LAST = "flatkv-last"; // id of the conversation that was open last
const isTouch = matchMedia("(pointer: coarse)").matches;
let current = newConversation(defaultSettings());
const info = {model: "", context: 0, hasChoice: false};
let askForKey = () => {};
let reconnect = () => {};

// ---- storage

let hasReportedFailure = false;

async function save(c) {
  if (c.turns.length === 0) return;
  try {
    await saveConversation(c);
    await showList();
  } catch (error) {
    if (!hasReportedFailure) toast(`The browser could not store the conversation (${error.name}). Export it to keep it.`);
    hasReportedFailure = true;
  }
}

// ---- list of conversations

const MIN_FILTERED = 10; // shorter lists have no search field
let shownRows = ""; // an unchanged list is not drawn again, so that an open menu and the focus are kept

async function rename(row, item) {
  const field = element("input", {"aria-label": "Title", maxlength: 200});
  field.value = row.title;
  const form = element("form", {class: "rename"}, field);
  const finish = async store => {
    form.removeEventListener("focusout", leave);
    form.remove();
    const c = row.id === current.id ? current : await loadConversation(row.id);
    if (store && field.value.trim() && c) {
      c.title = field.value.trim();
      await save(c);
    }
    await showList();
  };
  const leave = () => finish(true);
  form.addEventListener("submit", event => {
    event.preventDefault();
    finish(true);
  });
  form.addEventListener("keydown", event => {
    if (event.key === "Escape") {
      event.stopPropagation();
      finish(false);
    }
  });
  form.addEventListener("focusout", leave);
  item.replaceChildren(form);
  shownRows = ""; // the row must be drawn again even if its title does not change
  field.select();
}

async function remove(row) {
  const c = row.id === current.id ? current : await loadConversation(row.id);
  await stopAndWait(row.id); // the end of a run stores its conversation
  await deleteConversation(row.id);
  if (row.id === current.id) startNew();
  await showList();
  toast(`Deleted “${row.title}”.`, "Undo", () => save(c));
}

async function exportAs(row, format) {
  const c = row.id === current.id ? current : await loadConversation(row.id);
  const name = (c.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "") || "conversation").slice(0, 60);
  if (format === "json") download(name + ".json", "application/json", JSON.stringify(c, null, 1));
  else download(name + ".md", "text/markdown", toMarkdown(c));
}

function menuOf(row, item) {
  const menu = element("div", {class: "menu", role: "menu", popover: "auto"});
  const entry = (text, act) =>
    element(
      "button",
      {
        type: "button",
        role: "menuitem",
        onclick: () => {
          menu.hidePopover();
          act();
        },
      },
      text,
    );
  menu.append(
    entry("Rename", () => rename(row, item)),
    entry("Export as Markdown", () => exportAs(row, "markdown")),
    entry("Export as JSON", () => exportAs(row, "json")),
    entry("Delete", () => remove(row)),
  );
  menu.addEventListener("keydown", event => {
    const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
    if (!step) return;
    event.preventDefault();
    const entries = [...menu.children];
    entries[(entries.indexOf(document.activeElement) + step + entries.length) % entries.length].focus();
  });
  const button = element(
    "button",
    {type: "button", class: "icon small", "aria-label": `Actions for ${row.title}`, "aria-haspopup": "menu"},
    icon("more"),
  );
  button.addEventListener("click", () => {
    menu.togglePopover();
    const at = button.getBoundingClientRect();
    menu.style.left = Math.max(8, Math.min(at.left, innerWidth - menu.offsetWidth - 8)) + "px";
    menu.style.top = Math.min(at.bottom + 4, innerHeight - menu.offsetHeight - 8) + "px";
    menu.firstChild.focus();
  });
  return [button, menu];
}

async function showList() {
  const all = await listConversations();
  if ($("conversations").querySelector(".rename")) return; // keeps the field that is being edited
  $("filter").hidden = all.length < MIN_FILTERED;
  const wanted = $("filter").hidden ? "" : $("filter").value.trim().toLowerCase();
  const rows = all.filter(row => row.title.toLowerCase().includes(wanted));
  const key = JSON.stringify([current.id, rows.map(row => [row.id, row.title])]);
  if (key === shownRows) return;
  shownRows = key;
  $("conversations").replaceChildren(
    ...rows.map(row => {
      const item = element("li", {class: row.id === current.id ? "current" : null});
      const open = element(
        "button",
        {
          type: "button",
          class: "open",
          "aria-current": row.id === current.id ? "true" : null,
          title: row.title,
          onclick: () => openById(row.id),
        },
        row.title || "Untitled",
      );
      item.append(open, ...menuOf(row, item));
      return item;
    }),
  );
}

$("filter").addEventListener("input", showList);

// ---- the open conversation

// Returns the number of tokens of the conversation and of the documents that were not part of a request with known usage.
function usedTokens(c) {
  const path = pathOf(c),
    last = path.findLastIndex(turn => turn.usage),
    usage = path[last]?.usage,
    files = path.slice(last + 1).flatMap(turn => turn.files ?? []);
  return (usage ? usage.prompt + usage.generated : 0) + files.reduce((sum, file) => sum + (file.tokens ?? 0), attachedTokens());
}

function showSettingsMark() {
  const {system, sampling, tools} = current.settings,
    isChanged = Boolean(system || tools || Object.keys(sampling).length),
    label = isChanged ? "Settings (changed for this conversation)" : "Settings";
  $("settings-button").classList.toggle("changed", isChanged);
  $("settings-button").title = label;
  $("settings-button").setAttribute("aria-label", label);
}

function show() {
  const c = current,
    run = runOf(c.id);
  showThread(c, info, turn => run?.turn === turn);
  showSettingsMark();
  $("send").hidden = Boolean(run);
  $("stop").hidden = !run;
  const used = usedTokens(c);
  $("context").textContent = used && info.context ? `${integer(used)} of ${integer(info.context)} tokens` : "";
  $("context").classList.toggle("error", info.context > 0 && used > info.context);
  document.title = c.title ? `${c.title} – flatkv` : "flatkv";
}

function open(c) {
  if (c !== current) clearThread();
  current = c;
  small.set("sessionStorage", LAST, c.turns.length ? c.id : null);
  closeSidebar();
  show();
  scrollToEnd();
  showList();
}

async function openById(id) {
  if (id === current.id) {
    closeSidebar();
    return;
  }
  const c = runOf(id)?.conversation ?? (await loadConversation(id));
  if (c) open(c);
}

// Returns the focus to the message box after a button was used that is hidden or replaced. A touch screen would show its keyboard.
function focusBox() {
  if (!isTouch) $("message").focus();
}

function startNew() {
  open(newConversation(defaultSettings()));
  focusBox();
}

// Generates an answer to the turn `parent` of the open conversation. begun: the incomplete answer that it continues, or null.
function answer(parent, begun = null) {
  const c = current;
  const done = generate(c, parent, info.hasChoice ? info.model : "", begun, {
    changed: () => {
      if (c === current) show();
    },
    save: () => save(c),
    needsKey: () => askForKey("The server did not accept the API key."),
    lost: () => reconnect(),
  });
  focusBox();
  small.set("sessionStorage", LAST, c.id);
  scrollToEnd();
  save(c);
  return done;
}

function send(text) {
  if (runOf(current.id)) return;
  const files = takeDocuments();
  if (!text.trim() && files.length === 0) return;
  const parent = pathOf(current).at(-1)?.id ?? -1;
  answer(addTurn(current, parent, "user", {content: text, files}).id);
}

async function stopAndWait(id) {
  stopRun(id);
  while (runOf(id)) await new Promise(resolve => setTimeout(resolve, 10));
}

// Stops a running answer first, because only one answer per conversation is generated at a time.
async function whenIdle(act) {
  await stopAndWait(current.id);
  act();
}

setActions({
  start: send,
  retry: turn =>
    whenIdle(() => {
      const isEmpty = !turn.content && !turn.reasoning && !turn.calls.length;
      if (isEmpty && turn === current.turns.at(-1)) removeLastTurn(current);
      answer(turn.parent);
    }),
  regenerate: turn => whenIdle(() => answer(turn.parent)),
  proceed: turn => whenIdle(() => answer(turn.parent, turn)),
  sendResults: (turn, results) => {
    const next = addTurn(current, turn.id, "tool", {results});
    redraw(turn); // without the form
    answer(next.id);
  },
  switchTo: turn => {
    choose(current, turn);
    show();
    save(current);
  },
  edit: (turn, content) =>
    whenIdle(() => {
      if (turn.role === "user") {
        answer(addTurn(current, turn.parent, "user", {content, files: turn.files}).id);
        return;
      }
      addTurn(current, turn.parent, "assistant", {
        content,
        reasoning: "",
        calls: [],
        usage: null,
        times: null,
        finish: "edited",
        error: null,
      });
      redraw(turn);
      show();
      save(current);
    }),
});

// ---- message box

const box = $("message");

function fitBox() {
  box.style.height = "auto";
  box.style.height = Math.min(box.scrollHeight, innerHeight * 0.4) + "px";
}

box.addEventListener("input", fitBox);
box.addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !isTouch) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
  if (event.key === "ArrowUp" && !box.value) {
    const edit = [...document.querySelectorAll(".turn.user .turn-tools [aria-label=Edit]")].at(-1);
    if (edit) {
      event.preventDefault();
      edit.click();
    }
  }
});
$("composer").addEventListener("submit", event => {
  event.preventDefault();
  if (runOf(current.id)) return;
  const text = box.value;
  box.value = "";
  fitBox();
  send(text);
});
$("stop").addEventListener("click", () => {
  stopRun(current.id);
  focusBox();
});
document.addEventListener("keydown", event => {
  if (event.key === "Escape" && !document.querySelector("dialog[open], :popover-open")) stopRun(current.id);
});
onDocumentsChange(() => show());

// ---- sidebar, which is a drawer on narrow screens

function closeSidebar() {
  document.body.classList.remove("drawer");
  $("shade").hidden = true;
  $("menu").setAttribute("aria-expanded", "false");
}

$("menu").addEventListener("click", () => {
  const isOpen = document.body.classList.toggle("drawer");
  $("shade").hidden = !isOpen;
  $("menu").setAttribute("aria-expanded", String(isOpen));
  if (isOpen) $("new-chat").focus();
});
$("shade").addEventListener("click", closeSidebar);
$("sidebar").addEventListener("keydown", event => {
  if (event.key === "Escape" && document.body.classList.contains("drawer")) {
    closeSidebar();
    $("menu").focus();
  }
});
$("new-chat").addEventListener("click", startNew);
$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", async event => {
  const file = event.target.files[0];
  event.target.value = "";
  if (!file) return;
  try {
    const c = importConversation(JSON.parse(await file.text()));
    await save(c);
    open(c);
  } catch (error) {
    toast(`${file.name} cannot be imported: ${error.message}`);
  }
});
$("settings-button").addEventListener("click", () => openSettings(current.settings, () => {
    showSettingsMark();
    save(current);
  }),
);

// ---- start

// Sets the model that answers. hasChoice: the server has several models, so requests name one.
export function setModel(model, context, hasChoice) {
  Object.assign(info, {model, context, hasChoice});
  if (current.turns.length === 0) clearThread();
  show();
}

// onKey(reason) asks the user for an API key. onLost() tries to reach the server and reads its list of models again.
export async function startChat(onKey, onLost) {
  askForKey = onKey;
  reconnect = onLost;
  const isStored = await openStore();
  if (!isStored) toast("This browser does not allow storage, so conversations are lost when the page is closed.");
  onOtherTab(async id => {
    await showList();
    if (id !== current.id || runOf(id)) return;
    const c = await loadConversation(id);
    if (c) open(c);
    else startNew();
  });
  const last = small.get("sessionStorage", LAST);
  const c = last ? await loadConversation(last) : null;
  open(c ?? current);
  focusBox();
}
