"""The site has every page once, and the pages that are written from the code are as it is. `make docs` builds it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import yaml

from benchmarks.__main__ import BENCHMARKS
from tests.docs.pages import PAGES, ROOT
from tests.reference import config_page, records_page


class Loader(yaml.SafeLoader):
    """Reads what is no plain YAML as nothing."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def in_navigation(entry: object) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        for value in entry.values():
            yield from in_navigation(value)
    elif isinstance(entry, list):
        for each in entry:
            yield from in_navigation(each)


def test_every_page_is_in_the_navigation_once() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)
    listed = sorted(in_navigation(site["nav"]))
    docs = ROOT / "docs"
    assert listed == sorted(str(page.relative_to(docs)) for page in PAGES if page.is_relative_to(docs))


@pytest.mark.parametrize(
    ("page", "document"), [("config.md", config_page.document), ("records.md", records_page.document)]
)
def test_what_is_written_from_the_code_is_as_the_code(page: str, document: Callable[[], str]) -> None:
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == document(), "run `make reference`"


def test_every_key_says_what_it_means() -> None:
    silent = [key for *_, model in config_page.SECTIONS for key, _, _, text in config_page.rows(model) if not text]
    assert silent == []


def test_every_benchmark_is_listed() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [each.name for each in BENCHMARKS]
