"""The process that renders chat templates: it reads conversations from standard input and answers on standard output.

`genesis.data.chat.renderer` starts it by path in Python's isolated mode, and it imports nothing of Genesis. A frame is
eight bytes of length followed by that many bytes of JSON. The first frame holds templates, variables and limits. Each
later frame is a list of jobs, and each job gets one frame in answer. The process ends with its input.

The environment of the templates matches transformers' `apply_chat_template`, except that a render depends only on its
input: `strftime_now` returns a fixed date, and the `random` filter and `lipsum` are removed.
"""

from __future__ import annotations

import datetime
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

LENGTH_BYTES = 8
MAX_ERROR_CHARS = 500
# Higher than the parent's limit, so that everything that it can write can be read.
_DEPTH = 4000
# The date that Llama 3.2's template uses if it cannot request today's.
DATE = datetime.datetime(2024, 7, 26)


class TooLong(Exception):
    """A render, or the answer for a conversation, has more characters than allowed."""


def read_frame(stream: BinaryIO) -> Any:
    """Return the next frame's value; None at the end of the input."""
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    size = int.from_bytes(head, "big")
    data = stream.read(size)
    return json.loads(data) if len(data) == size else None


def write_frame(stream: BinaryIO, value: Any) -> None:
    """Write `value` as one frame and flush it."""
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    stream.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)
    stream.flush()


def set_limits(memory_bytes: int) -> None:
    """Limit the resources of the process, as far as the system supports it."""
    import resource

    for name, limit in (("AS", memory_bytes), ("CORE", 0), ("FSIZE", 0), ("NPROC", 0)):
        kind = getattr(resource, f"RLIMIT_{name}", None)
        try:
            if kind is not None:
                resource.setrlimit(kind, (limit, limit))
        except (OSError, ValueError):
            pass


def environment() -> ImmutableSandboxedEnvironment:
    """Return the sandbox in which chat templates run."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """Renders the contents of `{% generation %}…{% endgeneration %}`: targets come from the renders.

        The body has its own scope, as in transformers: variables set inside are not set outside.
        """

        tags = {"generation"}  # noqa: RUF012 - so jinja2 declares it

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("body"), [], [], body).set_lineno(line)

        def body(self, caller: Callable[[], str]) -> str:
            return caller()

    class PlainNamespace(Namespace):
        """A namespace that refuses names of Python's internals."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            self, rest = args[0], args[1:]
            for name in dict(*rest, **kwargs):
                check(name)
            Namespace.__init__(self, *rest, **kwargs)

        def __setitem__(self, name: str, value: Any) -> None:
            check(name)
            super().__setitem__(name, value)

    def check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")

    def raise_exception(message: Any) -> None:
        raise jinja2.TemplateError(str(message))

    def strftime_now(form: str) -> str:
        return DATE.strftime(form)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    # Match transformers' environment, but remove what would make renders random.
    result = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    result.filters["tojson"] = tojson
    result.globals.update(raise_exception=raise_exception, strftime_now=strftime_now, namespace=PlainNamespace)
    del result.filters["random"], result.globals["lipsum"]
    return result


def error_text(error: BaseException) -> str:
    """Return the error's message, with the template's line if it is known."""
    import jinja2

    line: int | None = getattr(error, "lineno", None)
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    raised = isinstance(error, jinja2.TemplateError)
    text = str(error) if raised and str(error) else f"{type(error).__name__}: {error}".removesuffix(": ")
    return (f"line {line}: " * (line is not None) + text)[:MAX_ERROR_CHARS]


def common_start(first: str, second: str) -> int:
    """Return the length of the longest common start of two texts."""
    same, stop = 0, min(len(first), len(second))
    while same < stop:
        middle = (same + stop + 1) // 2
        if first[same:middle] == second[same:middle]:
            same = middle
        else:
            stop = middle - 1
    return same


def forms(messages: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield the messages, then forms that templates require: joined parts of text, arguments as objects or as JSON
    strings, and null or empty content next to calls.
    """
    yield messages
    joined = [
        {**each, "content": "".join(part["text"] for part in each["content"])}
        if isinstance(each.get("content"), list)
        else each
        for each in messages
    ]
    if joined != messages:
        yield joined
    if any("tool_calls" in each for each in messages):
        for kind in (dict, str):
            changed = [_with_arguments(each, kind) for each in joined]
            yield changed
            for content in (None, ""):
                yield [{"content": content, **each} if "tool_calls" in each else each for each in changed]


def _with_arguments(message: Any, kind: type) -> Any:
    """Return the message with the arguments of its calls as objects or as strings of JSON."""
    calls = []
    for call in message.get("tool_calls", ()):
        function = call.get("function", call)
        arguments = function.get("arguments")
        if isinstance(arguments, str) and kind is dict:
            arguments = json.loads(arguments.strip() or "{}")
        elif isinstance(arguments, dict) and kind is str:
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {**function, "arguments": arguments}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls} if calls else message


class Child:
    """The compiled templates, and the inputs of every render. `start` holds `templates` by name, `variables`, `cpu_s`
    and `output_chars`, the limits of one render.
    """

    def __init__(self, start: Mapping[str, Any]) -> None:
        self._cpu_s: float = start["cpu_s"]
        self._output_chars: int = start["output_chars"]
        self._variables: dict[str, Any] = start["variables"]
        sandbox = environment()
        self._limit_time()
        self._templates: dict[str, Template] = {}
        for name, text in start["templates"].items():
            self._templates[name] = sandbox.from_string(text)

    def answer(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Return the renders of a job: of all `messages`, and of the prompt and the end of each of `turns`.

        Returns:
            `whole`: the render of all messages; if they cannot be rendered, of those up to the last turn that can.
            `turns`: for each turn, the short forms (see `_part`) of its prompt and of the render up to and including
            it; pairs of errors for later turns. Only `error`, if no turn can be rendered.
        """
        messages, tools, turns = job["messages"], job["tools"], job["turns"]
        failed: list[list[dict[str, str]]] = []
        try:
            # Drop turns from the end until the rest renders.
            whole: str | None = None
            while whole is None:
                try:
                    messages, whole = self._readable(messages, tools)
                except (TooLong, MemoryError):
                    raise
                except Exception as error:
                    failed = [[{"error": error_text(error)}] * 2, *failed]
                    if len(turns) < 2:
                        return failed[-1][0]
                    turns = turns[:-1]
                    messages = messages[: turns[-1] + 1]
            # Render the prompt and the end of each turn.
            self._last = whole
            self._left = self._output_chars - len(whole)
            pairs = [
                [
                    self._part(whole, messages[:turn], tools, True),
                    len(whole) if turn + 1 == len(messages) else self._part(whole, messages[: turn + 1], tools, False),
                ]
                for turn in turns
            ]
        except TooLong:
            return {"error": f"its renders have more than {self._output_chars:,} characters"}
        except MemoryError:
            return {"error": "it needs more memory than it may take"}
        return {"whole": whole, "turns": [*pairs, *failed]}

    def _readable(self, messages: Sequence[Any], tools: Any) -> tuple[Sequence[Any], str]:
        """Return the messages in the first form that the template can read, and their render.

        The first form is the record's own, as transformers passes it. The others are tried if that raises, or if lists
        of text parts appear as Python prints them or not at all. Raises the first form's error.
        """
        first: Exception | None = None
        lists = [message["content"] for message in messages if isinstance(message.get("content"), list)]
        texts = [part["text"].strip() for parts in lists for part in parts]
        for form in forms(messages):
            try:
                whole = self._render(form, tools, False)
            except (TooLong, MemoryError):
                raise
            except Exception as error:
                first = first or error
                continue
            is_read = all(text in whole for text in texts) and not any(
                str(part) in whole for parts in lists for part in parts
            )
            if is_read or form is not messages:
                return form, whole
        assert first is not None
        raise first

    def _part(
        self, whole: str, messages: Sequence[Any], tools: Any, prompt: bool
    ) -> int | tuple[int, str] | dict[str, str]:
        """Return the short form of a render: its length if `whole` begins with it; otherwise the length that it shares
        with the last such render, and the rest of its text; or its `error`.
        """
        try:
            text = self._render(messages, tools, prompt)
        except (TooLong, MemoryError):
            raise
        except Exception as error:
            return {"error": error_text(error)}
        if whole.startswith(text):
            return len(text)
        same = common_start(self._last, text)
        self._last = text
        self._left -= len(text) - same
        if self._left < 0:
            raise TooLong
        return same, text[same:]

    def _render(self, messages: Sequence[Any], tools: Any, prompt: bool) -> str:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        self._limit_time()
        parts, size = [], 0
        for part in self._templates[name].generate(
            messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **self._variables
        ):
            size += len(part)
            if size > self._output_chars:
                raise TooLong
            parts.append(part)
        return "".join(parts)

    def _limit_time(self) -> None:
        # Nothing handles the signal, so it ends the process, whatever the process does.
        signal.setitimer(signal.ITIMER_PROF, self._cpu_s)


def main() -> None:
    """Answer frames until the input ends."""
    inputs, outputs = sys.stdin.buffer, sys.stdout.buffer
    start = read_frame(inputs)
    if start is None:
        return
    sys.path += start["paths"]
    sys.setrecursionlimit(_DEPTH)
    try:
        set_limits(start["memory_bytes"])
        child = Child(start)
    except Exception as error:
        write_frame(outputs, {"error": error_text(error)})
        return
    write_frame(outputs, {})
    while (jobs := read_frame(inputs)) is not None:
        for job in jobs:
            try:
                write_frame(outputs, child.answer(job))
            except UnicodeEncodeError:
                write_frame(outputs, {"error": "it returns half a surrogate pair, which is not a character"})


if __name__ == "__main__":
    main()
