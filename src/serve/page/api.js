// Requests to this server: API keys, error messages, token counts and streamed answers.

import {small} from "./util.js";

const KEYS = {chat: "flatkv-key", admin: "flatkv-admin-key"};

export function keyOf(kind) {
  return small.get("sessionStorage", KEYS[kind]) || small.get("localStorage", KEYS[kind]) || "";
}

// An empty key removes the stored key.
export function setKey(kind, key, remember) {
  small.set("sessionStorage", KEYS[kind], key || null);
  small.set("localStorage", KEYS[kind], key && remember ? key : null);
}

export const isKeyRemembered = () => Boolean(small.get("localStorage", KEYS.chat));

// An error in words: what happened and what to do. `retry_s` is set if the same request may succeed after that time.
export class RequestError extends Error {
  constructor(message, advice, status = 0, retry_s = null) {
    super(message);
    this.advice = advice;
    this.status = status;
    this.retry_s = retry_s;
  }
}

function advice(status, message) {
  if (status === 401) return "Enter an API key of this server.";
  if (status === 413) return "Remove a document or shorten the message. A request is limited to 8 MiB.";
  if (status === 429) return "Other requests are running.";
  if (status === 503) return "The server is starting or shutting down.";
  if (status === 400 && /token|context/.test(message))
    return "Remove a document, start a new conversation, or lower the answer limit in the settings. A server with a larger -c accepts longer conversations.";
  if (status === 400) return "Check the settings of this conversation.";
  if (status >= 500) return "Try again. If the error persists, see the log of the server.";
  return "";
}

const sentence = text => text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

async function errorOf(reply) {
  let message = `the server replied with status ${reply.status}`;
  try {
    message = (await reply.json()).error.message || message;
  } catch {
    /* the reply is not JSON */
  }
  message = sentence(message);
  const wait = Number(reply.headers.get("Retry-After"));
  const retry =
    (reply.status === 429 || reply.status === 503) && reply.headers.has("Retry-After") && wait >= 0 ? Math.max(1, wait) : null;
  return new RequestError(message, advice(reply.status, message), reply.status, retry);
}

const unreachable = () =>
  new RequestError(
    "The server cannot be reached.",
    "Check that flatkv serve is running and that this device is connected, then try again.",
  );

// Sends a request and returns the response. Throws RequestError for all failures except an abort by the caller.
export async function request(path, {body, signal, kind = "chat"} = {}) {
  const key = kind === "admin" ? keyOf("admin") || keyOf("chat") : keyOf(kind);
  const headers = key ? {Authorization: "Bearer " + key} : {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let reply;
  try {
    reply = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw unreachable();
  }
  if (!reply.ok) throw await errorOf(reply);
  return reply;
}

export const listModels = async () => (await (await request("v1/models")).json()).data;

let chosenModel = ""; // name of the selected model; "" if the server has only one

export function chooseModel(name) {
  chosenModel = name;
}

export async function countTokens(text) {
  const model = chosenModel ? {model: chosenModel} : {};
  return (await (await request("tokenize", {body: {...model, content: text, parse_special: false}})).json()).count;
}

// State of the selected model for the memory view.
export async function fetchState() {
  const query = chosenModel ? "?model=" + encodeURIComponent(chosenModel) : "";
  return (await request("flatkv/state" + query, {kind: "admin"})).json();
}

// Yields the JSON objects of a stream of server-sent events up to [DONE].
async function* eventsOf(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done)
      throw new RequestError(
        "The connection ended before the answer was complete.",
        "Check that the server is still running, then regenerate the answer.",
      );
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

// Streams a chat completion. `onPart` receives {content}, {reasoning}, {call: {index, id, name, arguments}}, {finish} and {usage}.
export async function streamChat(body, signal, onPart) {
  const reply = await request("v1/chat/completions", {
    body: {...body, stream: true, stream_options: {include_usage: true}},
    signal,
  });
  try {
    for await (const event of eventsOf(reply)) {
      if (event.error)
        throw new RequestError(sentence(event.error.message || "the server reports an error"), "Continue or regenerate the answer.");
      if (event.usage) onPart({usage: event.usage});
      const choice = event.choices?.[0];
      if (!choice) continue;
      if (choice.delta?.reasoning_content) onPart({reasoning: choice.delta.reasoning_content});
      if (choice.delta?.content) onPart({content: choice.delta.content});
      for (const call of choice.delta?.tool_calls ?? [])
        onPart({
          call: {index: call.index, id: call.id, name: call.function?.name ?? "", arguments: call.function?.arguments ?? ""},
        });
      if (choice.finish_reason) onPart({finish: choice.finish_reason});
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof RequestError) throw error;
    throw new RequestError(
      "The connection was lost before the answer was complete.",
      "Check that the server is still running, then regenerate the answer.",
    );
  }
}
