// The displayed conversation: one element per turn of the chosen path. Turns do not change after their answer is complete, so a
// new branch redraws only the turns that differ.

import {sizeOf} from "./documents.js";
import {MarkdownStream, drawScheduler, renderMarkdown} from "./markdown.js";
import {childrenOf, pathOf} from "./tree.js";
import {$, copyText, element, icon, iconButton, integer, plural, seconds, toast} from "./util.js";

const thread = $("thread");
const NEAR_END = 80; // in pixels; the view follows new text if it is scrolled at least this close to its end
const MIN_RATE_S = 0.02; // the rate is not shown if it was measured over a shorter time
let views = []; // [{turn, node, ...}] of the displayed path
let act = {}; // see setActions()

// actions: edit(turn, content), regenerate(turn), proceed(turn), switchTo(turn), retry(turn), sendResults(turn, results), start(text)
export function setActions(actions) {
  act = actions;
}

const isAtEnd = () => thread.scrollHeight - thread.scrollTop - thread.clientHeight < NEAR_END;
export const scrollToEnd = () => {
  thread.scrollTop = thread.scrollHeight;
};

function showLatestButton() {
  $("latest").hidden = isAtEnd();
}

thread.addEventListener("scroll", showLatestButton, {passive: true});
$("latest").addEventListener("click", scrollToEnd);

// ---- parts of a turn

function branchSwitch(c, turn) {
  const siblings = childrenOf(c, turn.parent),
    at = siblings.indexOf(turn);
  if (siblings.length < 2) return null;
  const step = (by, name, label) => {
    const button = iconButton(name, label, () => act.switchTo(siblings[at + by]));
    button.disabled = !siblings[at + by];
    return button;
  };
  return element(
    "span",
    {class: "branches", role: "group", "aria-label": "Versions of this turn"},
    step(-1, "left", "Previous version"),
    `${at + 1} / ${siblings.length}`,
    step(1, "right", "Next version"),
  );
}

function copyButton(turn) {
  return iconButton("copy", "Copy", async () =>
    toast((await copyText(turn.content)) ? "Copied." : "The browser does not allow copying."),
  );
}

// Replaces the content of a turn with a text field.
function editTurn(c, turn, body) {
  const field = element("textarea", {"aria-label": "Edit the turn", rows: Math.min(12, turn.content.split("\n").length + 1)});
  field.value = turn.content;
  const before = [...body.childNodes];
  const restore = () => {
    const node = body.closest("article");
    body.replaceChildren(...before);
    node.classList.remove("editing");
    node.querySelector("[aria-label=Edit]").focus();
  };
  const form = element(
    "form",
    {
      class: "edit",
      onsubmit: event => {
        event.preventDefault();
        act.edit(turn, field.value);
      },
    },
    field,
    element(
      "div",
      {class: "row end"},
      element("button", {type: "button", class: "plain", onclick: restore}, "Cancel"),
      element("button", {}, turn.role === "user" ? "Send" : "Save as a new version"),
    ),
  );
  form.addEventListener("keydown", event => {
    if (event.key === "Escape") {
      event.stopPropagation();
      restore();
    }
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  body.closest("article").classList.add("editing");
  body.replaceChildren(form);
  field.focus();
}

function fileChip(file) {
  return element(
    "li",
    {},
    icon("file"),
    element("span", {class: "name"}, file.name),
    element("span", {class: "dim"}, sizeOf(file)),
  );
}

function toolCard(call) {
  let shown = call.arguments;
  try {
    shown = JSON.stringify(JSON.parse(call.arguments), null, 2);
  } catch {
    /* incomplete or invalid JSON is shown as it is */
  }
  return element(
    "details",
    {class: "tool", open: true},
    element("summary", {}, "Tool call: ", element("b", {}, call.name)),
    element("pre", {tabindex: "0"}, shown),
  );
}

function resultsForm(turn) {
  const fields = turn.calls.map(call =>
    element("textarea", {rows: 2, "aria-label": `Result of ${call.name}`, placeholder: `Result of ${call.name}`}),
  );
  return element(
    "form",
    {
      class: "edit",
      onsubmit: event => {
        event.preventDefault();
        act.sendResults(
          turn,
          turn.calls.map((call, i) => ({id: call.id, content: fields[i].value})),
        );
      },
    },
    ...fields,
    element("div", {class: "row end"}, element("button", {}, "Send results")),
  );
}

// Shows the effect of the prefix cache: the numbers of cached, computed and generated tokens, and the speed.
function usageLine(turn) {
  const parts = [],
    {usage, times} = turn;
  let bar = null;
  if (usage) {
    const computed = usage.prompt - usage.cached,
      whole = usage.prompt + usage.generated || 1;
    bar = element("span", {class: "usage-bar", "aria-hidden": "true"});
    for (const [name, n] of [
      ["cached", usage.cached],
      ["computed", computed],
      ["generated", usage.generated],
    ]) {
      const part = element("i", {class: "fill-" + {cached: "cached", computed: "shared", generated: "private"}[name]});
      part.style.width = (100 * n) / whole + "%";
      bar.append(part);
      parts.push(element("span", {class: "tokens-" + name}, element("b", {}, integer(n)), " " + name));
    }
    if (times && times.total - times.first > MIN_RATE_S && usage.generated > 1)
      parts.push(
        element("span", {class: "rate"}, ((usage.generated - 1) / (times.total - times.first)).toFixed(1) + " tokens/s"),
      );
  }
  if (times?.first) parts.push(element("span", {}, "first token in " + seconds(times.first)));
  if (turn.model) parts.push(element("span", {class: "model"}, turn.model));
  if (turn.finish === "stopped") parts.push(element("span", {}, "stopped"));
  if (turn.finish === "edited") parts.push(element("span", {}, "edited by you"));
  if (!parts.length) return null;
  const title =
    usage &&
    `Prompt of ${plural(usage.prompt, "token")}: ${integer(usage.cached)} were reused from the prefix cache, ${integer(usage.prompt - usage.cached)} had to be computed.`;
  return element("div", {class: "usage dim", title}, bar, ...parts);
}

function errorBox(turn) {
  return element(
    "div",
    {class: "error-box", role: "alert"},
    element("p", {}, element("b", {}, turn.error.message)),
    turn.error.advice && element("p", {}, turn.error.advice),
    element("button", {type: "button", onclick: () => act.retry(turn)}, "Try again"),
  );
}

// ---- turns

function userView(c, turn) {
  const body = element("div", {class: "body"}, turn.content);
  const tools = element(
    "div",
    {class: "turn-tools"},
    branchSwitch(c, turn),
    copyButton(turn),
    iconButton("edit", "Edit", () => editTurn(c, turn, body)),
  );
  const files = turn.files.length ? element("ul", {class: "files"}, ...turn.files.map(fileChip)) : null;
  return {turn, node: element("article", {class: "turn user", "aria-label": "You"}, files, body, tools)};
}

function toolView(c, turn) {
  const branches = branchSwitch(c, turn);
  const results = turn.results.map(result =>
    element("details", {class: "tool"}, element("summary", {}, "Tool result"), element("pre", {tabindex: "0"}, result.content)),
  );
  return {
    turn,
    node: element(
      "article",
      {class: "turn tool-results", "aria-label": "Tool results"},
      ...results,
      branches && element("div", {class: "turn-tools"}, branches),
    ),
  };
}

function answerView(c, turn) {
  const reasoning = document.createTextNode(""),
    label = element("summary", {}, "Reasoning");
  const fold = element(
    "details",
    {class: "reasoning", hidden: true},
    label,
    element("div", {class: "reasoning-text"}, reasoning),
  );
  const body = element("div", {class: "body markdown"}),
    calls = element("div"),
    foot = element("div", {class: "foot"}),
    wait = element("div", {class: "wait", hidden: true});
  const node = element("article", {class: "turn answer", "aria-label": "Answer"}, fold, body, calls, wait, foot);
  let stream = null,
    nReasoning = 0;

  const drawReasoning = () => {
    fold.hidden = !turn.reasoning;
    reasoning.appendData(turn.reasoning.slice(nReasoning));
    nReasoning = turn.reasoning.length;
  };
  const draw = drawScheduler(() => {
    if (!stream) return; // the answer is complete
    const follow = isAtEnd();
    drawReasoning();
    stream.draw();
    calls.replaceChildren(...turn.calls.map(toolCard));
    if (follow) scrollToEnd();
    showLatestButton();
  });

  // Draws the final state.
  const finish = () => {
    const follow = isAtEnd();
    wait.hidden = true;
    node.removeAttribute("aria-busy");
    label.textContent = "Reasoning";
    drawReasoning();
    if (stream) stream.draw();
    else renderMarkdown(body, turn.content);
    stream = null;
    calls.replaceChildren(...turn.calls.map(toolCard));
    const awaitsResults = turn.calls.length > 0 && turn.finish === "tool_calls" && childrenOf(c, turn.id).length === 0;
    if (awaitsResults) calls.append(resultsForm(turn));
    if (turn.finish === "length")
      foot.append(
        element("p", {class: "dim"}, "The answer reached its limit. Continue it, or set a higher answer limit in the settings."),
      );
    if (turn.error) foot.append(errorBox(turn));
    const isCut = turn.content && !turn.calls.length && (turn.finish === "length" || turn.finish === "stopped" || turn.error);
    const tools = element(
      "div",
      {class: "turn-tools"},
      branchSwitch(c, turn),
      turn.content && copyButton(turn),
      turn.content && iconButton("edit", "Edit", () => editTurn(c, turn, body)),
      iconButton("again", "Regenerate", () => act.regenerate(turn)),
      isCut && element("button", {type: "button", class: "plain small", onclick: () => act.proceed(turn)}, "Continue"),
      usageLine(turn),
    );
    foot.append(tools);
    if (follow) scrollToEnd();
  };

  return {
    turn,
    node,
    finish,
    begin() {
      stream = new MarkdownStream(body);
      node.setAttribute("aria-busy", "true");
      this.showWait(null);
    },
    add(part) {
      wait.hidden = true;
      if (part.content) stream.append(part.content);
      if (part.reasoning) label.textContent = "Reasoning…";
      else if (part.content) label.textContent = "Reasoning";
      draw();
    },
    // Shows that the answer has not started. text: reason for waiting, or null; now: starts the next attempt.
    showWait(text, now) {
      wait.replaceChildren(element("span", {class: "dots", "aria-hidden": "true"}, element("i"), element("i"), element("i")));
      if (text)
        wait.append(
          element("span", {role: "status"}, text),
          element("button", {type: "button", class: "plain", onclick: now}, "Try now"),
        );
      wait.hidden = false;
    },
    // Shows how long the server has been reading the prompt, unless a reason for waiting is shown.
    showElapsed(s) {
      if (wait.childElementCount === 1) wait.append(element("span", {class: "elapsed"}));
      const label = wait.querySelector(".elapsed");
      if (label) label.textContent = `Reading the prompt, ${Math.round(s)} s`;
      wait.hidden = false;
    },
  };
}

const makeView = (c, turn) => ({user: userView, tool: toolView, assistant: answerView})[turn.role](c, turn);

// ---- the thread

const STARTERS = [
  "Explain what a KV cache is, in three sentences.",
  "Write a Python function that merges two sorted lists.",
  "Make a table of five planets with their diameters.",
];

function emptyThread(info) {
  return element(
    "div",
    {class: "empty"},
    element("h2", {}, "Ask " + (info.model || "the model")),
    element(
      "p",
      {class: "dim"},
      info.context
        ? `Up to ${integer(info.context)} tokens per conversation. Drop text documents anywhere on the page to ask about them.`
        : "Drop text documents anywhere on the page to ask about them.",
    ),
    element(
      "div",
      {class: "starters"},
      ...STARTERS.map(text => element("button", {type: "button", class: "plain", onclick: () => act.start(text)}, text)),
    ),
  );
}

// Displays the chosen path of a conversation. isRunning(turn): the answer is still being generated. Returns the view of the last turn.
export function showThread(c, info, isRunning) {
  const path = pathOf(c);
  let same = 0;
  while (
    same < path.length &&
    views[same]?.turn === path[same] &&
    views[same].siblings === childrenOf(c, path[same].parent).length
  )
    same++;
  for (const view of views.splice(same)) view.node.remove();
  thread.querySelector(".empty")?.remove();
  if (!path.length) thread.append(emptyThread(info));
  for (const turn of path.slice(same)) {
    const view = makeView(c, turn);
    view.siblings = childrenOf(c, turn.parent).length;
    if (turn.role === "assistant") {
      if (isRunning(turn)) resume(view);
      else view.finish();
    }
    views.push(view);
    thread.append(view.node);
  }
  showLatestButton();
  return views.at(-1);
}

// Shows an answer that is being generated, with the text received so far.
function resume(view) {
  view.begin();
  if (view.turn.content || view.turn.reasoning || view.turn.calls.length) view.add({content: view.turn.content});
}

// Removes all turns, for example before another conversation is displayed.
export function clearThread() {
  views = [];
  thread.replaceChildren();
}

// Draws a turn again after its answer was changed by something other than a stream.
export function redraw(turn) {
  const at = views.findIndex(view => view.turn === turn);
  if (at >= 0) for (const view of views.splice(at)) view.node.remove();
}

export const viewOf = turn => views.find(view => view.turn === turn);
