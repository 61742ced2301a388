// Generation of answers. A run belongs to a conversation, not to the display, so the user can read another conversation during the run.

import {streamChat} from "./api.js";
import {viewOf} from "./thread.js";
import {addTurn, requestBody} from "./tree.js";
import {announce, seconds} from "./util.js";

const ELAPSED_MS = 1000; // interval at which the time without a token is shown
const SAVE_MS = 2000; // interval at which a partial answer is stored
const MAX_AUTO_RETRY_S = 300; // a longer wait is reported as an error
const runs = new Map(); // conversation id to {conversation, turn, controller}

export const runOf = id => runs.get(id);

export const stopRun = id => runs.get(id)?.controller.abort();

// Waits until the server accepts the next attempt, the user asks for it, or the run is stopped.
async function waitForRetry(turn, error, signal) {
  const end = performance.now() + 1000 * error.retry_s;
  let skip = false;
  while (!skip && !signal.aborted && performance.now() < end) {
    const left = Math.ceil((end - performance.now()) / 1000);
    const why = error.status === 429 ? "The server is busy." : "The server is not ready.";
    viewOf(turn)?.showWait(`${why} Trying again in ${left} s.`, () => {
      skip = true;
    });
    await new Promise(resolve => setTimeout(resolve, 200));
  }
  signal.throwIfAborted();
  viewOf(turn)?.showWait(null);
}

// Streams the answer. A busy server rejects the request and states how long to wait before the next attempt.
async function attempt(body, turn, signal, onPart) {
  for (;;) {
    try {
      return await streamChat(body, signal, onPart);
    } catch (error) {
      if (error.retry_s === null || error.retry_s === undefined) throw error;
      if (error.retry_s > MAX_AUTO_RETRY_S) {
        error.advice = `The server expects to be busy for ${seconds(error.retry_s)}. Try again then.`;
        throw error;
      }
      await waitForRetry(turn, error, signal);
    }
  }
}

function addPart(turn, part) {
  if (part.content) turn.content += part.content;
  if (part.reasoning) turn.reasoning += part.reasoning;
  if (part.finish) turn.finish = part.finish;
  if (part.usage)
    turn.usage = {
      prompt: part.usage.prompt_tokens,
      cached: part.usage.prompt_tokens_details?.cached_tokens ?? 0,
      generated: part.usage.completion_tokens,
    };
  if (part.call) {
    const call = (turn.calls[part.call.index] ??= {id: "", name: "", arguments: ""});
    call.id ||= part.call.id ?? "";
    call.name += part.call.name;
    call.arguments += part.call.arguments;
  }
}

// Adds an answer to the turn `parent` and generates it. begun: an incomplete answer that the new answer continues, or null. hooks:
// changed() after every change of state, save() to store the conversation, needsKey() if the server rejected the API key, lost() if
// the server cannot be reached or does not have the model.
export async function generate(c, parent, model, begun, hooks) {
  const controller = new AbortController();
  const start = begun?.content ?? "";
  const turn = addTurn(c, parent, "assistant", {
    content: start,
    reasoning: begun?.reasoning ?? "",
    calls: [],
    model,
    usage: null,
    times: null,
    finish: "",
    error: null,
  });
  runs.set(c.id, {conversation: c, turn, controller});
  hooks.changed();
  announce("Waiting for the answer.");
  const startTime = performance.now();
  let first = 0,
    saved = startTime;
  const onPart = part => {
    const now = performance.now();
    if (!first && (part.content || part.reasoning || part.call)) first = now;
    addPart(turn, part);
    viewOf(turn)?.add(part);
    if (now - saved > SAVE_MS) {
      saved = now;
      hooks.save();
    }
  };
  const timer = setInterval(() => {
    if (!first) viewOf(turn)?.showElapsed((performance.now() - startTime) / 1000);
  }, ELAPSED_MS);
  try {
    await attempt(requestBody(c, parent, model, start), turn, controller.signal, onPart);
    announce("The answer is complete.");
  } catch (error) {
    if (error.name === "AbortError") {
      turn.finish = "stopped";
      announce("Stopped.");
    } else {
      turn.error = {message: error.message, advice: error.advice ?? ""};
      if (error.status === 401) hooks.needsKey();
      if (error.status === 0 || error.status === 404) hooks.lost();
    }
  }
  clearInterval(timer);
  if (first) turn.times = {first: (first - startTime) / 1000, total: (performance.now() - startTime) / 1000};
  runs.delete(c.id);
  c.updated = Date.now();
  viewOf(turn)?.finish();
  hooks.save();
  hooks.changed();
}
