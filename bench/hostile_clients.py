"""Hostile clients of a server, for `serve_load hostile`. They run in a separate process with one event loop.

usage: hostile_clients.py PORT KEY CLIENTS SECONDS

Each client repeats one behaviour until SECONDS have passed. Prints the number of attempts and the HTTP statuses of each behaviour as JSON.
"""

import asyncio
import collections
import json
import random
import sys
import time

HOST = "127.0.0.1"
STREAM = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "stream": True}


def chat(content):
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8}


def schema_bomb():
    """A schema whose alternatives multiply with every level of references."""
    levels = {"l0": {"type": "string"}}
    for i in range(1, 25):
        inner = {"$ref": f"#/$defs/l{i - 1}"}
        levels[f"l{i}"] = {"anyOf": [{"type": "object", "properties": {f"p{k}": inner, "q": inner}, "required": ["q"]} for k in range(4)]}
    return {**chat("x"), "response_format": {"type": "json_schema", "json_schema": {"name": "bomb", "schema": {"$ref": "#/$defs/l24", "$defs": levels}}}}


class Crowd:
    def __init__(self, port, key, seconds):
        self.port, self.key = port, key
        self.end = time.monotonic() + seconds
        self.counts = collections.defaultdict(collections.Counter)
        deep = b'{"a":' * 50000 + b"1" + b"}" * 50000
        self.large = {"blanks": self.request(chat(" " * 2000000)), "schema": self.request(schema_bomb()), "deep_json": self.head(len(deep)) + deep,
                      "many_messages": self.request({"messages": [{"role": "user", "content": ""}] * 20000, "max_tokens": 1})}

    def head(self, n_bytes, path="/v1/chat/completions"):
        return f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Bearer {self.key}\r\nContent-Length: {n_bytes}\r\nConnection: close\r\n\r\n".encode()

    def request(self, body, path="/v1/chat/completions"):
        data = json.dumps(body).encode()
        return self.head(len(data), path) + data

    async def connect(self):
        return await asyncio.open_connection(HOST, self.port)

    async def say(self, name, data, pause_s):
        """Sends a complete request and reads the reply."""
        reader, writer = await self.connect()
        writer.write(data)
        await writer.drain()
        line = await asyncio.wait_for(reader.readline(), 120)
        self.counts[name][line.split(b" ")[1].decode() if line.count(b" ") > 1 else "closed"] += 1
        writer.close()
        await asyncio.sleep(pause_s)

    async def drip(self, name, data, interval_s, at_once=0):
        """Sends the first `at_once` bytes at once and then one byte at a time, until the server closes the connection."""
        reader, writer = await self.connect()
        writer.write(data[:at_once])
        for at in range(at_once, len(data)):
            writer.write(data[at : at + 1])
            await writer.drain()
            await asyncio.sleep(interval_s)
            if reader.at_eof() or time.monotonic() > self.end:
                break
        self.counts[name]["dropped"] += 1
        writer.close()

    # ---- behaviours

    async def idle(self, rng):
        reader, writer = await self.connect()
        await asyncio.wait_for(reader.read(), max(1.0, self.end - time.monotonic()))
        self.counts["idle"]["closed"] += 1
        writer.close()

    async def slow_header(self, rng):
        await self.drip("slow_header", self.head(10), 0.5)

    async def slow_body(self, rng):
        data = self.request(chat("x" * 100))
        await self.drip("slow_body", data, 1.0, at_once=len(data) - 100)

    async def garbage(self, rng):
        await self.say("garbage", rng.randbytes(200) + b"\r\n\r\n", 1.0)

    async def smuggling(self, rng):
        await self.say("smuggling", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n", 1.0)

    async def blanks(self, rng):
        await self.say("blanks", self.large["blanks"], 20 + 20 * rng.random())

    async def many_messages(self, rng):
        await self.say("many_messages", self.large["many_messages"], 20 + 20 * rng.random())

    async def deep_json(self, rng):
        await self.say("deep_json", self.large["deep_json"], 5.0)

    async def schema(self, rng):
        await self.say("schema", self.large["schema"], 10 + 20 * rng.random())

    async def leaves(self, rng):
        reader, writer = await self.connect()
        writer.write(self.request(STREAM, "/v1/completions"))
        await writer.drain()
        await asyncio.sleep(rng.random())
        self.counts["leaves"]["left"] += 1
        writer.close()
        await asyncio.sleep(1 + 2 * rng.random())

    async def unread(self, rng):
        _, writer = await self.connect()
        writer.write(self.request(STREAM, "/v1/completions"))
        await writer.drain()
        await asyncio.sleep(30)
        self.counts["unread"]["left"] += 1
        writer.close()

    async def greedy(self, rng):
        await self.say("greedy", self.request({"prompt": "Once" * rng.randrange(1, 400), "max_tokens": 300, "ignore_eos": True}, "/v1/completions"), 1.0)

    async def wrong_key(self, rng):
        await self.say("wrong_key", self.request(chat("x")).replace(self.key.encode(), b"another-key"), 0.5)

    async def client(self, number):
        rng = random.Random(number)
        behaviour = BEHAVIOURS[number % len(BEHAVIOURS)]
        await asyncio.sleep(5 * rng.random())
        while time.monotonic() < self.end:
            try:
                await behaviour(self, rng)
            except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
                self.counts[behaviour.__name__]["broken"] += 1
                await asyncio.sleep(1)

    async def run(self, n_clients):
        tasks = [asyncio.create_task(self.client(i)) for i in range(n_clients)]
        await asyncio.sleep(max(0.0, self.end - time.monotonic()))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


BEHAVIOURS = (Crowd.idle, Crowd.slow_header, Crowd.slow_body, Crowd.garbage, Crowd.smuggling, Crowd.blanks, Crowd.many_messages, Crowd.deep_json, Crowd.schema,
              Crowd.leaves, Crowd.unread, Crowd.greedy, Crowd.wrong_key)


def main():
    crowd = Crowd(int(sys.argv[1]), sys.argv[2], float(sys.argv[4]))
    asyncio.run(crowd.run(int(sys.argv[3])))
    print(json.dumps(crowd.counts))


if __name__ == "__main__":
    main()
