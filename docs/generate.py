"""The generated pages: docs/configuration.md and configs/chats.jsonl from the schema, the API from docstrings.

`python -m docs.generate` writes the first two. `make docs` also builds the website, which includes the API reference.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from docs import examples
from genesis.train.config import Config, fine_tuning_defaults, json_schema

__all__ = ["PAGES", "api_pages", "configuration_page", "is_current"]

REPOSITORY = Path(__file__).resolve().parents[1]
MODULES = (
    "genesis", "genesis.nn", "genesis.nn.functional", "genesis.optim", "genesis.optim.lr_scheduler",
    "genesis.optim.swa_utils", "genesis.autograd", "genesis.distributions",
    "genesis.cuda", "genesis.custom", "genesis.profiler", "genesis.utils.data", "genesis_models",
)  # fmt: skip


# --- The configuration ------------------------------------------------------------------------------------------------

CONFIGURATION = """\
# Configuration

`make docs` writes this page from the schema in `genesis/train/config.py`. `genesis schema` prints the schema as JSON,
so that editors can complete and check a configuration.

A configuration is a YAML file with the sections below. Change any setting on the command line, as in
`genesis train quickstart optim.lr=1e-3`. An unknown key is an error that names the nearest one. A run writes its
configuration, with every default filled in, to `config.resolved.yaml` in its folder. `--resume` continues with these
settings, including overrides. On resume you may change settings marked *may change*, on the command line or in the
file; other changes are refused.
"""


FINE_TUNING = """\
## Defaults of fine-tuning

A run that starts from the weights of `model.path` has other defaults, and prints those that it uses. Settings in your
configuration take precedence. The rates are for AdamW; other optimizers' rates change by the same factor.
"""


def configuration_page() -> str:
    """docs/configuration.md."""
    lines = [CONFIGURATION, *_fine_tuning(), ""]
    for name, section in _sections():
        lines += [f"## {name}", "", _sentence(section["description"]), ""]
        required = section.get("required", ())
        marks = {"x-resume": section.get("x-resume")}
        rows = [_setting(name, key, marks | field, key in required) for key, field in section["properties"].items()]
        lines += [
            *markdown_table(("setting", "value", "default", "meaning"), rows, ("setting", "value", "meaning")),
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def markdown_table(names: Sequence[str], rows: Sequence[Sequence[object]], words: Sequence[str]) -> Iterator[str]:
    """The lines of a table; columns of `words` are aligned left, numbers right."""
    yield "| " + " | ".join(names) + " |"
    yield "|" + "|".join(" --- " if name in words else " ---: " for name in names) + "|"
    for row in rows:
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"


def _fine_tuning() -> list[str]:
    """Return the section that compares the defaults from scratch, with `model.path` or `lora`, and for preferences."""
    path, lora = {"path": "folder"}, {"lora": {}}
    required = {"data": {"train": "x"}, "train": {"output_dir": "run", "steps": 1}}
    runs = [
        Config.model_validate(run)
        for run in (
            {"model": {"preset": "0.5B"}, **required},
            {"model": path, **required},
            {"model": path, **lora, **required},
            {"model": path, "objective": "dpo", **required},
            {"model": path, "objective": "dpo", **lora, **required},
        )
    ]
    keys = list(dict.fromkeys(key for run in runs for key in fine_tuning_defaults(run)))
    columns = [dict(run.settings()) for run in runs]
    rows = [[f"`{key}`", *(f"`{json.dumps(column[key])}`" for column in columns)] for key in keys]
    names = ("setting", "from scratch", "with `model.path`", "with `lora`", "preferences", "preferences with `lora`")
    return [FINE_TUNING, *markdown_table(names, rows, ("setting",))]


def _sections() -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the JSON schema of each section."""
    schema = json_schema()
    for name, field in schema["properties"].items():
        reference = next(each["$ref"] for each in (field, *field.get("anyOf", ())) if "$ref" in each)
        yield name, schema["$defs"][reference.rpartition("/")[2]]


def _setting(section: str, key: str, field: dict[str, Any], is_required: bool) -> list[str]:
    default = "required" if is_required else f"`{json.dumps(field['default'])}`" if "default" in field else "–"
    meaning = _sentence(field["description"])
    if field.get("x-resume"):
        meaning += " *May change.*"
    return [f"`{section}.{key}`", _kind(field), default, meaning]


def _kind(field: dict[str, Any]) -> str:
    """The type, choices and bounds of a setting, in a few words."""
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "anyOf" in field:
        kinds = [_kind(each) for each in field["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    kind = {"array": "list", "object": "mapping", "string": "text", "boolean": "`true` or `false`"}.get(
        field["type"], field["type"]
    )
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {field[bound]:g}" for bound, sign in signs.items() if bound in field]
    return f"{kind} {', '.join(bounds)}".strip()


# --- The example of chats ---------------------------------------------------------------------------------------------


def chats_page() -> str:
    """configs/chats.jsonl, the source `example:chats`: several questions about each setting, with answers."""
    chats: list[list[str]] = []
    for name, section in _sections():
        for key, field in section["properties"].items():
            setting, meaning, kind = f"{name}.{key}", _sentence(field["description"]), _kind(field).replace("`", "")
            chats.append([f"What does the setting {setting} of Genesis do?", meaning])
            chats.append([f"In a configuration of Genesis, what is {key} in the section {name}?", meaning])
            chats.append([f"What does {setting} take?", f"{kind[0].upper()}{kind[1:]}."])
            chats.append([f"Which setting of Genesis is this? {meaning}", f"It is {setting}."])
            if "default" in field:
                default = json.dumps(field["default"])
                chats.append([f"What does {setting} do?", meaning, "And what is its default?", f"It is {default}."])
    rows = [{"messages": [_message(i, text) for i, text in enumerate(chat)]} for chat in chats]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _message(index: int, text: str) -> dict[str, str]:
    return {"role": "assistant" if index % 2 else "user", "content": text}


# --- The API ----------------------------------------------------------------------------------------------------------

API = """\
# API reference

This reference is generated from the docstrings. Names, arguments and semantics follow PyTorch; [Genesis or
PyTorch?](../genesis-or-pytorch.md) lists the differences.

The examples begin with these lines, after `import genesis` and `from genesis import nn, optim`:

```python
"""


def api_pages() -> dict[str, str]:
    """The Markdown of each page of the API reference, by file name; the website includes them."""
    pages = {f"{name}.md": _module_page(name) for name in MODULES}
    rows = [f"- [{name}]({name}.md): {_first_sentence(importlib.import_module(name).__doc__)}" for name in MODULES]
    return {"index.md": f"{API}{examples.SETUP}```\n\n" + "\n".join(rows) + "\n", **pages}


def _module_page(name: str) -> str:
    module = importlib.import_module(name)
    prefix = "" if name == "genesis" else f"{name.removeprefix('genesis.')}."
    shown = examples.examples()
    names = sorted(getattr(module, "__all__", ()), key=str.lower)
    values = [each for each in names if not callable(getattr(module, each))]
    lines = [f"# {name}", "", _markdown(module.__doc__), ""]
    for each in names:
        if each not in values:
            lines += _entry(each, getattr(module, each))
            lines += _example(shown.get(f"{prefix}{each}"))
    if values:
        lines += ["## Modules and values", "", ", ".join(f"`{each}`" for each in values), ""]
    return "\n".join(lines).rstrip() + "\n"


def _entry(name: str, value: Any) -> Iterator[str]:
    """The heading, signature and docstring of a function or class, and a row for each method that a class documents."""
    call = f"{name}{_signature(value)}"
    if len(call) > 80:
        call = f"{name}(\n    " + call[len(name) + 1 : -1].replace(", ", ",\n    ") + ",\n)"
    yield from (f"## {name}", "", "```python", call, "```", "", _markdown(value.__doc__), "")
    if inspect.isclass(value):
        members = {key: getattr(member, "__func__", member) for key, member in sorted(vars(value).items())}
        shown = {key: each for key, each in members.items() if key[0] != "_" and callable(each) and each.__doc__}
        yield from ["**Methods**", ""] * bool(shown)
        for key, function in shown.items():
            yield f"- `{key}{_signature(function)}`: {_first_sentence(function.__doc__)}"
        yield ""


def _example(example: tuple[str, str] | None) -> list[str]:
    """The code block of an example of docs/examples.txt."""
    return ["```python", f">>> {example[0]}", *example[1].splitlines(), "```", ""] if example else []


def _markdown(doc: str | None) -> str:
    """A docstring whose sections (`Args:` and the like) become lists."""
    lines: list[str] = []
    in_section = False
    for line in inspect.cleandoc(doc or "").splitlines():
        if re.fullmatch(r"(Args|Attributes|Returns|Raises|Yields):", line):
            in_section = True
            lines += ["", f"**{line[:-1]}**", ""]
        elif in_section and (found := re.fullmatch(r"    ([\w*][\w.*, ]*): (.*)", line)):
            lines.append(f"- `{found[1]}`: {found[2]}")
        elif in_section and line.startswith("    "):
            lines.append(("  " if lines and lines[-1] else "") + line.strip())
        else:
            in_section = in_section and not line.strip()
            lines.append(line)
    return "\n".join(lines)


def _signature(value: Callable[..., Any]) -> str:
    """Names and defaults. Docstrings and editors show the types."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    arguments = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in arguments]
    text = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return re.sub(r"<object object at \w+>", "…", text)


def _first_sentence(doc: str | None) -> str:
    paragraph = " ".join((doc or "").strip().split("\n\n")[0].split())
    found = re.match(r".+?[.:](?=\s[A-Z`(]|$)", paragraph)
    return _sentence(found[0] if found else paragraph)


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text if text.endswith((".", "?", "!")) or not text else text.rstrip(":") + "."


# --- The pages --------------------------------------------------------------------------------------------------------

PAGES: dict[str, Callable[[], str]] = {
    "docs/configuration.md": configuration_page,
    "configs/chats.jsonl": chats_page,
    "docs/examples.txt": examples.page,
}


def is_current(name: str) -> bool:
    """Whether `make docs` would leave the page unchanged."""
    path = REPOSITORY / name
    return path.is_file() and path.read_text() == PAGES[name]()


def main() -> int:
    """Write the pages."""
    for name, make in PAGES.items():
        path = REPOSITORY / name
        path.write_text(make())
        print(f"written: {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
