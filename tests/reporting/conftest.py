"""Pages of results of every kind, and a browser that is allowed to read files and nothing else."""

from __future__ import annotations

import os
import shutil
from functools import cache

import pytest

from fulldepth.results import PAGE
from reporting.plotted import KINDS

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """Name of results, see `plotted.KINDS` -> path of their page, written once through the result folder."""
    return cache(lambda name: KINDS[name]().save(tmp_path_factory.mktemp(name)) / PAGE)


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium; skipped where there is none, unless this is CI."""
    executable = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if executable is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no Chromium on this machine")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield running
        running.close()


@pytest.fixture
def visit(browser):
    """Open a page and wait until every figure is drawn; afterwards nothing may have gone wrong in it."""
    opened, wrong = [], []

    def open_page(path, **settings):
        context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}, "color_scheme": "light", **settings}
        )
        page = context.new_page()
        opened.append(context)
        page.on("console", lambda message: wrong.append(f"console: {message.type}: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))

        def gate(route):
            if route.request.url.startswith("file://"):
                route.continue_()
            else:
                wrong.append(f"request: {route.request.url[:200]}")
                route.abort()

        page.route("**/*", gate)
        page.goto(path.as_uri())
        wait_until_ready(page)
        return page

    yield open_page
    for context in opened:
        context.close()
    assert wrong == []


def wait_until_ready(page):
    """Wait until the queue of figures is empty."""
    page.wait_for_selector("html[data-ready=yes]", state="attached", timeout=60_000)


@pytest.fixture(name="ready")
def ready_fixture():
    """`ready(page)` waits until every figure is drawn."""
    return wait_until_ready
