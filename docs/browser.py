"""Open every page of the built site in a browser: ``python docs/browser.py build/site``

A page fails if it scrolls horizontally, shows a broken picture or writes an error to the console, at
the width of a computer or of a telephone. It needs ``pip install playwright`` and a Chromium: the one
of ``playwright install chromium``, or one of the system.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

WIDTHS = (1400, 390)
SCROLLS = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
BROKEN = "() => [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)"


def faults(page: Any, path: Path) -> list[str]:
    """Return what is wrong with a page at each width."""
    found: list[str] = []
    page.on("pageerror", lambda error: found.append(f"error: {error}"))
    # The text of a failed request does not name it; requests to other hosts are not made.
    page.on("console", lambda m: found.append(m.text) if m.type == "error" else None)
    page.goto(path.resolve().as_uri())
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        if (more := page.evaluate(SCROLLS)) > 0:
            found.append(f"at a width of {width} pixels, it scrolls {more} pixels horizontally")
    found += [f"broken picture: {source}" for source in page.evaluate(BROKEN)]
    return [text for text in found if "net::ERR_FAILED" not in text]


def main() -> int:
    site = Path(sys.argv[1])
    pages = sorted(p for p in site.rglob("*.html") if "_static" not in p.parts)
    wrong = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        for path in pages:
            page = browser.new_page()
            page.route(lambda url: not url.startswith("file:"), lambda route: route.abort())
            for text in faults(page, path):
                wrong += 1
                print(f"{path.relative_to(site)}: {text}")
            page.close()
        browser.close()
    print(f"{len(pages)} pages, {wrong} faults")
    return 1 if wrong or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
