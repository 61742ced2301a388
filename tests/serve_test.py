#!/usr/bin/env python3
"""Tests flatkv serve over real sockets with the needle model: the APIs, streams, hostile input, disconnecting clients, overload and shutdown.

usage: serve_test.py <flatkv> [test...]
"""
import base64
import concurrent.futures
import contextlib
import hashlib
import http.client
import json
import os
import random
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

TREE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
with open(os.path.join(TREE, "models/needle/book.txt"), encoding="ascii") as file:
    BOOK = " ".join(file.read().split())
SANITIZED = "FKV_TEST_SANITIZED" in os.environ  # sanitizers are slow, so texts and bodies are shorter
STORIES = os.path.join(TREE, "tests/data/stories260K.gguf")
KEYS = ("first-key-0123456789", "second-key-987654321")
ADMIN_KEY = "admin-key-5555555555"
ADMIN = {"Authorization": "Bearer " + ADMIN_KEY}
TEMPLATE = ("{% if tools %}<|im_start|>system\nCall <tool_call>{\"name\": ..., \"arguments\": ...}</tool_call>\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


class Server:
    def __init__(self, *options, wrapper=(), model="needle"):
        self.process = subprocess.Popen([*wrapper, sys.argv[1], "serve", "-m", model, "--port", "0", *options], stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE)
        line = self.process.stdout.readline().decode()
        assert line.startswith("listening on "), (line, self.process.stderr.read())
        self.port = int(line.rsplit(":", 1)[1])

    def connect(self, timeout=1500):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def raw(self, method, path, body=None, headers=None):
        connection = self.connect()
        connection.request(method, path, body if body is None or isinstance(body, bytes) else json.dumps(body), headers or {})
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        return answer.status, dict(answer.getheaders()), data

    def post(self, path, body, headers=None, expect=200):
        status, _, data = self.raw("POST", path, body, headers)
        assert status == expect, (path, status, data[:500])
        return json.loads(data)

    def metrics(self, headers=None):
        status, _, data = self.raw("GET", "/metrics", headers=headers)
        assert status == 200, status
        return {name: float(value) for name, value in re.findall(r"^flatkv:(\S+) (\S+)$", data.decode(), re.MULTILINE)}

    def until(self, condition, what, seconds=600, headers=None):  # a generous timeout, because the machine may be busy
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            metrics = self.metrics(headers)
            if condition(metrics):
                return metrics
            time.sleep(0.05 if SANITIZED else 0.02)
        raise AssertionError(f"{what}: {metrics}")

    def stop(self, again=True):
        if again and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(600)
        errors = self.process.stderr.read().decode()
        assert code == 0, (code, errors)
        return errors


def check_resident_growth(before, after, limit):
    """Compares the resident bytes of two metrics. Sanitizers keep freed memory, so there is no limit under them."""
    if not SANITIZED:
        assert after["resident_bytes"] <= before["resident_bytes"] + limit, (before["resident_bytes"], after["resident_bytes"])


@contextlib.contextmanager
def serving(*options, wrapper=(), model="needle"):
    server = Server(*options, wrapper=wrapper, model=model)
    try:
        yield server
        server.stop()
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
        server.process.stdout.close()
        server.process.stderr.close()


@contextlib.contextmanager
def serving_tools(*options):
    """Serves the needle model with a byte-level tokenizer that has an end token and fill-in-the-middle tokens, and with a chat template."""
    with tempfile.TemporaryDirectory(prefix="flatkv-clients-") as folder:
        for name in ("config.json", "needle.safetensors"):
            os.symlink(os.path.join(TREE, "models/needle", name), os.path.join(folder, name))
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        letters = {byte: chr(byte) for byte in shown}
        letters.update({byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in shown)})
        # Bytes 3 to 6 become special tokens, and byte 7 the only merged token, which a BPE vocabulary must have.
        special = {"<|end|>": 3, "<|fim_prefix|>": 4, "<|fim_suffix|>": 5, "<|fim_middle|>": 6}
        vocab = {letters[byte]: byte for byte in range(256) if not 3 <= byte <= 7} | {**special, letters[1] + letters[2]: 7}
        tokenizer = {"added_tokens": [{"id": i, "content": text, "special": True} for text, i in special.items()], "decoder": {"type": "ByteLevel"},
                     "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
                     "model": {"type": "BPE", "vocab": vocab, "merges": [letters[1] + " " + letters[2]]}}
        for name, value in (("tokenizer.json", tokenizer), ("tokenizer_config.json", {"eos_token": "<|end|>", "chat_template": TEMPLATE})):
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                json.dump(value, file)
        with serving("-c", "16K", "--alias", "needle", *options, model=folder) as server:
            yield server


@contextlib.contextmanager
def admin_key():
    """Yields the options that set the admin key."""
    with tempfile.NamedTemporaryFile("w", suffix=".key") as file:
        file.write(ADMIN_KEY + "\n")
        file.flush()
        yield "--admin-key-file", file.name


def chat(text, **more):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 16, "temperature": 0, "ignore_eos": True, **more}


def events_of(data):
    """Parses server-sent events into [(name or None, data)]."""
    found = []
    for block in data.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            fields = dict(line.split(": ", 1) for line in lines)
            found.append((fields.get("event"), fields["data"]))
    return found


def all_pages_released(metrics):
    return metrics["num_requests_running"] == 0 and metrics['pages{group="0",state="held"}'] == 0


# ---- APIs


def openai_complete_and_streamed_responses_agree():
    with serving("-c", "8K") as server:
        whole = server.post("/v1/chat/completions", chat(BOOK[:300]))
        choice = whole["choices"][0]
        assert choice["finish_reason"] == "length" and len(choice["message"]["content"]) == 16, whole
        assert whole["usage"]["completion_tokens"] == 16 and whole["usage"]["prompt_tokens"] == 300, whole
        again = server.post("/v1/chat/completions", chat(BOOK[:300]))
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 256, again
        assert again["choices"][0]["message"] == choice["message"], (whole, again)
        status, headers, data = server.raw("POST", "/v1/chat/completions", chat(BOOK[:300], stream=True, n=2,
                                                                               stream_options={"include_usage": True}))
        events = events_of(data)
        assert status == 200 and headers["Content-Type"] == "text/event-stream" and events[-1] == (None, "[DONE]"), data
        chunks = [json.loads(event) for _, event in events[:-1]]
        for answer in range(2):
            text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks
                           if c["choices"] and c["choices"][0]["index"] == answer)
            assert text == choice["message"]["content"], (text, choice)
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 32, chunks[-1]
        text = choice["message"]["content"]
        stopped = server.post("/v1/chat/completions", chat(BOOK[:300], stop=[text[5:9], "never"]))["choices"][0]
        assert stopped["finish_reason"] == "stop" and stopped["message"]["content"] == text[:text.index(text[5:9])], stopped
        odds = server.post("/v1/completions", {"prompt": BOOK[:100], "max_tokens": 3, "temperature": 0, "logprobs": 2})
        assert len(odds["choices"][0]["logprobs"]["token_logprobs"]) == 3, odds
        drawn = [server.post("/v1/completions", {"prompt": BOOK[:100], "max_tokens": 9, "temperature": 1.5, "seed": 7})["choices"]
                 for _ in range(2)]
        assert drawn[0] == drawn[1], drawn
        biased = server.post("/v1/completions", {"prompt": BOOK[:100], "max_tokens": 5, "temperature": 0, "logit_bias": {"120": 100}})
        assert biased["choices"][0]["text"] == "xxxxx", biased
        ask = {"prompt": "x" * 60, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        plain, varied = (server.post("/v1/completions", {**ask, **more})["choices"][0]["text"]
                         for more in ({}, {"frequency_penalty": 2.0, "presence_penalty": 2.0}))
        assert len(set(varied)) > len(set(plain)), (plain, varied)
        for refused in ({"suffix": "x"}, {"suffix": 1}, {"best_of": 3}, {"echo": 1}, {"echo": True, "logprobs": 1}, {"logit_bias": {"-1": 1}}, {"logit_bias": {"1": 1e300}}):
            assert list(refused)[0] in server.post("/v1/completions", {"prompt": "x", **refused}, expect=400)["error"]["message"]
        parts = [{"type": "text", "text": "x"}] * 5000
        assert "parts" in server.post("/v1/chat/completions", chat(parts), expect=400)["error"]["message"]
        for sent, read in ((r"a\u0000b", "a\ufffdb"), (r"\ud800x", "\ufffdx"), (r"\ud83d\ude00\udc00", "\U0001f600\ufffd"), (r"\\u0000", r"\u0000")):
            body = b'{"messages": [{"role": "user", "content": "' + sent.encode() + b'"}]}' # escaped NUL and lone surrogates, as some clients send them
            assert server.post("/apply-template", body)["prompt"] == read, (sent, read)
        tokens = server.post("/tokenize", {"content": "a b"})["tokens"]
        assert server.post("/detokenize", {"tokens": tokens})["content"] == "a b"
        assert [t["piece"] for t in server.post("/tokenize", {"content": "a b", "with_pieces": True})["tokens"]] == ["a", " ", "b"]
        assert json.loads(server.raw("GET", "/models")[2]) == json.loads(server.raw("GET", "/v1/models")[2])
        assert server.post("/apply-template", chat("hello"))["prompt"] == "hello"
        listed = json.loads(server.raw("GET", "/v1/models")[2])["data"][0]
        assert listed["id"] == "needle"
        for path in ("/v1/models/needle", "/models/needle", "/v1/models/%6eeedle"):
            assert json.loads(server.raw("GET", path)[2]) == listed, path
        for path in ("/v1/models/", "/v1/models/gpt-4", "/v1/health/needle", "/metrics/"):
            status, _, data = server.raw("GET", path)
            assert status == 404 and b"docs/" not in data, (path, status, data)  # messages must not refer to documentation, which is not installed with the program
        ask = {"max_tokens": 3, "temperature": 0}
        one, listed, nested = (server.post("/v1/completions", {**ask, "prompt": p})["choices"] for p in ("ab", ["ab"], [[97, 98]]))
        assert one == listed == nested, (one, listed, nested)
        assert server.raw("GET", "/health")[0] == 200


def embeddings_match_the_program_and_reject_invalid_requests():
    with serving("-c", "1K", "--embeddings", "--embedding-tokens", "64") as server:
        reply = server.post("/v1/embeddings", {"model": "needle", "input": ["a text", "another"]})
        first, second = reply["data"]
        assert reply["object"] == "list" and (first["index"], second["index"], first["object"]) == (0, 1, "embedding"), reply
        assert reply["usage"] == {"prompt_tokens": 13, "total_tokens": 13}, reply
        done = subprocess.run([sys.argv[1], "embed", "-m", "needle", "-p", "a text", "--json"], check=True, capture_output=True)
        assert first["embedding"] == json.loads(done.stdout)["embedding"]
        for same in ("a text", [97, 32, 116, 101, 120, 116], [[97, 32, 116, 101, 120, 116]]):
            assert server.post("/v1/embeddings", {"input": same})["data"][0]["embedding"] == first["embedding"], same
        packed = server.post("/v1/embeddings", {"input": "a text", "encoding_format": "base64", "dimensions": 7})["data"][0]["embedding"]
        values = struct.unpack("<7f", base64.b64decode(packed, validate=True))
        plain = server.post("/v1/embeddings", {"input": "a text", "dimensions": 7})["data"][0]["embedding"]
        assert all(abs(a - b) < 1e-6 for a, b in zip(values, plain)) and abs(sum(x * x for x in plain) - 1) < 1e-5, (values, plain)
        for field, value in (("input", ""), ("input", []), ("input", 7), ("input", [97, -1]), ("input", ["x", 7]), ("input", "x" * 65),
                             ("input", ["x"] * 2049), ("dimensions", 0), ("dimensions", 1 << 40), ("dimensions", "7"), ("encoding_format", "int8")):
            error = server.post("/v1/embeddings", {"input": "x", field: value}, expect=400)["error"]
            assert error["param"] == field, (field, error)
        server.post("/v1/embeddings", b"{", expect=400)
        ollama = server.post("/api/embed", {"model": "needle", "input": ["a text", "another"]})
        assert ollama["embeddings"] == [first["embedding"], second["embedding"]] and ollama["prompt_eval_count"] == 13 and ollama["model"] == "needle", ollama
        assert server.post("/api/embed", {"input": "a text", "dimensions": 7})["embeddings"] == [plain]
        assert server.post("/api/embeddings", {"prompt": "a text"}) == {"embedding": first["embedding"]}
        cut = server.post("/api/embed", {"input": BOOK[:63] + "x" * 100 + BOOK[200]})
        assert cut["prompt_eval_count"] == 64 and cut["embeddings"] == server.post("/api/embed", {"input": BOOK[:63] + BOOK[200]})["embeddings"], cut
        for path, body in (("/api/embed", {"input": "x" * 65, "truncate": False}), ("/api/embed", {"input": "x", "truncate": 1}), ("/api/embed", {}), ("/api/embed", {"input": ""}),
                           ("/api/embeddings", {}), ("/api/embeddings", {"prompt": 7}), ("/api/embed", {"input": "x", "dimensions": 0}), ("/api/embed", b"[")):
            assert isinstance(server.post(path, body, expect=400)["error"], str), (path, body)
        assert server.post("/v1/completions", {"prompt": "ab", "max_tokens": 2})["usage"]["completion_tokens"] > 0
    with serving("-c", "1K") as server:
        assert "--embeddings" in server.post("/v1/embeddings", {"input": "x"}, expect=501)["error"]["message"]
        assert "--embeddings" in server.post("/api/embed", {"input": "x"}, expect=501)["error"]


def several_models_are_chosen_by_name():
    def names(server, path, field, key):
        return [model[key] for model in json.loads(server.raw("GET", path)[2])[field]]

    ask = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with serving("-c", "2K") as server:
        needle = server.post("/v1/completions", {**ask, "model": "any name"})
        assert needle["model"] == "needle", needle
    with serving("-c", "512", "--alias", "tales", model=STORIES) as server:
        tales = server.post("/v1/completions", ask)
    # The caches of both models are reduced to fit one memory limit.
    with tempfile.TemporaryDirectory(prefix="flatkv-serve-") as path, \
            serving("-m", STORIES, "--alias", "needle", "--alias", "tales", "--memory", "76M", "--embeddings", "--embedding-tokens", "64", "--parallel", "2",
                    "--prefix-dir", path) as server:
        assert names(server, "/v1/models", "data", "id") == names(server, "/api/tags", "models", "name") == names(server, "/api/ps", "models", "model") == ["needle", "tales"]
        for name, alone in (("needle", needle), ("tales", tales), ("tales:latest", tales)):
            reply = server.post("/v1/completions", {**ask, "model": name})
            assert reply["choices"] == alone["choices"] and reply["model"] == alone["model"], (name, reply, alone)
        assert server.post("/v1/completions", ask)["model"] == "needle"  # a request without a model name uses the first model
        with concurrent.futures.ThreadPoolExecutor(8) as pool:  # uses both engines at the same time
            replies = list(pool.map(lambda i: server.post("/v1/completions", {**ask, "model": ("needle", "tales")[i % 2]}), range(8)))
        assert all(r["choices"] == (needle, tales)[i % 2]["choices"] for i, r in enumerate(replies)), replies
        message = [{"role": "user", "content": "x"}]
        for path, body in (("/v1/chat/completions", {"messages": message}), ("/v1/messages", {"messages": message, "max_tokens": 2}), ("/v1/responses", {"input": "x"}),
                           ("/v1/messages/count_tokens", {"messages": message}), ("/v1/embeddings", {"input": "x"}), ("/tokenize", {"content": "x"}),
                           ("/detokenize", {"tokens": [1]}), ("/apply-template", {"messages": message}), ("/api/chat", {"messages": message}),
                           ("/api/generate", {"prompt": "x"}), ("/api/show", {})):
            error = str(server.post(path, {**body, "model": "other"}, expect=404)["error"])
            assert "other" in error and ("needle, tales" in error or path == "/api/show"), (path, error)
            if path != "/v1/responses":
                server.post(path, {**body, "model": 3}, expect=400)
        assert server.post("/api/show", {"model": "tales"})["model_info"]["general.architecture"] == "llama"
        for path in ("/v1/chat/completions", "/api/chat"):
            reply = server.post(path, {"model": "tales", "messages": message, "stream": False, "max_tokens": 2, "options": {"num_predict": 2}})
            assert reply["model"] == "tales", reply
        assert server.post("/v1/messages", {"model": "tales", "messages": message, "max_tokens": 2})["model"] == "tales"
        pieces = [server.post("/tokenize", {"model": name, "content": "Once"})["count"] for name in ("needle", "tales")]
        vectors = [server.post("/v1/embeddings", {"model": name, "input": "x"})["data"][0]["embedding"] for name in ("needle", "tales")]
        assert pieces[0] == 4 and pieces[1] < 4 and vectors[0] != vectors[1], pieces
        for path, field in (("/flatkv/state", "model"), ("/props", "model_alias")):
            for query, name in (("", "needle"), ("?model=tales", "tales")):
                assert json.loads(server.raw("GET", path + query)[2])[field] == name, (path, query)
            assert server.raw("GET", path + "?model=other")[0] == 404
        assert server.raw("GET", "/v1/models/tales")[0] == 200 and server.raw("GET", "/v1/models/other")[0] == 404
        metrics = server.until(lambda m: all(m[f'num_requests_running{{model_name="{name}"}}'] == 0 for name in ("needle", "tales")), "requests do not end")
        assert all(metrics[f'requests_total{{model_name="{name}"}}'] > 4 for name in ("needle", "tales")), metrics
        for name in ("needle", "tales"):
            for latency in ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time"):
                assert metrics[f'{latency}_seconds_count{{model_name="{name}"}}'] > 4, (name, latency, metrics)
            assert metrics[f'request_queue_time_seconds_count{{model_name="{name}"}}'] == metrics[f'requests_total{{model_name="{name}"}}'], (name, metrics)
        assert not any("_seconds_count" in key and "model_name" not in key for key in metrics), metrics
        planned = sum(metrics[f'planned_bytes{{model_name="{name}"}}'] for name in ("needle", "tales"))
        planned += metrics["prefix_store_memory_bytes"]  # the index of the store, which both models share
        assert 40 << 20 < planned <= 76 << 20, planned
        report = server.stop()
        assert "needle: cache of" in report and "tales: cache of" in report and "2 models: " in report, report
    with serving("-c", "2K", "-m", STORIES) as server:
        cards = json.loads(server.raw("GET", "/v1/models")[2])["data"]
        assert [card["id"] for card in cards] == ["needle", "stories260K.gguf"] and cards[1]["default_max_tokens"] < cards[1]["max_model_len"], cards
        for name in ("stories260K", "stories260K.gguf", "stories260K:latest", "stories260K.gguf:latest"):
            assert server.post("/v1/completions", {**ask, "model": name})["model"] == "stories260K.gguf"
        server.post("/v1/completions", {**ask, "model": "stories260K.gg"}, expect=404)
        assert "[stories260K.gguf: the model has no chat template" in server.stop()
    with tempfile.TemporaryDirectory(prefix="flatkv-hub-") as folder:  # a model from the Hugging Face cache is served under its full name
        os.makedirs(os.path.join(folder, "models--some--needle/snapshots"))
        os.symlink(os.path.join(TREE, "models/needle"), os.path.join(folder, "models--some--needle/snapshots/abc"))
        with serving("-c", "2K", model="some/needle", wrapper=("env", "HF_HUB_CACHE=" + folder)) as server:
            assert names(server, "/v1/models", "data", "id") == ["some/needle"] and server.raw("GET", "/v1/models/some/needle")[0] == 200
    for options, reason in ((("-m", "needle"), "two models have the name needle"), (("-m", STORIES, "--alias", "a", "--alias", "b", "--alias", "c"), "--alias was given 3 times"),
                            (("-m", STORIES, "-c", "64K", "--memory", "2M"), "lower -c"), (("-c", "8"), "-c must be more than --parallel (8)"), (("-m", STORIES, "--memory", "2M"), "need at least"),
                            (("-m", STORIES, "--device", "mlx"), "--device cpu")):
        done = subprocess.run([sys.argv[1], "serve", "-m", "needle", "--port", "0", *options], capture_output=True, check=False)
        assert done.returncode != 0 and reason in done.stderr.decode(), (options, done)


def special_tokens_in_raw_prompts_are_parsed_on_request():
    with serving("-c", "1K", model=STORIES) as server:
        parsed, plain = (server.post("/tokenize", {"content": "<s>Once</s>", **more})["tokens"] for more in ({}, {"parse_special": False}))
        assert parsed[0] == 1 and parsed[-1] == 2 and 1 not in plain and 2 not in plain, (parsed, plain)
        body = {"prompt": "Once</s>", "max_tokens": 1}
        used = [server.post("/v1/completions", {**body, **more})["usage"]["prompt_tokens"] for more in ({}, {"parse_special": False})]
        assert used[0] == len(parsed) and used[1] > used[0], (used, parsed)
        assert "parse_special" in server.post("/v1/completions", {**body, "parse_special": 1}, expect=400)["error"]["message"]


def anthropic_complete_and_streamed_responses_agree():
    with serving("-c", "8K") as server:
        ask = {"messages": [{"role": "user", "content": [{"type": "text", "text": BOOK[:200]}]}], "max_tokens": 8, "temperature": 0,
               "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1\n" + BOOK[300:500]}]}
        whole = server.post("/v1/messages", ask)
        assert whole["stop_reason"] in ("max_tokens", "end_turn") and whole["usage"]["output_tokens"] <= 8, whole
        ask["system"][0]["text"] = "x-anthropic-billing-header: cch=another\n" + BOOK[300:500]
        again = server.post("/v1/messages", ask)
        assert again["usage"]["cache_read_input_tokens"] == 384, again # the server removes the header line, which differs in every request
        assert again["content"] == whole["content"], (whole, again)
        events = events_of(server.raw("POST", "/v1/messages", {**ask, "stream": True})[2])
        names = [name for name, _ in events]
        assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"], names
        text = "".join(json.loads(data)["delta"]["text"] for name, data in events if name == "content_block_delta")
        assert text == whole["content"][0]["text"], (text, whole)
        assert server.post("/v1/messages/count_tokens", ask)["input_tokens"] == 401
        long = {"max_tokens": 5, "messages": [{"role": "user", "content": BOOK[:9000]}]}
        error = server.post("/v1/messages", long, expect=400)
        assert error["type"] == "error" and "limited to" in error["error"]["message"], error


def claude_code(turn, *more):
    """Returns a request in the form that Claude Code 2.1 sends, with other texts. The first block of the system prompt changes every time."""
    system = [{"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.197.{turn:03x}; cc_entrypoint=cli; cch={turn * 7919:05x};"},
              {"type": "text", "text": "You are an agent. " + BOOK[:64], "cache_control": {"type": "ephemeral"}},
              {"type": "text", "text": "\n" + BOOK[1000:1700], "cache_control": {"type": "ephemeral", "scope": "global"}}]
    tools = [{"name": name, "description": "d", "input_schema": {"type": "object", "properties": {}}} for name in ("Bash", "Read")]
    tools.append({"type": "web_search_20250305", "name": "web_search", "max_uses": 8})
    user = {"role": "user", "content": [{"type": "text", "text": "<system-reminder>\nToday\n</system-reminder>\n\n"},
                                        {"type": "text", "text": "Say hello", "cache_control": {"type": "ephemeral"}}]}
    return {"model": "claude-opus-4-8", "messages": [user, {"role": "system", "content": "Agents: none."}, *more], "system": system,
            "tools": tools, "metadata": {"user_id": json.dumps({"device_id": "0" * 64, "session_id": str(turn)})}, "max_tokens": 64000,
            "thinking": {"type": "adaptive"}, "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"}, "temperature": 0, "stream": True}


def claude_code_requests_reuse_their_prefix():
    headers = {"Content-Type": "application/json", "Accept": "application/json", "anthropic-version": "2023-06-01", "x-api-key": "sk-none",
               "anthropic-beta": "claude-code-20250219,context-1m-2025-08-07,interleaved-thinking-2025-05-14", "x-app": "cli",
               "anthropic-dangerous-direct-browser-access": "true", "User-Agent": "claude-cli/2.1.197 (external, cli)",
               "X-Stainless-Lang": "js", "X-Stainless-Retry-Count": "0", "Accept-Encoding": "gzip, deflate, br, zstd"}
    with serving("-c", "2K") as server:
        status, reply, data = server.raw("HEAD", "/")
        assert status == 200 and data == b"" and int(reply["Content-Length"]) > 1000, (status, reply)
        n_prompt = server.post("/v1/messages/count_tokens?beta=true", claude_code(1), headers)["input_tokens"]
        whole = "You are an agent. " + BOOK[:64] + "\n" + BOOK[1000:1700] + "\n<system-reminder>\nToday\n</system-reminder>\n\nSay hello\n\nAgents: none."
        assert n_prompt == len(whole), (n_prompt, len(whole)) # the server removed only the line that differs in every request
        used = []
        for turn in range(1, 4):
            body = {**claude_code(turn), "stop_sequences": [" "]}
            status, reply, data = server.raw("POST", "/v1/messages?beta=true", body, headers)
            events = [(name, json.loads(event)) for name, event in events_of(data)]
            assert status == 200 and reply["Content-Type"] == "text/event-stream" and events[-1][0] == "message_stop", data
            used.append(events[0][1]["message"]["usage"])
        assert [u["cache_read_input_tokens"] for u in used] == [0] + 2 * [n_prompt // 64 * 64], used
        assert all(u["cache_read_input_tokens"] + u["input_tokens"] == n_prompt for u in used), used
        more = [{"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "Hello."},
                                                  {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "is_error": False, "cache_control": {"type": "ephemeral"},
                                              "content": [{"type": "text", "text": "README.md"}]}]}]
        answer = server.post("/v1/messages?beta=true", {**claude_code(9, *more), "stream": False, "stop_sequences": [" "]}, headers)
        assert answer["usage"]["cache_read_input_tokens"] >= n_prompt // 64 * 64, answer


def responses_api_complete_and_streamed_agree():
    with serving("-c", "8K") as server:
        ask = {"input": [{"role": "user", "content": [{"type": "input_text", "text": BOOK[:300]}]}], "max_output_tokens": 16, "temperature": 0}
        whole = server.post("/v1/responses", ask)
        text = whole["output"][0]["content"][0]["text"]
        assert whole["status"] == "incomplete" and whole["incomplete_details"]["reason"] == "max_output_tokens" and len(text) == 16, whole
        again = server.post("/v1/responses", {**ask, "input": BOOK[:300]})
        assert again["output"][0]["content"] == whole["output"][0]["content"], (whole, again)
        assert again["usage"]["input_tokens_details"]["cached_tokens"] == 256 and again["store"] is False, again
        events = [(name, json.loads(data)) for name, data in events_of(server.raw("POST", "/v1/responses", {**ask, "stream": True})[2])]
        assert all(name == data["type"] and data["sequence_number"] == i for i, (name, data) in enumerate(events)), events
        names = [name.removeprefix("response.") for name, _ in events]
        n_deltas = names.count("output_text.delta")
        assert names == ["created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * n_deltas,
                         "output_text.done", "content_part.done", "output_item.done", "incomplete"], names
        assert "".join(data["delta"] for name, data in events if name.endswith("text.delta")) == text, events
        last = events[-1][1]["response"]
        assert last["output"][0]["content"][0]["text"] == text and last["usage"]["output_tokens"] == 16, last
        few, many = {"a": "b" * 512, "c" * 64: ""}, {str(i): "x" for i in range(17)}
        echoed = server.post("/v1/responses", {**ask, "metadata": few, "instructions": "Be brief."})
        assert echoed["metadata"] == few and echoed["instructions"] == "Be brief.", echoed
        large = server.post("/v1/responses", {**ask, "metadata": few, "tools": [{"type": "function", "name": "f", "description": "x" * 70000}], "tool_choice": "none"})
        assert large["metadata"] == few and large["tools"] == [], str(large)[:500]
        for metadata in (many, [], {"a": 1}, {"a": "b" * 513}, {"c" * 65: ""}):
            assert server.post("/v1/responses", {**ask, "metadata": metadata}, expect=400)["error"]["param"] == "metadata"
        for kept in ({"previous_response_id": "resp_1"}, {"background": True}, {"input": [{"type": "item_reference", "id": "x"}]}):
            assert "the server stores no" in (message := server.post("/v1/responses", {**ask, **kept}, expect=400)["error"]["message"]), message


def ollama_complete_and_streamed_responses_agree():
    with serving("-c", "8K") as server:
        ask = {"model": "needle", "messages": [{"role": "user", "content": BOOK[:300]}], "options": {"num_predict": 16, "temperature": 0, "num_ctx": 64}}
        whole = server.post("/api/chat", {**ask, "stream": False})
        assert whole["done"] and whole["eval_count"] == 16 and whole["prompt_eval_count"] == 300 and whole["done_reason"] == "length", whole
        text = whole["message"]["content"]
        assert len(text) == 16 and all(whole[name] >= 0 for name in ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")), whole
        status, headers, data = server.raw("POST", "/api/chat", ask)  # streams by default
        lines = [json.loads(line) for line in data.decode().splitlines()]
        assert status == 200 and headers["Content-Type"] == "application/x-ndjson", headers
        assert "".join(line["message"]["content"] for line in lines) == text and [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True], lines
        ask = {"model": "needle", "prompt": BOOK[:300], "options": {"num_predict": 16, "temperature": 0, "stop": [text[5:9]]}}
        lines = [json.loads(line) for line in server.raw("POST", "/api/generate", ask)[2].decode().splitlines()]
        assert "".join(line["response"] for line in lines) == text[:text.index(text[5:9])] and lines[-1]["done_reason"] == "stop", lines
        for more, reason in (({}, "load"), ({"keep_alive": 0}, "unload")):
            for path, name in (("/api/chat", "messages"), ("/api/generate", "prompt")):
                assert server.post(path, {"model": "needle", name: [] if name == "messages" else "", **more})["done_reason"] == reason
        tags, running = (json.loads(server.raw("GET", path)[2])["models"] for path in ("/api/tags", "/api/ps"))
        assert tags[0]["name"] == running[0]["name"] == "needle" and len(tags[0]["digest"]) == 64, (tags, running)
        assert json.loads(server.raw("GET", "/api/version")[2])["version"].count(".") == 2
        assert server.post("/api/show", {"model": "needle"})["model_info"]["general.architecture"] == tags[0]["details"]["family"]
        message = [{"role": "user", "content": "x"}]
        wrong = [(400, "/api/chat", b"{"), (400, "/api/chat", b'{"a":' * 2000 + b"1" + b"}" * 2000), (400, "/api/chat", {"messages": 3}),
                 (400, "/api/chat", {"messages": [3]}), (400, "/api/chat", {"messages": [{"role": "narrator", "content": "x"}]}),
                 (400, "/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["AAAA"]}]}), (400, "/api/chat", {"messages": message, "stream": 1}),
                 (400, "/api/chat", {"messages": message, "options": []}), (400, "/api/chat", {"messages": message, "options": {"temperature": "hot"}}),
                 (400, "/api/chat", {"messages": message, "options": {"num_predict": 1.5}}), (400, "/api/chat", {"messages": message, "options": {"num_ctx": "2K"}}),
                 (400, "/api/chat", {"messages": message, "options": {"stop": [""]}}), (400, "/api/chat", {"messages": message, "format": "xml"}),
                 (400, "/api/chat", {"messages": message, "format": 3}), (400, "/api/chat", {"messages": message, "tools": [3]}),
                 (400, "/api/chat", {"messages": message, "think": 3}), (400, "/api/chat", {"messages": message, "keep_alive": []}),
                 (400, "/api/generate", {"prompt": 3}), (400, "/api/generate", {"prompt": "x", "system": 3}), (400, "/api/generate", {"prompt": "x", "raw": 1}),
                 (400, "/api/generate", {"prompt": "x", "images": ["AAAA"]}), (400, "/api/generate", {"prompt": "x", "context": [1]}),
                 (400, "/api/generate", {"prompt": "x", "template": "{{ .Prompt }}"}), (400, "/api/generate", {"prompt": BOOK[:9000]}),
                 (400, "/api/show", b"[]"), (400, "/api/show", {"model": 3}), (404, "/api/show", {"model": "needle2"}), (404, "/api/pull", {"model": "x"}),
                 (405, "/api/tags", {})]
        for status, path, body in wrong:
            assert isinstance(server.post(path, body, expect=status)["error"], str), (path, body)
        server.until(all_pages_released, "pages of Ollama requests are not released")
    with serving("-c", "2K", "--api-key", KEYS[0]) as server:
        for method, path in (("POST", "/api/chat"), ("POST", "/api/generate"), ("POST", "/api/show"), ("GET", "/api/tags"), ("GET", "/api/ps"), ("GET", "/api/version")):
            assert server.raw(method, path)[0] == 401, path


def answers_continue_the_last_assistant_message():
    with serving_tools() as server:
        def prompt(messages, **more):
            return server.post("/apply-template", {"messages": messages, **more})["prompt"]
        user, start = {"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two<|im_end|>"}
        opened = prompt([user])
        assert opened.endswith("<|im_start|>assistant\n") and prompt([user, start]) == opened + "One, two<|im_end|>"
        assert prompt([user, start], continue_final_message=False).endswith("<|im_end|><|im_end|>\n<|im_start|>assistant\n")
        assert prompt([user, start], add_generation_prompt=True) == prompt([user, start], continue_final_message=False)
        assert prompt([user, start], continue_final_message=True, add_generation_prompt=False) == opened + "One, two<|im_end|>"
        assert prompt([user], add_generation_prompt=False) == "<|im_start|>user\nCount.<|im_end|>\n"
        body = {"max_tokens": 8, "temperature": 0}
        text = server.post("/v1/completions", {"prompt": opened + "One, two", **body})["choices"][0]["text"]
        start["content"] = "One, two"
        assert server.post("/v1/chat/completions", {"messages": [user, start], **body})["choices"][0]["message"]["content"] == text
        assert server.post("/v1/messages", {"messages": [user, start], **body})["content"][0]["text"] == text
        ollama = {"messages": [user, start], "stream": False, "options": {"num_predict": 8, "temperature": 0}}
        assert server.post("/api/chat", ollama)["message"]["content"] == text
        for more in ({"messages": [user], "continue_final_message": True}, {"messages": [user, start], "continue_final_message": 1},
                     {"messages": [user, start], "continue_final_message": True, "add_generation_prompt": True}):
            assert "continue_final_message" in server.post("/v1/chat/completions", more, expect=400)["error"]["message"], more
    with serving("-c", "2K") as server:  # a model without a template
        messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
        assert server.post("/apply-template", {"messages": messages})["prompt"] == "ab\ncd"
        assert server.post("/apply-template", {"messages": messages[1:]})["prompt"] == "cd"


def completions_answer_several_prompts():
    with serving("-c", "16K") as server:
        body = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
        prompts = [BOOK[i * 50:i * 50 + 70] for i in range(12)]
        single = [server.post("/v1/completions", {"prompt": p, **body})["choices"][0]["text"] for p in prompts]
        whole = server.post("/v1/completions", {"prompt": prompts, "n": 2, **body})
        assert [c["index"] for c in whole["choices"]] == list(range(24)), whole
        assert [c["text"] for c in whole["choices"]] == [text for text in single for _ in range(2)], (single, whole)
        assert whole["usage"]["prompt_tokens"] == 12 * 70 and whole["usage"]["completion_tokens"] == 24 * 6, whole["usage"]
        tokens = server.post("/v1/completions", {"prompt": [[ord(c) for c in prompts[0]], prompts[1]], "echo": True, **body})
        assert [c["text"] for c in tokens["choices"]] == [prompts[0] + single[0], prompts[1] + single[1]], tokens
        data = server.raw("POST", "/v1/completions", {"prompt": prompts[:3], "echo": True, "stream": True, "stream_options": {"include_usage": True}, **body})[2]
        chunks = [json.loads(event) for _, event in events_of(data)[:-1]]
        for i in range(3):
            text = "".join(c["choices"][0]["text"] for c in chunks if c["choices"] and c["choices"][0]["index"] == i)
            assert text == prompts[i] + single[i], (i, text)
        assert chunks[-1]["usage"]["completion_tokens"] == 18, chunks[-1]
        for wrong in ([], [[]], ["a", 3], ["a", []], [["a"]], ["a", None], ["a"] * 65, [["a"]] * 3, {}, [1, "a"], ["a", ""], ["a", "x" * 20000]):
            assert "prompt" in server.post("/v1/completions", {"prompt": wrong}, expect=400)["error"]["message"], wrong
        assert "n = 16" in server.post("/v1/completions", {"prompt": ["a"] * 5, "n": 16}, expect=400)["error"]["message"]
        server.until(all_pages_released, "pages of several prompts are not released")
    with serving("-c", "4K", "--parallel", "1", "--queue", "3") as server:  # the queue cannot hold all prompts
        status, headers, data = server.raw("POST", "/v1/completions", {"prompt": prompts, "max_tokens": 50, "ignore_eos": True})
        assert status == 429 and int(headers["Retry-After"]) >= 1, (status, data)
        server.until(all_pages_released, "pages of rejected prompts are not released")
    with serving("-c", "4K", "--parallel", "1") as server:
        connection = server.connect()
        connection.request("POST", "/v1/completions", json.dumps({"prompt": prompts[:3], "max_tokens": 1000, "ignore_eos": True}))
        server.until(lambda f: f["num_requests_running"] > 0, "no prompt is running")
        connection.close()
        server.until(lambda f: all_pages_released(f) and f["num_requests_waiting"] == 0, "prompts of a disconnected client are not cancelled")


def infill_uses_the_tokens_of_the_model():
    with serving_tools() as server:
        ask = {"input_prefix": "def f():\n    ", "input_suffix": "\n    return x", "n_predict": 6, "temperature": 0, "ignore_eos": True}
        whole = server.post("/infill", ask)
        prompt = "<|fim_prefix|>" + ask["input_prefix"] + "<|fim_suffix|>" + ask["input_suffix"] + "<|fim_middle|>"
        raw = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        plain = server.post("/v1/completions", raw)
        assert whole["content"] == plain["choices"][0]["text"] and whole["stop"] and whole["stop_type"] == "limit", (whole, plain)
        assert whole["tokens_evaluated"] == plain["usage"]["prompt_tokens"] and whole["tokens_predicted"] == 6, whole
        assert server.post("/v1/completions", {**raw, "prompt": ask["input_prefix"], "suffix": ask["input_suffix"]})["choices"] == plain["choices"]
        events = [json.loads(data) for _, data in events_of(server.raw("POST", "/infill", {**ask, "stream": True})[2])]
        assert "".join(e["content"] for e in events[:-1]) == whole["content"] and [e["stop"] for e in events] == [False] * (len(events) - 1) + [True], events
        more = server.post("/infill", {**ask, "prompt": "x = <|end|>", "input_extra": [{"filename": "a.py", "text": "import b"}, {"text": "c"}]})
        assert more["tokens_evaluated"] == whole["tokens_evaluated"] + len("x = <|end|>") + len("a.py\nimport b\n") + len("file\nc\n"), more
        for wrong in ({"input_prefix": 3}, {"input_suffix": None}, {"prompt": []}, {"input_extra": {}}, {"input_extra": [3]}, {"input_extra": [{"text": 3}]},
                      {"input_extra": [{"text": "x", "filename": 3}]}, {"n_predict": -2}, {"input_extra": [{"text": ""}] * 5000}, {"input_prefix": "x" * 200000}):
            assert server.post("/infill", {**ask, **wrong}, expect=400)["error"]["message"], wrong
    with serving("-c", "2K") as server:
        assert "fill-in-the-middle" in server.post("/infill", ask, expect=400)["error"]["message"]


def llama_properties_and_slots_are_listed():
    with admin_key() as option, serving("-c", "8K", "--parallel", "3", "--api-key", KEYS[0], *option) as server:
        key = {"x-api-key": KEYS[0]}
        assert [server.raw("GET", "/props", headers=h)[0] for h in ({}, key, ADMIN)] == [401, 200, 200]
        assert [server.raw("GET", "/slots", headers=h)[0] for h in ({}, key, ADMIN)] == [401, 403, 200]
        props = json.loads(server.raw("GET", "/props", headers=key)[2])
        assert props["total_slots"] == 3 and props["default_generation_settings"]["n_ctx"] == 8192 and props["model_alias"] == "needle", props
        def slots():
            return json.loads(server.raw("GET", "/slots", headers=ADMIN)[2])
        assert len(slots()) == 3 and not any(slot["is_processing"] for slot in slots())
        connection = server.connect()
        connection.request("POST", "/v1/chat/completions", json.dumps(chat(BOOK[:90], max_tokens=7000)), key)
        end = time.monotonic() + 600
        while not slots()[0]["is_processing"]:
            assert time.monotonic() < end
        assert slots()[0]["n_prompt_tokens"] == 90
        connection.close()


def cross_origin_requests_are_allowed_by_option():
    page, other = {"Origin": "https://app.example"}, {"Origin": "https://other.example"}
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type, x-stainless-lang"}
    with serving("-c", "2K", "--cors", "https://app.example", "--api-key", KEYS[0]) as server:
        status, headers, data = server.raw("OPTIONS", "/v1/chat/completions", headers={**page, **preflight})
        assert status == 204 and data == b"" and headers["Access-Control-Allow-Origin"] == page["Origin"], (status, headers)
        assert headers["Access-Control-Allow-Headers"] == preflight["Access-Control-Request-Headers"] and headers["Access-Control-Allow-Methods"] == "POST", headers
        odd = server.raw("OPTIONS", "/v1/models", headers={**page, "Access-Control-Request-Headers": "x<y>"})[1]
        assert "<" not in odd["Access-Control-Allow-Headers"], odd
        status, headers, _ = server.raw("POST", "/v1/chat/completions", chat("x"), {**page, "x-api-key": KEYS[0]})
        assert status == 200 and headers["Access-Control-Allow-Origin"] == page["Origin"] and headers["Vary"] == "Origin", (status, headers)
        assert server.raw("POST", "/v1/chat/completions", chat("x"), page)[0] == 401
        for method, expected in (("POST", 403), ("OPTIONS", 405)):
            status, headers, _ = server.raw(method, "/v1/chat/completions", chat("x") if method == "POST" else None, {**other, "x-api-key": KEYS[0]})
            assert status == expected and "Access-Control-Allow-Origin" not in headers, (method, status, headers)
        assert "Access-Control-Allow-Origin" not in server.raw("GET", "/health")[1]
    with serving("-c", "2K", "--cors", "*") as server:
        status, headers, _ = server.raw("POST", "/v1/chat/completions", chat("x"), other)
        assert status == 200 and headers["Access-Control-Allow-Origin"] == "*", (status, headers)
    for wrong in ("app.example", "https://", "https://app.example/", "https://a.example,https://b.example", "://x"):
        done = subprocess.run([sys.argv[1], "serve", "-m", "needle", "--port", "0", "--cors", wrong], capture_output=True, check=False)
        assert done.returncode == 2 and b"--cors" in done.stderr, (wrong, done)


def tool_messages_reach_the_template():
    with serving("-c", "8K") as server:
        ask = {"max_tokens": 4, "messages": [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "I look."},
                                              {"type": "tool_use", "id": "t1", "name": "get", "input": {"city": "Paris"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "rain"}]}],
            "tools": [{"name": "get", "description": "d", "input_schema": {"type": "object"}}]}
        assert server.post("/v1/messages", ask)["type"] == "message"
        assert server.post("/v1/messages/count_tokens", ask)["input_tokens"] == len("weather?\nI look.\nrain")
        nameless = {**ask, "tools": [{"input_schema": {"type": "object"}}]}
        assert "function with a name" in server.post("/v1/messages", nameless, expect=400)["error"]["message"]
        for path, name in (("/v1/chat/completions", "messages"), ("/v1/messages", "messages"), ("/v1/responses", "input")):
            message = server.post(path, {"max_tokens": 4, name: [{"role": "narrator", "content": "x"}]}, expect=400)["error"]["message"]
            assert "narrator" in message and "user, assistant or" in message, message
        image = {"max_tokens": 4, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}
        assert "image" in server.post("/v1/messages", image, expect=400)["error"]["message"]


def web_page_is_self_contained_and_strict():
    with serving("-c", "8K") as server:
        status, headers, data = server.raw("GET", "/")
        assert status == 200 and b"<title>flatkv</title>" in data and headers["Content-Type"].startswith("text/html"), status
        policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
        assert policy["default-src"] == "'none'" and "unsafe" not in headers["Content-Security-Policy"], policy
        assert all(policy[name] == "'self'" for name in ("script-src", "style-src", "img-src", "connect-src")), policy
        assert policy["require-trusted-types-for"] == "'script'" and policy["trusted-types"] == "dompurify", policy
        assert not re.search(rb"<style|<script>|\bstyle=|\bon[a-z]+=", data), "the page contains inline code"
        types = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "html": "text/html"}
        paths = {path.decode() for path in re.findall(rb'(?:src|href)="(page/[^"]+)"', data)}
        assert {"page/app.js", "page/style.css"} <= paths, paths
        todo, files = list(paths), {}
        while todo:
            path = todo.pop()
            status, headers, data = server.raw("GET", "/" + path)
            assert status == 200 and headers["X-Content-Type-Options"] == "nosniff", (path, status)
            assert headers["Content-Type"].startswith(types[path.rsplit(".", 1)[1]]), (path, headers)
            assert server.raw("GET", "/" + path, headers={"If-None-Match": headers["ETag"]})[::2] == (304, b""), path
            files[path] = data
            imports = re.findall(rb' from "\./([^"]+)";', data) if "/vendor/" not in path else []
            todo += [f"page/{name.decode()}" for name in imports if f"page/{name.decode()}" not in files]
        assert "page/vendor/marked.esm.js" in files and sum(map(len, files.values())) < 250000, {path: len(data) for path, data in files.items()}
        with open(os.path.join(TREE, "src/serve/page/vendor/README.md"), encoding="utf-8") as file:
            listed = file.read()
        for path in ("page/vendor/marked.esm.js", "page/vendor/purify.min.js"):
            assert hashlib.sha256(files[path]).hexdigest() in listed, f"{path} differs from the published file"
        own = b"".join(data for path, data in files.items() if "/vendor/" not in path and not path.endswith(".svg"))
        urls = set(re.findall(rb"https?://[\w.]+[^\s\"']*", own)) - {b"http://www.w3.org/2000/svg"} # this URL is only the name of the SVG namespace
        assert not urls, urls
        for path in ("/page/", "/page/nothing.js", "/page/index.html", "/page/../serve.c", "/page/vendor"):
            assert server.raw("GET", path)[0] == 404, path
        assert server.raw("GET", "/", headers={"Host": "evil.example:80"})[0] == 403, "a foreign Host header must be rejected"


def memory_view_fields_exist_in_the_state():
    with serving("-c", "8K") as server:
        assert server.raw("GET", "/flatkv/state", headers={"Host": "evil.example:80"})[0] == 403, "a foreign Host header must be rejected"
        script = server.raw("GET", "/page/memory.js")[2].decode()
        server.post("/v1/chat/completions", chat(BOOK[:300]))
        end = time.monotonic() + 600  # the engine publishes the pages after the answer
        while (state := json.loads(server.raw("GET", "/flatkv/state")[2]))["map"]["states"].count("3") < 4 and time.monotonic() < end:
            time.sleep(0.02)
        fields = set(re.findall(r"\bs\.([a-z_]+)\b(?!\()", script)) | set(re.findall(r'(?:rate|more)\("([a-z_]+)"\)', script))
        assert len(fields) > 20 and fields <= set(state), fields - set(state)
        group = state["groups"][state["map"]["group"]]
        assert len(state["map"]["states"]) == group["pages"] and state["map"]["states"].count("3") == group["cached"], state["map"]
        assert group["free"] + group["held"] + group["cached"] == group["pages"] and group["cached"] == 4, group
        assert 0 < sum(g["pages"] * g["page_bytes"] for g in state["groups"]) <= state["planned_bytes"], state


SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer", "minimum": 3, "maximum": 12},
                                           "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}},
          "required": ["kind", "n", "list"], "additionalProperties": False}


def structured_outputs_follow_the_schema():
    """With llguidance, answers must match the schema. Without it, json_object must still work, and other formats must be rejected with a hint."""
    def request_with(form, **more):
        return {"messages": [{"role": "user", "content": BOOK[:200]}], "max_tokens": 200, "temperature": 1.5, **form, **more}

    def schema_format(schema):
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}

    def check_value(text):
        value = json.loads(text)
        assert value["kind"] in "ab" and 3 <= value["n"] <= 12 and 1 <= len(value["list"]) <= 3 and len(value) == 3, value

    tools = {"tools": [{"type": "function", "function": {"name": "get"}}], "tool_choice": "required"}
    with serving("-c", "8K", "--draft-tokens", "3") as server:
        first = server.raw("POST", "/v1/chat/completions", request_with(schema_format(SCHEMA)))
        for seed in range(8):
            any_object = {**request_with({"response_format": {"type": "json_object"}}, seed=seed), "logit_bias": {str(ord(c)): 8 for c in "}]\""}}
            choice = server.post("/v1/chat/completions", any_object)["choices"][0]
            assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["message"]["content"]), dict), choice
        if b"get-llguidance" in first[2]:
            for form, param in ((schema_format({}), "response_format"), (tools, "tool_choice")):
                error = server.post("/v1/chat/completions", request_with(form), expect=400)["error"]
                assert error["param"] == param and "get-llguidance" in error["message"], error
            print("skipped: this build has no JSON schemas")
            return
        for seed in range(4):
            whole = server.post("/v1/chat/completions", request_with(schema_format(SCHEMA), seed=seed, n=2))
            for choice in whole["choices"]:
                assert choice["finish_reason"] == "stop", whole
                check_value(choice["message"]["content"])
            chunks = events_of(server.raw("POST", "/v1/chat/completions", request_with(schema_format(SCHEMA), seed=seed, stream=True))[2])[:-1]
            text = "".join(json.loads(data)["choices"][0]["delta"].get("content", "") for _, data in chunks)
            assert text == whole["choices"][0]["message"]["content"], (text, whole)
        text = server.post("/v1/completions", {"prompt": BOOK[:200], "max_tokens": 200, **schema_format(SCHEMA)})["choices"][0]["text"]
        check_value(text)
        message = {**request_with({}), "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
        check_value(server.post("/v1/messages", message)["content"][0]["text"])
        for schema in ({"type": "banana"}, {"not": {}}, {"$ref": "#"}, {"$ref": "http://127.0.0.1/x"}, {"type": "string", "pattern": "("},
                       {"enum": ["x" * 70000]}, {"properties": {str(i): {} for i in range(1000)}}, {"type": "integer", "multipleOf": 999999937}):
            error = server.post("/v1/chat/completions", request_with(schema_format(schema)), expect=400)["error"]
            assert error["param"] == "response_format" and len(error["message"]) > 20, (schema, error)
        assert "tool calls" in server.post("/v1/chat/completions", request_with(tools), expect=400)["error"]["message"] # the needle model has no tool syntax
        hard = schema_format({"type": "string", "pattern": "(.*a.{20}|.*b.{25})*"}) # may exceed the work limit, which is reported as a client error
        assert server.raw("POST", "/v1/chat/completions", request_with(hard))[0] in (200, 400)
        server.until(all_pages_released, "pages of structured outputs are not released")


# ---- authentication


def api_keys_are_separate_tenants():
    with serving("-c", "8K", "--api-key", KEYS[0], "--api-key", KEYS[1]) as server:
        first, second = ({"Authorization": "Bearer " + KEYS[0]}, {"x-api-key": KEYS[1]})
        for wrong in ({}, {"Authorization": "Bearer " + KEYS[0][:-1]}, {"x-api-key": KEYS[0] + "x"}, {"x-api-key": ""}):
            assert server.raw("POST", "/v1/chat/completions", chat("x"), wrong)[0] == 401, wrong
            assert server.raw("GET", "/metrics", headers=wrong)[0] == 401
        assert server.raw("GET", "/health")[0] == 200
        cached = [server.post("/v1/chat/completions", chat(BOOK[:300]), key)["usage"]["prompt_tokens_details"]["cached_tokens"]
                  for key in (first, second, first, second)]
        assert cached == [0, 0, 256, 256], cached # tenants do not share pages
        assert server.raw("POST", "/v1/chat/completions", chat("x"), {**first, "Origin": "http://evil.example"})[0] == 403
        for path in ("/metrics", "/flatkv/state"):  # no admin key is set
            status, _, data = server.raw("GET", path, headers=first)
            assert status == 403 and b"--admin-key-file" in data, (path, status, data)
    with admin_key() as option, serving("-c", "8K", "--api-key", KEYS[0], *option) as server:
        for path in ("/metrics", "/flatkv/state"):
            assert [server.raw("GET", path, headers=h)[0] for h in ({}, first, ADMIN)] == [401, 403, 200], path
        assert server.post("/v1/chat/completions", chat("x"), ADMIN)["choices"]
        assert server.post("/v1/chat/completions", chat("x"), first)["choices"]
    done = subprocess.run([sys.argv[1], "serve", "--host", "0.0.0.0", "--port", "0"], capture_output=True, check=False)
    assert done.returncode == 2 and b"--no-auth" in done.stderr, done
    with serving() as server:  # a port in use is reported before the model is loaded
        done = subprocess.run([sys.argv[1], "serve", "-m", "no-such-model", "--port", str(server.port)], capture_output=True, check=False)
        assert done.returncode == 1 and b"cannot listen on" in done.stderr, done


# ---- hostile input


def hostile_requests_are_rejected():
    with serving("-c", "128", "--queue", "4") as server:  # some requests are accepted by some of the APIs, and their answers fill the context
        chats = [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"messages": []}', b'{"messages": [1]}', b'{"messages": {}}',
                 b'{"messages": [{"role": 1}]}', b'{"messages": [{"role": "narrator", "content": "x"}]}',
                 b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
                 b"[" * 100000, b'{"a":' * 2000 + b"1" + b"}" * 2000, b'{"messages":[{"role":"user","content":"x"}],"n":99}',
                 b'{"messages":[{"role":"user","content":"x"}],"temperature":"hot"}',
                 b'{"messages":[{"role":"user","content":"x"}],"temperature":-1}',
                 b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1e99}',
                 b'{"messages":[{"role":"user","content":"x"}],"max_tokens":99999999}',
                 b'{"messages":[{"role":"user","content":"x"}],"stop":[""]}',
                 b'{"messages":[{"role":"user","content":"x"}],"stop":' + json.dumps(["x"] * 99).encode() + b"}",
                 b'{"messages":[{"role":"user","content":"x"}],"response_format":{"type":"xml"}}',
                 b'{"messages":[{"role":"user","content":"x"}],"tools":3}',
                 b'{"messages":[{"role":"user","content":"x"}],"tools":[3]}',
                 b'{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{}}]}',
                 b'{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":5}}]}',
                 b'{"messages":[{"role":"user","content":"x","content":"y"}]}']
        for body in chats:
            for path in ("/v1/chat/completions", "/v1/messages", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize", "/apply-template",
                         "/v1/messages/count_tokens", "/infill"):
                status, _, data = server.raw("POST", path, body)
                assert status in (200, 400), (path, body[:80], status, data[:200])
                assert status == 400 or path in ("/apply-template", "/v1/messages/count_tokens", "/v1/messages"), (path, body[:80], data)
                json.loads(data)
        assert server.raw("POST", "/v1/completions", {"prompt": [1, 2, 10 ** 9]})[0] == 400
        with socket.create_connection(("127.0.0.1", server.port), timeout=300) as sock: # rejected because of its declared length
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\n")
            assert b" 413 " in sock.recv(1000).split(b"\r\n")[0]
        random.seed(1)
        for packet in [b"GET / HTTP/1.1\r\n" + b"A: " + b"x" * 100000 + b"\r\n\r\n", b"\0\0\0\0\r\n\r\n", b"GET\r\n\r\n",
                       b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n", b"GET " + b"/" * 50000 + b" HTTP/1.1\r\n\r\n",
                       b"POST /v1/completions HTTP/1.1\r\nContent-Length: 10\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
                       b"DELETE /v1/completions HTTP/1.1\r\n\r\n", *(random.randbytes(500) for _ in range(30))]:
            with socket.create_connection(("127.0.0.1", server.port), timeout=300) as sock:
                with contextlib.suppress(OSError):
                    sock.sendall(packet)
                    sock.shutdown(socket.SHUT_WR)
                    sock.recv(1000)
        for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
            status, headers, _ = server.raw(method, "/v1/completions")
            assert status == 405 and headers["Allow"] == "POST", (method, status, headers)
        assert server.raw("GET", "/health")[0] == 200
        assert server.metrics()["num_requests_waiting"] == 0


def answers_of(sock, n):
    """Reads the next n responses of a connection as [(status, body)]. Each must have a Content-Length."""
    found, data = [], b""
    while len(found) < n:
        head, split, body = data.partition(b"\r\n\r\n")
        length = int(re.search(rb"Content-Length: (\d+)", head)[1]) if split else 0
        if split and len(body) >= length:
            found.append((int(head.split()[1]), body[:length]))
            data = body[length:]
        else:
            more = sock.recv(65536)
            assert more, (found, data[:300])
            data += more
    return found


def requests_may_arrive_in_any_chunks():
    body = json.dumps({"prompt": BOOK[:100], "max_tokens": 2, "temperature": 0}).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    with serving("-c", "2K") as server:
        expected = server.post("/v1/completions", json.loads(body))["choices"]
        with socket.create_connection(("127.0.0.1", server.port), timeout=300) as sock: # pipelined requests
            sock.sendall((post + b"Content-Length: %d\r\n\r\n" % len(body) + body) * 3 + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answers = answers_of(sock, 4)
            assert [json.loads(b)["choices"] for _, b in answers[:3]] == [expected] * 3 and answers[3][0] == 200, answers
        with socket.create_connection(("127.0.0.1", server.port), timeout=300) as sock: # chunked encoding in small packets
            whole = post + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in (body[:7], body[7:])) + b"0\r\n\r\n"
            for i in range(0, len(whole), 16):
                sock.sendall(whole[i:i + 16])
            assert json.loads(answers_of(sock, 1)[0][1])["choices"] == expected
        with socket.create_connection(("127.0.0.1", server.port), timeout=300) as sock: # the body of a rejected request is not parsed as a request
            inner = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
            sock.sendall(b"TRACE /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(inner) + inner)
            data = b""
            with contextlib.suppress(ConnectionResetError):
                while more := sock.recv(65536):
                    data += more
            assert data.count(b"HTTP/1.1 ") == 1, data
        with socket.create_connection(("127.0.0.1", server.port), timeout=300) as sock: # endless chunks
            with contextlib.suppress(OSError):
                sock.sendall(post + b"Transfer-Encoding: chunked\r\n\r\n")
                for _ in range(2000):
                    sock.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                raise AssertionError("131 MB were accepted")
        with socket.create_connection(("127.0.0.1", server.port), timeout=300) as sock: # pipelined data is not buffered without limit
            before = server.metrics()
            long = json.dumps({"prompt": BOOK[:50], "max_tokens": 300 if SANITIZED else 1900, "ignore_eos": True}).encode()
            sock.sendall(post + b"Content-Length: %d\r\n\r\n" % len(long) + long)
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                for _ in range(1000):
                    sock.send(post * 1000)
            check_resident_growth(before, server.metrics(), 4 << 20)


def ambiguous_requests_are_rejected():
    """Tests request smuggling: sends requests that proxies and servers may parse differently. Each is followed by a request that must not be answered."""
    post = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n"
    chunked = post + b"Transfer-Encoding: chunked\r\n\r\n"
    body = b'{"content": "a b"}'
    length = b"Content-Length: %d\r\n" % len(body)
    size = b"%x" % len(body)
    bad = [(400, post + b"Transfer-Encoding : chunked\r\n\r\n"), (400, post + b"Transfer-Encoding\t: chunked\r\n\r\n"),
           (400, post + length + b"Content-Length: 5\r\n\r\n" + body), (400, post + length + length + b"\r\n" + body),
           (400, post + length + b"Transfer-Encoding: chunked\r\n\r\n" + body), (400, post + b"Content-Length: +18\r\n\r\n" + body),
           (400, post + b"Content-Length: 0x12\r\n\r\n" + body), (400, post + b"Content-Length: 18, 18\r\n\r\n" + body),
           (400, post + b"Content-Length: -1\r\n\r\n"), (400, post + b"Content-Length:\r\n\r\n"),
           (413, post + b"Content-Length: 99999999999999999999999\r\n\r\n"), (413, chunked + b"7fffffff\r\n"),
           (400, chunked + b"0x" + size + b"\r\n" + body + b"\r\n0\r\n\r\n"), (400, chunked + b"+" + size + b"\r\n" + body + b"\r\n0\r\n\r\n"),
           (400, chunked + b" " + size + b"\r\n" + body + b"\r\n0\r\n\r\n"), (400, chunked + b"-1\r\n" + body),
           (400, chunked + b"\r\n" + body), (400, chunked + b"123456789\r\n" + body), (400, chunked + size + b"\n" + body),
           (400, chunked + size + b"\r\n" + body + b"0\r\n\r\n"), (400, chunked + size + b"\r\n" + body + b"xx0\r\n\r\n"),
           (400, chunked + size + b"\r\n" + body + b"\r\n0\r\nbad trailer\r\n\r\n"),
           (501, post + b"Transfer-Encoding: xchunked\r\n\r\n"), (501, post + b"Transfer-Encoding: chunked, identity\r\n\r\n"),
           (400, post + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n"),
           (400, b"POST /tokenize HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n"), (400, post + b"Host: localhost\r\n" + length + b"\r\n" + body),
           (400, b"GET /health HTTP/1.1\r\n\r\n"), (400, post + b"X: a\0b\r\n\r\n"), (400, post + b"X: a\rb\r\n\r\n"), (400, post + b"X\0: a\r\n\r\n"),
           (400, post + b" folded: a\r\n\r\n"), (400, post + b"X: a\r\n b\r\n\r\n"), (400, post + b": a\r\n\r\n"), (400, post + b"no colon\r\n\r\n"),
           (400, post + b"X: a\n\r\n"), (400, b"GET /health HTTP/1.1\nHost: localhost\n\n"), (400, b"GET  /health HTTP/1.1\r\n\r\n"),
           (400, b"GET /health\r\n\r\n"), (400, b"GET /health HTTP/1.2\r\n\r\n"), (400, b"GET /health http/1.1\r\n\r\n"), (501, b"get /health HTTP/1.1\r\n\r\n"),
           (400, b"GET /a\x7f HTTP/1.1\r\n\r\n"), (400, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + length + b"\r\n" + body),
           (431, post + b"X: " + b"x" * 17000 + b"\r\n\r\n"), (431, post + b"X: x\r\n" * 4000 + b"\r\n"), (417, post + b"Expect: more\r\n\r\n")]
    good = [post + length + b"\r\n" + body, chunked + size + b"\r\n" + body + b"\r\n0\r\n\r\n",
            chunked + size.upper() + b";name=value;flag\r\n" + body + b"\r\n0;last\r\n\r\n", chunked + size + b' ; name="a b"\r\n' + body + b"\r\n000\r\n\r\n",
            chunked + b"".join(b"1\r\n%c\r\n" % c for c in body) + b"0\r\nX-Trailer: a\r\nContent-Length: 7\r\n\r\n",
            b"\r\n" + post + b"X:\r\nCONTENT-length:  18 \r\n\r\n" + body, post + length + b"Expect: 100-continue\r\n\r\n" + body]
    follower = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"

    def replies_to(server, data, step=0):
        with socket.create_connection(("127.0.0.1", server.port), timeout=300) as sock:
            received = b""
            with contextlib.suppress(OSError):
                for i in range(0, len(data), step or len(data)):
                    sock.sendall(data[i:i + (step or len(data))])
                sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while more := sock.recv(65536):
                    received += more
        return received

    with serving("-c", "2K") as server:
        for status, request in bad:
            for step in (0, 7):
                reply = replies_to(server, request + follower, step)
                head, _, data = reply.partition(b"\r\n\r\n")
                assert reply.count(b"HTTP/1.1 ") == 1 and head.startswith(b"HTTP/1.1 %d " % status), (status, request[:200], reply[:300])
                assert json.loads(data)["error"]["message"], (request[:200], reply)
        for request in good:
            for step in (0, 1):
                with socket.create_connection(("127.0.0.1", server.port), timeout=300) as sock:
                    whole = request + follower
                    for i in range(0, len(whole), step or len(whole)):
                        sock.sendall(whole[i:i + (step or len(whole))])
                    received = b""
                    while received.count(b"HTTP/1.1 200") < 2:
                        more = sock.recv(65536)
                        assert more, (request[:200], received)
                        received += more
                    assert b'"count":3' in received, (request[:200], received)
        with socket.create_connection(("127.0.0.1", server.port), timeout=300) as sock:  # requests before the violation are answered
            sock.sendall(good[0] + good[1] + bad[0][1] + follower)
            received = b""
            while more := sock.recv(65536):
                received += more
            assert received.count(b"HTTP/1.1 200") == 2 and received.count(b"HTTP/1.1 400") == 1 and received.count(b"HTTP/1.1 ") == 3, received


def connections_are_limited_and_time_out():
    with serving("-c", "2K", "--connections", "8", "--request-seconds", "1") as server:  # 2 of the connections are reserved for other addresses
        def connect():
            return socket.create_connection(("127.0.0.1", server.port), timeout=300)
        slow = [connect() for _ in range(6)]
        for sock in slow: # unterminated header
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
        refused = []
        for _ in range(4):
            with connect() as sock:
                sock.settimeout(300)
                with contextlib.suppress(ConnectionResetError):
                    refused.append(sock.recv(1000))
        assert refused and all(b" 503 " in r and b"too many connections" in r for r in refused), refused
        with contextlib.suppress(OSError):  # not every system has a second loopback address
            other = socket.create_connection(("127.0.0.1", server.port), timeout=300, source_address=("127.0.0.2", 0))
            with other:
                other.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert b" 200 " in other.recv(1000).split(b"\r\n")[0], "another address cannot connect"
        start = time.monotonic()
        for sock in slow:
            with contextlib.suppress(OSError):
                while True: # sending single bytes does not extend the time limit
                    assert time.monotonic() < start + 1500
                    sock.sendall(b"x")
                    sock.settimeout(0.1)
                    with contextlib.suppress(TimeoutError):
                        if not sock.recv(100):
                            break
            sock.close()
        metrics = server.metrics()
        assert metrics["refused_connections_total"] >= 4 and metrics["connections"] <= 8, metrics
        for i in range(30): # the slots of closed connections are available immediately
            assert server.raw("GET", "/health")[0] == 200, i
        connection = server.connect() # a connection waiting for its response does not time out
        connection.request("POST", "/v1/completions", json.dumps({"prompt": BOOK[:50], "max_tokens": 1000 if SANITIZED else 1900, "ignore_eos": True}))
        assert connection.getresponse().status == 200
        connection.close()


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        fields = stat.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def descriptor_exhaustion_pauses_accepting():
    def connect(server):
        return socket.create_connection(("127.0.0.1", server.port), timeout=20)
    def is_healthy(server):
        """Waits until the server has noticed that connections were closed and answers again."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if server.raw("GET", "/health")[0] == 200:
                    return True
            time.sleep(0.05)
        return False
    def ulimit(option):
        return "sh", "-c", f'ulimit {option} 64; exec "$0" "$@"'
    with serving("-c", "2K", "--connections", "104", wrapper=ulimit("-S -n")) as server:  # the server raises the soft limit on open files
        idle = [connect(server) for _ in range(75)]
        assert is_healthy(server)
        for sock in idle:
            sock.close()
    with serving("-c", "2K", wrapper=ulimit("-n")) as server:
        idle = [connect(server) for _ in range(75)]
        for sock in idle:
            sock.close()
        assert is_healthy(server)
        if hasattr(resource, "prlimit"):
            n_open = len(os.listdir(f"/proc/{server.process.pid}/fd"))
            resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (n_open + 2, n_open + 2))
            idle = [connect(server) for _ in range(20)]
            start = cpu_seconds(server.process.pid)
            time.sleep(2.5)
            assert cpu_seconds(server.process.pid) - start < 0.5, "accept() is retried without a pause"
            for sock in idle:
                sock.close()
            assert is_healthy(server)
        errors = server.stop()
        assert "allows 32 connections" in errors and len(errors.splitlines()) < 20, errors[:2000]


# ---- disconnects and overload


def pages_are_released_when_clients_disconnect():
    with serving("-c", "16K", "--parallel", "2", "--chunk", "64") as server:
        def ask(stream, n_prompt, n_new):
            connection = server.connect()
            connection.request("POST", "/v1/chat/completions", json.dumps(chat(BOOK[:n_prompt], max_tokens=n_new, stream=stream)))
            return connection
        streams = [ask(True, 50 + i, 6000) for i in range(2)]
        answers = [c.getresponse() for c in streams]
        for answer in answers:
            assert answer.readline().startswith(b"data: ")
        queued = ask(False, 40, 100)
        server.until(lambda f: f["num_requests_waiting"] == 1, "no request is queued")
        queued.close()
        server.until(lambda f: f["num_requests_waiting"] == 0, "the request of a disconnected client stays queued")
        for connection, answer in zip(streams, answers): # during decode
            answer.close()
            connection.close()
        server.until(all_pages_released, "pages are held after a disconnect during decode")
        prefill = ask(False, 15000, 10)
        server.until(lambda f: f["prompt_tokens_computed_total"] > 200, "prefill does not advance")
        prefill.close()
        metrics = server.until(all_pages_released, "pages are held after a disconnect during prefill")
        assert metrics["prompt_tokens_computed_total"] < 15000 and metrics["disconnects_total"] == 4, metrics
        assert server.post("/v1/chat/completions", chat("still there"))["choices"]


def overload_is_rejected_with_a_retry_time():
    with serving("-c", "16K", "--parallel", "2", "--queue", "3") as server:
        def one(i):
            return server.raw("POST", "/v1/chat/completions", chat(BOOK[i * 7:i * 7 + 200], max_tokens=150))
        with concurrent.futures.ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(one, range(24)))
        good = [json.loads(data) for status, _, data in answers if status == 200]
        busy = [(headers, json.loads(data)) for status, headers, data in answers if status == 429]
        assert len(good) >= 3 and len(busy) >= 1 and len(good) + len(busy) == 24, [a[0] for a in answers]
        assert all(a["usage"]["completion_tokens"] == 150 for a in good), good
        assert all(int(headers["Retry-After"]) >= 1 and body["error"]["type"] == "rate_limit_error" for headers, body in busy), busy
        metrics = server.until(all_pages_released, "pages are held after all requests")
        assert metrics['request_success_total{finished_reason="error"}'] == 0, metrics


def tenant_that_fills_the_queue_does_not_lock_out_others():
    def ask(server, key, n_new):
        connection = server.connect()
        connection.request("POST", "/v1/chat/completions", json.dumps(chat("x", max_tokens=n_new)), {"x-api-key": key})
        return connection
    with admin_key() as option, serving("-c", "16K", "--parallel", "1", "--queue", "20", "--max-wait", "0", "--api-key", KEYS[0], "--api-key", KEYS[1],
                                        *option) as server:
        running = ask(server, KEYS[0], 15000)  # runs until the test disconnects, even if the machine is busy
        server.until(lambda f: f["num_requests_running"] == 1, "the first request does not start", headers=ADMIN)
        queued = [ask(server, KEYS[0], 8000) for _ in range(20)]
        server.until(lambda f: f["num_requests_waiting"] == 20, "the queue does not fill", headers=ADMIN)
        assert server.raw("POST", "/v1/chat/completions", chat("x"), {"x-api-key": KEYS[0]})[0] == 429
        other = ask(server, KEYS[1], 4)
        metrics = server.until(lambda f: f["requests_total"] + f["refused_busy_total"] == 23, "the request of the other tenant does not arrive", headers=ADMIN)
        assert metrics["refused_busy_total"] == 1, metrics
        running.close()
        assert json.loads(other.getresponse().read())["usage"]["completion_tokens"] == 4
        metrics = server.metrics(ADMIN)
        assert metrics["num_requests_waiting"] >= 18, metrics  # each request of the first tenant runs for several seconds
        for connection in queued:
            connection.close()
        server.until(all_pages_released, "pages are held after all requests", headers=ADMIN)


def shared_prefix_is_computed_once():
    n_shared = 512 if SANITIZED else 2048
    with serving("-c", "32K", "--parallel", "8") as server:
        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(lambda i: server.post("/v1/chat/completions", chat(BOOK[:n_shared] + f" {i:02}", max_tokens=4)), range(32)))
        assert len(answers) == 32
        metrics = server.metrics()
        assert metrics["prompt_tokens_computed_total"] == n_shared + 32 * 3, metrics


def slow_reader_is_disconnected():
    with serving("-c", "64K", "--parallel", "4") as server:
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            body = json.dumps(chat("x", max_tokens=4000, n=4, stream=True, logprobs=True, top_logprobs=20)).encode()
            sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            server.until(lambda f: f["slow_readers_total"] == 1 and all_pages_released(f), "the slow reader stays connected")


# ---- large requests


LARGE = 1 if SANITIZED else 2  # factor of the sizes of large requests


def many_turns(n):
    """Returns a body of the Messages API with n user messages, which are merged into one prompt."""
    return json.dumps({"messages": [{"role": "user", "content": "x" * 20}] * n, "max_tokens": 4}).encode()


def large_requests_do_not_delay_other_clients():
    bodies = (("/v1/messages", many_turns(LARGE * 15000)), ("/v1/chat/completions", json.dumps(chat(" " * (LARGE * 1875000))).encode()),
              ("/tokenize", json.dumps({"content": "a b " * (LARGE * 50000), "with_pieces": True}).encode()))
    with serving("-c", "16K") as server:
        connection = server.connect()
        connection.request("POST", "/v1/chat/completions", json.dumps(chat("x", max_tokens=12000, stream=True)))
        stream = connection.getresponse()
        tokens_at = []

        def read_stream():
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError, AttributeError):
                while stream.readline():
                    tokens_at.append(time.monotonic())

        reader = threading.Thread(target=read_stream)
        reader.start()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            for path, body in bodies:
                start = last = time.monotonic()
                longest = 0.0
                large = pool.submit(server.raw, "POST", path, body)
                while not large.done():
                    assert server.raw("GET", "/health")[0] == 200
                    longest = max(longest, time.monotonic() - last)
                    last = time.monotonic()
                    time.sleep(0.002)
                status, _, data = large.result()
                took = time.monotonic() - start
                times = [start] + [t for t in tokens_at if start < t < start + took] + [start + took]
                gap = max(b - a for a, b in zip(times, times[1:])) if reader.is_alive() else 0.0
                assert status == (200 if path == "/tokenize" else 400), (path, status, data[:200])
                # Long gaps also occur on a slow machine, but they are shorter than the request itself.
                assert longest < 5.0 or longest < took / 2, (path, longest, took)
                assert gap < 5.0 or gap < took / 2, (path, gap, took)
        assert b"bytes" in server.raw("POST", *bodies[1])[2], "the prompt was tokenized before its length was checked"
        connection.sock.shutdown(socket.SHUT_RDWR)
        reader.join()
        connection.close()


def receiving_a_large_body_takes_linear_time():
    def loop_seconds(server):
        with open(f"/proc/{server.process.pid}/task/{server.process.pid}/schedstat", encoding="ascii") as file:  # the event loop runs on the first thread
            return int(file.read().split()[0]) / 1e9

    def least_seconds(server, n):
        body, seconds = json.dumps({"content": 0, "x": " " * n}).encode(), []
        for _ in range(3):
            start = loop_seconds(server)
            server.post("/tokenize", body, expect=400)
            seconds.append(loop_seconds(server) - start)
        return min(seconds)
    if not os.path.exists("/proc/self/schedstat"):
        return
    with serving("-c", "2K") as server:
        small, large = (least_seconds(server, n) for n in (LARGE * 250000, LARGE * 2000000))
        assert large < 32 * small, (small, large)  # the ratio is 8 in linear time and 64 in quadratic time


def clients_may_disconnect_during_preparation():
    body = many_turns(LARGE * 25000)
    head = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    with serving("-c", "8K") as server:
        for _ in range(8):
            with socket.create_connection(("127.0.0.1", server.port), timeout=300) as sock:
                sock.sendall(head + body)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close() then resets the connection
        server.until(lambda f: f["num_requests_preparing"] == 0 and all_pages_released(f), "abandoned requests remain")
        assert server.post("/v1/chat/completions", chat("still there"))["choices"]


def sigterm_finishes_requests_in_preparation():
    n_turns = LARGE * 25000
    with serving("-c", "8K") as server, concurrent.futures.ThreadPoolExecutor(2) as pool:
        count = pool.submit(server.post, "/v1/messages/count_tokens", many_turns(n_turns))
        answer = pool.submit(server.post, "/v1/chat/completions", chat(BOOK[:100], ignored=[0] * (LARGE * 250000)))
        server.until(lambda f: f["num_requests_preparing"] == 2 or count.done() or answer.done(), "no request is being prepared")
        server.process.send_signal(signal.SIGTERM)
        if not count.done() and not answer.done():
            assert count.result()["input_tokens"] == 22 * n_turns - 2
            assert answer.result()["usage"]["completion_tokens"] == 16
        for ask in (count, answer):
            ask.exception()
        server.stop(again=False)


# ---- prefixes on disk


@contextlib.contextmanager
def folder():
    with tempfile.TemporaryDirectory(prefix="flatkv-serve-") as parent:
        yield os.path.join(parent, "prefixes")


def prefixes_survive_a_restart():
    body = chat(BOOK[:900])
    key = [{"Authorization": "Bearer " + k} for k in KEYS]
    with serving("-c", "8K") as server:
        expected = server.post("/v1/chat/completions", body)["choices"][0]["message"]
    with folder() as path, admin_key() as option:
        options = ("-c", "8K", *option, "--prefix-dir", path, "--prefix-disk", "8M", "--api-key", KEYS[0], "--api-key", KEYS[1])
        with serving(*options) as server:
            assert server.post("/v1/chat/completions", body, key[0])["choices"][0]["message"] == expected
        assert all(k not in name for k in KEYS for name in os.listdir(path))
        with serving(*options[:-4], "--api-key", KEYS[1], "--api-key", KEYS[0]) as server:  # prefixes remain available to their keys if the order of the keys changes
            answer = server.post("/v1/chat/completions", body, key[0])
            other = server.post("/v1/chat/completions", body, key[1])
            assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, other
            assert answer["choices"][0]["message"] == other["choices"][0]["message"] == expected
            metrics = server.metrics(ADMIN)
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            open_pages = cached // 64 % 4  # pages of sealed layers that are also read in open form
            assert cached > 500 and metrics["prefix_store_read_pages_total"] == cached // 64 + open_pages, (cached, metrics)
            assert 0 < metrics["prefix_store_bytes"] <= metrics["prefix_store_max_bytes"] == 8 << 20, metrics
            second = subprocess.run([sys.argv[1], "serve", "-m", "needle", "--port", "0", *options], capture_output=True, timeout=600, check=False)
            assert second.returncode != 0 and b"separate folder" in second.stderr, second


def killed_server_leaves_no_damaged_prefixes():
    rng = random.Random(5)
    prompts = [BOOK[i:i + (350 if SANITIZED else 700)] for i in range(0, 2000, 500)]
    body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with serving("-c", "8K") as server:
        expected = [server.post("/v1/completions", {"prompt": p, **body})["choices"][0]["text"] for p in prompts]
    with folder() as path:
        for _ in range(6):
            with contextlib.suppress(OSError, http.client.HTTPException), serving("-c", "8K", "--prefix-dir", path) as server:
                timer = threading.Timer(rng.random() * 0.4, server.process.kill)
                timer.start()
                for prompt, text in zip(prompts, expected):
                    assert server.post("/v1/completions", {"prompt": prompt, **body})["choices"][0]["text"] == text
                timer.join()
                server.post("/v1/completions", {"prompt": prompts[0], **body})
                raise AssertionError("the server was not killed")
            timer.join()
        with serving("-c", "8K", "--prefix-dir", path) as server:
            for prompt, text in zip(prompts, expected):
                assert server.post("/v1/completions", {"prompt": prompt, **body})["choices"][0]["text"] == text
            assert server.metrics()["prefix_store_damaged_pages_total"] == 0


# ---- combined options


def small_steps_fit_the_drafts_of_all_answers():
    with serving("-c", "8K", "--chunk", "16", "--parallel", "8") as server:  # 8 answers with 3 draft tokens each exceed the size of a step
        text = server.post("/v1/chat/completions", chat(BOOK[:100]))["choices"][0]["message"]["content"]
    with serving("-c", "8K", "--draft-tokens", "0") as server:
        assert server.post("/v1/chat/completions", chat(BOOK[:100]))["choices"][0]["message"]["content"] == text


# ---- load balancing


def readiness_follows_the_predicted_wait():
    with serving("-c", "64K", "--parallel", "1", "--queue", "1", "--max-wait", "0.001", "--busy-status", "503", "--server-name", "a1") as server:
        def readiness():
            status, headers, data = server.raw("GET", "/ready")
            assert headers["x-flatkv-server"] == "a1", headers
            return status, json.loads(data)["status"]
        def until(expected):
            end = time.monotonic() + 600
            while readiness() != expected:
                assert time.monotonic() < end, expected
                time.sleep(0.01)
        def stream():
            connection = server.connect()
            connection.request("POST", "/v1/chat/completions", json.dumps(chat(BOOK[:100], max_tokens=15000, stream=True)))
            return connection, connection.getresponse()
        until((200, "ready"))
        streams = [stream()]
        assert streams[0][1].status == 200 and streams[0][1].getheader("x-flatkv-server") == "a1"
        until((503, "busy"))
        assert server.raw("GET", "/live")[0] == 200 and server.raw("GET", "/health")[0] == 200
        while streams[-1][1].status == 200 and len(streams) < 4:  # at most one request waits
            streams.append(stream())
        rejected = streams[-1][1]
        assert rejected.status == 503 and int(rejected.getheader("Retry-After")) >= 1, [a.status for _, a in streams]
        for connection, _ in streams:
            if connection.sock is not None:
                connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()
        until((200, "ready"))


def draining_server_serves_until_its_time_is_up():
    with serving("-c", "8K", "--drain-seconds", "86400") as server:
        keep = server.connect()
        keep.request("GET", "/ready")
        assert keep.getresponse().read() == b'{"status":"ready"}\n'
        server.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + 600
        while server.raw("GET", "/ready")[0] == 200 and time.monotonic() < end:
            time.sleep(0.02)
        status, headers, data = server.raw("GET", "/ready")
        assert status == 503 and json.loads(data) == {"status": "draining"}, (status, data)
        assert server.raw("GET", "/health")[0] == 503 and server.raw("GET", "/live")[0] == 200
        keep.request("POST", "/v1/chat/completions", json.dumps(chat(BOOK[:100])))  # on a connection that was opened before the drain began
        answer = keep.getresponse()
        assert answer.status == 200 and answer.getheader("Connection") == "close", answer.getheaders()
        assert json.loads(answer.read())["usage"]["completion_tokens"] == 16
        assert server.post("/v1/chat/completions", chat(BOOK[:100]))["usage"]["completion_tokens"] == 16
        server.process.send_signal(signal.SIGTERM)  # a second signal stops the server immediately
        server.stop(again=False)
    with serving("-c", "8K", "--drain-seconds", "0.2") as server:
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            asks = [pool.submit(server.post, "/v1/chat/completions", chat(BOOK[i:i + 100], max_tokens=250)) for i in range(3)]
            server.until(lambda f: f["requests_total"] == 3, "not all requests are accepted")
            server.process.send_signal(signal.SIGTERM)
            assert all(a.result()["usage"]["completion_tokens"] == 250 for a in asks)
        server.stop(again=False)


def balancers_find_metrics_and_descriptions():
    with serving("-c", "8K", "--metrics-names", "vllm", "--alias", 'a"b\\c') as server:
        for path in ("/server_info", "/get_server_info"):
            status, _, data = server.raw("GET", path)
            info = json.loads(data)
            assert status == 200 and info["served_model_name"] == 'a"b\\c' and info["max_total_num_tokens"] == 8192, info
            assert info["page_size"] == 64 and info["status"] == "ready" and info["numerics"].startswith("cpu "), info
        info = json.loads(server.raw("GET", "/get_model_info")[2])
        assert info["is_generation"] is True and info["vocab_size"] == 256, info
        body = chat(BOOK[:300])
        for cached in (0, 256):
            status, headers, data = server.raw("POST", "/v1/chat/completions", body)
            assert json.loads(data)["usage"]["prompt_tokens_details"]["cached_tokens"] == int(headers["x-flatkv-cached-tokens"]), headers
            assert int(headers["x-flatkv-cached-tokens"]) >= cached and int(headers["x-flatkv-wait-ms"]) >= 0, headers
            assert "x-flatkv-server" not in headers, headers
        server.until(all_pages_released, "pages are held after all requests")
        text = server.raw("GET", "/metrics")[2].decode()
        label = 'model_name="a\\"b\\\\c"'
        for line in ("vllm:num_requests_waiting{%s} 0", "vllm:num_requests_running{%s} 0", 'vllm:cache_config_info{%s,block_size="64",num_gpu_blocks="',
                     'vllm:request_success_total{%s,finished_reason="length"} 2', "vllm:time_to_first_token_seconds_count{%s} 2",
                     'vllm:time_to_first_token_seconds_bucket{%s,le="+Inf"} 2'):
            assert "\n" + line % label in text, (line, text[-4000:])
        assert "\nflatkv:num_requests_waiting 0\n" in text
    with serving("-c", "8K") as server:
        assert b"vllm:" not in server.raw("GET", "/metrics")[2]


# ---- shutdown


def sigterm_finishes_running_requests():
    with serving("-c", "8K") as server:
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            asks = [pool.submit(server.post, "/v1/chat/completions", chat(BOOK[i:i + 100], max_tokens=250)) for i in range(3)]
            server.until(lambda f: f["requests_total"] == 3, "not all requests are accepted")
            server.process.send_signal(signal.SIGTERM)
            assert all(a.result()["usage"]["completion_tokens"] == 250 for a in asks)
        errors = server.stop(again=False)
        assert BOOK[:20] not in errors, errors


# All functions without parameters, except context managers.
TESTS = [value for name, value in list(globals().items())
         if callable(value) and getattr(value, "__module__", "") == "__main__" and name.islower() and value.__code__.co_argcount == 0
         and not hasattr(value, "__wrapped__")]


def run(tests):
    wanted = sys.argv[2:]
    unknown = set(wanted) - {test.__name__ for test in tests}
    assert not unknown, f"unknown tests: {unknown}"
    for test in tests:
        if not wanted or test.__name__ in wanted:
            start = time.monotonic()
            test()
            print(f"ok {test.__name__} {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    run(TESTS)
