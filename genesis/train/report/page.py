"""The page about runs: one HTML file without scripts or anything from elsewhere, light and dark, for any width."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from importlib import resources
from itertools import groupby
from typing import Any, NamedTuple

import yaml

from genesis.errors import ConfigError, escape
from genesis.train.config_file import RESOLVED
from genesis.train.report.curves import Chart, drawn, kinds_of
from genesis.train.report.runs import Run, named
from genesis.train.strict_yaml import parse

MOST_RUNS = 6  # as many colours as people tell apart
WIDE, NARROW = (1040, 300), (350, 240)
SAMPLED = 20  # steps whose samples are shown, the last ones
MOST_DIGITS = 1e15  # numbers from there on are shown with an exponent
LONGEST = 4000  # characters of a sample, and of a setting's value
SETTINGS = 100  # rows of a table of evaluations


class Drawn(NamedTuple):
    """A chart in both widths."""

    title: str
    unit: str
    wide: Chart
    narrow: Chart


def page_of(runs: Sequence[Run], *, refresh: int | None = None) -> str:
    """The page.

    Args:
        refresh: seconds after which a browser asks for it again; None: never.
    """
    import jinja2

    own, shared = resources.files("genesis.train.report"), resources.files("genesis.report")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=False)
    template = environment.from_string(own.joinpath("run.html").read_text("utf-8"))
    names = _names(runs)
    return template.render(
        css=shared.joinpath("page.css").read_text("utf-8") + own.joinpath("run.css").read_text("utf-8"),
        refresh=refresh,
        now=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S"),
        title=f"Run {names[0]}" if len(runs) == 1 else f"{len(runs)} runs",
        names=names,
        runs=runs,
        charts=list(_charts(runs, names)),
        figures=[dict(_figures(run)) for run in runs],
        evaluations=[_evaluations(run) for run in runs],
        samples=[_samples(run) for run in runs],
        differing=_differing(runs, names) if len(runs) > 1 else [],
    )


def _names(runs: Sequence[Run]) -> list[str]:
    """The name of each run: its `train.name`, or its folder's where it has none that is its own."""
    names = [_name(_parsed(run.config)) for run in runs]
    folders = named([run.folder for run in runs])
    return [name if name and names.count(name) == 1 else folder for name, folder in zip(names, folders, strict=True)]


def _name(config: Any) -> str:
    train = config.get("train") if isinstance(config, dict) else None
    return escape(train.get("name") or "") if isinstance(train, dict) else ""


def _charts(runs: Sequence[Run], names: Sequence[str]) -> list[Drawn]:
    found = []
    for kind in kinds_of(runs):
        wide, narrow = (drawn(kind, runs, names, *size) for size in (WIDE, NARROW))
        if wide is not None and narrow is not None:
            found.append(Drawn(kind.title, kind.unit, wide, narrow))
    return found


def _figures(run: Run) -> list[tuple[str, str]]:
    """What is said of a run at a glance."""
    best = run.least("eval/loss")
    found: list[tuple[str, float | None, str]] = [
        ("steps", run.last_step, ",.0f"),
        ("tokens", run.last("train/num_tokens"), ",.0f"),
        ("loss", run.last("train/loss"), ".4f"),
        ("held-out loss", run.last("eval/loss"), ".4f"),
        ("lowest held-out loss", None if best is None else best[1], ".4f"),
        ("bits per byte", run.last("eval/bits_per_byte"), ".3f"),
        ("token accuracy", run.last("eval/token_accuracy"), ".3f"),
        ("tokens a second", run.middle("perf/tokens_per_second"), ",.0f"),
        ("step, ms", run.middle("perf/step_ms"), ",.1f"),
        ("memory, GiB", _scaled(run.most("memory/max_allocated"), 2.0**-30), ".2f"),
    ]
    rows = [(name, _number(value, form)) for name, value, form in found if value is not None]
    bad = [("rows that are not finite, or beyond 1e100", str(run.bad_rows))] if run.bad_rows else []
    return rows + bad


def _number(value: float, form: str) -> str:
    return format(value, form if abs(value) < MOST_DIGITS else ".3e")


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


def _evaluations(run: Run) -> list[tuple[str, ...]]:
    """Step, loss, perplexity, bits per byte and token accuracy of the last evaluations, the newest first."""
    names, forms = ("loss", "perplexity", "bits_per_byte", "token_accuracy"), (".4f", ",.2f", ".3f", ".3f")
    columns = [dict(run.series.get(f"eval/{name}", ())[-SETTINGS:]) for name in names]
    return [
        (f"{step:,.0f}", *(_number(c[step], f) if step in c else "–" for c, f in zip(columns, forms, strict=True)))
        for step in sorted(columns[0], reverse=True)
    ]


def _samples(run: Run) -> list[tuple[int, list[tuple[str, str]]]]:
    """The samples of the last steps that had some, the newest first."""
    found = [
        (step, [(_short(each.prompt), _short(each.text)) for each in group])
        for step, group in groupby(run.samples, lambda sample: sample.step)
    ]
    return found[::-1][:SAMPLED]


def _short(text: str) -> str:
    shown = "".join(c if c.isprintable() or c in "\n\t" else escape(c) for c in text[:LONGEST])
    return shown + ("…" if len(text) > LONGEST else "")


def _differing(runs: Sequence[Run], names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The settings in which runs differ, with the value of each; a section that a run lacks has no row of its own."""
    flat = [dict(_flat(_parsed(run.config))) for run in runs]
    keys = dict.fromkeys(key for each in flat for key in each)
    return [
        (key, values)
        for key in keys
        if key not in ("train.output_dir", "train.name")
        and len(set(values := [each.get(key, "–") for each in flat])) > 1
        and not any(other.startswith(f"{key}.") for other in keys)
    ]


def _parsed(text: str) -> Any:
    try:
        parse(text, RESOLVED)  # refuses what would be without end, as aliases of aliases
        return yaml.safe_load(text)
    except (ConfigError, yaml.YAMLError, ValueError, RecursionError):
        return None


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Keys and values as YAML."""
    if isinstance(value, dict) and value:
        return [row for key, each in value.items() for row in _flat(each, f"{prefix}.{key}" if prefix else str(key))]
    text = yaml.safe_dump(value, default_flow_style=True, width=LONGEST, allow_unicode=True, sort_keys=False)
    return [(prefix, _short(text.removesuffix("\n").removesuffix("\n...")))]
