"""Chromium: where it is, how big its windows are, what scrolling costs in it."""

from __future__ import annotations

import os
import shutil
from typing import Final

from playwright.sync_api import Browser, Page, Playwright, ViewportSize, expect

WINDOW: Final[ViewportSize] = {"width": 1400, "height": 860}
_PATIENCE_MS: Final = 60_000
"""Playwright's own for an expectation are 5 s, which a busy machine may take for anything."""
PHONE: Final[ViewportSize] = {"width": 390, "height": 800}


def chromium(playwright: Playwright) -> Browser:
    """The machine's own Chromium: Playwright downloads none."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        raise SystemExit("no Chromium on the PATH: make test-ui says how to get it")
    expect.set_options(timeout=_PATIENCE_MS)
    # Chromium's sandbox does not start for root, as in a container; the pages are the tests' own.
    return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])


def scrolled(page: Page, what: str, ready: str, *, pixels: int = 60, steps: int = 40) -> float:
    """Processor time of the page's own thread for a step of the wheel, a frame apart, in milliseconds."""
    page.locator(ready).first.wait_for()
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def spent() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return float(next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration"))

    before = spent()
    page.evaluate(_SCROLL, [what, pixels, steps])
    return 1000 * (spent() - before) / steps


_SCROLL: Final = """async ([what, pixels, steps]) => {
    const frame = () => new Promise(done => requestAnimationFrame(done));
    const box = document.querySelector(what);
    for (let step = 0; step < steps; step++) { box.scrollTop += pixels; await frame(); }
}"""
