"""The pages over the real server, `gym-capture ui`, and a real log that is written while one looks (`make test-ui`)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from playwright.sync_api import Page, expect, sync_playwright

from tests.inspector.browser import WINDOW, chromium
from tests.inspector.world import conversation, record, write_world


class Log:
    """A log that this process writes, as a graph does; in a loop of its own, as Playwright has this thread's."""

    def __init__(self, directory: Path, portal: BlockingPortal) -> None:
        self._portal = portal
        self._store = portal.call(write_world, directory)

    def second_call_of_alone(self) -> None:
        self._portal.call(record, self._store, conversation("alone")[1:])

    def close(self) -> None:
        self._portal.call(self._store.close)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with start_blocking_portal() as portal:
        log = Log(tmp_path, portal)
        yield log
        log.close()


@pytest.fixture
def page(log: Log, tmp_path: Path) -> Iterator[Page]:
    command = [sys.executable, "-m", "gym_capture.cli", "ui", str(tmp_path), "--port", "0", "--no-open"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        sync_playwright() as playwright,
    ):
        assert server.stdout is not None
        address = next(line.split()[0] for line in server.stdout if line.startswith("http"))
        browser = chromium(playwright)
        page = browser.new_page(viewport=WINDOW, base_url=address)
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda said: problems.append(said.text) if "Content Security Policy" in said.text else None)
        yield page
        browser.close()
        server.terminate()
    assert problems == []


def test_from_the_rollouts_to_a_token_and_a_note_on_it_while_the_log_grows(
    log: Log, page: Page, tmp_path: Path
) -> None:
    page.goto("#/")
    expect(page.locator(".job-table .row-place")).to_have_count(4)
    page.get_by_label("state", exact=True).select_option("failed")
    expect(page.locator(".job-table .row-place")).to_have_count(1)
    page.locator(".tokens, .job-table").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="two")).to_be_visible()
    page.get_by_role("tree").get_by_text("split: tail_differs").click()
    call = page.get_by_role("region", name="Call 2")  # what is above the calls has reasons, too, folded up
    expect(call.get_by_text("What to do:").first).to_be_visible()
    expect(page.get_by_text("<img src=x onerror=alert(1)>").first).to_be_visible()
    assert page.locator("img").count() == 0

    page.goto("#/rollout/two/trajectory/1/splits")
    expect(page.locator(".sides")).to_contain_text("reply of c1")
    page.goto("#/rollout/two/trajectory/1/token/18")
    expect(page.get_by_text("Why it was not trained")).to_be_visible()
    page.get_by_label("Note on token 18").fill("odd")
    page.keyboard.press("Enter")
    expect(page.locator(".notes")).to_contain_text("odd")
    assert '"odd"' in (tmp_path / "_annotations.jsonl").read_text()

    page.goto("#/rollout/alone")
    expect(page.get_by_role("treeitem")).to_have_count(1)
    log.second_call_of_alone()
    expect(page.get_by_role("treeitem")).to_have_count(2)
    page.get_by_role("link", name="Its tokens").click()  # of a rollout that nobody has ended
    expect(page.get_by_role("listbox", name="Tokens")).to_contain_text("turn 2")
    page.goto("#/group/group%2F1")
    expect(page.get_by_text("All are the same, id for id.")).to_be_visible()
    page.goto("#/rollout/nobody")
    expect(page.get_by_role("alert")).to_contain_text("nobody")
