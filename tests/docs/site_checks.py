"""The site as a reader has it, in a headless Chromium: `make browser-test`, which builds it first.

`make test` does not collect this file, because it needs a browser. Screenshots go to the folder that the environment
variable SCREENSHOTS names.
"""

import os
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import expect

from alpaca_ppo import __all__ as public_names
from tests.chromium import LAPTOP, PHONE, WIDE, chromium
from tests.docs.markdown import ROOT

SITE = ROOT / "site"
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    assert PAGES, "no site; `make docs` builds it"
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=SITE)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture(scope="module", params=[WIDE, LAPTOP, PHONE], ids=["wide", "laptop", "phone"])
def shown(browser, request):
    """A browser's page, and what it complained of and asked for."""
    context = browser.new_context(viewport=request.param, permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.set_default_timeout(60_000)
    complaints, requests = [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda made: requests.append(made.url))
    yield page, complaints, requests
    context.close()


def keep(page, name):
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(
            path=Path(folder) / f"site_{re.sub(r'[^a-z0-9]+', '_', name)}_{page.viewport_size['width']}.png"
        )


def results_of(page, address, query):
    """The pages that a search finds, in order."""
    page.goto(address)
    # What is typed before the index is loaded may be missed.
    expect(page.locator(".md-search-result__meta")).to_have_text("Type to start searching", timeout=60_000)
    if page.viewport_size == PHONE:
        page.click("label.md-header__button[for=__search]")
    # At once, so that no results of a part of the query are replaced while they are read; a key starts the search.
    box = page.locator("[data-md-component=search-query]")
    box.fill(query)
    box.press("End")
    first_links = page.locator(".md-search-result__item > a")
    first_links.first.wait_for()
    keep(page, query)
    links = first_links.evaluate_all("links => links.map(link => link.getAttribute('href'))")
    return [link.split("?")[0].removeprefix(address) for link in links]


@pytest.mark.parametrize("path", [path for path in PAGES if path != "404.html"])
def test_every_page_opens_within_the_width_and_asks_for_nothing_from_elsewhere(shown, address, path):
    page, complaints, requests = shown
    complaints.clear()
    requests.clear()
    page.goto(address + path)
    keep(page, path)
    assert page.locator("article h1").first.is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    cut_off = "[...document.querySelectorAll('pre > code')].filter(code => code.scrollWidth > code.clientWidth)"
    assert page.evaluate(f"{cut_off}.map(code => code.innerText)") == []
    broken = (
        "Array.from(document.images).filter(image => !image.complete || !image.naturalWidth).map(image => image.src)"
    )
    assert page.evaluate(broken) == []
    assert complaints == []
    assert [url for url in requests if not url.startswith((address, "data:", "blob:"))] == []


@pytest.mark.parametrize(
    ("query", "page_found"), [("cliprange", "configuration.html"), ("out of memory", "troubleshooting.html")]
)
def test_a_search_finds_the_right_page_among_the_first_three(shown, address, query, page_found):
    assert page_found in results_of(shown[0], address, query)[:3]


def test_a_result_leads_to_its_page(shown, address):
    page = shown[0]
    results_of(page, address, "out of memory")
    page.locator(".md-search-result__item a[href*='troubleshooting.html']").first.click()
    page.wait_for_url("**/troubleshooting.html*")
    assert "Troubleshooting" in page.locator("article h1").inner_text()


def test_code_can_be_copied_and_colours_be_changed(shown, address):
    page = shown[0]
    page.goto(address + "getting-started.html")
    page.locator(".highlight", has_text="make quickstart").locator("button").first.click()
    assert page.evaluate("navigator.clipboard.readText()") == "make quickstart"
    assert page.locator("body").get_attribute("data-md-color-scheme") == "default"
    page.locator("label[title=Dark]").click()
    assert page.locator("body").get_attribute("data-md-color-scheme") == "slate"
    page.locator("label[title=Light]").click()


def test_links_to_code_lead_to_the_repository_and_those_to_pages_stay(shown, address):
    page = shown[0]
    page.goto(address + "customization.html")
    links = {link.get_attribute("href") for link in page.locator("article a[href]").all()}
    assert any(link.endswith("/blob/main/alpaca_ppo/generation/backends.py") for link in links)
    page.goto(address + "algorithms.html")
    assert page.locator("article a[href^='examples/mini_farm/RESULTS.html']").count() > 0
    assert page.locator("article a[href^='../']").count() == 0


def test_the_public_names_have_their_docstrings(shown, address):
    page = shown[0]
    page.goto(address + "api.html")
    for name in (name for name in public_names if not name.startswith("_")):
        assert page.locator(f"[id='alpaca_ppo.{name}']").count() == 1, name
    for name in ("train", "evaluate", "generate", "save_model", "push_to_hub", "compute_policy_loss"):
        assert page.locator(f"[id='alpaca_ppo.PPOTrainer.{name}']").count() == 1, name
    assert (
        "Generalized advantage" in page.locator("article").inner_text() or "GAE" in page.locator("article").inner_text()
    )
