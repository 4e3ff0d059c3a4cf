"""What the site does beyond MkDocs: links to files of the repository lead to copies of them in the site.

The pages are read in the repository too, where `../gym_capture/errors.py` is right. The site holds such a file as
`source/gym_capture/errors.py.txt`, so that it is whole without a network. A link to a folder becomes its text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_PAGES = {"README.md": "index.md"}


def on_files(files: Files, config: Any) -> Files:
    root = Path(config["config_file_path"]).parent
    held = {file.src_uri for file in files}
    for page in files.documentation_pages():
        for _, target, _ in _LINK.findall(page.content_string):
            path = _in_repository(page.src_uri, target)
            if path is not None and path not in _PAGES and (root / path).is_file() and _copy(path) not in held:
                held.add(_copy(path))
                files.append(File.generated(config, _copy(path), content=(root / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    root = Path(config["config_file_path"]).parent
    here = page.file.src_uri

    def within_the_site(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = _in_repository(here, target)
        if path is None or not (root / path).exists():
            return link[0]  # MkDocs says what is wrong with it
        if (root / path).is_dir():
            return text
        to = _PAGES.get(path) or _copy(path)
        return f"[{text}]({posixpath.relpath(to, posixpath.dirname(here) or '.')}{anchor})"

    return _LINK.sub(within_the_site, markdown)


def _in_repository(page: str, target: str) -> str | None:
    """The path of a link's target from the root of the repository, unless the site has it anyway."""
    if "://" in target or target.startswith(("/", "mailto:")):
        return None
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    is_page = path.startswith("docs/") and not path.endswith(".py") and not path.startswith("docs/examples/")
    return None if is_page and path != "docs/trainers" else path


def _copy(path: str) -> str:
    return f"source/{path}.txt"
