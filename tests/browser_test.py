#!/usr/bin/env python3
"""The page of flatkv serve in a real browser: chromium, driven by selenium.

usage: browser_test.py <flatkv> [behaviour...]     with a Python that has selenium. Skips, and says so, where there is no chromium.
FLATKV_SCREENSHOTS=DIR keeps pictures of what was seen.
"""
import contextlib
import json
import os
import shutil
import sys
import threading
import time

from serve_test import BOOK, KEYS, chat, run, serving

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MAX_PAGE_BYTES = 100_000


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
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile})
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        yield browser
    finally:
        browser.quit()


def until(browser, script, what, seconds=120):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = browser.execute_script("return " + script)
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"{what}: {browser.find_element('tag name', 'body').text}")


def look(browser, server, key=None):
    browser.get(f"http://127.0.0.1:{server.port}/")
    if key:
        browser.execute_script("sessionStorage.setItem('flatkv-key', arguments[0])", key)
        browser.get(f"http://127.0.0.1:{server.port}/")
    until(browser, "document.getElementById('model').textContent", "figures arrive")


def keep_picture(browser, name):
    folder = os.environ.get("FLATKV_SCREENSHOTS")
    if folder:
        browser.save_screenshot(os.path.join(folder, name + ".png"))


def cells(browser):
    return browser.execute_script("const n = {}; for (const i of document.querySelectorAll('#map i')) { const k = i.className.split(' ')[0]; n[k] = (n[k] || 0) + 1; } return n")


def has_ink(browser, canvas):
    """A line was drawn: the canvas has more than its grid's colours."""
    return browser.execute_script("""
        const c = document.getElementById(arguments[0]), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, seen = new Set();
        for (let i = 0; i < d.length; i += 4) if (d[i + 3] > 200) seen.add(d[i] >> 5 << 10 | d[i + 1] >> 5 << 5 | d[i + 2] >> 5);
        return seen.size > 3""", canvas)


def the_page_is_small_asks_nobody_else_and_draws():
    with serving("-c", "8K") as server, browsing() as browser:
        assert len(server.raw("GET", "/")[2]) < MAX_PAGE_BYTES
        look(browser, server)
        server.post("/v1/chat/completions", chat(BOOK[:300], max_tokens=200))
        until(browser, "document.getElementById('figures').textContent.includes('200')", "the tokens are counted")
        time.sleep(1.2)
        assert has_ink(browser, "memory-plot") and has_ink(browser, "rate-plot")
        sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
        asked = {m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"}
        own = (f"http://127.0.0.1:{server.port}/", "data:", "chrome:", "about:")
        assert asked and all(url.startswith(own) for url in asked), asked
        complaints = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
        assert not complaints, complaints
        keep_picture(browser, "desktop")


def pages_change_under_ones_eyes():
    with serving("-c", "4K", "--parallel", "4", "--api-key", KEYS[0], "--api-key", KEYS[1]) as server, browsing() as browser:
        first, second = ({"Authorization": "Bearer " + key} for key in KEYS)
        look(browser, server, KEYS[0])
        n_pages = until(browser, "document.querySelectorAll('#map i').length", "there is a map")
        assert cells(browser) == {"free": n_pages} and n_pages >= 64, cells(browser)
        asks = [threading.Thread(target=server.post, args=("/v1/chat/completions", chat(BOOK[:400], max_tokens=2500, n=1), first)),
                threading.Thread(target=server.post, args=("/v1/chat/completions", chat(BOOK[700:1100], max_tokens=500), second))]
        for ask in asks:
            ask.start()
        until(browser, "document.querySelectorAll('#map .promised').length > 0 && document.querySelectorAll('#map .private').length > 0", "pages are promised and taken")
        until(browser, "document.getElementById('map').classList.contains('tenants')", "two keys are two colours")
        colours = browser.execute_script("return [...new Set([...document.querySelectorAll('#map .private, #map .pinned, #map .cached')].map(i => i.style.getPropertyValue('--own')))]")
        assert len(colours) == 2, colours
        keep_picture(browser, "tenants")
        for ask in asks:
            ask.join()
        until(browser, "document.querySelectorAll('#map .cached').length > 0 && document.querySelectorAll('#map .private').length == 0", "prefixes stay")
        server.post("/v1/chat/completions", chat(BOOK[2000:5500], max_tokens=100), first)
        until(browser, "document.querySelectorAll('#map .evicted').length > 0", "what was given up is seen")
        browser.find_element("id", "by").click()
        until(browser, "!document.getElementById('map').classList.contains('tenants')", "colours by state")


def the_chat_box_answers():
    with serving("-c", "8K") as server, browsing() as browser:
        look(browser, server)
        browser.find_element("id", "say").send_keys("The vault")
        browser.find_element("css selector", "#ask button").click()
        until(browser, "document.querySelector('#talk .answer') && document.querySelector('#talk .answer').textContent.length > 20", "an answer streams")


def a_phone_and_the_dark_are_served():
    with serving("-c", "8K", "--api-key", KEYS[0]) as server:
        for name, settings in (("phone", {"width": 390, "height": 844, "mobile": True}), ("dark", {"dark": True}), ("light", {})):
            with browsing(**settings) as browser:
                browser.get(f"http://127.0.0.1:{server.port}/")
                until(browser, "!document.getElementById('key-form').hidden", "a key is asked for")
                browser.find_element("id", "key").send_keys(KEYS[0])
                browser.find_element("css selector", "#key-form button").click()
                until(browser, "document.getElementById('model').textContent", "the key opens the figures")
                assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth"), "the page is wider than " + name
                back = browser.execute_script("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
                assert (max(back) < 80) == (name == "dark"), (name, back)
                keep_picture(browser, name)


if __name__ == "__main__":
    if BROWSER is None or DRIVER is None:
        print("skipped: chromium and chromium-driver are not here; Debian has packages of these names")
        sys.exit(0)
    run([the_page_is_small_asks_nobody_else_and_draws, pages_change_under_ones_eyes, the_chat_box_answers, a_phone_and_the_dark_are_served])
