"""Seconds until the first figure of a stored result's page is drawn, in headless Chromium.

    python benchmarks/first_figure.py docs/gallery/smollm2 --runs 9

Each run opens the page in a new context. Printed are the median and the smallest of the times from the start of the
navigation to the first contentful paint, to the first figure, and to the last figure of the first screen's queue.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from fulldepth.results import report

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WATCH = """
new MutationObserver((_, watcher) => {
  if (!document.querySelector(".plot .main-svg .trace, .plot .main-svg .hm")) return;
  window.firstFigure = performance.now();
  watcher.disconnect();
}).observe(document, { childList: true, subtree: true });
"""
TIMES = {
    "first paint": "performance.getEntriesByName('first-contentful-paint')[0].startTime",
    "first figure": "window.firstFigure",
    "all figures": "window.allFigures",
}


def main() -> None:
    """Time the page of one result folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    executable = next(filter(None, map(shutil.which, CHROMIUM)))
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        page_file = report([options.folder], place)
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        runs = []
        for _ in range(options.runs):
            context = browser.new_context(viewport={"width": 1280, "height": 800})
            page = context.new_page()
            page.add_init_script(WATCH)
            page.goto(page_file.as_uri())
            page.wait_for_selector("html[data-ready=yes]", state="attached", timeout=60_000)
            page.evaluate("window.allFigures = performance.now()")
            runs.append({name: page.evaluate(script) / 1000 for name, script in TIMES.items()})
            context.close()
        browser.close()
        print(f"{page_file.stat().st_size / 1e6:.2f} MB, {options.runs} runs")
    for name in TIMES:
        times = [run[name] for run in runs]
        print(f"{name}: median {statistics.median(times):.2f} s, smallest {min(times):.2f} s")


if __name__ == "__main__":
    main()
