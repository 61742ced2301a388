// A conversation is a tree of turns. Editing or regenerating a turn adds a sibling, and nothing is overwritten. The displayed
// conversation is the path of chosen turns.
//
// A turn's id is its index in `turns`, and its parent has a smaller id (-1: the root), so the tree cannot contain cycles.
//   user:      {content, files: [{name, text, tokens}]}
//   assistant: {content, reasoning, calls: [{id, name, arguments}], model, usage, times, finish, error}; model is "" if the server has one
//   tool:      {results: [{id, content}]}

const VERSION = 1;
const MAX_TITLE = 60;
const ROLES = ["user", "assistant", "tool"];
export const SAMPLING = [
  {name: "temperature", label: "Temperature", min: 0, max: 5, step: 0.05},
  {name: "top_p", label: "Top p", min: 0, max: 1, step: 0.01},
  {name: "top_k", label: "Top k", min: 0, max: 100000, step: 1},
  {name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01},
  {name: "repetition_penalty", label: "Repetition penalty", min: 0.1, max: 10, step: 0.01},
  {name: "max_tokens", label: "Answer limit, tokens", min: 1, max: 100000000, step: 1},
  {name: "seed", label: "Seed", min: 0, max: 9007199254740991, step: 1},
];

export const emptySettings = () => ({system: "", sampling: {}, tools: ""});

// crypto.randomUUID() exists only on https and localhost.
const randomId = () => [...crypto.getRandomValues(new Uint8Array(12))].map(byte => byte.toString(16).padStart(2, "0")).join("");

export function newConversation(settings = emptySettings()) {
  const now = Date.now();
  return {
    version: VERSION,
    id: randomId(),
    title: "",
    created: now,
    updated: now,
    settings: structuredClone(settings),
    turns: [],
    chosen: -1,
  };
}

export const childrenOf = (c, parent) => c.turns.filter(turn => turn.parent === parent);

function chosenChild(c, parent) {
  const id = parent < 0 ? c.chosen : c.turns[parent].chosen;
  return id >= 0 ? c.turns[id] : undefined;
}

// Returns the turns from the root to the end of the chosen branch.
export function pathOf(c) {
  const path = [];
  for (let turn = chosenChild(c, -1); turn; turn = chosenChild(c, turn.id)) path.push(turn);
  return path;
}

export function choose(c, turn) {
  if (turn.parent < 0) c.chosen = turn.id;
  else c.turns[turn.parent].chosen = turn.id;
}

// Removes the last turn of a conversation, which must be an answer, for example one that failed.
export function removeLastTurn(c) {
  const turn = c.turns.pop();
  const before = childrenOf(c, turn.parent).at(-1)?.id ?? -1;
  if (turn.parent < 0) c.chosen = before;
  else c.turns[turn.parent].chosen = before;
}

export function addTurn(c, parent, role, fields) {
  const turn = {id: c.turns.length, parent, role, chosen: -1, at: Date.now(), ...fields};
  c.turns.push(turn);
  choose(c, turn);
  if (!c.title && role === "user") c.title = titleOf(turn);
  c.updated = Date.now();
  return turn;
}

function titleOf(turn) {
  const text = (turn.content || turn.files[0]?.name || "").replace(/\s+/g, " ").trim();
  return text.length > MAX_TITLE ? text.slice(0, MAX_TITLE - 1) + "…" : text;
}

// Documents come before the question, so that all questions about them share their prefix.
function userContent(turn) {
  const documents = turn.files.map(file => `Document "${file.name}":\n${file.text}\n\n`);
  return documents.join("") + turn.content;
}

function messagesOfTurn(turn) {
  if (turn.role === "user") return [{role: "user", content: userContent(turn)}];
  if (turn.role === "tool") return turn.results.map(result => ({role: "tool", tool_call_id: result.id, content: result.content}));
  const message = {role: "assistant", content: turn.content};
  if (turn.calls.length)
    message.tool_calls = turn.calls.map(call => ({
      id: call.id,
      type: "function",
      function: {name: call.name, arguments: call.arguments},
    }));
  return [message];
}

// Returns the turns from the root to the turn `last`, without questions that got no answer because of an error or a stop.
function ancestorsOf(c, last) {
  const turns = [];
  for (let id = last; id >= 0; id = c.turns[id].parent) {
    const turn = c.turns[id],
      isEmpty = turn.role === "assistant" && !turn.content && !turn.calls.length;
    if (isEmpty && c.turns[turn.parent]?.role === "user") id = turn.parent;
    else if (!isEmpty) turns.push(turn);
  }
  return turns.reverse();
}

// Returns the body of the request for an answer to the turn `last`. start: text with which the answer begins, or "".
export function requestBody(c, last, model, start) {
  const messages = ancestorsOf(c, last).flatMap(messagesOfTurn);
  if (start) messages.push({role: "assistant", content: start});
  if (c.settings.system) messages.unshift({role: "system", content: c.settings.system});
  const body = {messages, ...c.settings.sampling};
  if (model) body.model = model;
  if (c.settings.tools) body.tools = JSON.parse(c.settings.tools);
  return body;
}

export function toMarkdown(c) {
  const names = {user: "You", assistant: "Assistant", tool: "Tool results"};
  const parts = [`# ${c.title || "Conversation"}`];
  if (c.settings.system) parts.push(`**System prompt:** ${c.settings.system}`);
  for (const turn of pathOf(c)) {
    parts.push(`## ${names[turn.role]}`);
    if (turn.role === "tool") parts.push(...turn.results.map(result => "```\n" + result.content + "\n```"));
    else if (turn.role === "user") parts.push(...turn.files.map(file => `*Document: ${file.name}*`), turn.content);
    else parts.push(turn.content, ...turn.calls.map(call => `Tool call: \`${call.name}(${call.arguments})\``));
  }
  return parts.filter(Boolean).join("\n\n") + "\n";
}

// ---- import

const text = value => (typeof value === "string" ? value : "");
const list = value => (Array.isArray(value) ? value : []);
const count = value => (Number.isFinite(value) && value >= 0 ? value : 0);

function cleanUsage(usage) {
  return usage ? {prompt: count(usage.prompt), cached: count(usage.cached), generated: count(usage.generated)} : null;
}

function cleanTurn(turn, id) {
  const parent = turn.parent;
  if (!ROLES.includes(turn.role) || !Number.isInteger(parent) || parent < -1 || parent >= id)
    throw new Error(`turn ${id} is invalid`);
  const common = {id, parent, role: turn.role, chosen: -1, at: count(turn.at)};
  if (turn.role === "user")
    return {
      ...common,
      content: text(turn.content),
      files: list(turn.files).map(f => ({name: text(f?.name), text: text(f?.text), tokens: count(f?.tokens)})),
    };
  if (turn.role === "tool")
    return {...common, results: list(turn.results).map(r => ({id: text(r?.id), content: text(r?.content)}))};
  return {
    ...common,
    content: text(turn.content),
    reasoning: text(turn.reasoning),
    calls: list(turn.calls).map(k => ({id: text(k?.id), name: text(k?.name), arguments: text(k?.arguments)})),
    model: text(turn.model),
    usage: cleanUsage(turn.usage),
    times: turn.times ? {first: count(turn.times.first), total: count(turn.times.total)} : null,
    finish: text(turn.finish),
    error: null,
  };
}

export function cleanSettings(settings) {
  const clean = emptySettings();
  clean.system = text(settings?.system);
  clean.tools = text(settings?.tools);
  for (const {name} of SAMPLING) if (Number.isFinite(settings?.sampling?.[name])) clean.sampling[name] = settings.sampling[name];
  return clean;
}

// Returns a conversation with a new id that contains only known fields of `value`. Throws an Error with a message for the user.
export function importConversation(value) {
  if (value?.version !== VERSION || !Array.isArray(value.turns))
    throw new Error("the file is not a conversation exported by this page");
  const c = newConversation(cleanSettings(value.settings));
  c.title = text(value.title).slice(0, 200);
  c.turns = value.turns.map(cleanTurn);
  for (const turn of c.turns) choose(c, turn); // the default is the latest branch
  const chosen = [[-1, value.chosen], ...value.turns.map((turn, id) => [id, turn.chosen])];
  for (const [parent, child] of chosen) if (c.turns[child]?.parent === parent) choose(c, c.turns[child]);
  return c;
}
