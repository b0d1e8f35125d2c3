"""Pages about runs: what is read, which points are drawn where, what the page holds, and who may see it."""

from __future__ import annotations

import errno
import functools
import http.client
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from genesis.errors import DataError, DeviceError
from genesis.train.metrics import Sample, append_samples, keep_samples, read_samples
from genesis.train.report.curves import CHARTS, make_chart, nice_ticks, reduced
from genesis.train.report.page import MOST_RUNS, page_of
from genesis.train.report.runs import RunReader, named, read_run
from genesis.train.report.watch import Watcher
from tests.cli.command import printed

ROW = {"train/learning_rate": 1e-4, "train/grad_norm": 0.5, "train/num_tokens": 8, "perf/tokens_per_second": 1000.0,
       "perf/step_ms": 8.0, "memory/max_allocated": 3 << 30}  # fmt: skip


def made(folder: Path, losses: list[float | None], *, lr: str = "1e-4", text: str = "a text") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "metrics.jsonl", "w") as file:
        for step, loss in enumerate(losses, 1):
            row = {"train/global_step": step, "train/loss": loss, **ROW, "train/num_tokens": 8 * step}
            if loss is None:
                row["nonfinite"] = {"train/loss": "nan"}
            file.write(json.dumps(row) + "\n")
            if step % 5 == 0:
                loss = loss or 0.0
                row = {"eval/loss": loss + 1, "eval/perplexity": math.exp(loss + 1), "eval/bits_per_byte": loss / 2}
                file.write(json.dumps({"train/global_step": step, **row}) + "\n")
    append_samples(folder, [Sample(5, "prompt ", text)])
    (folder / "config.resolved.yaml").write_text(
        f"optim:\n  lr: {lr}\n  betas: [0.9, 0.95]\ntrain:\n  output_dir: {folder}\n"
    )
    return folder


def test_runs_have_the_names_that_they_were_given(tmp_path: Path) -> None:
    folders = [made(tmp_path / name / "run", [2.0, 1.0]) for name in "abcde"]
    for folder, text in zip(folders, ("first", "twice", "twice", "null", "[1]"), strict=True):
        with open(folder / "config.resolved.yaml", "a") as file:
            file.write(f"  name: {text}\n")
    page = page_of([read_run(folder) for folder in folders])
    legend = re.findall(r"</svg>([^<]+)</li>", page)
    assert legend == ["first", "b/run", "c/run", "d/run", "[1]"]
    assert (
        "<title>Run first</title>" in page_of([read_run(folders[0])])
        and "train.name" not in page.partition("<h2>Settings</h2>")[0]
    )


class Page(HTMLParser):
    """The tags of a page, which must close in order, and its text."""

    VOID = frozenset({"meta", "line", "circle"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_run_as_it_was_recorded(tmp_path: Path) -> None:
    run = read_run(made(tmp_path / "r", [3.0, None, 2.0, 2.5, 1.5]))
    assert run.series["train/loss"].T.tolist() == [[1, 3.0], [3, 2.0], [4, 2.5], [5, 1.5]]
    assert (run.last_step, run.bad_rows) == (5, 1)
    assert run.last("train/loss") == 1.5 and run.least("train/loss") == 1.5 and run.most("train/loss") == 3.0
    assert run.middle("train/loss") == 2.25 and run.last("perf/mfu") is None
    with pytest.raises(DataError, match=r"no metrics\.jsonl"):
        read_run(tmp_path)


def test_names_tell_folders_apart() -> None:
    assert named([Path("/x/a/run"), Path("/x/b/run"), Path("/x/c")]) == ["a/run", "b/run", "x/c"]
    assert named([Path("/x/run")]) == ["run"]
    assert named([Path("/x/run"), Path("/x/run")]) == ["run", "run"]


def test_long_lines_keep_their_peaks() -> None:
    points = [(step, math.sin(step / 50)) for step in range(10_000)]
    points[4321], points[7777] = (4321, 9.0), (7777, -9.0)
    steps, values = np.array(points).T
    kept = reduced(steps, values, 500)
    assert len(kept) <= 500 and kept == sorted(kept) and {*kept} <= {*points}
    assert points[4321] in kept and points[7777] in kept
    assert reduced(steps, -steps, 500)[0] == (0.0, 0.0) and reduced(steps, -steps, 500)[-1] == (9999.0, -9999.0)
    assert reduced(steps[:500], values[:500], 500) == points[:500]


@pytest.mark.parametrize("low, high, wanted", [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (1.9, 6.9, [1, 2, 3, 4, 5, 6, 7]),
                                               (0, 189_000, [0, 50e3, 100e3, 150e3, 200e3])])  # fmt: skip
def test_ticks_are_round(low: float, high: float, wanted: list[float]) -> None:
    assert nice_ticks(low, high, 5) == pytest.approx(wanted)


def test_points_are_where_the_axes_say(tmp_path: Path) -> None:
    run = read_run(made(tmp_path / "r", [4.0, 3.0, 2.0, 1.0]))
    chart = make_chart(CHARTS[0], [run], ["r"], 1000, 300)
    assert chart is not None
    [raw, smooth] = chart.lines
    assert raw.look == "raw" and raw.points == smooth.points  # few points are not smoothed
    at = {float(tick.label): tick.at for tick in chart.rows}
    assert [y for _, y in raw.points] == [at[4.0], at[3.0], at[2.0], at[1.0]]
    assert [x for x, _ in raw.points] == pytest.approx(
        [chart.left + (chart.right - chart.left) * step / 4 for step in (1, 2, 3, 4)], abs=0.1
    )
    assert make_chart(CHARTS[1], [run], ["r"], 1000, 300) is None


def test_a_page_of_a_run(tmp_path: Path) -> None:
    losses: list[float | None] = [5 * 0.9**step + 1 for step in range(20)]
    page = Page(page_of([read_run(made(tmp_path / "r<b>", losses, text="<script>alert(1)</script>\x1b[31m\u202e"))]))
    assert "Run r<b>" in page.text
    assert "<script>alert(1)</script>\\x1b[31m\\u202e" in page.text
    assert not [tag for tag, _ in page.tags if tag in ("script", "img", "link", "iframe", "a")]
    assert not any(name.startswith("on") or name in ("src", "href") for _, found in page.tags for name in found)
    for wanted in (f"{losses[-1]:.4f}", "160", "1,000", "3.00", "4 evaluations", "step 5", "betas: [0.9, 0.95]"):
        assert wanted in page.text, wanted
    assert "http-equiv" not in str(page.tags)
    assert Page(page_of([read_run(made(tmp_path / "empty", []))])).text.count("Nothing is recorded yet.") == 1


def test_several_runs_are_overlaid(tmp_path: Path) -> None:
    folders = [made(tmp_path / name, [3.0, 2.0, 1.0], lr=lr) for name, lr in (("a", "1e-4"), ("b", "3e-4"))]
    page = Page(page_of([read_run(folder) for folder in folders]))
    assert {found["class"] for tag, found in page.tags if tag == "g"} == {"run0", "run1"}
    assert re.search(r"Settings that differ.*optim\.lr\s*0\.0001\s*0\.0003", page.text, re.DOTALL)
    assert "output_dir" not in page.text.split("Settings that differ")[1].split("Settings")[0]


def test_ten_thousand_rows_stay_small_and_quick(tmp_path: Path) -> None:
    run = read_run(made(tmp_path / "long", [5 / step**0.3 + step % 7 / 10 for step in range(1, 10_001)]))
    assert len(page_of([run]).encode()) < 1 << 20


def test_the_command(tmp_path: Path) -> None:
    a, b = (str(made(tmp_path / name, [2.0, 1.0])) for name in "ab")
    code, out, _ = printed("report", a)
    assert (code, out) == (0, f"{a}/report.html\n") and "Run a" in Path(a, "report.html").read_text()
    code, out, _ = printed("report", a, b, "--out", tmp_path / "p.html")
    assert code == 0 and "2 runs" in (tmp_path / "p.html").read_text()
    assert printed("report", *[a] * (MOST_RUNS + 1))[0] == 2
    code, _, told = printed("report", tmp_path)
    assert code == 4 and "no metrics.jsonl" in told and f"choose a run in it: {a} {b}" in told
    code, _, told = printed("report", a, "--out", tmp_path)
    assert code == 8 and "error" in told


def test_settings_are_shown_as_yaml_and_an_absent_section_has_no_row(tmp_path: Path) -> None:
    plain, adapted = made(tmp_path / "plain", [2.0]), made(tmp_path / "adapted", [2.0])
    for folder, text in (
        (plain, "lora: null\ndata: {train: [a.txt], parse_special: false, eval: null}\n"),
        (
            adapted,
            "lora: {r: 8, alpha: 16.0}\ndata: {train: [{path: b, weight: 2.0}], parse_special: true, eval: 'on'}\n",
        ),
    ):
        (folder / "config.resolved.yaml").write_text(text)
    page = Page(page_of([read_run(plain), read_run(adapted)]))
    table = page.text.split("Settings that differ")[1].split("Settings")[0]
    assert [line for line in table.split("\n") if line][1:] == [
        "data.train[a.txt][{path: b, weight: 2.0}]", "data.parse_specialfalsetrue", "data.evalnull\"on\"",
        "lora.r–8", "lora.alpha–16.0",
    ]  # fmt: skip
    names = [found for tag, found in page.tags if tag == "summary" and found.get("class") == "name"]
    assert len(names) == 2 and "summary.name::first-letter { text-transform: none; }" in page.text


def test_a_run_without_a_record_has_no_settings(tmp_path: Path) -> None:
    recorded, bare = made(tmp_path / "a", [2.0]), made(tmp_path / "b", [2.0])
    (bare / "config.resolved.yaml").unlink()
    table = Page(page_of([read_run(recorded), read_run(bare)])).text.split("Settings that differ")[1]
    assert [line for line in table.split("Settings")[0].split("\n") if line][1:] == [
        "optim.lr0.0001–", "optim.betas[0.9, 0.95]–",
    ]  # fmt: skip


def test_settings_that_never_end_are_none(tmp_path: Path) -> None:
    folders = [made(tmp_path / name, [2.0]) for name in "ab"]
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    (folders[0] / "config.resolved.yaml").write_text(bomb)
    assert "2 runs" in page_of([read_run(folder) for folder in folders])


@pytest.mark.parametrize(
    "losses",
    [[1e308, -1e308], [1e308] * 70, [1e100, -1e100] * 50, [5e-324, 0.0], [1e16, 1e16 + 2], [1.0, 1.0 + 2**-52],
     [-1e-310] * 2, [1e99], [None], [0.0] * 2, [-5.0, 5e15]],
)  # fmt: skip
def test_any_number_can_be_drawn(tmp_path: Path, losses: list[float | None]) -> None:
    page = Page(page_of([read_run(made_plain(tmp_path / "r", losses))]))
    points = [found["points"] or "" for tag, found in page.tags if tag == "polyline"]
    drawable = [loss for loss in losses if loss is not None and abs(loss) <= 1e100]
    assert bool(points) == bool(drawable)
    assert all(-1 < float(n) < 1100 for line in points for n in re.split("[ ,]", line.strip()))
    assert ("not finite" in page.text) == (len(drawable) < len(losses))
    assert "nan" not in page.text and max(map(len, page.text.split())) < 400
    assert len({found["points"] for tag, found in page.tags if tag == "polyline"}) >= bool(drawable)


def made_plain(folder: Path, losses: list[float | None]) -> Path:
    """A run with metrics alone."""
    folder.mkdir()
    rows = [{"train/global_step": step, "train/loss": loss} for step, loss in enumerate(losses, 1)]
    rows = [row if row["train/loss"] is not None else {**row, "nonfinite": {"train/loss": "nan"}} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "config.resolved.yaml"])
@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "folder", "other user"])
def test_nothing_outside_of_a_run_gets_into_its_page(
    tmp_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(tmp_path / "r", [2.0])
    secret = made(tmp_path / "secret", [7.5], lr="canary", text="canary") / name
    path = run / name
    if kind == "other user":
        monkeypatch.setattr("genesis.files.trust.foreign_owner", lambda found: 4242 if Path(found) == path else None)
    else:
        path.unlink()
    if kind in ("link", "dangling"):
        path.symlink_to(secret if kind == "link" else tmp_path / "nothing")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    code, _, told = printed("report", run)
    assert code == 4 and name in told and not (run / "report.html").exists()
    assert printed("watch", run, "--port", "0")[0] == 4
    if name == "samples.jsonl" and kind != "other user":
        with pytest.raises(DataError, match=name):
            keep_samples(run, 9)


def test_a_run_is_read_on_where_it_was_read_to(tmp_path: Path) -> None:
    folder = made(tmp_path / "r", [2.0, None, 1.5])
    path, reader = folder / "metrics.jsonl", RunReader(folder)
    before = path.read_bytes()
    assert reader.read().series["train/loss"].T.tolist() == [[1, 2.0], [3, 1.5]]
    row = b'{"train/global_step": 4, "train/loss": 0.5}\n'
    path.write_bytes(b"x" * 50 + before[50:] + row + row[:20])  # what was read is not read again
    run = reader.read()
    assert run.series["train/loss"].T.tolist() == [[1, 2.0], [3, 1.5], [4, 0.5]] and (run.last_step, run.bad_rows) == (
        4,
        1,
    )
    # A resumed run cuts its file, and goes another way.
    path.write_bytes(before + row.replace(b"0.5", b"0.7") + row.replace(b"4", b"5"))
    run = reader.read()
    assert run.series["train/loss"].T.tolist() == [[1, 2.0], [3, 1.5], [4, 0.7], [5, 0.5]] and run.bad_rows == 1
    path.write_bytes(b"")
    assert not reader.read().series
    path.write_bytes(row + b"no row\n")
    for _ in range(2):
        with pytest.raises(DataError) as caught:
            reader.read()
        assert caught.value.where.endswith(":2")
    path.write_bytes(row * 2)
    assert reader.read().series["train/loss"].shape[1] == 2


def test_of_many_samples_the_last_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path / "r", [2.0])
    append_samples(folder, [Sample(step, "p", "é" * 40) for step in range(6, 100)])
    monkeypatch.setattr("genesis.train.report.runs.MOST_SAMPLES", 2000)
    samples = read_run(folder).samples
    assert 3 < len(samples) < 20 and samples[-1] == Sample(99, "p", "é" * 40)
    assert samples == list(read_samples(folder))[-len(samples) :]


@pytest.fixture
def watcher(tmp_path: Path) -> Iterator[Watcher]:
    with Watcher(made(tmp_path / "r", [2.0, 1.0]), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def asked(watcher: Watcher, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", watcher.server_address[1], timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), dict(answer.getheaders())
    connection.close()
    return found


def test_a_watched_run_is_always_the_newest(watcher: Watcher, tmp_path: Path) -> None:
    status, text, headers = asked(watcher)
    assert status == 200 and 'http-equiv="refresh"' in text and "1.0000" in text
    assert "default-src 'none'" in headers["Content-Security-Policy"] and headers["Cache-Control"] == "no-store"
    made(tmp_path / "r", [2.0, 1.0, 0.25])
    assert "0.2500" in asked(watcher)[1]
    (tmp_path / "r" / "metrics.jsonl").write_text("no row\n")
    status, text, _ = asked(watcher)
    assert status == 500 and "a row of metrics" in text
    made(tmp_path / "r", [2.0])
    assert asked(watcher)[0] == 200
    assert asked(watcher, method="HEAD")[:2] == (200, "")


def test_only_this_machines_browser_is_answered(watcher: Watcher) -> None:
    port = watcher.server_address[1]
    assert watcher.server_address[0] == "127.0.0.1"
    assert asked(watcher, Host=f"localhost:{port}")[0] == 200
    assert asked(watcher, Origin=f"http://127.0.0.1:{port}")[0] == 200
    for headers in ({"Host": "evil.example"}, {"Host": f"evil.example:{port}"}, {"Host": "127.0.0.1"},
                    {"Origin": "http://evil.example"}, {"Origin": "null"}):  # fmt: skip
        assert asked(watcher, **headers)[0] == 403, headers
    assert asked(watcher, "/metrics.jsonl")[0] == 404
    assert asked(watcher, "/", "POST")[0] == 501


def test_a_page_under_way_is_sent_before_the_command_ends(watcher: Watcher, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on, statuses = threading.Event(), threading.Event(), list[int]()
    page = watcher.page

    def slow() -> bytes:
        begun.set()
        assert goes_on.wait(10)
        return page()

    monkeypatch.setattr(watcher, "page", slow)
    asking = threading.Thread(target=lambda: statuses.append(asked(watcher)[0]))
    asking.start()
    assert begun.wait(10) and watcher.answering
    threading.Timer(0.1, goes_on.set).start()
    watcher.server_close()
    assert goes_on.is_set() and not watcher.answering
    asking.join(10)
    assert statuses == [200]


@pytest.mark.sample(cases=1)
@pytest.mark.skipif(sys.platform != "linux", reason="namespaces of processes are Linux's")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_watch_obeys_signals_as_process_1_of_a_container(tmp_path: Path, number: int) -> None:
    words = [sys.executable, "-m", "genesis_cli.main", "watch", str(made(tmp_path / "r", [2.0])), "--port", "0"]
    alone = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    can = bool(shutil.which("unshare")) and not subprocess.call([*alone, "true"], stderr=subprocess.DEVNULL)
    listens = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
    process = subprocess.Popen(alone * can + words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               preexec_fn=listens)  # fmt: skip  # noqa: PLW1509
    assert process.stdout is not None and process.stdout.readline().startswith("http://127.0.0.1:")
    if can:
        [inner] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(inner) if can else process.pid, number)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 128 + number and told.startswith("stopped: ")


def test_a_browser_that_leaves_is_no_error_to_show(watcher: Watcher, capfd: pytest.CaptureFixture[str]) -> None:
    for error in (BrokenPipeError(), ConnectionResetError(), RuntimeError("can't start new thread")):
        try:
            raise error
        except (OSError, RuntimeError):
            watcher.handle_error(None, ("127.0.0.1", 1))
    told = capfd.readouterr().err
    assert "new thread" in told and "BrokenPipe" not in told and "Reset" not in told


def test_a_connection_that_cannot_be_taken_is_waited_for(watcher: Watcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket asks again at once, and the server would do nothing else."""
    tries: list[float] = []
    real = watcher.socket

    class Full:
        fileno = staticmethod(real.fileno)

        def accept(self) -> None:
            tries.append(time.monotonic())
            if len(tries) == 3:
                monkeypatch.setattr(watcher, "socket", real)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(watcher, "socket", Full())
    assert asked(watcher)[0] == 200
    assert tries[2] - tries[0] > 0.15


def test_a_taken_port_and_a_folder_that_is_no_run(watcher: Watcher, tmp_path: Path) -> None:
    port = watcher.server_address[1]
    with pytest.raises(DeviceError, match=f"port {port}"):
        Watcher(tmp_path / "r", port)
    code, _, told = printed("watch", tmp_path / "r", "--port", str(port))
    assert code == 6 and "choose another" in told
    assert printed("watch", tmp_path)[0] == 4
