#!/usr/bin/env python3
"""Tests the dashboard of flatkv serve in Chromium, driven by Selenium.

usage: browser_test.py <flatkv> [test...]     requires a Python with selenium. Prints a note and skips if Chromium is not installed.
FLATKV_SCREENSHOTS=DIR saves screenshots.
"""
import contextlib
import json
import os
import shutil
import sys
import threading
import time

from serve_test import ADMIN_KEY, BOOK, KEYS, admin_key, chat, run, serving

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


def until(browser, script, what, seconds=600):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = browser.execute_script("return " + script)
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"{what}: {browser.find_element('tag name', 'body').text}")


def open_page(browser, server, key=None):
    browser.get(f"http://127.0.0.1:{server.port}/")
    if key:
        browser.execute_script("sessionStorage.setItem('flatkv-key', arguments[0])", key)
        browser.get(f"http://127.0.0.1:{server.port}/")
    until(browser, "document.getElementById('model').textContent", "no metrics arrive")


def save_screenshot(browser, name):
    folder = os.environ.get("FLATKV_SCREENSHOTS")
    if folder:
        browser.get_screenshot_as_file(os.path.join(folder, name + ".png"))


def cells(browser):
    return browser.execute_script("const n = {}; for (const i of document.querySelectorAll('#map i')) { const k = i.className.split(' ')[0]; n[k] = (n[k] || 0) + 1; } return n")


def has_ink(browser, canvas):
    """Returns true if a line was drawn, which adds colours to those of the grid."""
    return browser.execute_script("""
        const c = document.getElementById(arguments[0]), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, seen = new Set();
        for (let i = 0; i < d.length; i += 4) if (d[i + 3] > 200) seen.add(d[i] >> 5 << 10 | d[i + 1] >> 5 << 5 | d[i + 2] >> 5);
        return seen.size > 3""", canvas)


def dashboard_is_small_self_contained_and_draws():
    with serving("-c", "8K") as server, browsing() as browser:
        assert len(server.raw("GET", "/")[2]) < MAX_PAGE_BYTES
        open_page(browser, server)
        server.post("/v1/chat/completions", chat(BOOK[:300], max_tokens=200))
        until(browser, "document.getElementById('totals').textContent.includes('200')", "the tokens are not counted")
        time.sleep(1.2)
        assert has_ink(browser, "memory-plot") and has_ink(browser, "rate-plot")
        sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
        asked = {m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"}
        own = (f"http://127.0.0.1:{server.port}/", "data:", "chrome:", "about:")
        assert asked and all(url.startswith(own) for url in asked), asked
        complaints = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
        assert not complaints, complaints
        save_screenshot(browser, "desktop")


def dashboard_shows_page_states_live():
    with admin_key() as option, serving("-c", "4K", "--parallel", "4", "--api-key", KEYS[0], "--api-key", KEYS[1], *option) as server, browsing() as browser:
        first, second = ({"Authorization": "Bearer " + key} for key in KEYS)
        open_page(browser, server, ADMIN_KEY)
        n_pages = until(browser, "document.querySelectorAll('#map i').length", "there is no page map")
        assert cells(browser) == {"free": n_pages} and n_pages >= 64, cells(browser)
        asks = [threading.Thread(target=server.post, args=("/v1/chat/completions", chat(BOOK[:400], max_tokens=2500, n=1), first)),
                threading.Thread(target=server.post, args=("/v1/chat/completions", chat(BOOK[700:1100], max_tokens=500), second))]
        for ask in asks:
            ask.start()
        until(browser, "document.querySelectorAll('#map .promised').length > 0 && document.querySelectorAll('#map .private').length > 0", "no pages are promised and held")
        until(browser, "document.getElementById('map').classList.contains('tenants')", "two keys do not have two colours")
        colours = browser.execute_script("return [...new Set([...document.querySelectorAll('#map .private, #map .pinned, #map .cached')].map(i => i.style.getPropertyValue('--own')))]")
        assert len(colours) == 2, colours
        save_screenshot(browser, "tenants")
        for ask in asks:
            ask.join()
        until(browser, "document.querySelectorAll('#map .cached').length > 0 && document.querySelectorAll('#map .private').length == 0", "prefixes are not cached")
        server.post("/v1/chat/completions", chat(BOOK[2000:5500], max_tokens=100), first)
        until(browser, "document.querySelectorAll('#map .evicted').length > 0", "evicted pages are not shown")
        browser.find_element("id", "by").click()
        until(browser, "!document.getElementById('map').classList.contains('tenants')", "colours do not switch to page states")


def chat_box_streams_an_answer():
    with serving("-c", "8K") as server, browsing() as browser:
        open_page(browser, server)
        browser.find_element("id", "say").send_keys("The vault")
        browser.find_element("css selector", "#ask button").click()
        until(browser, "document.querySelector('#talk .answer') && document.querySelector('#talk .answer').textContent.length > 20", "no answer is streamed")


def dashboard_works_on_phones_and_in_dark_mode():
    with admin_key() as option, serving("-c", "8K", "--api-key", KEYS[0], *option) as server:
        for name, settings in (("phone", {"width": 390, "height": 844, "mobile": True}), ("dark", {"dark": True}), ("light", {})):
            with browsing(**settings) as browser:
                browser.get(f"http://127.0.0.1:{server.port}/")
                until(browser, "!document.getElementById('key-form').hidden", "no key is requested")
                browser.find_element("id", "key").send_keys(ADMIN_KEY)
                browser.find_element("css selector", "#key-form button").click()
                until(browser, "document.getElementById('model').textContent", "the key does not show the metrics")
                assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth"), "the page is wider than " + name
                back = browser.execute_script("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
                assert (max(back) < 80) == (name == "dark"), (name, back)
                save_screenshot(browser, name)


if __name__ == "__main__":
    if BROWSER is None or DRIVER is None:
        print("skipped: chromium and chromedriver are not installed (Debian packages chromium and chromium-driver)")
        sys.exit(0)
    run([dashboard_is_small_self_contained_and_draws, dashboard_shows_page_states_live, chat_box_streams_an_answer, dashboard_works_on_phones_and_in_dark_mode])
