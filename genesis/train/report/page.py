"""The report page of runs, one HTML file without scripts or external resources, and a run's `loss.svg`."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from genesis.errors import ConfigError, escape
from genesis.files.atomic import write_file
from genesis.measure.svg import document, element, text
from genesis.train.config_file import RESOLVED
from genesis.train.progress import figure
from genesis.train.report.curves import kinds_of, make_chart
from genesis.train.report.runs import Run, named, read_run
from genesis.train.strict_yaml import emit_value, parse

MOST_RUNS = 6  # people distinguish about six colours
WIDE, NARROW = (1040, 300), (350, 240)
SAMPLED = 20  # last steps whose samples are shown
LONGEST = 4000  # characters of a sample or of a setting's value
EVALUATIONS = 100  # rows of a table of evaluations
LOOKS = "Thin: as logged. Thick: a mean over a twentieth of the steps. Dashed: held out."

PICTURE_NAME = "loss.svg"
PICTURE_WIDTH, HEAD = 1000, 30  # HEAD: height of a line of text
# Plain colours: only browsers support variables of CSS.
PICTURE_STYLE = """\
text { font-family: sans-serif; font-size: 12px; fill: #55606c; }
.title { font-size: 16px; font-weight: bold; fill: #1a1e23; }
.axis { stroke: #dfe3e8; }
.curve { fill: none; stroke: #0b66ad; stroke-width: 2; stroke-linejoin: round; }
.raw { stroke-width: 1; stroke-opacity: .35; }
.held-out { stroke: #c65300; stroke-dasharray: 6 4; }
.point-of { fill: #0b66ad; }
.held-out ~ .point-of { fill: #c65300; }
"""


class Views(NamedTuple):
    """A chart as SVG in both widths, wide and narrow."""

    title: str
    unit: str
    wide: str
    narrow: str


def loss_picture(folder: Path) -> None:
    """Draw the losses and the learning rate of a run to its `loss.svg`; the same metrics give the same bytes.

    Raises:
        DataError: the metrics file holds something other than rows of metrics.
        DiskError: the metrics cannot be read, or the picture cannot be written.
    """
    run = read_run(folder)
    [name] = _names([run])
    parts, top = [element("rect", width="100%", height="100%", fill="white"), text(name, 14, 24, class_="title")], HEAD
    for kind in kinds_of([run]):
        height = 320 if top == HEAD else 180
        chart = make_chart(kind, [run], [name], PICTURE_WIDTH, height) if kind.in_picture else None
        if chart is not None:
            metric, look = kind.metrics[-1]
            ends = run.series.get(metric) if look == "held-out" else None
            last = "" if ends is None else f" · held out {ends[1, -1]:.4g} at step {ends[0, -1]:,.0f}"
            head = f"{kind.title}{', ' * bool(kind.unit)}{kind.unit}{last}"
            parts += [
                text(head, 14, top + 22),
                chart.svg(kind.title, y=top + HEAD, width=PICTURE_WIDTH, height=height),
            ]
            top += HEAD + height
    caption = f"{LOOKS} From left to right: steps." if len(parts) > 2 else "Nothing is recorded yet."
    parts.append(text(caption, 14, top + 20))
    write_file(folder / PICTURE_NAME, document(PICTURE_WIDTH, top + HEAD, name, PICTURE_STYLE, parts).encode())


def page_of(runs: Sequence[Run], *, refresh: int | None = None) -> str:
    """Return the HTML page.

    Args:
        refresh: seconds after which a browser reloads the page; None: never.
    """
    import jinja2

    own = resources.files("genesis.train.report")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=False)
    template = environment.from_string(own.joinpath("run.html").read_text("utf-8"))
    names = _names(runs)
    return template.render(
        css=own.joinpath("page.css").read_text("utf-8") + own.joinpath("run.css").read_text("utf-8"),
        refresh=refresh,
        now=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S"),
        title=f"Run {names[0]}" if len(runs) == 1 else f"{len(runs)} runs",
        names=names,
        runs=runs,
        charts=_charts(runs, names),
        looks=LOOKS,
        figures=[dict(_figures(run)) for run in runs],
        evaluations=[_evaluations(run) for run in runs],
        samples=[_samples(run) for run in runs],
        differing=_differing(runs, names) if len(runs) > 1 else [],
    )


def _names(runs: Sequence[Run]) -> list[str]:
    """Return the name of each run: its `train.name` if it is unique, or else its folder's name."""
    names = [_name(_parsed(run.config)) for run in runs]
    folders = named([run.folder for run in runs])
    return [name if name and names.count(name) == 1 else folder for name, folder in zip(names, folders, strict=True)]


def _name(config: dict[str, Any]) -> str:
    train = config.get("train")
    return escape(train.get("name") or "") if isinstance(train, dict) else ""


def _charts(runs: Sequence[Run], names: Sequence[str]) -> list[Views]:
    found = []
    for kind in kinds_of(runs):
        wide, narrow = (make_chart(kind, runs, names, *size) for size in (WIDE, NARROW))
        if wide is not None and narrow is not None:
            both = ((wide, "wide"), (narrow, "narrow"))
            found.append(Views(kind.title, kind.unit, *(c.svg(kind.title, class_=w, width="100%") for c, w in both)))
    return found


def _figures(run: Run) -> list[tuple[str, str]]:
    memory = run.most("memory/max_allocated")
    found: list[tuple[str, float | None, str]] = [
        ("steps", run.last_step, ",.0f"),
        ("tokens", run.last("train/num_tokens"), ",.0f"),
        ("loss", run.last("train/loss"), ".4f"),
        ("held-out loss", run.last("eval/loss"), ".4f"),
        ("lowest held-out loss", run.least("eval/loss"), ".4f"),
        ("bits per byte", run.last("eval/bits_per_byte"), ".3f"),
        ("token accuracy", run.last("eval/token_accuracy"), ".3f"),
        ("tokens a second", run.middle("perf/tokens_per_second"), ",.0f"),
        ("step, ms", run.middle("perf/step_ms"), ",.1f"),
        ("memory, GiB", None if memory is None else memory / 2**30, ".2f"),
    ]
    rows = [(name, figure(value, form)) for name, value, form in found if value is not None]
    bad = [("rows that are not finite, or beyond 1e100", str(run.bad_rows))] if run.bad_rows else []
    return rows + bad


def _evaluations(run: Run) -> list[tuple[str, ...]]:
    """Return step, loss, perplexity, bits per byte and token accuracy of the last evaluations, newest first."""
    names, forms = ("loss", "perplexity", "bits_per_byte", "token_accuracy"), (".4f", ",.2f", ".3f", ".3f")
    columns = [dict(run.series.get(f"eval/{name}", np.empty((2, 0)))[:, -EVALUATIONS:].T.tolist()) for name in names]
    return [
        (f"{step:,.0f}", *(figure(c[step], f) if step in c else "–" for c, f in zip(columns, forms, strict=True)))
        for step in sorted(columns[0], reverse=True)
    ]


def _samples(run: Run) -> list[tuple[int, list[tuple[str, str]]]]:
    found = [
        (step, [(_short(each.prompt), _short(each.text)) for each in group])
        for step, group in groupby(run.samples, lambda sample: sample.step)
    ]
    return found[::-1][:SAMPLED]


def _short(text: str) -> str:
    shown = "".join(c if c.isprintable() or c in "\n\t" else escape(c) for c in text[:LONGEST])
    return shown + ("…" if len(text) > LONGEST else "")


def _differing(runs: Sequence[Run], names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the settings that differ between runs, with each run's value; missing sections have no row."""
    flat = [dict(_flat(_parsed(run.config))) for run in runs]
    keys = dict.fromkeys(key for each in flat for key in each)
    return [
        (key, values)
        for key in keys
        if key not in ("train.output_dir", "train.name")
        and len(set(values := [each.get(key, "–") for each in flat])) > 1
        and not any(other.startswith(f"{key}.") for other in keys)
    ]


def _parsed(text: str) -> dict[str, Any]:
    """Return the settings of a run; empty if its record cannot be read."""
    try:
        return parse(text, RESOLVED).data
    except ConfigError:
        return {}


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict) and (value or not prefix):
        return [row for key, each in value.items() for row in _flat(each, f"{prefix}.{key}" if prefix else str(key))]
    return [(prefix, _short(emit_value(value)))]
