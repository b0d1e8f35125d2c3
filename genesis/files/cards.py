"""The head of a README on the hub: YAML between two lines of three dashes, which says what a model or data set is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from genesis.files.paths import exists, safe_join
from genesis.files.strict_json import read_limited

README = "README.md"
MAX_BYTES = 8 << 20


def read_head(folder: Path) -> Mapping[str, Any]:
    """The values in the head of a folder's README; none where it has no head, or one that cannot be read.

    Raises:
        ModelError: it is no regular file, a link or too large.
    """
    import yaml

    data = read_limited(safe_join(folder, README), MAX_BYTES) if exists(folder / README) else b""
    text = data.decode("utf-8", "replace")
    begin, _, rest = text.removeprefix("\ufeff").replace("\r\n", "\n").partition("---\n")
    head, end, _ = rest.partition("\n---\n")
    if begin or not end:
        return {}
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(head, loader)):
            return {}  # a few of them are as large as a million values
        found = yaml.load(head, loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def with_head(values: Mapping[str, Any], text: str) -> bytes:
    """A README with these values in its head; those that are None or empty are left out."""
    import yaml

    kept = {key: value for key, value in values.items() if value}
    return f"---\n{yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)}---\n\n{text}".encode()
