"""The picture and the table of docs/architecture.md have the packages that there are, with the directions they keep."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from tests.docs.pages import ROOT
from tests.test_package_graph import CORE, MAY_IMPORT

PICTURE = ROOT / "docs" / "architecture.svg"
SVG = "{http://www.w3.org/2000/svg}"
ROW = re.compile(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", re.MULTILINE)
BESIDE_THE_ROAD = {CORE, "cli", "commands", "cluster", "conformance", "demo", "inspector"}
"""What no request and no trajectory goes through."""


def test_the_table_is_the_rule() -> None:
    rows = ROW.findall((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    assert {package: set(re.findall(r"\w+", others)) for package, others in rows} == MAY_IMPORT
    assert len(rows) == len(MAY_IMPORT)


def test_the_picture_has_the_packages_of_the_road() -> None:
    (group,) = ElementTree.parse(PICTURE).iterfind(f"{SVG}g[@class='packages']")
    drawn = {name for text in group for name in (text.text or "").split(", ")}
    assert drawn == MAY_IMPORT.keys() - BESIDE_THE_ROAD
