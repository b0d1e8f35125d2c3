"""What the pictures of a profile share: a self-contained SVG in light and dark, and text that fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from xml.sax.saxutils import escape, quoteattr

CHARACTER = 6.7  # pixels that a character of 11 px takes, at most
_STYLE = """
svg { color-scheme: light dark; max-width: 100%; height: auto;
  background: #fff; font: 11px ui-monospace, Menlo, Consolas, monospace; }
text { fill: #1b1f27; } .soft { fill: #5d6472; } .line { stroke: #d9dce3; } .mark { stroke: #1b1f27; }
.title { font-size: 15px; font-weight: 600; }
.on { fill: #10131a; pointer-events: none; } .frame { stroke: #fff; stroke-width: .6; }
.frame:hover, .area:hover { filter: brightness(1.12); }
@media (prefers-color-scheme: dark) {
  svg { background: #15171c; } text { fill: #e8eaf0; } .soft { fill: #9aa2b1; }
  .line { stroke: #333842; } .mark { stroke: #e8eaf0; } .frame { stroke: #15171c; } .on { fill: #10131a; }
}
"""


def document(width: float, height: float, title: str, body: Iterable[str], colours: Mapping[str, str]) -> str:
    """A picture; `colours` gives the fill of each class."""
    fills = "".join(f".{name} {{ fill: {colour}; }}\n" for name, colour in colours.items())
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {short(width)} {short(height)}"'
            f' width="{short(width)}" height="{short(height)}" role="img" aria-label={quoteattr(title)}>',
            f"<style>{_STYLE}{fills}</style>",
            *body,
            "</svg>\n",
        ]
    )


def element(name: str, content: str = "", **attributes: object) -> str:
    """An element; `class_` is written as class, and content is markup."""
    words = " ".join(
        f"{key.rstrip('_').replace('_', '-')}={quoteattr(short(v) if isinstance(v, float) else str(v))}"
        for key, v in attributes.items()
    )
    return f"<{name} {words}>{content}</{name}>" if content else f"<{name} {words}/>"


def titled(markup: str, title: str) -> str:
    """A group that shows `title` under the pointer."""
    return f"<g><title>{escape(title)}</title>{markup}</g>"


def fitted(text: str, width: float) -> str:
    """`text` cut to `width` pixels, as markup; empty where nothing readable fits."""
    count = int(width / CHARACTER)
    if count < 3:
        return ""
    return escape(text if len(text) <= count else text[: count - 1] + "…")


def short(number: float) -> str:
    """A number without needless digits."""
    return f"{number:.3f}".rstrip("0").rstrip(".")
