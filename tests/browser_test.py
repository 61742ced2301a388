#!/usr/bin/env python3
"""Tests the web page of flatkv serve in Chromium, driven by Selenium.

usage: browser_test.py <flatkv> [test...]     requires a Python with selenium. Skips with a message if Chromium is not installed.
       browser_test.py <flatkv> --screenshots DIR MODEL     saves screenshots for docs/images, taken with a real model

Tests of errors, tool calls and hostile text use a scripted server, which forwards the page from flatkv and answers chat requests with responses defined by the test.
"""
import contextlib
import http.client
import http.server
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import time

from serve_test import ADMIN_KEY, BOOK, KEYS, STORIES, admin_key, chat, run, serving

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


# ---- browser


@contextlib.contextmanager
def browsing(width=1280, height=1000, mobile=False, dark=False):
    from selenium import webdriver
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    try:
        browser.set_script_timeout(600)
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile})
        if mobile:
            browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        yield browser
    finally:
        # Without the timer, quit() can wait 10 minutes for a driver that hangs on a busy machine.
        timer = threading.Timer(60, browser.service.process.kill)
        timer.start()
        browser.quit()
        timer.cancel()


def until(browser, script, what, seconds=600):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = browser.execute_script("return " + script)
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{what}: {browser.find_element('tag name', 'body').text}")


def find(browser, selector):
    return browser.find_element("css selector", selector)


def poll(check, what, seconds=600):
    """Waits until check() returns a true value, and returns the value."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = check()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(what)


def click(browser, selector, seconds=600):
    """Clicks an element. Tries again if the page replaces or covers the element in between."""
    from selenium.common import exceptions
    end = time.monotonic() + seconds
    while True:
        try:
            return find(browser, selector).click()
        except (exceptions.StaleElementReferenceException, exceptions.ElementClickInterceptedException,
                exceptions.NoSuchElementException, exceptions.ElementNotInteractableException):
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def texts(browser, selector):
    return browser.execute_script("return [...document.querySelectorAll(arguments[0])].map(node => node.textContent)", selector)


def open_page(browser, port, path=""):
    browser.get(f"http://127.0.0.1:{port}/{path}")
    until(browser, "document.getElementById('model').textContent", "the page does not connect")


def log_of(browser, own=()):
    """Returns the errors in the console, except for failed requests whose URL ends with a text in `own`."""
    return [entry["message"] for entry in browser.get_log("browser")
            if entry["level"] == "SEVERE" and not any(f"{end} - Failed to load resource" in entry["message"] for end in own)]


def assert_only_own_requests(browser, port):
    sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = {m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"}
    own = (f"http://127.0.0.1:{port}/", "data:", "chrome:", "about:", f"blob:http://127.0.0.1:{port}/")
    assert urls and all(url.startswith(own) for url in urls), urls


DONE = "document.querySelector('.turn.answer:last-of-type:not([aria-busy]) .turn-tools')"


def send(browser, text, wait=True):
    n = len(texts(browser, ".turn"))
    find(browser, "#message").send_keys(text)
    click(browser, "#send")
    until(browser, f"document.querySelectorAll('.turn').length >= {n + 2}", "the message is not shown")
    if wait:
        until(browser, DONE, "the answer does not end")


def tokens_of(browser, kind):
    return [int(text.replace(",", "")) for text in texts(browser, f".tokens-{kind} b")]


def set_setting(browser, name, value):
    click(browser, "#settings-button")
    field = find(browser, f"#set-{name}")
    field.clear()
    field.send_keys(str(value))
    click(browser, "#set-done")


# ---- scripted server


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def forward(self, method, body=None):
        link = http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=600)
        link.request(method, self.path, body, {"Host": f"127.0.0.1:{self.server.behind}"})
        answer = link.getresponse()
        data = answer.read()
        self.reply(answer.status, {name: value for name, value in answer.getheaders() if name not in ("Date", "Content-Length")}, data)
        link.close()

    def reply(self, status, headers, data):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": len(data)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.forward("GET")

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.path.endswith("/chat/completions"):
            self.forward("POST", body)
            return
        self.server.bodies.append(json.loads(body))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.server.answer(self, json.loads(body))

    def stream(self, *deltas, finish="stop", usage=(100, 64, 7), end=True):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        if end:
            events += [{"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]},
                       {"choices": [], "usage": {"prompt_tokens": usage[0], "prompt_tokens_details": {"cached_tokens": usage[1]}, "completion_tokens": usage[2]}}]
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()
        if end:
            self.wfile.write(b"data: [DONE]\n\n")

    def fail(self, status, message, **headers):
        self.reply(status, {"Content-Type": "application/json", **headers}, json.dumps({"error": {"message": message, "code": status}}).encode())


@contextlib.contextmanager
def scripted(answer):
    """A server whose chats are answered by answer(handler, body)."""
    with serving("-c", "2K") as behind:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        server.behind, server.answer, server.bodies, server.port = behind.port, answer, [], server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            server.server_close()


# ---- chat


def chat_streams_stops_and_counts_cached_tokens():
    with serving("-c", "8K") as server, browsing() as browser:
        open_page(browser, server.port)
        set_setting(browser, "max_tokens", 40)
        send(browser, BOOK[:200])
        assert tokens_of(browser, "generated") == [40] and tokens_of(browser, "cached") == [0] and tokens_of(browser, "computed") == [200]
        assert "first token in" in texts(browser, ".usage")[0]
        send(browser, "and then")
        cached, computed = tokens_of(browser, "cached")[1], tokens_of(browser, "computed")[1]
        assert cached >= 192 and cached + computed == 250, (cached, computed) # the second prompt starts with the first one
        assert "of 8,192 tokens" in find(browser, "#context").text, find(browser, "#context").text
        set_setting(browser, "max_tokens", 6000)
        send(browser, "and now a long answer", wait=False)
        until(browser, "document.querySelector('.turn.answer:last-of-type .body').textContent.length > 20", "no answer is streamed")
        click(browser, "#new-chat") # the answer continues while another conversation is open
        assert find(browser, "#send").is_displayed() and not texts(browser, ".turn")
        click(browser, ".open")
        n = len(until(browser, "document.querySelector('.turn.answer:last-of-type .body')?.textContent", "the running answer is not shown"))
        until(browser, f"document.querySelector('.turn.answer:last-of-type .body').textContent.length > {n + 20}", "the answer does not continue")
        assert find(browser, "#stop").is_displayed() and not find(browser, "#send").is_displayed()
        click(browser, "#stop")
        until(browser, DONE, "the answer does not stop")
        assert "stopped" in texts(browser, ".usage")[-1] and find(browser, "#send").is_displayed()
        server.until(lambda m: m["num_requests_running"] == 0, "the stopped request still runs")
        n = len(texts(browser, ".turn.answer .body")[-1])
        assert 20 < n < 6000, n
        assert_only_own_requests(browser, server.port)
        assert not log_of(browser), "the console contains errors or violations of the security policy"


def turns_can_be_edited_and_regenerated():
    with serving("-c", "8K") as server, browsing() as browser:
        open_page(browser, server.port)
        set_setting(browser, "max_tokens", 20)
        send(browser, BOOK[:150])
        send(browser, "second")
        first, second = texts(browser, ".turn.answer .body")
        click(browser, ".turn.answer [aria-label=Regenerate]") # regenerates the first answer, which starts a new branch
        until(browser, DONE + " && document.querySelectorAll('.turn').length == 2", "the answer is not regenerated")
        assert texts(browser, ".branches") == ["2 / 2"] and tokens_of(browser, "cached")[0] >= 128, texts(browser, ".usage")
        click(browser, "[aria-label='Previous version']")
        assert texts(browser, ".turn.answer .body") == [first, second], "the first branch has changed"
        click(browser, "[aria-label='Next version']")
        assert len(texts(browser, ".turn")) == 2
        click(browser, ".turn.user [aria-label=Edit]")
        find(browser, ".turn.user textarea").clear()
        find(browser, ".turn.user textarea").send_keys("another question")
        click(browser, ".turn.user .edit .end button:last-child")
        until(browser, DONE + " && document.querySelector('.turn.user .body').textContent == 'another question'", "the edited question is not sent")
        assert texts(browser, ".turn.user .branches") == ["2 / 2"]
        click(browser, ".turn.answer [aria-label=Edit]")
        find(browser, ".turn.answer textarea").clear()
        find(browser, ".turn.answer textarea").send_keys("**my** answer")
        click(browser, ".turn.answer .edit .end button:last-child")
        until(browser, "document.querySelector('.turn.answer .body strong')", "the edited answer is not shown")
        assert "edited by you" in texts(browser, ".usage")[0] and texts(browser, ".turn.answer .branches") == ["2 / 2"]
        browser.refresh()
        until(browser, "document.querySelector('.turn.answer .body strong')", "the branches are not stored")
        click(browser, ".turn.user [aria-label='Previous version']")
        click(browser, ".turn.answer [aria-label='Previous version']")
        assert texts(browser, ".turn.answer .body") == [first, second]
        assert not log_of(browser)


def incomplete_answers_are_continued_and_failed_ones_replaced():
    plan = []
    def answer(handler, body):
        kind = plan.pop(0)
        if kind == "fail":
            handler.fail(500, "out of order")
        else:
            handler.stream({"content": kind}, finish="length" if kind == "One, two" else "stop")

    def focused():
        return browser.execute_script("return document.activeElement.id || document.activeElement.getAttribute('aria-label')")

    with scripted(answer) as server, browsing() as browser:
        open_page(browser, server.port)
        plan[:] = ["One, two", ", three"]
        send(browser, "Count.")
        assert focused() == "message", focused()
        browser.find_element("xpath", "//button[text()='Continue']").click()
        until(browser, DONE + " && document.querySelector('.turn.answer .body').textContent.trim() === 'One, two, three'", "the answer is not continued")
        assert server.bodies[1]["messages"] == [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two"}], server.bodies
        assert texts(browser, ".branches") == ["2 / 2"] and focused() == "message" and not browser.find_elements("xpath", "//button[text()='Continue']")
        plan[:] = ["fail", "fine"]
        send(browser, "Again.")
        assert len(browser.find_elements("css selector", ".turn.answer:last-of-type .turn-tools button")) == 1, "an empty answer can only be regenerated"
        click(browser, ".turn.answer:last-of-type .error-box button")
        until(browser, DONE + " && document.querySelector('.turn.answer:last-of-type .body').textContent.trim() === 'fine'", "trying again does not work")
        assert texts(browser, ".branches") == ["2 / 2"] and not texts(browser, ".error-box"), "the failed answer is kept as a version"
        click(browser, ".turn.user [aria-label=Edit]")
        browser.switch_to.active_element.send_keys("\ue00c") # Escape
        assert focused() == "Edit", focused()


def conversations_are_listed_renamed_exported_and_deleted():
    def answer(handler, body):
        handler.stream({"content": f"Answer to {body['messages'][-1]['content']}"})

    def choose(action):
        click(browser, "#conversations li.current .icon")
        browser.execute_script("[...document.querySelectorAll('.menu:popover-open button')].find(b => b.textContent === arguments[0]).click()", action)

    with scripted(answer) as server, browsing() as browser, tempfile.TemporaryDirectory() as folder:
        browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": folder})
        open_page(browser, server.port)
        click(browser, "#settings-button")
        find(browser, "#set-system").send_keys("Be brief.")
        find(browser, "#set-temperature").send_keys("0.25")
        click(browser, "#set-done")
        send(browser, "first question")
        assert server.bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."} and server.bodies[0]["temperature"] == 0.25, server.bodies
        click(browser, "#new-chat")
        send(browser, "second question")
        assert server.bodies[1]["messages"] == [{"role": "user", "content": "second question"}] and "temperature" not in server.bodies[1]
        assert texts(browser, ".open") == ["second question", "first question"], texts(browser, ".open")
        click(browser, "#conversations li.current .icon")
        browser.execute_async_script("import('/page/store.js').then(async store => { const c = await store.loadConversation((await store.listConversations())[0].id); "
                                     "new BroadcastChannel('flatkv').postMessage('another'); setTimeout(arguments[0], 100, c); })")
        assert browser.find_elements("css selector", ".menu:popover-open"), "an unchanged list is drawn again, which closes its menu"
        browser.switch_to.active_element.send_keys("\ue00c") # Escape
        choose("Rename")
        find(browser, ".rename input").send_keys("\ue00c")
        until(browser, "document.querySelectorAll('.open').length === 2", "Escape does not restore the title")
        choose("Rename")
        find(browser, ".rename input").send_keys("My title <b>\n") # replaces the selected title
        until(browser, "document.querySelector('.open').textContent === 'My title <b>'", "the title does not change")
        choose("Export as Markdown")
        choose("Export as JSON")
        paths = [os.path.join(folder, "My-title-b." + end) for end in ("md", "json")]
        poll(lambda: all(map(os.path.exists, paths)), "the conversation is not exported")
        with open(paths[0], encoding="utf-8") as file:
            assert file.read() == "# My title <b>\n\n## You\n\nsecond question\n\n## Assistant\n\nAnswer to second question\n"
        choose("Delete")
        until(browser, "document.querySelectorAll('.open').length === 1 && document.querySelectorAll('.turn').length === 0", "the conversation is not deleted")
        click(browser, "#toast button")
        until(browser, "document.querySelectorAll('.open').length === 2", "the deletion is not undone")
        find(browser, "#import-file").send_keys(paths[1])
        until(browser, "document.querySelectorAll('.open').length === 3 && document.querySelectorAll('.turn').length === 2", "the export cannot be imported")
        for text in ("{", "[]", '{"version": 1, "turns": [{"role": "user", "parent": 0}]}', '{"version": 1, "turns": [null]}', '{"version": 1, "turns": 7}'):
            with open(os.path.join(folder, "bad.json"), "w", encoding="utf-8") as file:
                file.write(text)
            browser.execute_script("document.getElementById('toast').hidden = true")
            find(browser, "#import-file").send_keys(os.path.join(folder, "bad.json"))
            until(browser, "!document.getElementById('toast').hidden", "an invalid file is not reported")
            assert "bad.json cannot be imported" in find(browser, "#toast").text
        assert len(texts(browser, ".open")) == 3 and not find(browser, "#filter").is_displayed()
        browser.execute_async_script("""
            const done = arguments[0];
            Promise.all([import("/page/store.js"), import("/page/tree.js")]).then(async ([store, tree]) => {
              for (let i = 0; i < 9; i++) await store.saveConversation({...tree.newConversation(), title: "Topic " + i, updated: 1});
              done();
            });""")
        browser.refresh()
        until(browser, "document.querySelectorAll('.open').length === 12", "a long list is not shown")
        find(browser, "#filter").send_keys("topic 7")
        until(browser, "document.querySelectorAll('.open').length === 1", "the list is not filtered")
        find(browser, "#filter").send_keys("\ue003" * 7) # Backspace
        until(browser, "document.querySelectorAll('.open').length === 12", "the filter is not removed")
        browser.execute_async_script("import('/page/store.js').then(async store => { for (const row of await store.listConversations()) "
                                     "if (row.title.startsWith('Topic')) await store.deleteConversation(row.id); arguments[0](); })")
        browser.refresh()
        until(browser, "document.querySelectorAll('.turn').length === 2 && document.querySelectorAll('.open').length === 3", "the conversations are lost")
        assert not log_of(browser)


def documents_are_counted_and_sent_before_the_question():
    with scripted(lambda handler, body: handler.stream({"content": "ok"})) as server, browsing() as browser, tempfile.TemporaryDirectory() as folder:
        open_page(browser, server.port)
        files = {"notes.txt": b"a" * 300, "binary.dat": b"\xff\xfe\x00", "nul.txt": b"a\0b", "big.txt": b"x" * 4_300_000}
        for name, data in files.items():
            with open(os.path.join(folder, name), "wb") as file:
                file.write(data)
        find(browser, "#attach-files").send_keys(os.path.join(folder, "notes.txt"))
        until(browser, "document.getElementById('documents').textContent.includes('300 tokens')", "the tokens are not counted")
        for name, words in (("binary.dat", "not a text file"), ("nul.txt", "not a text file"), ("big.txt", "too large")):
            find(browser, "#attach-files").send_keys(os.path.join(folder, name))
            until(browser, f"document.getElementById('toast').textContent.includes('{name}')", "a bad document is not reported")
            assert words in find(browser, "#toast").text
        assert len(texts(browser, "#documents li")) == 1 and "300 of 2,048 tokens" in find(browser, "#context").text
        send(browser, "What is it?")
        assert server.bodies[0]["messages"] == [{"role": "user", "content": f'Document "notes.txt":\n{"a" * 300}\n\nWhat is it?'}]
        assert "notes.txt" in texts(browser, ".turn.user .files")[0] and not texts(browser, "#documents li")
        dropped = """const data = new DataTransfer(); data.items.add(new File(["dropped text"], "dropped.md"));
            for (const type of ["dragover", "drop"]) window.dispatchEvent(new DragEvent(type, {dataTransfer: data, cancelable: true, bubbles: true}));"""
        browser.execute_script(dropped)
        until(browser, "document.getElementById('documents').textContent.includes('12 tokens')", "a dropped document is not attached")
        click(browser, "[aria-label='Remove dropped.md']")
        assert not texts(browser, "#documents li") and not log_of(browser)


def reasoning_is_folded_and_tool_calls_are_answered():
    def answer(handler, body):
        if body["messages"][-1]["role"] == "tool":
            handler.stream({"content": "It is 21 degrees."})
            return
        handler.stream({"reasoning_content": "I should "}, {"reasoning_content": "ask <b>the</b> tool."}, {"content": "One moment."},
                       {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}]},
                       {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]}, {"tool_calls": [{"index": 0, "function": {"arguments": '"Bonn"}'}}]},
                       finish="tool_calls")

    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    with scripted(answer) as server, browsing() as browser:
        open_page(browser, server.port)
        click(browser, "#settings-button")
        click(browser, "#settings summary")
        find(browser, "#set-tools").send_keys("[1]")
        click(browser, "#set-done")
        assert "expected a JSON array" in find(browser, "#set-error").text and find(browser, "#settings").is_displayed()
        find(browser, "#set-tools").clear()
        find(browser, "#set-tools").send_keys(json.dumps([tool]))
        click(browser, "#set-done")
        send(browser, "How warm is it in Bonn?")
        assert server.bodies[0]["tools"] == [tool]
        assert browser.execute_script("return !document.querySelector('.reasoning').open") and texts(browser, ".reasoning-text") == ["I should ask <b>the</b> tool."]
        assert texts(browser, ".tool summary") == ["Tool call: weather"] and json.loads(texts(browser, ".tool pre")[0]) == {"city": "Bonn"}
        find(browser, "[aria-label='Result of weather']").send_keys("21")
        click(browser, ".turn.answer .edit button")
        until(browser, DONE + " && document.querySelectorAll('.turn').length === 4", "the results are not sent")
        roles = [message["role"] for message in server.bodies[1]["messages"]]
        assert roles == ["user", "assistant", "tool"] and server.bodies[1]["messages"][2] == {"role": "tool", "tool_call_id": "call_1", "content": "21"}
        assert server.bodies[1]["messages"][1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Bonn"}'}
        assert texts(browser, ".turn.answer .body")[-1].strip() == "It is 21 degrees." and not log_of(browser)


def errors_are_explained():
    plan = []

    def answer(handler, body):
        kind = plan.pop(0)
        if kind == "busy":
            handler.fail(429, "the queue is full", **{"Retry-After": "2"})
        elif kind == "very busy":
            handler.fail(429, "the queue is full", **{"Retry-After": "900"})
        elif kind == "long":
            handler.fail(400, "the prompt has 9000 tokens, but a request is limited to 2048 tokens")
        elif kind == "large":
            handler.fail(413, "the request body is too large")
        elif kind == "lost":
            handler.stream({"content": "half an "}, end=False)
        elif kind == "gone":
            plan.insert(0, kind) # the browser repeats a request whose connection was closed
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)
        else:
            handler.stream({"content": "fine"})

    def explained(*words):
        until(browser, "document.querySelector('.turn.answer:last-of-type .error-box')", "no error is shown")
        text = texts(browser, ".turn.answer:last-of-type .error-box")[0]
        assert all(word in text for word in words), text

    with scripted(answer) as server, browsing() as browser:
        open_page(browser, server.port)
        plan[:] = ["busy", "ok"]
        send(browser, "hello", wait=False)
        until(browser, "document.querySelector('.wait')?.textContent.includes('The server is busy. Trying again in')", "the wait is not explained")
        until(browser, DONE, "a rejected request is not repeated")
        assert texts(browser, ".turn.answer .body")[0].strip() == "fine" and server.bodies[0] == server.bodies[1] and not texts(browser, ".error-box")
        for kind, words in (("very busy", ("The queue is full.", "900 s")), ("long", ("2048 tokens", "Remove a document")), ("large", ("too large", "8 MiB")),
                            ("gone", ("cannot be reached", "flatkv serve is running")), ("lost", ("connection", "before the answer was complete", "regenerate"))):
            plan[:] = [kind]
            send(browser, kind, wait=False)
            explained(*words)
            if kind == "lost":
                assert "half an" in texts(browser, ".turn.answer .body")[-1], "the received text is not kept"
            if kind == "large": # a question without an answer is not part of later prompts
                plan[:] = ["ok"]
                send(browser, "next")
                assert "large" not in [message["content"] for message in server.bodies[-1]["messages"]] and server.bodies[-1]["messages"][-1]["content"] == "next"
                continue
            plan[:] = ["ok"]
            click(browser, ".turn.answer:last-of-type .error-box button")
            until(browser, DONE + " && document.querySelector('.turn.answer:last-of-type .body').textContent.trim() === 'fine'", "trying again does not work")
    with serving("-c", "2K") as server, browsing() as browser: # error messages of the real server
        open_page(browser, server.port)
        find(browser, "#message").send_keys("x" * 10)
        browser.execute_script("document.getElementById('message').value = 'x'.repeat(5000)")
        click(browser, "#send")
        explained("2048", "-c")


# ---- hostile text

HOSTILE = [
    "<script>window.pwned = 1</script>", "<img src=x onerror='window.pwned = 1'>", "<svg onload='window.pwned = 1'><script>window.pwned = 1</script></svg>",
    "[click](javascript:window.pwned=1)", "[click](JaVaScRiPt&colon;window.pwned=1)", "[click](  javascript:window.pwned=1)", "[click](data:text/html,<script>window.pwned=1</script>)",
    "[click](vbscript:window.pwned=1)", "<a href='java\tscript:window.pwned=1'>x</a>", "![x](javascript:window.pwned=1)", "![x](https://evil.example/pixel.png)",
    "![x\" onerror=\"window.pwned=1](x)", "<iframe srcdoc='<script>parent.pwned=1</script>'></iframe>", "<style>body { display: none }</style>", "<base href='https://evil.example/'>",
    "<form action='https://evil.example/'><input name=password type=password></form>", "<meta http-equiv=refresh content='0;url=https://evil.example/'>",
    "<link rel=stylesheet href='https://evil.example/x.css'>", "<object data='javascript:window.pwned=1'></object>", "<embed src='javascript:window.pwned=1'>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror=window.pwned=1&gt;'>", "<noscript><p title='</noscript><img src=x onerror=window.pwned=1>'></noscript>",
    "<details open ontoggle='window.pwned = 1'>x</details>", "<video><source onerror='window.pwned=1'></video>", "<body onload='window.pwned=1'>", "<b id=thread name=message>x</b>",
    "```\"><img src=x onerror=window.pwned=1>\ncode\n```", "```js onload=window.pwned=1\n</code></pre><img src=x onerror=window.pwned=1>\n```", "`<img src=x onerror=window.pwned=1>`",
    "<br onclick='window.pwned=1'>", "<sub onmouseover=window.pwned=1>x</sub>", "| a |\n|---|\n| <img src=x onerror=window.pwned=1> |", "[x]: javascript:window.pwned=1\n\n[x]",
    "<https://example.org/\"onmouseover=window.pwned=1>", "<p style='position:fixed;inset:0'>cover</p>", "<div class='error-box'>spoof</div>", "<img srcset='https://evil.example/x 1x'>",
    "<template><script>window.pwned=1</script></template>", "<a href='https://example.org' style='x' target=_self onclick='window.pwned=1'>x</a>", "<xss contenteditable autofocus onfocus=window.pwned=1>",
    "<svg><use href='data:image/svg+xml,<svg onload=window.pwned=1>'/></svg>", "<![CDATA[<script>window.pwned=1</script>]]>", "<!-- --!><script>window.pwned=1</script> -->",
]

# Lists everything in an element that is not on the allow-list of markdown.js.
VIOLATIONS = """
    const tags = new Set(("A BLOCKQUOTE BR CODE DEL EM H1 H2 H3 H4 H5 H6 HR KBD LI OL P PRE STRONG SUB SUP TABLE TBODY TD TH THEAD TR UL").split(" ")), found = [];
    for (const node of arguments[0].querySelectorAll("*")) {
      if (node.closest(".code-head") || node.matches(".code, .table")) continue; // added by the page
      if (!tags.has(node.tagName.toUpperCase())) found.push(node.outerHTML);
      for (const {name, value} of node.attributes) {
        const good = {href: /^(https?:\\/\\/|mailto:)/i, title: /./, target: /^_blank$/, rel: /noopener/, class: /^(language-[\\w+#.-]+|plain-text)$/, align: /./, start: /./, tabindex: /^0$/}[name];
        if (!good || !good.test(value)) found.push(name + "=" + value);
      }
    }
    return found;"""


def hostile_markdown_is_sanitized():
    with scripted(lambda handler, body: handler.stream(*({"content": part} for part in body["messages"][-1]["content"]), {"reasoning_content": body["messages"][-1]["content"]})) as server, \
            browsing() as browser:
        open_page(browser, server.port)
        for text in HOSTILE + ["\n\n".join(HOSTILE)]: # the scripted server repeats the question, one character per event
            click(browser, "#new-chat")
            browser.execute_script("document.getElementById('message').value = arguments[0]", text)
            click(browser, "#send")
            until(browser, DONE, "the answer does not end")
            body = find(browser, ".turn.answer .body")
            violations = browser.execute_script(VIOLATIONS, body)
            assert not violations, (text, violations)
            for link in body.find_elements("css selector", "a[href^='http'], a:not([href])"):
                assert "example.org" in (link.get_attribute("href") or "example.org") or "evil.example" in link.get_attribute("href"), text
        browser.refresh() # stored conversations are rendered again
        until(browser, "document.querySelector('.turn.answer .turn-tools')", "the conversation is not shown")
        assert not browser.execute_script(VIOLATIONS, find(browser, ".turn.answer .body"))
        # tests DOMPurify alone, without the escaping of raw HTML
        browser.execute_async_script("""
            const [corpus, done] = arguments, box = document.createElement("div");
            box.id = "pure";
            import("/page/markdown.js").then(({sanitize}) => {
              for (const text of corpus) box.append(sanitize(text));
              document.body.append(box);
              setTimeout(done, 300);
            });""", HOSTILE)
        violations = browser.execute_script(VIOLATIONS, find(browser, "#pure"))
        assert not violations and "cover" in texts(browser, "#pure")[0], violations
        assert browser.execute_script("return window.pwned") is None
        assert_only_own_requests(browser, server.port)


def security_policy_blocks_inline_code():
    with serving("-c", "2K") as server, browsing() as browser:
        open_page(browser, server.port)
        assert not log_of(browser), "the page violates its own policy"
        attempts = ["document.body.innerHTML += '<b>x</b>'", "new DOMParser().parseFromString('<b>', 'text/html')", "setTimeout('1')", "document.createElement('script').text = '1'",
                    "trustedTypes.createPolicy('other', {})"]
        for code in attempts:
            blocked = browser.execute_script(f"try {{ {code}; return false; }} catch (error) {{ return true; }}")
            assert blocked, code
        result = browser.execute_async_script("""
            const done = arguments[0], seen = [];
            document.addEventListener("securitypolicyviolation", event => seen.push(event.effectiveDirective));
            const image = document.createElement("img"), style = document.createElement("style"), node = document.createElement("p");
            image.src = "https://evil.example/x.png"; style.textContent = "body { opacity: 0.5 }"; node.setAttribute("style", "opacity: 0.5");
            document.body.append(image, style, node);
            fetch("https://evil.example/").catch(() => 0).then(() => setTimeout(() => done([seen.sort(), getComputedStyle(document.body).opacity, getComputedStyle(node).opacity]), 200));""")
        assert set(result[0]) >= {"img-src", "style-src-elem", "style-src-attr", "connect-src"} and result[1:] == ["1", "1"], result


MARKDOWN = """# Title

A paragraph with **bold**, `code`, a [link](https://example.org/) and
a second line.

1. one

2. two
   - nested
     ```c
     int x;
     ```

- [ ] task
- [x] done

| a | b |
|---|--:|
| 1 | 2 |

```python
def f(x):
    return "```" + x

```
~~~
tildes
~~~
> quote
continued

    indented code

Setext
------
Text <b>with</b> html<br>and ~~del~~ * * *

[ref]: https://example.org/ref

See [ref].
"""


def streamed_markdown_equals_complete_markdown_at_linear_cost():
    with serving("-c", "2K") as server, browsing() as browser:
        open_page(browser, server.port)
        whole, streams = browser.execute_async_script("""
            const [text, done] = arguments;
            import("/page/markdown.js").then(({MarkdownStream, renderMarkdown}) => {
              const html = fill => { const box = document.createElement("div"); fill(box); box.normalize(); return box.innerHTML.replace(/\\s+</g, "<"); };
              const streamed = size => html(box => {
                const stream = new MarkdownStream(box);
                for (let i = 0; i < text.length; i += size) { stream.append(text.slice(i, i + size)); stream.draw(); }
              });
              done([html(box => renderMarkdown(box, text)), [1, 2, 3, 7, 50].map(streamed)]);
            }).catch(error => done([String(error), []]));""", MARKDOWN)
        for part in ("<h1>", "<strong>", "<ol>", "<table>", 'align="right"', "language-c", "tildes", "<blockquote>", "<del>", "☑ done", "&lt;b&gt;with", "https://example.org/ref"):
            assert part in whole, (part, whole)
        assert len(streams) == 5
        for stream in streams:
            assert stream == whole, (stream, whole)
        headings, plain = browser.execute_async_script("""
            const done = arguments[0];
            Promise.all([import("/page/markdown.js"), import("/page/vendor/marked.esm.js")]).then(([{renderMarkdown}, {Lexer}]) => {
              const lex = Lexer.prototype.lex, box = document.createElement("div");
              Lexer.prototype.lex = function (text) { const end = performance.now() + 260; while (performance.now() < end); return lex.call(this, text); };
              renderMarkdown(box, "## Title\\n\\nSome words.\\n\\n".repeat(400));
              Lexer.prototype.lex = lex;
              done([box.querySelectorAll("h2").length, box.querySelectorAll(".plain-text").length]);
            });""")
        assert (headings, plain) == (400, 0), "Markdown is shown as plain text if the machine is slow"
        kinds = {"paragraphs": "Some words of an answer, `code` and **bold**.\\n\\n", "code": "```\\n" + "    x = f(x)  # comment\\n" * 40, "one line": "word and word ", "marks": "!", "quotes": "> ",
                 "list": "- item of a long list\\n"}
        for kind, pattern in kinds.items(): # the number of parsed characters must not grow with the square of the length
            small, large, shown, size = browser.execute_async_script("""
                const [pattern, done] = arguments;
                Promise.all([import("/page/markdown.js"), import("/page/vendor/marked.esm.js")]).then(([{MarkdownStream}, {Lexer}]) => {
                  const lex = Lexer.prototype.lex; let parsed = 0;
                  Lexer.prototype.lex = function (text) { parsed += text.length; return lex.call(this, text); };
                  const cost = size => {
                    const box = document.createElement("div"), stream = new MarkdownStream(box), text = pattern.repeat(size / pattern.length + 1).slice(0, size);
                    parsed = 0;
                    for (let i = 0; i < size; i += 1024) { stream.append(text.slice(i, i + 1024)); stream.draw(); }
                    return [parsed, box.textContent.length];
                  };
                  const [small] = cost(40960), [large, shown] = cost(163840);
                  Lexer.prototype.lex = lex;
                  done([small, large, shown, 163840]);
                }).catch(error => done([0, String(error), 0, 0]));""", json.loads(f'"{pattern}"'))
            assert large <= 5 * small + 65536 and shown > 0.4 * size, (kind, small, large, shown, size)


# ---- memory view


def cells(browser):
    return browser.execute_script("const n = {}; for (const i of document.querySelectorAll('#map i')) { const k = i.className.split(' ')[0]; n[k] = (n[k] || 0) + 1; } return n")


def has_ink(browser, canvas):
    """Returns true if a line was drawn, which adds colours to those of the grid."""
    return browser.execute_script("""
        const c = document.getElementById(arguments[0]), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, seen = new Set();
        for (let i = 0; i < d.length; i += 4) if (d[i + 3] > 200) seen.add(d[i] >> 5 << 10 | d[i + 1] >> 5 << 5 | d[i + 2] >> 5);
        return seen.size > 3""", canvas)


def bytes_of(text):
    """Sums the sizes in a text such as "program 12 MB, cache 1.5 GB"."""
    units = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
    words = text.replace(",", " ").split()
    return sum(float(number) * units[unit] for number, unit in zip(words, words[1:]) if unit in units)


def memory_view_draws_and_its_sums_are_true():
    with serving("-c", "8K") as server, browsing() as browser:
        open_page(browser, server.port)
        click(browser, "#tab-memory")
        assert find(browser, "#memory").is_displayed() and not find(browser, "#chat").is_displayed()
        server.post("/v1/chat/completions", chat(BOOK[:300], max_tokens=200))
        until(browser, "document.getElementById('totals').textContent.includes('200')", "the tokens are not counted")
        until(browser, "document.querySelectorAll('#map .cached').length > 0", "no prefix is cached")
        poll(lambda: has_ink(browser, "memory-plot") and has_ink(browser, "rate-plot"), "the plots are empty")
        state = json.loads(server.raw("GET", "/flatkv/state")[2])
        for name, total in (("reserved", state["planned_bytes"]), ("resident", state["resident_bytes"])):
            parts = texts(browser, f"#{name}-key span")
            shown, whole = sum(map(bytes_of, parts)), bytes_of(texts(browser, f"#{name}-text")[0])
            assert len(parts) >= 3 and abs(shown - whole) < 0.03 * whole and abs(whole - total) < 0.1 * total, (name, parts, whole, total)
        assert "fixed" in texts(browser, "#reserved-text")[0]
        assert_only_own_requests(browser, server.port)
        assert not log_of(browser)
        browser.refresh() # the URL contains the open tab
        until(browser, "!document.getElementById('memory').hidden && document.getElementById('about').textContent", "the tab is not kept")
        find(browser, "#tab-memory").send_keys("\ue012") # arrow key
        assert find(browser, "#chat").is_displayed()


def several_models_can_be_chosen():
    with serving("-c", "512", "-m", STORIES, "--alias", "needle", "--alias", "tales") as server, browsing() as browser:
        browser.get(f"http://127.0.0.1:{server.port}/")
        until(browser, "document.querySelectorAll('#models option').length === 2", "the models are not listed")
        set_setting(browser, "max_tokens", 4)
        for name, answers in (("needle", {"needle": 1, "tales": 0}), ("tales", {"needle": 1, "tales": 1})):
            browser.execute_script("const s = document.getElementById('models'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))", name)
            send(browser, "Once upon a time")
            metrics = server.until(lambda m: m['num_requests_running{model_name="tales"}'] == 0, "the answer does not end")
            assert {key: metrics[f'requests_total{{model_name="{key}"}}'] for key in answers} == answers, (name, metrics)
            assert texts(browser, ".usage .model")[-1] == name
        click(browser, "#tab-memory")
        until(browser, "document.getElementById('about').textContent.startsWith('tales')", "the memory view shows another model")
        browser.refresh()
        until(browser, "document.getElementById('models').value === 'tales'", "the chosen model is not remembered")
        assert_only_own_requests(browser, server.port)
        assert not log_of(browser)


def memory_view_shows_page_states_live():
    with admin_key() as option, serving("-c", "4K", "--parallel", "4", "--api-key", KEYS[0], "--api-key", KEYS[1], *option) as server, browsing() as browser:
        first, second = ({"Authorization": "Bearer " + key} for key in KEYS)
        browser.get(f"http://127.0.0.1:{server.port}/")
        until(browser, "document.getElementById('key-dialog').open", "no key is requested")  # by then, the page has opened its database
        browser.execute_script("sessionStorage.setItem('flatkv-key', arguments[0])", ADMIN_KEY)
        browser.get("about:blank")
        open_page(browser, server.port, "#memory")
        n_pages = until(browser, "document.querySelectorAll('#map i').length", "there is no page map")
        assert cells(browser) == {"free": n_pages} and n_pages >= 64, cells(browser)
        is_seen = threading.Event()

        def ask(text, max_tokens, headers):  # repeats until the web page, which may be slow, has shown the cache pages of a running request
            while not is_seen.is_set():
                server.post("/v1/chat/completions", chat(text, max_tokens=max_tokens), headers)

        asks = [threading.Thread(target=ask, args=(BOOK[:400], 2500, first)), threading.Thread(target=ask, args=(BOOK[700:1100], 500, second))]
        for thread in asks:
            thread.start()
        try:
            until(browser, "document.querySelectorAll('#map .promised').length > 0 && document.querySelectorAll('#map .private').length > 0", "the map does not show reserved and used pages")
            until(browser, "document.getElementById('map').classList.contains('tenants')", "pages are not coloured by tenant")
            until(browser, "new Set([...document.querySelectorAll('#map .private, #map .pinned, #map .cached')].map(i => i.style.getPropertyValue('--own'))).size == 2", "the pages of two API keys do not have two colours")
        finally:
            is_seen.set()
            for thread in asks:
                thread.join()
        until(browser, "document.querySelectorAll('#map .cached').length > 0 && document.querySelectorAll('#map .private').length == 0", "prefixes are not cached")
        server.post("/v1/chat/completions", chat(BOOK[2000:5500], max_tokens=100), first)
        until(browser, "document.querySelectorAll('#map .evicted').length > 0", "evicted pages are not shown")
        click(browser, "#by")
        until(browser, "!document.getElementById('map').classList.contains('tenants')", "colours do not switch to page states")


# ---- keys, screens, colours, accessibility


def api_keys_are_requested():
    with admin_key() as option, serving("-c", "8K", "--api-key", KEYS[0], *option) as server, browsing() as browser:
        browser.get(f"http://127.0.0.1:{server.port}/")
        for key, words in (("wrong", "requires an API key"), (KEYS[0], "did not accept")):
            until(browser, f"document.getElementById('key-dialog').open && document.getElementById('key-text').textContent.includes('{words}')", "no key is requested")
            find(browser, "#key").clear()
            find(browser, "#key").send_keys(key)
            click(browser, "#key-form button[value=use]")
        until(browser, "document.getElementById('model').textContent", "the key is not used")
        set_setting(browser, "max_tokens", 8)
        send(browser, "hello")
        assert tokens_of(browser, "generated") == [8]
        assert browser.execute_script("return localStorage.getItem('flatkv-key')") is None, "the key is stored although the user did not ask for it"
        click(browser, "#tab-memory")
        until(browser, "!document.getElementById('admin-form').hidden", "no admin key is requested")
        for key, works in (("wrong", False), (ADMIN_KEY, True)):
            find(browser, "#admin-key").clear()
            find(browser, "#admin-key").send_keys(key)
            click(browser, "#admin-form button")
            until(browser, "document.getElementById('about').textContent" if works else "document.getElementById('admin-error').textContent", "the admin key has no effect")
        assert log_of(browser, ("/v1/models", "/flatkv/state")) == []


WIDE = "# Heading\n\n" + "Wide" * 60 + "\n\n```c\nint " + "a" * 300 + ";\n```\n\n|" + "column|" * 12 + "\n|" + "---|" * 12 + "\n|" + "value|" * 12 + "\n"


def page_fits_phones_and_follows_the_colour_scheme():
    with scripted(lambda handler, body: handler.stream({"reasoning_content": "w" * 200}, {"content": WIDE})) as server:
        for name, settings in (("phone", {"width": 320, "height": 640, "mobile": True}), ("dark", {"dark": True}), ("light", {})):
            with browsing(**settings) as browser:
                fits = "return ['html', 'body', '#thread', '#memory'].every(name => document.querySelector(name).scrollWidth <= window.innerWidth)"
                open_page(browser, server.port)
                assert browser.execute_script(fits), "the empty page is wider than " + name
                send(browser, "a" * 100)
                assert browser.execute_script(fits), "the conversation is wider than " + name
                for node in browser.find_elements("css selector", ".turn-tools button, #send, #attach"):
                    box = node.rect
                    assert box["width"] >= 24 and box["height"] >= 24 and 0 <= box["x"] and box["x"] + box["width"] <= settings.get("width", 1280), (name, box)
                if name == "phone":
                    assert not find(browser, "#sidebar").is_displayed()
                    click(browser, "#menu")
                    until(browser, "document.getElementById('sidebar').getBoundingClientRect().left === 0", "the drawer does not open")
                    assert texts(browser, ".open") == ["a" * 59 + "…"]
                    click(browser, ".open")
                    until(browser, "getComputedStyle(document.getElementById('sidebar')).visibility === 'hidden'", "the drawer does not close")
                    click(browser, "#settings-button")
                    assert browser.execute_script(fits), "the settings are wider than " + name
                    click(browser, "#set-done")
                click(browser, "#tab-memory")
                until(browser, "document.getElementById('about').textContent", "the memory view is empty")
                assert browser.execute_script(fits), "the memory view is wider than " + name
                background = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
                back = browser.execute_script("return " + background)
                assert (max(back) < 80) == (name == "dark"), (name, back)
                other = "light" if name == "dark" else "dark"
                while other not in find(browser, "#theme").get_attribute("aria-label"):
                    click(browser, "#theme")
                browser.refresh()
                back = until(browser, background, "no background")
                assert (max(back) < 80) == (other == "dark"), ("the chosen colours are not kept", back)


# Lists text with a contrast ratio below 4.5, which is the limit of WCAG 2 AA.
CONTRAST = """
    const channel = c => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
    const parse = color => { const m = color.match(/[\\d.]+/g).map(Number); return {rgb: m.slice(0, 3), a: m[3] ?? 1}; };
    const light = rgb => 0.2126 * channel(rgb[0]) + 0.7152 * channel(rgb[1]) + 0.0722 * channel(rgb[2]);
    const found = [];
    for (const node of document.querySelectorAll("body *")) {
      const own = [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim());
      if (!own || !node.checkVisibility({visibilityProperty: true}) || node.closest(".unseen, .skip") || node.disabled) continue;
      let back = node; while (back && parse(getComputedStyle(back).backgroundColor).a < 1) back = back.parentElement;
      const a = light(parse(getComputedStyle(node).color).rgb), b = light(parse(getComputedStyle(back ?? document.body).backgroundColor).rgb);
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      if (ratio < 4.5) found.push([ratio.toFixed(2), node.className, node.textContent.slice(0, 30)]);
    }
    return found;"""


def page_is_accessible():
    answers = iter([{"content": "Some `code`, a [link](https://example.org/)\n\n```c\nx\n```\n\n| a |\n|---|\n| b |", "reasoning_content": "hm"}] * 9)
    for dark in (False, True):
        with scripted(lambda handler, body: handler.stream(next(answers))) as server, browsing(dark=dark) as browser:
            open_page(browser, server.port)
            send(browser, "hello")
            for tab in ("#tab-chat", "#tab-memory"):
                click(browser, tab)
                def shown_nodes():
                    tree = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
                    nodes = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if not node.get("ignored")]
                    return nodes if len(nodes) > 30 else None
                nodes = poll(shown_nodes, "the page has too few accessible nodes")
                nameless = [node for node in nodes if node[0] in ("button", "textbox", "tab", "combobox", "menuitem", "dialog", "tabpanel", "navigation", "image", "checkbox", "spinbutton") and not node[1]]
                assert not nameless, nameless
                contrast = browser.execute_script(CONTRAST)
                assert not contrast, (dark, tab, contrast)
            click(browser, "#tab-chat")
            ids = browser.execute_script("return [...document.querySelectorAll('[id]')].map(node => node.id)")
            assert len(ids) == len(set(ids)), "duplicate ids"
            from selenium.webdriver import ActionChains, Keys
            browser.execute_script("document.getElementById('message').focus()")
            ActionChains(browser).send_keys("by keyboard").key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT).send_keys("second line", Keys.ENTER).perform()
            until(browser, "document.querySelectorAll('.turn').length === 4", "Enter does not send")
            until(browser, DONE, "the answer does not end")
            assert texts(browser, ".turn.user .body")[1] == "by keyboard\nsecond line"
            assert texts(browser, "#announce") == ["The answer is complete."]
            reached = set()
            for _ in range(60): # every control can be reached with the tab key
                ActionChains(browser).send_keys(Keys.TAB).perform()
                reached.add(browser.execute_script("const e = document.activeElement; return e.id || e.getAttribute('aria-label') || e.textContent.slice(0, 20)"))
            assert {"tab-chat", "theme", "settings-button", "new-chat", "thread", "message", "attach", "send", "Regenerate", "Edit", "Copy code"} <= reached, reached


# ---- screenshots for the documentation


def save_screenshots(folder, model):
    other = "What is a KV cache? Answer in one sentence."
    questions = ["Write a Python function that returns the sum of the squares of a list. Reply with code only.", "What is its time complexity? Answer in one sentence."]
    with serving("-c", "16K", model=model) as server, browsing(width=1200, height=660) as browser:
        def save(name):
            time.sleep(0.5)
            browser.get_screenshot_as_file(os.path.join(folder, name + ".png"))

        def resize(width, height, mobile=False):
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile})

        open_page(browser, server.port)
        send(browser, other)
        click(browser, "#new-chat")
        set_setting(browser, "temperature", 0)
        for question in questions:
            send(browser, question)
        click(browser, ".turn.answer:last-of-type [aria-label=Regenerate]")
        time.sleep(0.5)
        until(browser, DONE, "the answer is not regenerated")
        browser.execute_script("document.getElementById('thread').scrollTop = 1e9; document.activeElement.blur()")
        save("chat")
        resize(390, 780, True)
        browser.execute_script("document.documentElement.dataset.theme = 'dark'; document.getElementById('thread').scrollTop = 1e9")
        save("chat_phone_dark")
        browser.execute_script("delete document.documentElement.dataset.theme")
        resize(1200, 860)
        click(browser, "#tab-memory")
        text = BOOK[:4000]
        asks = [threading.Thread(target=server.post, args=("/v1/chat/completions", chat(text + f" Question {i}: " + BOOK[5000 + 80 * i:5400 + 80 * i], max_tokens=160))) for i in range(6)]
        server.post("/v1/chat/completions", chat(text, max_tokens=4))
        time.sleep(3)
        for ask in asks:
            ask.start()
        until(browser, "document.querySelectorAll('#requests .request').length >= 5 && document.querySelector('#requests').textContent.includes('decode')", "no requests are shown")
        time.sleep(2)
        save("memory")
        for ask in asks:
            ask.join()


TESTS = [chat_streams_stops_and_counts_cached_tokens, turns_can_be_edited_and_regenerated, incomplete_answers_are_continued_and_failed_ones_replaced, conversations_are_listed_renamed_exported_and_deleted,
         documents_are_counted_and_sent_before_the_question, reasoning_is_folded_and_tool_calls_are_answered, errors_are_explained, hostile_markdown_is_sanitized,
         security_policy_blocks_inline_code, streamed_markdown_equals_complete_markdown_at_linear_cost, memory_view_draws_and_its_sums_are_true,
         several_models_can_be_chosen, memory_view_shows_page_states_live, api_keys_are_requested, page_fits_phones_and_follows_the_colour_scheme, page_is_accessible]

if __name__ == "__main__":
    if BROWSER is None or DRIVER is None:
        print("skipped: chromium and chromedriver are not installed (Debian packages chromium and chromium-driver)")
        sys.exit(0)
    if sys.argv[2:3] == ["--screenshots"]:
        save_screenshots(*sys.argv[3:5])
    else:
        run(TESTS)
