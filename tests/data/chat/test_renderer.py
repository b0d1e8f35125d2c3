"""The process that renders: what templates can do in it, what they cannot, and what becomes of it."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateSyntaxError

from genesis.data.chat.child import Child, common_start
from genesis.data.chat.renderer import Job, Limits, Rendered, Renderer, RenderError, _checked, _Dead
from genesis.errors import ModelError

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
JOB = Job.of(MESSAGES, None, [1])
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@contextmanager
def renderer(text: str, limits: Limits | None = None, **variables: str) -> Iterator[Renderer]:
    with Renderer({"default": text}, variables, where="t.jinja", limits=limits) as found:
        yield found


def rendered(text: str, limits: Limits | None = None) -> str:
    """What the template makes of the messages in a process, or the error."""
    with renderer(text, limits) as process:
        [found] = process.render([Job.of(MESSAGES, None, [])])
    return found.whole if isinstance(found, Rendered) else found.what


def answer(text: str, messages: list[dict[str, Any]] = MESSAGES, turns: Sequence[int] = (), **variables: str) -> Any:
    """What the child would answer, without a process or limits."""
    templates = {"default": text, "tool_use": text}
    child = Child({"templates": templates, "variables": variables, "cpu_s": 0.0, "output_chars": 1 << 20})
    return child.answer({"messages": messages, "tools": None, "turns": turns})


def written_out(text: str, messages: list[dict[str, Any]], turns: Sequence[int]) -> Rendered | RenderError:
    """What the parent makes of that answer."""
    return _checked(json.loads(json.dumps(answer(text, messages, turns))), len(turns))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return os.path.exists("/proc/self") is False


def ends(pid: int, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


def child_of(process: Renderer) -> subprocess.Popen[bytes]:
    assert process._process is not None
    return process._process._child


class TestEnvironment:
    def test_is_that_of_transformers(self) -> None:
        text = (
            "{% for m in messages %}\n  {% if loop.index == 9 %}{% break %}{% endif %}\n"
            "{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}\n"
            "{{ {'a': ['<é>', none]} | tojson }} {{ {'b': 1} | tojson(indent=1) }}{{ bos }}{{ nothing }}"
        )
        assert answer(text, bos="^")["whole"] == 'Hi;Yes;{"a": ["<é>", null]} {\n "b": 1\n}^'

    def test_a_generation_is_a_scope(self) -> None:
        """What is set inside is not set outside, and what is outside is seen inside, as in transformers."""
        text = (
            "{% set x = 1 %}{% for m in messages %}{% set y = loop.index %}{% generation %}{% set x = 2 %}"
            "{{ x }}{{ y }}{{ loop.index }}{{ m.content }}{% endgeneration %}{{ x }};{% endfor %}{{ x }}"
        )
        assert answer(text)["whole"] == "211Hi1;222Yes1;1"

    def test_nothing_depends_on_clock_or_chance(self) -> None:
        assert answer("{{ strftime_now('%d %b %Y') }}")["whole"] == "26 Jul 2024"
        assert "'lipsum' is undefined" in answer("{{ lipsum() }}")["error"]
        with pytest.raises(TemplateSyntaxError, match="No filter named 'random'"):
            answer("{{ [1, 2] | random }}")

    def test_a_template_for_tools_is_taken_where_there_are_some(self) -> None:
        with Renderer({"default": "d{{ tools }}", "tool_use": "t{{ tools[0].x }}"}, {}, where="t") as process:
            found = process.render([Job.of([], None, []), Job.of([], [{"x": 1}], [])])
        assert [each.whole for each in found if isinstance(each, Rendered)] == ["dNone", "t1"]

    def test_renders_prompts_and_turns(self) -> None:
        text = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}[{% endif %}"
        more = [*MESSAGES, {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        assert answer(text, more, [1, 3]) == {"whole": "[Hi][Yes][x][y]", "turns": [[5, 9], [13, 15]]}
        assert written_out(text, more, [1, 3]) == Rendered(
            "[Hi][Yes][x][y]", [("[Hi][", "[Hi][Yes]"), ("[Hi][Yes][x][", "[Hi][Yes][x][y]")]
        )

    def test_renders_that_change_are_told_in_short(self) -> None:
        text = "{% for m in messages %}{{ '[' ~ m.content ~ ('!' if loop.last) ~ ']' }}{% endfor %}"
        text += "{% if add_generation_prompt %}[{% endif %}"
        more = [{"role": "assistant", "content": word * 1000} for word in "abcd"]
        found = answer(text, more, [1, 2])
        assert len(found["whole"]) == 4009 and len(str(found["turns"])) < 2100
        a, b, c, d = (message["content"] for message in more)
        turns = [(f"[{a}!][", f"[{a}][{b}!]"), (f"[{a}][{b}!][", f"[{a}][{b}][{c}!]")]
        assert written_out(text, more, [1, 2]) == Rendered(f"[{a}][{b}][{c}][{d}!]", turns)

    @given(st.text("ab", max_size=9), st.text("ab", max_size=9))
    def test_the_start_that_texts_have_in_common(self, first: str, second: str) -> None:
        same = common_start(first, second)
        assert first[:same] == second[:same] and first[same : same + 1] + second[same : same + 1] not in ("aa", "bb")

    def test_a_turn_without_a_prompt_is_an_error_of_its_own(self) -> None:
        text = "{% if messages | length < 2 %}{{ raise_exception('none: ' ~ 1) }}{% endif %}ok"
        assert written_out(text, MESSAGES, [1]) == Rendered("ok", [(RenderError("line 1: none: 1"), "ok")])

    def test_errors_name_the_line(self) -> None:
        assert answer("a\n{{ raise_exception('no ' ~ 'way') }}") == {"error": "line 2: no way"}
        assert answer("\n\n{{ messages[0].content + 1 }}")["error"].startswith("line 3: TypeError: ")
        assert answer("{{ x.y.z }}") == {"error": "line 1: 'x' is undefined"}
        assert "RecursionError" in answer("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")["error"]


class TestSandbox:
    @pytest.mark.parametrize(
        "text",
        [
            "{{ ''.__class__.__mro__ }}",
            "{{ raise_exception.__globals__ }}",
            "{{ strftime_now.__func__ }}",
            "{{ messages.append(1) }}",
            "{{ messages[0].update(content='x') }}",
            "{{ ('{0.__class__}').format(1) }}",
            "{{ self.__init__ }}",
            "{% set x = namespace(__class__=1) %}{{ x }}",
            "{% include '/etc/hostname' %}",
            "{% import 'os' as os %}",
            "{{ cycler.__init__.__globals__ }}",
        ],
    )
    def test_internals_and_changes_are_refused(self, text: str) -> None:
        found = answer(text)
        assert found.get("whole", "") == "" and "line 1" in found.get("error", "line 1")

    def test_the_process_has_no_environment_files_or_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SECRET_TOKEN", "abc")
        read, write = os.pipe()
        os.set_inheritable(read, True)
        with renderer("x") as process:
            folder = f"/proc/{child_of(process).pid}"
            if not os.path.exists(folder):
                pytest.skip("needs /proc")
            with open(f"{folder}/environ", "rb") as file:
                environment = file.read()
            assert b"SECRET" not in environment and b"HOME" not in environment
            assert os.readlink(f"{folder}/cwd") == "/"
            assert set(os.listdir(f"{folder}/fd")) == {"0", "1", "2"}
            assert os.getsid(child_of(process).pid) != os.getsid(0)
        os.close(read)
        os.close(write)


class TestLimits:
    def test_a_template_that_loops(self) -> None:
        assert Limits().cpu_s <= 2
        with renderer("{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}ok", Limits(cpu_s=0.1)) as process:
            loop = Job.of([{"role": "user", "content": "loop"}], None, [])
            found = process.render([JOB, loop, JOB])
        what = "a render took more than 0.1 s of CPU time"
        assert [each.whole if isinstance(each, Rendered) else each.what for each in found] == ["ok", what, "ok"]

    def test_a_template_that_always_loops_is_given_up(self) -> None:
        loop = renderer(LOOP, Limits(cpu_s=0.1))
        with loop as process, pytest.raises(ModelError, match=r"took more than 0\.1 s of CPU time, 3 times in a row"):
            process.render([JOB] * 100)

    def test_a_template_that_takes_its_time(self) -> None:
        assert rendered(LOOP, limits=Limits(wall_s=0.1)) == "rendering took more than 0.1 s"

    def test_a_template_that_writes_or_takes_memory_without_end(self) -> None:
        text = (
            "{% set what = messages[0].content %}{% if what == 'half' %}{{ '\\ud83d' }}"
            "{% elif what == 'writes' %}{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}"
            "{% else %}{% set n = what | length * 1000000000 %}{{ ('x' * n) | length }}{% endif %}"
        )
        jobs = [Job.of([{"content": what}], None, []) for what in ("half", "writes", "memory")]
        with renderer(text, Limits(output_chars=5000)) as process:
            found = process.render(jobs)
        assert found == [
            RenderError("it returns half a surrogate pair, which is not a character"),
            RenderError("its renders have more than 5,000 characters"),
            RenderError("it needs more memory than it may take"),
        ]

    @pytest.mark.parametrize("text", ["{{ 9 ** (9 ** 9) }}", "{% for %}"])
    def test_a_template_that_cannot_be_compiled(self, text: str) -> None:
        with pytest.raises(ModelError, match="the chat template cannot be used") as caught:
            Renderer({"default": text}, {}, where="t.jinja", limits=Limits(cpu_s=0.1))
        assert caught.value.where == "t.jinja"


class TestProcess:
    def test_one_that_is_killed_is_replaced(self) -> None:
        with renderer("ok") as process:
            child_of(process).send_signal(signal.SIGKILL)
            child_of(process).wait()
            first = process.render([JOB, JOB])
            second = process.render([JOB])
        assert [isinstance(each, Rendered) for each in [*first, *second]] == [True, True, True]

    @pytest.mark.parametrize("said", [[], {}, {"whole": 1, "turns": []}, {"whole": "", "turns": [[1]]}, "x", None])
    def test_nonsense_is_no_render(self, said: object) -> None:
        with pytest.raises(_Dead, match="malformed"):
            _checked(said, 1)

    def test_lengths_beyond_all_limits_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with renderer("ok", Limits(output_chars=10)) as process:
            assert process._process is not None
            process._process._buffer += (1 << 40).to_bytes(8, "big")
            [found] = process.render([JOB])
        assert found == RenderError("the process that renders it sent a malformed answer")

    def test_large_batches_do_not_block(self) -> None:
        """Each of the pipes holds less than one of the conversations."""
        large = Job.of([{"role": "user", "content": "x" * (1 << 21)}], None, [])
        with renderer("{{ messages[0].content }}") as process:
            lengths = [
                [len(each.whole) for each in found if isinstance(each, Rendered)]
                for found in process.render_batches([[large] * 3, [], [large] * 2])
            ]
        assert lengths == [[1 << 21] * 3, [], [1 << 21] * 2]

    @pytest.mark.parametrize("end", ["close", "leave", "drop"])
    def test_it_ends_with_its_owner(self, end: str) -> None:
        process = Renderer({"default": "ok"}, {}, where="t")
        child = child_of(process)
        if end == "close":
            process.close()
        elif end == "leave":
            batches = process.render_batches([[JOB], [JOB]])
            next(batches)
            batches.close()  # an answer is still to come
            assert process._process is None and process.render([JOB]) == [Rendered("ok", [("ok", "ok")])]
            process.close()
        else:
            del process
            gc.collect()
        assert child.returncode is not None

    def test_it_ends_with_a_parent_that_is_killed(self) -> None:
        program = (
            "import time; from genesis.data.chat.renderer import Renderer\n"
            "process = Renderer({'default': 'ok'}, {}, where='t')\n"
            "print(process._process._child.pid, flush=True); time.sleep(60)"
        )
        parent = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert parent.stdout is not None
        with parent:
            pid = int(parent.stdout.readline())
            assert is_running(pid)
            parent.kill()
        assert ends(pid)

    def test_an_interrupt_leaves_no_answer_behind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with renderer("{{ messages[0].content }}") as process:
            assert process._process is not None

            def interrupted(wall_s: float) -> Any:
                raise KeyboardInterrupt

            monkeypatch.setattr(process._process, "receive", interrupted)
            with pytest.raises(KeyboardInterrupt):
                process.render([JOB])
            other = [{"role": "user", "content": "other"}]
            [found] = process.render([Job.of(other, None, [])])
        assert found == Rendered("other", [])


def test_what_cannot_be_sent_is_refused() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    refused: list[tuple[Callable[[], Job], type[Exception]]] = [
        (lambda: Job.of([{"content": "\ud83d"}], None, []), UnicodeEncodeError),
        (lambda: Job.of([{"content": deep}], None, []), RecursionError),
    ]
    for make, error in refused:
        with pytest.raises(error):
            make()
    while deep:
        (deep,) = deep
