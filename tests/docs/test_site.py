"""The site in a real browser: pages fit at 1400 and 400 pixels, code is whole, search finds what people look for.

Requires the extra [docs], playwright (`pip install playwright`; its own browsers are not needed) and a Chromium on
PATH, such as Debian's.
"""

from __future__ import annotations

import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.docs.pages import ROOT

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PAGES = ("", "tutorial/", "compression/", "benchmarks/", "reference/training/")
OVERFLOWS = """() => { const content = document.querySelector('.md-content').getBoundingClientRect(); return {
    page: document.documentElement.scrollWidth - window.innerWidth,
    code: [...document.querySelectorAll('.md-content pre, .md-content pre code')]
        .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent.trim().slice(0, 60)),
    tables: [...document.querySelectorAll('.md-content table')]
        .filter(e => e.getBoundingClientRect().right > content.right)
        .map(e => e.textContent.trim().slice(0, 60)),
    pictures: [...document.querySelectorAll('.md-content img')].filter(e => !e.naturalWidth).map(e => e.src),
}}"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Build the site, and serve it; yield its address."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    pytest.importorskip("playwright.sync_api")
    if not any(map(shutil.which, BROWSERS)):
        pytest.skip(f"none of {', '.join(BROWSERS)} is on PATH")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert built.returncode == 0, built.stderr
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser(site: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    found = next(path for name in BROWSERS if (path := shutil.which(name)))
    with sync_playwright() as playwright:
        # As root, which CI often is, Chromium refuses to start with its sandbox. It sees our own pages only.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        opened = playwright.chromium.launch(executable_path=found, args=arguments)
        yield opened
        opened.close()


@pytest.mark.parametrize("page", PAGES)
def test_pages_fit(browser: Any, site: str, page: str) -> None:
    """Wide, everything fits. Narrow, tables and drawings scroll in their own frames, and the page does not."""
    tab = browser.new_page(viewport={"width": 1400, "height": 900})
    tab.goto(site + page)
    tab.wait_for_selector(".md-content")
    assert tab.evaluate(OVERFLOWS) == {"page": 0, "code": [], "tables": [], "pictures": []}
    tab.set_viewport_size({"width": 400, "height": 900})
    narrow = tab.evaluate(OVERFLOWS)
    assert narrow["page"] == 0
    tab.close()


@pytest.mark.parametrize("words", ["NaN", "straggler", "fault tolerance", "tutorial", "FAQ", "ZeRO", "DiLoCo"])
def test_search_finds_what_people_look_for(browser: Any, site: str, words: str) -> None:
    """Among the results is a page whose title has the words."""
    tab = browser.new_page(viewport={"width": 1400, "height": 900})
    tab.goto(site)
    tab.fill(".md-search__input", words)
    tab.wait_for_selector(".md-search-result__item h1", timeout=20_000)
    titles = tab.locator(".md-search-result__item h1, .md-search-result__item h2").all_text_contents()
    assert any(words.lower() in title.lower() for title in titles), titles
    tab.close()


def test_overflow_is_noticed(browser: Any, site: str) -> None:
    """What is too wide is found: a line of code, and then the page."""
    tab = browser.new_page(viewport={"width": 400, "height": 900})
    tab.goto(site)
    tab.evaluate("document.querySelector('.md-content pre code').style.whiteSpace = 'pre'")
    assert tab.evaluate(OVERFLOWS)["code"]
    tab.evaluate("document.body.style.width = '900px'")
    assert tab.evaluate(OVERFLOWS)["page"] > 0
    tab.close()
