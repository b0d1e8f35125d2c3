"""What mkdocs adds to the pages of docs/: the README as the start page, and the API reference (hooks of mkdocs.yml)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from docs.generate import REPOSITORY, api_pages

TEXTS = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files of docs/."""
    pages = {page: (REPOSITORY / source).read_text() for page, source in TEXTS.items()}
    pages |= {f"api/{name}": text for name, text in api_pages().items()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links and pictures at files of the website; a link to another file of the repository becomes its path."""
    folder = Path("." if page.file.src_uri in TEXTS else "docs", page.file.src_uri).parent

    def replace(link: re.Match[str]) -> str:
        mark, text, target, anchor = link[1], link[2], link[3], link[4] or ""
        if "://" in target or not target:
            return link[0]
        path = (REPOSITORY / folder / target).resolve()
        if page.file.src_uri.startswith("api/"):
            return link[0]
        name = path.relative_to(REPOSITORY).as_posix()
        source = next((each for each, origin in TEXTS.items() if origin == name), name.removeprefix("docs/"))
        if files.get_file_from_path(source) is None:
            return f"`{name}`" if text == name else f"{text} (`{name}`)"
        depth = "../" * page.file.src_uri.count("/")
        return f"{mark}[{text}]({depth}{source}{anchor})"

    return re.sub(r"(!?)\[([^\]]*)\]\(\s*([^)#\s]*)(#[^)\s]*)?\s*\)", replace, markdown)
