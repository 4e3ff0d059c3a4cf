"""The inspector's page in Chromium: 10,000 rollouts, and a trajectory of 100,000 tokens.

Claims: the page, with the table of 10,000 rollouts, is there at less than 1 s of its processor time; while one
scrolls, no task of the page's thread takes more than 50 ms of it, be it through the rows or the tokens. Processor
time, because on a shared machine the clock says what others did; what `PerformanceObserver` saw by the clock is
reported beside it. Each step of the wheel is 600 pixels, every tenth leaps over an eighth of the list.

Run: python -m benchmarks.inspector_page     (needs what `make test-ui` installs)

Prints one JSON object a line; exits non-zero if a claim does not hold.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).parents[1] / "tests/inspector/.packages"))

from playwright.sync_api import Browser, sync_playwright

from tests.inspector.browser import WINDOW, chromium
from tests.inspector.fake import LONG, Fake
from tests.inspector.fake_server import serve

STEPS: Final = 60
LONG_TASK_MS: Final = 50.0
READY_CPU_MS: Final = 1000.0
CATEGORIES: Final = ["toplevel", "disabled-by-default-devtools.timeline", "devtools.timeline"]


def main() -> int:
    with serve(Fake()) as address, sync_playwright() as playwright:
        browser = chromium(playwright)
        found = [
            look(browser, "inspector.rows_10k", f"{address}#/", ".job-table", ".job-row .c-reward"),
            look(browser, "inspector.tokens_100k", f"{address}#/rollout/{LONG}/trajectory/0", ".tokens", ".line"),
        ]
        browser.close()
    for one in found:
        print(json.dumps(one))
    return 0 if all(one["holds"] for one in found) else 1


def look(browser: Browser, name: str, url: str, what: str, ready: str) -> dict[str, Any]:
    """Opens the page, then scrolls."""
    page = browser.new_page(viewport=WINDOW)
    browser.start_tracing(page=page, categories=CATEGORIES)
    page.goto(url)
    page.locator(ready).first.wait_for()
    opened = sum(tasks_ms(browser.stop_tracing()))
    clock = page.evaluate("""() => ({
        first_contentful_paint_ms: Math.round(performance.getEntriesByName("first-contentful-paint")[0].startTime),
        ready_ms: Math.round(performance.now()),
    })""")
    page.wait_for_timeout(1000)  # the plots are drawn
    browser.start_tracing(page=page, categories=CATEGORIES)
    observed = page.evaluate(_SCROLL, [what, STEPS])
    tasks = tasks_ms(browser.stop_tracing())
    page.close()
    return {
        "benchmark": name,
        **clock,
        "ready_cpu_ms": round(opened),
        "scroll_cpu_ms_a_step": round(sum(tasks) / STEPS, 1),
        "longest_task_cpu_ms": round(max(tasks), 1),
        "long_tasks_by_the_clock": len(observed),
        "holds": opened < READY_CPU_MS and max(tasks) <= LONG_TASK_MS,
    }


def tasks_ms(trace: bytes) -> list[float]:
    """Processor time of each task of the page's own thread."""
    events = json.loads(trace)["traceEvents"]
    names = [event for event in events if event.get("name") == "thread_name"]
    main = {(one["pid"], one["tid"]) for one in names if one["args"]["name"] == "CrRendererMain"}
    tasks = [event for event in events if event.get("name") == "ThreadControllerImpl::RunTask"]
    return [task["tdur"] / 1000 for task in tasks if (task["pid"], task["tid"]) in main and "tdur" in task]


_SCROLL: Final = """async ([what, steps]) => {
    const seen = [];
    const observer = new PerformanceObserver(list => seen.push(...list.getEntries().map(one => one.duration)));
    observer.observe({entryTypes: ["longtask"]});
    const frame = () => new Promise(done => requestAnimationFrame(done));
    const box = document.querySelector(what);
    for (let step = 0; step < steps; step++) {
        box.scrollTop += step % 10 === 9 ? box.scrollHeight / 8 : 600;
        await frame();
    }
    await new Promise(done => setTimeout(done));
    return [...seen, ...observer.takeRecords().map(one => one.duration)];
}"""


if __name__ == "__main__":
    sys.exit(main())
