"""The inspector in a real browser, by what a person does: clicks, keys, search, a rollout that grows, hostile text.

`make test-ui` runs it; it needs Chromium and Playwright, so `make test` does not. The data is `fake.py`'s.
With `--screenshots` (`make test-ui ARGS=--screenshots`) the pictures of docs/inspector.md are made again.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from tests.inspector.browser import PHONE, WINDOW, chromium, scrolled
from tests.inspector.fake import HOSTILE, LIVE, LONG, ROLLOUTS, TREE, Fake
from tests.inspector.fake_server import STATIC, serve

ROOT: Final = Path(__file__).parents[2]
PICTURES: Final = ROOT / "docs/images"


class Site:
    """A served fake, and pages that fail their test when anything is written to the console."""

    def __init__(self, browser: Browser, fake: Fake, address: str) -> None:
        self.browser, self.fake, self.address = browser, fake, address
        self.problems: list[str] = []

    def open(self, hash_: str = "#/", **options: Any) -> Page:
        page = self.browser.new_page(**{"viewport": WINDOW, **options})
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", self._console)
        page.goto(self.address + hash_)
        return page

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and "the server responded with a status of" not in message.text:
            self.problems.append(message.text)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = chromium(playwright)
        yield browser
        browser.close()


@pytest.fixture
def site(browser: Browser) -> Iterator[Site]:
    fake = Fake()
    with serve(fake) as address:
        site = Site(browser, fake, address)
        yield site
        for context in browser.contexts:
            context.close()
    assert site.problems == []


def cells(page: Page, column: str) -> list[str]:
    return page.locator(f".job-table .row-place .c-{column}").all_inner_texts()


# --- the job ----------------------------------------------------------------------------------------------------------


def test_ten_thousand_rollouts_are_there_and_few_of_them_in_the_document(site: Site) -> None:
    page = site.open()
    expect(page.get_by_role("grid", name="Rollouts")).to_have_attribute("aria-rowcount", str(ROLLOUTS + 1))
    expect(page.locator(".filters .shown")).to_have_text("10,000 rollouts")
    assert page.locator(".job-table .row-place").count() < 120
    expect(page.locator(".plot")).to_have_count(10)


def test_rows_are_sorted_and_filtered_and_the_address_says_how(site: Site) -> None:
    page = site.open()
    expect(page.locator(".job-table .row-place").first).to_contain_text(LIVE)
    page.get_by_role("button", name="turns").click()
    page.wait_for_url("**sort=-turns")
    turns = [int(text) for text in cells(page, "turns")[:10]]
    assert turns == sorted(turns, reverse=True)
    page.get_by_label("mask", exact=True).select_option("missing_reward")
    page.get_by_label("state", exact=True).select_option("finished")
    page.get_by_label("Filter by text").fill("claude")
    page.wait_for_url("**q=claude**")
    expect(page.locator(".filters .shown")).to_contain_text(" of 10,000")
    assert all(mask.startswith("missing_reward") for mask in cells(page, "mask"))
    assert set(cells(page, "harness")) == {"claude-code"}
    seen = cells(page, "rollout")[:10]
    again = site.open(page.url.removeprefix(site.address))  # what was sent to somebody shows the same
    expect(again.locator(".job-table .row-place").first).to_be_visible()
    assert cells(again, "rollout")[:10] == seen
    page.get_by_role("button", name="Clear").click()
    expect(page.locator(".filters .shown")).to_have_text("10,000 rollouts")


def test_keys_go_down_the_table_and_into_a_rollout_and_back(site: Site) -> None:
    page = site.open("#/?q=reg-0000&sort=rollout")
    expect(page.locator("#row-0")).to_have_attribute("aria-selected", "true")
    page.keyboard.press("j")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("k")
    expect(page.locator("#row-1")).to_have_attribute("aria-selected", "true")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name=LONG)).to_be_visible()
    page.keyboard.press("g")
    expect(page.get_by_role("heading", name="task-0000")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("grid", name="Rollouts")).to_be_visible()
    page.keyboard.press("End")
    expect(page.locator(f"#row-{ROLLOUTS - 1}")).to_be_visible()


def test_a_range_drawn_over_a_plot_is_a_filter(site: Site) -> None:
    page = site.open()
    box = page.locator(".plot-box").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 20)
    page.mouse.up()
    page.wait_for_url("**from=**")
    expect(page.locator(".filters .shown")).to_have_text(re.compile(r"^2,\d\d\d of 10,000"))
    page.get_by_role("button", name="time range").click()
    expect(page.locator(".filters .shown")).to_have_text("10,000 rollouts")


def test_a_step_of_the_wheel_costs_the_same_however_long_the_list_is(site: Site) -> None:
    """Processor time, 10,000 rows against 800, 100,000 tokens against 4,000; figures are in benchmarks."""
    few = scrolled(site.open("#/?q=reg-00"), ".job-table", ".plot")
    assert scrolled(site.open(), ".job-table", ".plot") < 2 * few
    short = scrolled(site.open("#/rollout/reg-0000-4/trajectory/0"), ".tokens", ".line")
    assert (
        scrolled(site.open(f"#/rollout/{LONG}/trajectory/0"), ".tokens", ".line") < 3 * short
    )  # it reads two chunks, too


# --- a rollout --------------------------------------------------------------------------------------------------------


def test_the_tree_says_what_each_call_is_and_why_a_link_is_not_exact(site: Site) -> None:
    page = site.open(f"#/rollout/{TREE}")
    tree = page.get_by_role("tree", name="Calls")
    for role in ("side call", "sub-agent", "branch", "retry", "aborted", "unresolved"):
        expect(tree.get_by_text(role, exact=True).first).to_be_visible()
    tree.get_by_text("unresolved", exact=True).click()
    expect(page.get_by_text("its history was edited or compacted")).to_be_visible()
    expect(page.get_by_text("What to do:")).to_be_visible()
    assert page.url.endswith(f"#/rollout/{TREE}/call/{TREE}-c11")
    page.keyboard.press("k")
    expect(page.get_by_role("heading", name="Call 11 aborted")).to_be_visible()
    page.keyboard.press("Home")
    expect(page.get_by_role("heading", name="Call 1 main chain")).to_be_visible()
    expect(page.get_by_text("The test of parse_date fails")).to_be_visible()


def test_a_live_rollout_grows_while_one_looks(site: Site) -> None:
    page = site.open(f"#/rollout/{LIVE}")
    expect(page.get_by_role("heading", name="Call 3")).to_be_visible()
    site.fake.grow()
    expect(page.get_by_role("heading", name="Call 4")).to_be_visible()
    expect(page.get_by_role("tree").get_by_role("treeitem")).to_have_count(4)
    page.keyboard.press("Home")  # who looks at a call goes on looking at it
    site.fake.grow()
    expect(page.get_by_role("tree").get_by_role("treeitem")).to_have_count(5)
    expect(page.get_by_role("heading", name="Call 1 ")).to_be_visible()


def test_an_open_trajectory_grows_and_what_is_in_sight_stays(site: Site) -> None:
    page = site.open(f"#/rollout/{LIVE}/trajectory/0/token/1500")
    expect(page.locator("#t1500")).to_be_visible()
    page.locator(".tokens").hover()
    page.mouse.wheel(0, 400)  # away from the token that is chosen
    expect(page.locator("#t1500")).not_to_be_in_viewport()
    top = page.locator(".tokens").evaluate("element => element.scrollTop")
    for size in ("4,000", "5,000"):
        site.fake.grow()
        expect(page.locator(".summary .facts")).to_contain_text(size)
    page.keyboard.press("c")  # it is drawn, keys and all
    assert page.locator(".tokens").evaluate("element => element.scrollTop") == top
    page.keyboard.press("End")
    expect(page.locator("#t4999")).to_be_visible()


def test_the_job_shows_what_became_of_a_live_rollout(site: Site) -> None:
    page = site.open()
    expect(page.locator("#row-0 .c-calls")).to_have_text("3")
    site.fake.grow()
    expect(page.locator("#row-0 .c-calls")).to_have_text("4")


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_a_permanent_link_shows_its_token_out_of_100_000(site: Site) -> None:
    page = site.open(f"#/rollout/{LONG}/trajectory/0/token/54321")
    token = page.locator("#t54321")
    expect(token).to_be_in_viewport()
    expect(token).to_have_attribute("aria-selected", "true")
    panel = page.get_by_label("Token", exact=True)
    expect(panel.get_by_role("heading")).to_contain_text("Token 54,321")
    expect(panel).to_contain_text("generated, trained")
    assert page.locator(".line").count() < 150
    asked = [path for path in site.fake.asked if "/tokens" in path]
    assert len(asked) <= 3, "only what is in sight is read"


def test_the_link_of_a_token_is_copied(site: Site) -> None:
    page = site.open(f"#/rollout/{LONG}/trajectory/0/token/400")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#t400").wait_for()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("c")
    expect(page.get_by_text("Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == f"{site.address}#/rollout/{LONG}/trajectory/0/token/401"


def test_keys_walk_over_tokens_lines_and_turns(site: Site) -> None:
    page = site.open(f"#/rollout/{LONG}/trajectory/0/token/1000")
    page.locator("#t1000").wait_for()

    def at() -> int:
        return int(page.url.rsplit("/", 1)[1])

    page.keyboard.press("l")
    assert at() == 1001
    page.keyboard.press("j")
    below = at()
    assert below > 1001
    page.keyboard.press("k")
    assert abs(at() - 1001) <= 3  # the same place in the line, as far as there is one
    page.keyboard.press("]")
    turn = at()
    expect(page.get_by_label("Token", exact=True)).to_contain_text("generated")
    page.keyboard.press("]")
    page.keyboard.press("[")
    assert at() == turn
    page.keyboard.press("End")
    expect(page.locator("#t99999")).to_be_in_viewport()
    page.get_by_label("Go to token").fill("77777")
    page.keyboard.press("Enter")
    expect(page.locator("#t77777")).to_be_in_viewport()


def test_a_token_that_was_not_trained_says_why_and_what_to_do(site: Site) -> None:
    tokens = site.fake.tokens(LONG, 0, 100_000)
    assert tokens is not None
    token = tokens["kinds"].index(2)
    page = site.open(f"#/rollout/{LONG}/trajectory/0/token/{token}")
    panel = page.get_by_label("Token", exact=True)
    expect(panel.get_by_text("Why it was not trained")).to_be_visible()
    reason = tokens["whys"][tokens["why"][token]]
    expect(panel.get_by_text(reason, exact=True)).to_be_visible()
    expect(panel.get_by_text("What to do:")).to_be_visible()


def test_pointing_at_a_token_shows_it_and_control_characters_are_seen(site: Site) -> None:
    page = site.open(f"#/rollout/{LONG}/trajectory/0")
    page.locator("#t40").hover()
    panel = page.get_by_label("Token", exact=True)
    expect(panel.locator(".token-text")).to_have_text(r'"\u{7}\u{0}"')
    expect(page.locator("#t40")).to_have_text("␇␀")
    page.locator("#t40").click()
    page.mouse.move(5, 5)
    expect(panel.get_by_role("heading")).to_contain_text("Token 40")
    page.wait_for_url("**/token/40")


def test_colours_have_a_legend_and_never_colour_alone(site: Site) -> None:
    page = site.open(f"#/rollout/{LONG}/trajectory/0/token/400")
    page.locator("#t400").wait_for()
    styles = {}
    for kind in ("trained", "not_trained", "inserted_close"):
        sample = page.locator(f".legend .kind-{kind}")
        styles[kind] = sample.evaluate("one => getComputedStyle(one).borderBottomStyle")
    assert styles == {"trained": "solid", "not_trained": "dotted", "inserted_close": "dashed"}
    choose = page.get_by_label("Colour by")
    for name in ("log probability", "weight version", "entropy", "difference", "advantage"):
        choose.select_option(label=name)
        expect(page.locator(".legend li").first).to_be_visible()
    choose.select_option("logprob")
    expect(page.locator(".legend")).to_contain_text("over 90 %")
    assert page.locator(".line .seq-0, .line .seq-1, .line .seq-2").count() > 0
    page.locator(".tokens").focus()
    page.keyboard.press("m")
    expect(choose).to_have_value("version")


def test_splits_stand_side_by_side_with_the_reason(site: Site) -> None:
    page = site.open(f"#/rollout/{LONG}/trajectory/0")
    page.get_by_role("link", name="Splits (1)").click()
    expect(page.get_by_text("The template strips thinking from history.")).to_be_visible()
    expect(page.get_by_text("The two part at token 412.")).to_be_visible()
    first = page.locator(".sides tbody tr").first
    expect(first).to_contain_text("151667")
    expect(first).to_contain_text("≠")
    page.keyboard.press("Escape")
    expect(page.get_by_role("listbox", name="Tokens")).to_be_visible()


def test_a_note_is_added_to_a_token_and_kept_by_its_call(site: Site) -> None:
    turn = site.fake.trajectories(LONG)
    assert turn is not None
    call, (begin, _) = next(iter(turn[0]["generated"].items()))
    page = site.open(f"#/rollout/{LONG}/trajectory/0/token/{begin + 3}")
    page.get_by_label(f"Note on token {begin + 3}").fill("looks copied")
    page.keyboard.press("Enter")
    expect(page.locator(".notes")).to_contain_text("looks copied")
    expect(page.locator(f"#t{begin + 3}")).to_have_class(re.compile("noted"))
    assert [(note["call"], note["token"], note["note"]) for note in site.fake.notes] == [(call, 3, "looks copied")]


# --- search, groups, reasons, errors ----------------------------------------------------------------------------------


def test_search_leads_to_a_token_and_n_to_the_next(site: Site) -> None:
    page = site.open()
    page.locator(".job-table .row-place").first.wait_for()
    page.keyboard.press("/")
    page.keyboard.type("366")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Search for 366")).to_be_visible()
    expect(page.locator(".hits li").first).to_contain_text(LONG)
    expect(page.locator(".hits li")).to_have_count(200)
    page.get_by_role("button", name="Search on").click()
    expect(page.locator(".hits li").nth(200)).to_be_attached()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/token/**")
    first = int(page.url.rsplit("/", 1)[1])
    expect(page.locator(f"#t{first}")).to_be_in_viewport()
    page.keyboard.press("n")
    page.wait_for_function("before => Number(location.hash.split('/').pop()) > before", arg=first)
    page.keyboard.press("N")
    page.wait_for_function("before => Number(location.hash.split('/').pop()) === before", arg=first)


def test_a_group_shows_how_first_prompts_differ(site: Site) -> None:
    page = site.open("#/group/task-0000")
    expect(page.get_by_text("parts from the others at token 40.")).to_be_visible()
    expect(page.locator(".sides")).to_contain_text("Tuesday")
    expect(page.locator("table.plain").first.locator("tbody tr")).to_have_count(8)
    page.goto(f"{site.address}#/group/task-0001")
    expect(page.get_by_text("All are the same, id for id.")).to_be_visible()


def test_what_is_not_there_is_said(site: Site) -> None:
    page = site.open("#/rollout/nobody")
    expect(page.get_by_role("alert")).to_contain_text("there is no api/rollouts/nobody")
    page.goto(f"{site.address}#/rollout/{LONG}/trajectory/7")
    expect(page.get_by_role("alert")).to_contain_text("there is no number 7")
    page.goto(f"{site.address}#/nowhere")
    expect(page.get_by_role("alert")).to_contain_text("There is no page")


def test_a_graph_asks_for_its_token_and_the_tab_keeps_it(site: Site) -> None:
    site.fake.token = "may-read"
    page = site.open()
    page.get_by_label("Token", exact=True).fill("wrong")
    page.keyboard.press("Enter")
    page.get_by_label("Token", exact=True).fill("may-read")
    page.keyboard.press("Enter")
    expect(page.locator(".filters .shown")).to_have_text("10,000 rollouts")
    page.reload()
    expect(page.locator(".filters .shown")).to_have_text("10,000 rollouts")
    assert "may-read" not in page.evaluate("JSON.stringify(localStorage)")


def test_hostile_text_is_text_wherever_it_stands(site: Site) -> None:
    site.fake.columns["mask_reason"][0] = HOSTILE
    site.fake.columns["group"][1] = HOSTILE
    turn = site.fake.trajectories(LONG)
    assert turn is not None
    site.fake.notes.append(
        {"rollout": TREE, "call": f"{TREE}-c3", "name": HOSTILE, "note": HOSTILE, "by": HOSTILE, "at": 0}
    )
    for place in (
        "#/",
        f"#/rollout/{TREE}/call/{TREE}-c3",
        f"#/rollout/{LONG}/trajectory/0/token/41",
        f"#/search?q={quote('<img')}&where=text",
        f"#/search?q={quote(HOSTILE)}&where=id",
        f"#/group/{quote(HOSTILE, safe='')}",
        f"#/rollout/{quote(HOSTILE, safe='')}",
    ):
        page = site.open(place)
        expect(page.locator("body")).to_contain_text("<img")
        assert page.evaluate("window.hacked") is None, place
        assert page.locator("img, main script, main iframe").count() == 0, place
        page.close()


# --- looks ------------------------------------------------------------------------------------------------------------


def test_dark_follows_the_system_until_one_is_chosen(site: Site) -> None:
    page = site.open(color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    becomes = f"colour => {ground} === colour"
    dark = page.evaluate(ground)
    page.emulate_media(color_scheme="light")
    page.wait_for_function(f"colour => {ground} !== colour", arg=dark)
    light = page.evaluate(ground)
    button = page.get_by_role("button", name=re.compile("^Theme"))
    button.click()
    page.wait_for_function(becomes, arg=dark)
    page.reload()
    page.get_by_role("button", name="Theme: dark").wait_for()
    page.wait_for_function(becomes, arg=dark)
    button.click()
    page.wait_for_function(becomes, arg=light)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_the_contrast_that_eyes_need(site: Site, scheme: str) -> None:
    """WCAG AA: 4.5 to 1, for every text in sight on its own ground."""
    for place in (
        "#/",
        f"#/rollout/{TREE}",
        f"#/rollout/{LONG}/trajectory/0/token/400",
        f"#/rollout/{LONG}/trajectory/0/splits",
    ):
        page = site.open(place, color_scheme=scheme)
        page.locator(".row-place, .line, .sides").first.wait_for()
        modes = ["kind", "logprob", "version", "difference", "entropy"] if "token" in place else [None]
        for mode in modes:
            if mode is not None:
                page.get_by_label("Colour by").select_option(mode)
            assert page.evaluate(FAINT) == [], f"{place} {mode}"
        page.close()


FAINT: Final = """() => {
    const parse = text => text.match(/[\\d.]+/g).map(Number);
    const linear = c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const light = rgb => [0.2126, 0.7152, 0.0722].reduce((sum, weight, at) => sum + weight * linear(rgb[at] / 255), 0);
    const ground = one => {
        for (let at = one; at; at = at.parentElement) {
            const colour = parse(getComputedStyle(at).backgroundColor);
            if (colour.length < 4 || colour[3] === 1) return colour;
        }
        return [255, 255, 255];
    };
    const faint = new Set();
    for (const one of document.querySelectorAll("#app *")) {
        const own = [...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
        if (!own || !one.checkVisibility() || one.disabled) continue;
        const [more, less] = [light(parse(getComputedStyle(one).color)), light(ground(one))].sort((x, y) => y - x);
        if ((more + 0.05) / (less + 0.05) < 4.5) faint.add(`${one.className}: ${one.textContent.slice(0, 30)}`);
    }
    return [...faint];
}"""


def test_a_phone_shows_all_of_it(site: Site) -> None:
    token = f"#/rollout/{LONG}/trajectory/0/token/400"
    for place in ("#/", f"#/rollout/{TREE}", token, "#/group/task-0000", "#/search?q=year&where=text"):
        page = site.open(place, viewport=PHONE)
        page.locator(".row-place, .line, .plain, .hits li").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], f"{place} scrolls sideways"
        page.close()
    page = site.open(token, viewport=PHONE, has_touch=True)
    page.locator("#t405").tap()
    expect(page.get_by_label("Token", exact=True).get_by_role("heading")).to_contain_text("Token 405")


def test_help_lists_the_keys_and_closes_with_escape(site: Site) -> None:
    page = site.open()
    page.locator(".job-table .row-place").first.wait_for()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Keys")).to_be_hidden()
    expect(page.get_by_role("grid", name="Rollouts")).to_be_visible()


def test_nothing_is_asked_of_anybody_else(site: Site) -> None:
    page = site.browser.new_page(viewport=WINDOW)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{site.address}#/rollout/{LONG}/trajectory/0")
    page.locator(".line").first.wait_for()
    assert all(url.startswith(site.address) for url in asked)


# --- what is committed ------------------------------------------------------------------------------------------------


def test_the_built_files_are_those_of_the_sources(tmp_path: Path) -> None:
    """A change of the sources without `make ui` fails here."""
    command = ["npm", "--prefix", str(ROOT / "inspector"), "run", "--silent", "build"]
    subprocess.run(command, check=True, env={**os.environ, "INSPECTOR_OUT": str(tmp_path)}, stdout=subprocess.DEVNULL)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {
        file.name: file.read_bytes() for file in STATIC.iterdir()
    }


def test_pictures_for_the_docs(site: Site, screenshots: bool) -> None:
    """Made again with --screenshots; without, they must be there."""
    tokens = site.fake.tokens(LONG, 0, 100_000)
    assert tokens is not None
    why = tokens["kinds"].index(2) + 12
    token = f"#/rollout/{LONG}/trajectory/0/token"
    pictures: dict[str, tuple[str, str, dict[str, Any]]] = {
        "job": ("#/", ".plot", {}),
        "rollout": (f"#/rollout/{TREE}/call/{TREE}-c6", ".message", {}),
        "trajectory": (f"{token}/{why}", f"#t{why}", {}),
        "splits": (f"#/rollout/{LONG}/trajectory/0/splits", ".sides", {"viewport": {"width": 1000, "height": 440}}),
        "dark": (f"{token}/2106", "#t2106", {"color_scheme": "dark"}),
        "phone": (f"{token}/2106", "#t2106", {"viewport": PHONE}),
    }
    for name, (place, ready, options) in pictures.items():
        file = PICTURES / f"inspector-{name}.png"
        if screenshots:
            page = site.open(place, **{"viewport": {"width": 1200, "height": 720}, **options})
            page.locator(ready).first.wait_for()
            if name == "dark":
                page.get_by_label("Colour by").select_option("logprob")
            page.screenshot(path=file)
            page.close()
        assert file.is_file()
