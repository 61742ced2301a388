// Start of the page: tabs, colour theme, API key, and the connection to the server.

import {RequestError, chooseModel, isKeyRemembered, keyOf, listModels, setKey} from "./api.js";
import {setModel, startChat} from "./chat.js";
import {showMemory} from "./memory.js";
import {$, icon, small} from "./util.js";

// ---- tabs

const tabs = [$("tab-chat"), $("tab-memory")];

function select(tab) {
  for (const other of tabs) {
    other.setAttribute("aria-selected", String(other === tab));
    other.tabIndex = other === tab ? 0 : -1;
    $(other.getAttribute("aria-controls")).hidden = other !== tab;
  }
  const isMemory = tab === $("tab-memory");
  document.body.classList.toggle("memory-tab", isMemory);
  history.replaceState(null, "", isMemory ? "#memory" : location.pathname + location.search);
  showMemory(isMemory);
}

for (const tab of tabs) {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", event => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = tabs[1 - tabs.indexOf(tab)];
    select(other);
    other.focus();
  });
}

addEventListener("hashchange", () => select(location.hash === "#memory" ? $("tab-memory") : $("tab-chat")));

// ---- colour theme: follows the system until the user chooses

const THEMES = {auto: "Colours: same as the system", light: "Colours: light", dark: "Colours: dark"};

function showTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").replaceChildren(icon("theme-" + theme));
  $("theme").setAttribute("aria-label", THEMES[theme]);
  $("theme").title = THEMES[theme];
}

$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES),
    now = document.documentElement.dataset.theme ?? "auto",
    next = names[(names.indexOf(now) + 1) % names.length];
  small.set("localStorage", "flatkv-theme", next === "auto" ? null : next);
  showTheme(next);
});
showTheme(document.documentElement.dataset.theme ?? "auto");

// ---- API key

function askForKey(reason) {
  if ($("key-dialog").open) return;
  $("key-text").textContent = reason;
  $("key").value = keyOf("chat");
  $("key-remember").checked = isKeyRemembered();
  $("settings").close();
  $("key-dialog").showModal();
}

$("set-key").addEventListener("click", () => askForKey("The key is sent only to this server."));
$("key-cancel").addEventListener("click", () => {
  $("key-dialog").close();
  if (!$("model").textContent) notice("This server requires an API key. The settings contain a button to enter it.");
});
$("key-form").addEventListener("submit", () => {
  setKey("chat", $("key").value.trim(), $("key-remember").checked);
  connect();
});

// ---- models

const RETRY_MS = 2000;
const MODEL = "flatkv-model"; // name of the model that was chosen last
let retryTimer = 0;

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

function showModels(models) {
  const select = $("models"),
    before = small.get("localStorage", MODEL);
  $("model").textContent = models[0].id;
  $("model").hidden = models.length > 1;
  select.hidden = models.length < 2;
  select.replaceChildren(...models.map(model => new Option(model.id, model.id)));
  if (models.some(model => model.id === before)) select.value = before;
  const apply = () => {
    const model = models.find(one => one.id === select.value) ?? models[0];
    chooseModel(models.length > 1 ? model.id : "");
    setModel(model.id, model.max_model_len ?? 0, models.length > 1);
  };
  select.onchange = () => {
    small.set("localStorage", MODEL, select.value);
    apply();
  };
  apply();
}

// Asks the server for its models until it answers.
async function connect() {
  clearTimeout(retryTimer);
  try {
    showModels(await listModels());
    notice("");
  } catch (error) {
    if (!(error instanceof RequestError)) throw error;
    if (error.status === 401) {
      askForKey(keyOf("chat") ? "The server did not accept this API key." : "This server requires an API key.");
      return;
    }
    const lost = "The server cannot be reached. The page connects again as soon as it is running.";
    notice(error.status === 503 ? "The model is loading." : error.status === 0 ? lost : error.message + " " + error.advice);
    retryTimer = setTimeout(connect, RETRY_MS);
  }
}

await startChat(askForKey, connect);
select(location.hash === "#memory" ? $("tab-memory") : $("tab-chat"));
connect();
