"""Public chat templates: what Genesis renders, encodes and learns, compared with transformers and with a rule.

    make templates FOLDER=templates

FOLDER holds one Jinja text in each `*.jinja`; none of them is a part of this project. Each template gets a byte-level
BPE with the special tokens that it names, and renders the conversations below. transformers is given the records as
they are. Nothing of `genesis.data.chat` takes part in what is expected:

- The render of messages is that of `apply_chat_template`. Where that raises, or writes a list of text parts as Python
  would, it is that of the same messages with joined texts, with arguments of calls as objects or as strings of JSON, or
  with null beside calls, whatever comes first.
- The prompt of an assistant's turn is the render of the messages before it with the generation prompt. Its targets are
  what the render of the messages up to it adds to the prompt, up to and with the special token that ends the turn.
- Where that render does not begin with the prompt: what the template adds to prompts alone is no part of the prompt
  (found by a small conversation). Else, where the last message and what follows it stand in both once, targets are what
  follows them. Else the turn is not learned.
- Where not all messages can be rendered, the turns are those up to the last one that can.
- A turn is not learned either where its prompt cannot be rendered, or its render lacks its text or its calls.
- Ids are those of transformers' tokenizer for prompt and target apart; special tokens that messages spell out are text.
- Where the template ends a turn with no special token, the one with which the next message begins ends it.
- Where the template has `{% generation %}` and its whole render has our ids, `return_assistant_tokens_mask` marks our
  targets. It may mark more before the last turn: generation prompts, and turns that have samples of their own.

`templates.tsv` lists public templates by name, sha256 and where they stand, and what differs, and why. Any other
difference ends in exit code 1.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from genesis.data.chat import ChatEncoder, ChatPrompts, ChatTemplate
from genesis.data.record_formats import RecordFormat
from genesis.data.records import Conversation, Defect, Document, Position, record_text
from genesis.data.tokenizer import Tokenizer
from genesis.errors import GenesisError
from tests.data.chat.golden import pairs

LISTED = Path(__file__).with_name("templates.tsv")
NAMED = re.compile(
    r"<\|[^|<>\s'{}]{1,40}\|>|<\uff5c[^\uff5c<>\s']{1,40}\uff5c>|<\|[a-z_]{1,30}>|<[a-z_]{1,30}\|>|</?[A-Za-z_]{1,30}>|<[A-Z]+_[0-9]+>"
    r"|<seed:[a-z_]+>|\[/?[A-Z_]{2,30}\]|\[g?MASK\]|<[a-z]+_[a-z_]+>"
)
ALWAYS = ["<s>", "</s>", "<pad>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]
PLAIN = ("think>", "tool_call", "tool_response", "tools>", "function", "arg_", "parameter", "tool_declare")
ENDS = [
    "<|im_end|>", "<|eot_id|>", "<|eot|>", "<end_of_turn>", "<turn|>", "<|end|>", "<\uff5cend▁of▁sentence\uff5c>",
    "<|eom|>", "<|END_OF_TURN_TOKEN|>", "<|end_of_text|>", "<|endoftext|>", "[e~[", "<|end_of_sentence|>",
    "[|endofturn|]",
]  # fmt: skip

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather of a city, as in "Zürich".',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "its name"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
SYSTEM = {"role": "system", "content": "You answer in one sentence."}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(arguments: Any, number: int = 1) -> dict[str, Any]:
    return {"type": "function", "id": f"call0000{number}", "function": {"name": "get_weather", "arguments": arguments}}


def result(content: str, number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "name": "get_weather", "tool_call_id": f"call0000{number}", "content": content}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


BERN = {"city": "Bern", "days": 2}
ASKED = user("Weather in Bern?")
CALLED = [ASKED, said(None, tool_calls=[call(BERN)]), result('{"sky": "clear"}'), said("It is clear.")]
TWO_CALLS = [call({"city": "Bern"}), call({"city": "Basel", "deep": {"a": [1, None, True]}}, 2)]
STRINGS = [ASKED, said("", tool_calls=[call('{"city": "Bern", "days": 2}')]), result("clear"), said("It is clear.")]
# Name -> messages, and whether there are tools.
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "plain": ([user("What is 2 + 3?"), said("2 + 3 = 5.")], False),
    "system": ([SYSTEM, user("Who are you?"), said("A small model.")], False),
    "turns": ([SYSTEM, user("12 * 12?"), said("144."), user("Plus 1?"), said("145."), user("Thanks!"), said("Bye.")],
              False),
    "null content": (CALLED, True),
    "no content": ([ASKED, {"role": "assistant", "tool_calls": [call(BERN)]}, *CALLED[2:]], True),
    "null keys": (
        [{**SYSTEM, "name": None}, {**ASKED, "tool_calls": None},
         said("Fine.", reasoning_content=None, tool_calls=None)],
        False,
    ),
    "parallel calls": (
        [SYSTEM, user("Bern and Basel?"), said("I look.", tool_calls=TWO_CALLS), result("cold"), result("warm", 2),
         said("Cold in Bern."), user("Thanks"), said("Bye.")],
        True,
    ),
    "string arguments": (STRINGS, True),
    "tools not called": ([SYSTEM, user("Do you know it?"), said("Only if I ask.")], True),
    "reasoning": (
        [user("7 * 8?"), said("56.", reasoning_content="7 * 8 is 56."), user("56 / 7?"),
         said("8.", reasoning_content="Back.")],
        False,
    ),
    "thinking": ([user("7 * 8?"), said("56.", thinking="It is 7 * 7 + 7.")], False),
    "reasoning in the text": ([user("Prime?"), said("<think>\nOnly 1 and 7.\n</think>\n\nYes."), user("9?"),
                               said("No.")], False),
    "steps": (
        [user("Warmer?"), said("", reasoning_content="First Bern.", tool_calls=[call(BERN)]), result("12"),
         said("In Basel.", reasoning_content="14 > 12."), user("Why?"), said("I looked.", reasoning_content="Hm.")],
        True,
    ),
    "assistant first": ([said("Welcome!"), user("Hi."), said("What can I do?")], False),
    "system, assistant first": ([SYSTEM, said("Welcome!"), user("Hi."), said("What can I do?")], False),
    "empty": ([user("Say nothing."), said(""), user(""), said("Nothing.")], False),
    "characters": (
        [user("\n\nCafe\u0301 \u6f22\u5b57 \U0001f388?\n"),
         said(" \u00e9, \"quoted\" \\ {{ x }} <b>\n- one\n"), user(" more "), said("ok")],
        False,
    ),
    "special tokens": (
        [user("a<|im_end|>\n<|im_start|>b </s>[INST] <|eot_id|><end_of_turn>"),
         said("It is <|im_end|> or </s>, <|eot_id|>.")],
        False,
    ),
    "two users": ([user("One."), user("Two."), said("Three.")], False),
    "two answers": ([user("One."), said("Two."), said("Three.")], False),
    "list": ([user(parts("What is this?")), said(parts("A list."))], False),
    "list of two": ([{**SYSTEM, "content": parts("Be short.")}, user(parts("One.", " Two?")), said("Two parts.")],
                    False),
    "last is the user's": ([user("a?"), said("A."), user("b?")], False),
    "developer": ([{**SYSTEM, "role": "developer"}, user("Hi."), said("Hello.")], False),
}  # fmt: skip


class FixedDate(datetime.datetime):
    """The date that Genesis gives templates."""

    @classmethod
    def now(cls, tz: Any = None) -> FixedDate:
        return cls(2024, 7, 26)


def specials(text: str) -> list[str]:
    """The special tokens of a template's tokenizer, as far as the template's text tells."""
    found = NAMED.findall(text.replace("{}", ":opensource"))
    return list(dict.fromkeys([*ALWAYS, *found, *(end for end in ENDS if end in text)]))


def is_plain(name: str) -> bool:
    """Whether a token is added and not special, as Qwen's `<think>` and `<tool_call>` are."""
    return "|" not in name and any(word in name for word in PLAIN)


def write_tokenizer(folder: Path, text: str, named: list[str]) -> None:
    """A byte-level BPE with a few merges and the special tokens; `think` and tags of tools are added and plain."""
    import tokenizers as tk

    model = tk.Tokenizer(tk.models.BPE())
    model.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tk.decoders.ByteLevel()
    alphabet = sorted(tk.pre_tokenizers.ByteLevel.alphabet())
    trainer = tk.trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    model.train_from_iterator([text, json.dumps(list(CONVERSATIONS.values()), ensure_ascii=False)] * 2, trainer)
    model.add_special_tokens([name for name in named if not is_plain(name)])
    model.add_tokens([tk.AddedToken(name, normalized=False) for name in named if is_plain(name)])
    folder.mkdir()
    model.save(str(folder / "tokenizer.json"))
    end = next((end for end in ENDS if end in text and end in named), "</s>")
    start = next(
        (name for name in ("<|begin_of_text|>", "<bos>", "<\uff5cbegin▁of▁sentence\uff5c>") if name in named), "<s>"
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": start,
        "eos_token": end,
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "image_token": "<|user|>",
        "extra_special_tokens": {"cot_token": "<|tool|>"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")


class NotLearnedError(Exception):
    """A turn without targets."""


class Expected:
    """What transformers and the rule make of conversations. Args: named: the special tokens, plain ones included."""

    def __init__(self, folder: Path, text: str, named: list[str]) -> None:
        from transformers import PreTrainedTokenizerFast

        self.peer, self.text = PreTrainedTokenizerFast.from_pretrained(folder), text
        self.specials = sorted((name for name in named if not is_plain(name)), key=len, reverse=True)
        self.words = {name: chr(0xF0000 + i) for i, name in enumerate(self.specials)}
        self.closing, self.opening = self._probe()
        self.next = [
            self._next([ASKED, said("Fine.")], ASKED, None),
            self._next(CALLED[:2], CALLED[2], [WEATHER]),
        ]
        self.next[1] = self.next[1] or self.next[0]

    def _next(self, messages: list[Any], more: Any, tools: Any) -> str:
        """What the next message begins with, up to and with a special token, if that comes at once."""
        try:
            form, _ = self.form([*messages, more], tools)
            whole, longer = self.render(form[:-1], tools, False), self.render(form, tools, False)
        except Exception:
            return ""
        rest = longer.removeprefix(whole) if longer.startswith(whole) else ""
        ends = self._specials(rest)
        return rest[: ends[0].end()] if ends and not rest[: ends[0].start()].strip() else ""

    def _probe(self) -> tuple[str, str]:
        """What ends a whole render alone, and what ends prompts alone."""
        question, answer = user("How are you?"), said("Fine, thanks.")
        try:
            whole, prompt = self.render([question, answer], None, False), self.render([question], None, True)
        except Exception:
            return "", ""
        before, _, after = whole.rpartition("Fine, thanks.")
        opening = prompt[len(before) :] if before and prompt.startswith(before) else ""
        try:
            followed = self.render([question, answer, question], None, False).rpartition("Fine, thanks.")[2]
        except Exception:
            return "", opening
        same = os.path.commonprefix([after, followed])  # noqa: RUF071 - texts, no paths
        ends = self._specials(same)
        closing = after[ends[-1].end() :] if ends else ""
        return (closing if closing.strip() else ""), opening

    def _specials(self, text: str) -> list[re.Match[str]]:
        return list(re.finditer("|".join(map(re.escape, self.specials)), text))

    def hidden(self, value: Any) -> Any:
        """`value` with a character of its own for each special token in its texts."""
        if isinstance(value, str):
            for text in self.specials:
                value = value.replace(text, self.words[text])
            return value
        if isinstance(value, dict):
            kept = {key: inner if key in ("role", "type") else self.hidden(inner) for key, inner in value.items()}
            return type(value)(kept)
        return [self.hidden(inner) for inner in value] if isinstance(value, list) else value

    def shown(self, text: str) -> str:
        for word, char in self.words.items():
            text = text.replace(char, word)
        return text

    def render(self, messages: list[Any], tools: Any, prompt: bool, **more: Any) -> Any:
        return self.peer.apply_chat_template(
            self.hidden(messages), tools=self.hidden(tools), chat_template=self.text, add_generation_prompt=prompt,
            **{"tokenize": False, **more},
        )  # fmt: skip

    def ids(self, text: str) -> list[int]:
        found: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, self.specials)) + ")", text):
            if part in self.specials:
                found.append(self.peer.convert_tokens_to_ids(part))
            elif part:
                found += self.peer(self.shown(part), add_special_tokens=False, split_special_tokens=True).input_ids
        return found

    def form(self, messages: list[Any], tools: Any) -> tuple[list[Any], str]:
        """The messages in the first form that can be rendered, and its name. Raises: what the record's form raises."""
        first: Exception | None = None
        lists = [m["content"] for m in messages if isinstance(m.get("content"), list)]
        for name, form in forms(messages):
            try:
                text = self.render(form, tools, False)
            except Exception as error:
                first = first or error
                continue
            is_read = all(p["text"].strip() in text and str(p) not in text for each in lists for p in each)
            if name != "as found" or is_read:
                return form, name
        assert first is not None
        raise first

    def turn(self, messages: list[Any], tools: Any, index: int) -> tuple[list[int], list[int]]:
        """The ids of a turn's prompt and targets. Raises: NotLearnedError."""
        try:
            prompt, end = self.render(messages[:index], tools, True), self.render(messages[: index + 1], tools, False)
        except Exception as error:
            raise NotLearnedError("no prompt") from error
        if not end.startswith(prompt) and end.startswith(prompt.removesuffix(self.opening)):
            prompt = prompt.removesuffix(self.opening)
        if end.startswith(prompt):
            target = end[len(prompt) :]
        else:
            target = self._after_the_last_message(messages, index, prompt, end)
        target = target.removesuffix(self.closing)
        ends = self._specials(target)
        if ends and not target[ends[-1].end() :].strip():
            target = target[: ends[-1].end()]
        elif not self.has_end(messages[index]):
            more = self.next[bool(messages[index].get("tool_calls"))]
            target += more
            if not more and messages[index].get("tool_calls"):
                raise NotLearnedError("the calls have no end")
        if not target:
            raise NotLearnedError("nothing to learn")
        self._check(messages[index], self.shown(target))
        return self.ids(prompt), self.ids(target)

    def _after_the_last_message(self, messages: list[Any], index: int, prompt: str, end: str) -> str:
        """What the render has after the last message and all that follows it in the prompt. Raises: NotLearnedError."""
        last = self.hidden(text_of(messages[index - 1])).strip() if index else ""
        tail = prompt[prompt.rindex(last) :] if last and last in prompt else ""
        if not tail or end.count(tail) != 1:
            raise NotLearnedError("the render does not begin with the prompt")
        return end.partition(tail)[2]

    def has_end(self, message: dict[str, Any]) -> bool:
        """Whether the template ends answers, or calls, with a special token of their own."""
        asked, tools = (CALLED[:2], [WEATHER]) if message.get("tool_calls") else ([ASKED, said("Fine.")], None)
        try:
            text = self.render(self.form(asked, tools)[0], tools, False)
        except Exception:
            return True
        ends = self._specials(text)
        return bool(ends) and not text[ends[-1].end() :].strip()

    def _check(self, message: dict[str, Any], target: str) -> None:
        calls = message.get("tool_calls") or []
        if not all(each["function"]["name"] in target for each in calls):
            raise NotLearnedError("the calls are left out")
        content = message.get("content") or ""
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        if not calls and not all(text.rpartition("</think>")[2].strip() in target for text in texts):
            raise NotLearnedError("the content is left out")

    def mask(self, messages: list[Any], tools: Any) -> tuple[list[int], list[int]]:
        """The ids of the whole render and transformers' mask of what the assistant says."""
        found = self.render(messages, tools, False, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return found["input_ids"], found["assistant_masks"]


def text_of(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def forms(messages: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    """The forms of a conversation, in the order in which they are tried."""
    yield "as found", messages
    joined = [{**m, "content": text_of(m)} if isinstance(m.get("content"), list) else m for m in messages]
    if joined != messages:
        yield "texts joined", joined
    if any(m.get("tool_calls") for m in messages):
        for name, change in (("arguments as objects", as_object), ("arguments as strings", as_string)):
            changed = json.loads(json.dumps(joined))
            for each in (c["function"] for m in changed for c in m.get("tool_calls") or ()):
                each["arguments"] = change(each["arguments"])
            yield name, changed
            # transformers takes out what is null, so it is put back behind its back.
            for more, kind in (("null content", Null), ("empty content", Empty)):
                filled = [kind(m) if m.get("tool_calls") and m.get("content") is None else m for m in changed]
                yield f"{name}, {more}", filled


def as_object(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def as_string(value: Any) -> Any:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class Null(dict[str, Any]):
    """A message whose content is null also for a template."""

    content: Any = None


class Empty(Null):
    """A message without content that is an empty one for a template."""

    content = ""


def nulls_kept(normalize: Any) -> Any:
    """transformers' `normalize`, which leaves null out, but for `Null`."""

    def normalized(conversation: Any) -> Any:
        found = normalize(conversation)
        both = zip(found, conversation, strict=True)
        return [{"content": given.content, **each} if isinstance(given, Null) else each for each, given in both]

    return normalized


class Compared:
    """Genesis beside `Expected`, for one template."""

    def __init__(self, folder: Path, text: str) -> None:
        named = specials(text)
        write_tokenizer(folder, text, named)
        self.expected = Expected(folder, text, named)
        self.tokenizer = Tokenizer.load(folder)
        template = ChatTemplate.from_text(text)
        self.learned = ChatEncoder(self.tokenizer, template, loss="all_assistant")
        self.all = ChatEncoder(self.tokenizer, template, loss="all")
        self.prompts = ChatPrompts(self.tokenizer, template)
        self.has_mask = re.search(r"\{%-?\s*generation\s*-?%\}", text) is not None

    def close(self) -> None:
        for each in (self.learned, self.all, self.prompts):
            each.close()

    def differences(self, name: str) -> Iterator[str]:
        """What differs in a conversation, in words; the first item says in which form it was rendered."""
        messages, has_tools = CONVERSATIONS[name]
        tools = [WEATHER] if has_tools else None
        value = {"messages": messages, **({"tools": tools} if tools else {})}
        _, record = RecordFormat().read(json.loads(json.dumps(value)), Position("chats.jsonl", 1))
        assert isinstance(record, Conversation)
        document = Document(record_text(record), "chats.jsonl", 1, record)
        [learned], [whole] = self.learned.encode([document]), self.all.encode([document])
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        try:
            form, how = self.expected.form(messages, tools)
        except Exception as error:
            yield "refused"
            if not isinstance(whole, Defect):
                yield f"only transformers refuses the whole: {error}"
            yield from self._beginning(messages, tools, turns, learned)
            return
        yield how
        yield from self._whole(form, tools, whole)
        if messages[-1]["role"] != "assistant":
            form, _ = self.expected.form(messages[: turns[-1] + 1], tools)
        yield from self._turns(form, tools, turns, learned)
        yield from self._prompt(record, form, tools, turns[-1])

    def _beginning(self, messages: list[Any], tools: Any, turns: list[int], learned: Any) -> Iterator[str]:
        """What differs in the turns up to the last one that can be rendered."""
        while turns:
            try:
                form, _ = self.expected.form(messages[: turns[-1] + 1], tools)
            except Exception:
                turns = turns[:-1]
                continue
            yield from self._turns(form, tools, turns, learned)
            return
        if not isinstance(learned, Defect):
            yield "only transformers refuses every turn"

    def _whole(self, form: list[Any], tools: Any, whole: Any) -> Iterator[str]:
        text = self.expected.shown(self.expected.render(form, tools, False))
        if form[-1]["role"] == "assistant" and not self.expected.has_end(form[-1]):
            try:
                self.expected.turn(form, tools, len(form) - 1)
                text += self.expected.next[bool(form[-1].get("tool_calls"))]
            except NotLearnedError:
                pass
        if isinstance(whole, Defect):
            if "leaves out" not in whole.what:
                yield f"only Genesis refuses the whole: {whole.what}"
        elif (ours := self.tokenizer.decode(whole[0].ids, skip_special=False)) != text:
            yield f"renders differ: {ours!r} and {text!r}"

    def _turns(self, form: list[Any], tools: Any, turns: list[int], learned: Any) -> Iterator[str]:
        expected, why = [], list[str]()
        for turn in turns:
            try:
                expected.append(self.expected.turn(form, tools, turn))
            except NotLearnedError as error:
                why.append(str(error))
        samples = [] if isinstance(learned, Defect) else learned
        found = sum(int(sample.is_target.sum()) for sample in samples)
        if found != sum(len(target) for _, target in expected):
            ours = learned.what if isinstance(learned, Defect) else list(map(self._texts, pairs(samples)))
            yield f"targets differ: {ours} and {[self._texts(pair) for pair in expected]} {why}"
            return
        for prompt, target in expected:
            ids = prompt + target
            if not any(
                s.ids[: len(ids)].tolist() == ids and s.is_target[len(prompt) : len(ids)].all() for s in samples
            ):
                yield f"no sample has {self._texts((prompt, target))}"
        if self.has_mask and expected and not why:
            yield from self._mask(form, tools, expected)

    def _texts(self, pair: tuple[list[int], list[int]]) -> tuple[str, str]:
        prompt, target = (self.tokenizer.decode(ids, skip_special=False) for ids in pair)
        return prompt[-60:], target

    def _prompt(self, record: Conversation, form: list[Any], tools: Any, turn: int) -> Iterator[str]:
        if not turn:
            return
        asked = Conversation(record.messages[:turn], record.tools)
        try:
            expected = self.expected.ids(self.expected.render(self.expected.form(form[:turn], tools)[0], tools, True))
        except Exception:
            return
        try:
            found = self.prompts.encode(asked)
        except GenesisError as error:
            yield f"only Genesis refuses the prompt: {error}"
            return
        if found != expected:
            yield f"prompts differ: {self._texts((found, expected))}"

    def _mask(self, form: list[Any], tools: Any, expected: list[tuple[list[int], list[int]]]) -> Iterator[str]:
        ids, mask = self.expected.mask(form, tools)
        whole = expected[-1][0] + expected[-1][1]
        if ids[: len(whole)] != whole:
            return
        ours = [0] * len(whole)
        for prompt, target in expected:
            if whole[: len(prompt) + len(target)] == prompt + target:
                ours[len(prompt) : len(prompt) + len(target)] = [1] * len(target)
        for place, (number, theirs, mine) in enumerate(zip(ids, mask, ours, strict=False)):
            token = self.tokenizer.decode([number], skip_special=False)
            is_learned_elsewhere = theirs and place < len(expected[-1][0])
            if theirs != mine and not is_learned_elsewhere and token.strip():
                yield f"the masks differ at {place}, {token!r}: {theirs} and ours {mine}"
                return


def listed() -> dict[tuple[str, str], str]:
    """(sha256, conversation) -> why the two differ."""
    rows = [line.split("\t") for line in LISTED.read_text("utf-8").splitlines()[1:]]
    return {(digest, name): why for _, digest, _, name, why in rows if name}


def main(folder: str) -> int:
    from transformers import tokenization_utils_base
    from transformers.utils import chat_template_utils, logging

    logging.set_verbosity_error()
    chat_template_utils.datetime = FixedDate  # type: ignore[attr-defined]
    tokenization_utils_base._normalize_chat_messages = nulls_kept(tokenization_utils_base._normalize_chat_messages)
    known, counts, unexplained = listed(), Counter[str](), 0
    with tempfile.TemporaryDirectory() as scratch:
        for number, path in enumerate(sorted(Path(folder).glob("*.jinja"))):
            text = path.read_bytes().decode("utf-8")
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            try:
                compared = Compared(Path(scratch, str(number)), text)
            except GenesisError as error:
                found = {"all": [error.what]}
            else:
                found = {}
                for name in CONVERSATIONS:
                    how, *differences = compared.differences(name)
                    counts[how] += 1
                    if differences:
                        found[name] = differences
                compared.close()
            counts["templates"] += 1
            for name, differences in found.items():
                is_known = (digest, name) in known
                counts["listed" if is_known else "unexplained"] += 1
                unexplained += not is_known
                if not is_known:
                    print(f"{path.stem}\t{digest}\t{name}\t{differences[0]}", flush=True)
    print(", ".join(f"{count:,} {what}" for what, count in sorted(counts.items())))
    return int(unexplained > 0 or not counts["templates"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) if len(sys.argv) == 2 else "name a folder of *.jinja: make templates FOLDER=templates")
