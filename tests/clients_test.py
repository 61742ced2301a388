#!/usr/bin/env python3
"""Tests that common client libraries work with flatkv serve: chats, streams, errors, structured output and tools.

usage: clients_test.py <flatkv> [--output FILE] [test...]

Requires a Python with openai, anthropic, langchain-openai, instructor and ollama; scripts/test creates one. Tests of litellm,
pydantic-ai-slim[openai] and llm are skipped if these are not installed.
The node clients openai-node and Vercel AI SDK are installed with npm into a temporary folder and are skipped if node or npm is missing or cannot install them.
--output adds the results to a JSON file.

Structured output is tested with the needle model, to which the test adds a tokenizer, an end token and a chat template with tool calls. The
model was not trained for JSON or tool calls, so only the grammar makes its answers valid.
"""
import contextlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import typing

import anthropic
import instructor
import ollama
import openai
import pydantic
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

from serve_test import BOOK, KEYS, run, serving, serving_tools

SETTINGS = {"max_tokens": 16, "temperature": 0}


class Reading(pydantic.BaseModel):
    """A reading of an instrument."""
    model_config = pydantic.ConfigDict(extra="forbid")
    kind: typing.Literal["wind", "rain"]
    level: int = pydantic.Field(ge=3, le=12)


READING = Reading.model_json_schema()
TOOL = {"type": "function", "function": {"name": "report", "description": "Reports a reading.", "parameters": READING}}
ASK = [{"role": "user", "content": "Read the instrument."}]


def check_call(name, arguments):
    assert name == "report", name
    Reading.model_validate_json(arguments) if isinstance(arguments, str) else Reading.model_validate(arguments)


def address(server):
    return f"http://127.0.0.1:{server.port}"


def openai_chat_streams_and_reports_errors():
    with serving("-c", "8K", "--api-key", KEYS[0]) as server:
        client = openai.OpenAI(base_url=address(server) + "/v1", api_key=KEYS[0], max_retries=0)
        ask = {"model": "any", "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": BOOK[:300]}], **SETTINGS}
        whole = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
        text = whole.choices[0].message.content
        assert text and len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens, whole
        chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text, chunks
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 256, chunks[-1]
        assert client.completions.create(model="any", prompt=BOOK[:100], **SETTINGS).choices[0].text
        assert [m.id for m in client.models.list()] == ["needle"]
        for wrong, error in (({"temperature": -1}, openai.BadRequestError), ({"max_tokens": 10 ** 6}, openai.BadRequestError)):
            try:
                client.chat.completions.create(**{**ask, **wrong})
                raise AssertionError(wrong)
            except error as e:
                assert e.body["type"] == "invalid_request_error", e
        try:
            openai.OpenAI(base_url=address(server) + "/v1", api_key="wrong-key", max_retries=0).models.list()
            raise AssertionError("a wrong key was accepted")
        except openai.AuthenticationError:
            pass


def openai_responses_stream_and_report_errors():
    with serving("-c", "8K") as server:
        client = openai.OpenAI(base_url=address(server) + "/v1", api_key="none", max_retries=0)
        ask = {"model": "any", "instructions": "x", "input": BOOK[:300], "max_output_tokens": 16, "temperature": 0}
        whole = client.responses.create(**ask)
        assert len(whole.output_text) == 16 and whole.status == "incomplete" and whole.usage.input_tokens == 302, whole
        with client.responses.stream(**ask) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == whole.output_text, (text, whole)
        items = [{"role": "user", "content": BOOK[:300]}, *whole.output, {"role": "user", "content": "y"}]
        again = client.responses.create(**{**ask, "input": items})
        assert again.usage.input_tokens_details.cached_tokens == 256 and again.output_text, again
        for kept in ({"previous_response_id": whole.id}, {"background": True}):
            try:
                client.responses.create(**ask, **kept)
                raise AssertionError(kept)
            except openai.BadRequestError as e:
                assert e.body["param"] in kept, e


def anthropic_streams_and_counts_tokens():
    with serving("-c", "8K", "--api-key", KEYS[0]) as server:
        client = anthropic.Anthropic(base_url=address(server), api_key=KEYS[0], max_retries=0)
        ask = {"model": "any", "system": "x", "messages": [{"role": "user", "content": BOOK[:300]}]}
        new = {"max_tokens": 16, "extra_body": {"temperature": 0}}
        whole = client.messages.create(**ask, **new)
        assert whole.usage.input_tokens == client.messages.count_tokens(**ask).input_tokens == 302, whole
        with client.messages.stream(**ask, **new) as stream:
            text = "".join(stream.text_stream)
            last = stream.get_final_message()
        assert text == whole.content[0].text and last.stop_reason == whole.stop_reason, (text, whole)
        assert last.usage.cache_read_input_tokens == 256, last
        try:
            client.messages.create(**{**ask, "messages": [{"role": "unknown", "content": "x"}]}, **new)
            raise AssertionError("an unknown role was accepted")
        except anthropic.BadRequestError as e:
            assert e.body["error"]["type"] == "invalid_request_error", e


def langchain_invokes_streams_and_batches():
    with serving("-c", "8K") as server:
        model = ChatOpenAI(base_url=address(server) + "/v1", api_key="none", model="any", max_retries=0, stream_usage=True, **SETTINGS)
        messages = [SystemMessage("x"), HumanMessage(BOOK[:300])]
        whole = model.invoke(messages)
        assert whole.content and whole.usage_metadata["input_tokens"] == 302, whole
        chunks = list(model.stream(messages))
        assert "".join(c.content for c in chunks) == whole.content, chunks
        used = [c.usage_metadata for c in chunks if c.usage_metadata]
        assert used[-1]["input_token_details"]["cache_read"] == 256, used
        answers = model.batch([[HumanMessage(BOOK[i * 50:i * 50 + 200])] for i in range(6)])
        assert len(answers) == 6 and all(a.usage_metadata["output_tokens"] > 0 for a in answers), answers


# ---- structured output and tools


def openai_structured_output_and_tools():
    with serving_tools() as server:
        client = openai.OpenAI(base_url=address(server) + "/v1", api_key="none", max_retries=0)
        parsed = client.chat.completions.parse(model="any", messages=ASK, response_format=Reading, max_tokens=200)
        assert isinstance(parsed.choices[0].message.parsed, Reading), parsed
        anything = client.chat.completions.create(model="any", messages=ASK, response_format={"type": "json_object"}, max_tokens=300,
                                                  logit_bias={str(ord(c)): 8 for c in "}]\""})
        assert anything.choices[0].finish_reason == "length" or isinstance(json.loads(anything.choices[0].message.content), dict), anything
        for choice in ("required", {"type": "function", "function": {"name": "report"}}):
            called = client.chat.completions.create(model="any", messages=ASK, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, max_tokens=200)
            call = called.choices[0].message.tool_calls[0]
            check_call(call.function.name, call.function.arguments)
            assert called.choices[0].finish_reason == "tool_calls", called
        answer = client.chat.completions.create(model="any", tools=[TOOL], max_tokens=4, messages=[
            *ASK, called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "done"}])
        assert answer.usage.completion_tokens > 0, answer
        made = client.responses.parse(model="any", input="Read it.", text_format=Reading, max_output_tokens=200)
        assert isinstance(made.output_parsed, Reading), made


def anthropic_structured_output_and_tools():
    with serving_tools() as server:
        client = anthropic.Anthropic(base_url=address(server), api_key="none", max_retries=0)
        ask = {"model": "any", "messages": ASK, "max_tokens": 200}
        made = client.messages.create(**ask, extra_body={"output_config": {"format": {"type": "json_schema", "schema": READING}}})
        Reading.model_validate_json(made.content[0].text)
        tool = {"name": "report", "description": "Reports a reading.", "input_schema": READING}
        called = client.messages.create(**ask, tools=[tool], tool_choice={"type": "any", "disable_parallel_tool_use": True})
        block = next(b for b in called.content if b.type == "tool_use")
        check_call(block.name, block.input)
        with client.messages.stream(**ask, tools=[tool], tool_choice={"type": "tool", "name": "report"}) as stream:
            last = stream.get_final_message()
        check_call(last.content[-1].name, last.content[-1].input)


def langchain_structured_output_and_tools():
    with serving_tools() as server:
        model = ChatOpenAI(base_url=address(server) + "/v1", api_key="none", model="any", max_retries=0, max_tokens=200)
        for method in ("json_schema", "function_calling"):
            assert isinstance(model.with_structured_output(Reading, method=method).invoke("Read it."), Reading), method
        call = model.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False).invoke("Read it.").tool_calls[0]
        check_call(call["name"], call["args"])


def instructor_structured_output_and_tools():
    with serving_tools() as server:
        client = openai.OpenAI(base_url=address(server) + "/v1", api_key="none", max_retries=0)
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
            patched = instructor.from_openai(client, mode=mode)
            made = patched.chat.completions.create(model="any", messages=ASK, response_model=Reading, max_retries=0, max_tokens=200)
            assert isinstance(made, Reading), (mode, made)


def ollama_chats_streams_and_lists_models():
    with serving_tools("--api-key", KEYS[0]) as server:
        client = ollama.Client(address(server), headers={"Authorization": "Bearer " + KEYS[0]})
        options = {"temperature": 0, "num_predict": 16, "num_ctx": 4096, "seed": 1}
        whole = client.chat("needle", ASK, options=options, keep_alive="5m")
        assert whole.message.content and whole.done and whole.eval_count <= 16 and whole.prompt_eval_count > 20, whole
        parts = list(client.chat("needle", ASK, options=options, stream=True))
        assert "".join(p.message.content for p in parts) == whole.message.content and parts[-1].done_reason == whole.done_reason, parts
        made = client.chat("needle", ASK, format=READING, options={"num_predict": 200})
        Reading.model_validate_json(made.message.content)
        for text in [client.generate("needle", "Read it.", format=READING, options={"num_predict": 200}).response,
                     "".join(p.response for p in client.generate("needle", "Read it.", format=READING, stream=True))]:
            Reading.model_validate_json(text)
        raw = client.generate("needle", BOOK[:100], raw=True, options=options)
        assert raw.prompt_eval_count == 100 and raw.response, raw
        assert client.chat("needle", [*ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "report", "arguments": {"level": 3}}}]},
                                      {"role": "tool", "tool_name": "report", "content": "done"}], tools=[TOOL], options=options).done
        assert client.chat("needle").done_reason == "load" and client.generate("needle", keep_alive=0).done_reason == "unload"
        assert [m.model for m in client.list().models] == [m.model for m in client.ps().models] == ["needle"]
        shown = client.show("needle:latest")
        assert shown.modelinfo["general.architecture"] == shown.details.family and "tools" in shown.capabilities, shown
        for wrong in (lambda: client.chat("needle", ASK, options={"temperature": -1}), lambda: client.chat("needle", [{**ASK[0], "images": [b"x"]}]),
                      lambda: client.show("another"), lambda: ollama.Client(address(server)).list()):
            try:
                wrong()
                raise AssertionError("an invalid request was accepted")
            except ollama.ResponseError as e:
                assert e.status_code in (400, 401, 404) and e.error, e


def litellm_structured_output_and_tools():
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # keeps litellm from downloading prices
    import litellm
    litellm.suppress_debug_info = True
    with serving_tools() as server:
        for model, base in (("openai/any", "/v1"), ("ollama_chat/needle", "")):
            made = litellm.completion(model, ASK, api_base=address(server) + base, api_key="none", response_format=Reading, max_tokens=200, num_retries=0)
            Reading.model_validate_json(made.choices[0].message.content)
        called = litellm.completion("openai/any", ASK, api_base=address(server) + "/v1", api_key="none", tools=[TOOL], tool_choice="required", max_tokens=200)
        call = called.choices[0].message.tool_calls[0]
        check_call(call.function.name, call.function.arguments)
        chunks = list(litellm.completion("openai/any", ASK, api_base=address(server) + "/v1", api_key="none", stream=True, **SETTINGS))
        assert "".join(c.choices[0].delta.content or "" for c in chunks), chunks


def pydantic_ai_structured_output_and_tools():
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    with serving_tools() as server:
        model = OpenAIChatModel("any", provider=OpenAIProvider(base_url=address(server) + "/v1", api_key="none"))
        for output in (ToolOutput(Reading, name="report"), NativeOutput(Reading)):
            made = Agent(model, output_type=output, model_settings={"max_tokens": 200}).run_sync("Read it.")
            assert isinstance(made.output, Reading), made


def llm_structured_output_and_tools():
    from llm.default_plugins.openai_models import Chat

    def report(kind: str) -> str:
        """Reports a reading."""
        return kind
    with serving_tools() as server:
        model = Chat("any", model_name="any", api_base=address(server) + "/v1", supports_schema=True, supports_tools=True)
        made = model.prompt("Read it.", schema=Reading, stream=False, key="none", max_tokens=200)
        Reading.model_validate_json(made.text())
        streamed = model.prompt("Read it.", schema=Reading, key="none", max_tokens=200)
        Reading.model_validate_json("".join(streamed))
        assert model.prompt("Read it.", tools=[report], key="none", max_tokens=8, stream=False).usage().output > 0


NODE_TEST = """
import OpenAI from "openai";
import { generateObject, generateText, streamText, tool } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { z } from "zod";

const base = process.argv[2] + "/v1";
const schema = z.object({ kind: z.enum(["wind", "rain"]), level: z.number().int().min(3).max(12) });
const json = { type: "object", properties: { kind: { enum: ["wind", "rain"] }, level: { type: "integer", minimum: 3, maximum: 12 } },
               required: ["kind", "level"], additionalProperties: false };
const messages = [{ role: "user", content: "Read the instrument." }];

const client = new OpenAI({ baseURL: base, apiKey: "none", maxRetries: 0 });
const made = await client.chat.completions.create({ model: "any", messages, max_tokens: 200,
  response_format: { type: "json_schema", json_schema: { name: "reading", schema: json } } });
schema.parse(JSON.parse(made.choices[0].message.content));
const called = await client.chat.completions.create({ model: "any", messages, max_tokens: 200, tool_choice: "required",
  tools: [{ type: "function", function: { name: "report", parameters: json } }] });
schema.parse(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments));
let text = "";
for await (const chunk of await client.chat.completions.create({ model: "any", messages, max_tokens: 16, stream: true }))
  text += chunk.choices[0]?.delta?.content ?? "";
if (!text) throw new Error("openai-node: empty stream");
console.log("openai-node");

const model = createOpenAICompatible({ name: "flatkv", baseURL: base, apiKey: "none", supportsStructuredOutputs: true })("any");
schema.parse((await generateObject({ model, schema, prompt: "Read it.", maxOutputTokens: 200, maxRetries: 0 })).object);
const used = await generateText({ model, prompt: "Read it.", maxOutputTokens: 200, maxRetries: 0, toolChoice: "required",
  tools: { report: tool({ description: "Reports a reading.", inputSchema: schema }) } });
schema.parse(used.toolCalls[0].input);
let streamed = "";
for await (const part of streamText({ model, prompt: "Read it.", maxOutputTokens: 16, maxRetries: 0 }).textStream) streamed += part;
if (!streamed) throw new Error("Vercel AI SDK: empty stream");
console.log("vercel-ai");
"""


def node_clients_structured_output_and_tools():
    if not shutil.which("node") or not shutil.which("npm"):
        print("skipped: node and npm are not installed")
        return
    with tempfile.TemporaryDirectory(prefix="flatkv-node-") as folder, serving_tools() as server:
        done = subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", "openai", "ai", "@ai-sdk/openai-compatible", "zod"], cwd=folder, check=False)
        if done.returncode != 0:
            print("skipped: npm cannot install the packages")
            return
        with open(os.path.join(folder, "test.mjs"), "w", encoding="utf-8") as file:
            file.write(NODE_TEST)
        done = subprocess.run(["node", "test.mjs", address(server)], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and done.stdout.split() == ["openai-node", "vercel-ai"], (done.stdout, done.stderr[-3000:])
        with open(os.path.join(folder, "package-lock.json"), encoding="utf-8") as file:
            packages = json.load(file)["packages"]
        VERSIONS.update({"openai-node": packages["node_modules/openai"]["version"], "vercel-ai": packages["node_modules/ai"]["version"]})


# Each test and the package that it needs.
TESTS = {openai_chat_streams_and_reports_errors: "openai", openai_responses_stream_and_report_errors: "openai", anthropic_streams_and_counts_tokens: "anthropic",
         langchain_invokes_streams_and_batches: "langchain-openai", openai_structured_output_and_tools: "openai",
         anthropic_structured_output_and_tools: "anthropic", langchain_structured_output_and_tools: "langchain-openai",
         instructor_structured_output_and_tools: "instructor", ollama_chats_streams_and_lists_models: "ollama",
         litellm_structured_output_and_tools: "litellm", pydantic_ai_structured_output_and_tools: "pydantic-ai-slim", llm_structured_output_and_tools: "llm",
         node_clients_structured_output_and_tools: None}
VERSIONS = {}


def write_results(path, tests):
    """Adds the tests that passed and the versions of their clients to the file."""
    results = {"clients": {}, "tests": []}
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
        results = json.load(file)
    VERSIONS.update({package: importlib.metadata.version(package) for package in tests.values() if package})
    results = {"clients": dict(sorted((results["clients"] | VERSIONS).items())), "tests": sorted({*results["tests"], *(t.__name__ for t in tests)})}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(results, file, indent=1)
        file.write("\n")


def is_installed(package):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version(package))
    print(f"skipped: {package} is not installed")
    return False


def main():
    output = sys.argv[sys.argv.index("--output") + 1] if "--output" in sys.argv else None
    sys.argv = [a for a in sys.argv if a not in ("--output", output)]
    tests = {test: package for test, package in TESTS.items() if package is None or is_installed(package)}
    run(list(tests))
    if output:
        write_results(output, {t: package for t, package in tests.items() if len(sys.argv) == 2 or t.__name__ in sys.argv})


if __name__ == "__main__":
    main()
