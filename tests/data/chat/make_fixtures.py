"""Golden samples of chat templates, made with transformers and the templates that TRL's wheel carries.

    PYTHONPATH=. python -m tests.data.chat.make_fixtures

in an environment with numpy, transformers, trl 1.16 (Apache 2.0) and dashscope (Qwen's ranks, Apache 2.0). Nothing of
genesis.data.chat takes part. For each turn of the assistant the prompt is what `apply_chat_template` gives a server for
the messages before it, in ids; the target is what the text of the messages up to it has after the prompt's text, up to
and with the end of the turn, in ids. Special tokens inside messages are rendered as words of a private use area, and
only the template's own become ids. Where TRL's training template, whose masks come from `{% generation %}`, gives the
same ids, its mask must agree.

The tokenizer has Qwen's own ranks, cut down to what the texts need, and Qwen3's added tokens. Llama's ranks cannot be
had here: its case has the same with Llama's added tokens and pattern. `templates/llama3_2.jinja` was written for these
tests and must render as the original does.
"""

from __future__ import annotations

import copy
import gzip
import json
import os
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.data.chat.conversations import CONVERSATIONS, with_objects
from tests.data.make_fixtures import folder_of, qwen

HERE = Path(__file__).parent
FIXTURE = HERE / "golden.json.gz"

QWEN_SPECIAL = re.findall(
    r"\S+",
    """
    <|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|>
    <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>
    """,
)
QWEN_PLAIN = re.findall(
    r"\S+",
    """
    <tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>
    <tool_response> </tool_response> <think> </think>
    """,
)
LLAMA_SPECIAL = re.findall(
    r"\S+",
    """
    <|begin_of_text|> <|end_of_text|> <|finetune_right_pad_id|> <|start_header_id|> <|end_header_id|> <|eom_id|>
    <|eot_id|> <|python_tag|>
    """,
)
FIRST_ADDED = 151643

# Case -> template, arguments, tokenizer, the token that ends a turn.
CASES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "qwen2_5": ("qwen2_5", {}, "qwen", "<|im_end|>"),
    "qwen3": ("qwen3", {}, "qwen", "<|im_end|>"),
    "qwen3 without thinking": ("qwen3", {"enable_thinking": False}, "qwen", "<|im_end|>"),
    "qwen3_5_think": ("qwen3_5_think", {}, "qwen", "<|im_end|>"),
    "qwen3_5_nothink": ("qwen3_5_nothink", {}, "qwen", "<|im_end|>"),
    "llama3_2": ("llama3_2", {"date_string": "01 Feb 2025"}, "llama", "<|eot_id|>"),
}


_qwen = cache(qwen)


def tokenizer_content(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A whole tokenizer.json, and tokenizer_config.json."""
    content, config = copy.deepcopy(_qwen())
    names = [(name, True) for name in (QWEN_SPECIAL if kind == "qwen" else LLAMA_SPECIAL)]
    names += [(name, False) for name in (QWEN_PLAIN if kind == "qwen" else ())]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] = [
        {"id": FIRST_ADDED + i, "content": name, "special": special, **flags} for i, (name, special) in enumerate(names)
    ]
    if kind == "llama":
        pattern = content["pre_tokenizer"]["pretokenizers"][0]["pattern"]
        pattern["Regex"] = pattern["Regex"].replace(r"|\p{N}|", r"|\p{N}{1,3}|")
        content["normalizer"] = None
        start, text = (
            {"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        )
        named = {"id": "<|begin_of_text|>", "ids": [FIRST_ADDED], "tokens": ["<|begin_of_text|>"]}
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [start, text],
            "pair": [start, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|begin_of_text|>": named},
        }
        config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|finetune_right_pad_id|>"}
    return content, config


class Oracle:
    """What transformers makes of conversations with one template."""

    def __init__(self, peer: Any, template: str, training: str | None, args: dict[str, Any], end: str) -> None:
        self.peer, self.template, self.training, self.args, self.end = peer, template, training, args, end
        named = [t for t in peer.added_tokens_decoder.values() if t.special]
        self.specials = sorted((t.content for t in named), key=len, reverse=True)
        self.words = {text: chr(0xF0000 + i) for i, text in enumerate(self.specials)}
        self.used: set[int] = set()

    def hidden(self, value: Any) -> Any:
        """`value` with a character of its own for each special token in its texts."""
        if isinstance(value, str):
            for text in self.specials:
                value = value.replace(text, self.words[text])
            return value
        if isinstance(value, dict):
            return {self.hidden(key): self.hidden(inner) for key, inner in value.items()}
        return [self.hidden(inner) for inner in value] if isinstance(value, list) else value

    def render(self, messages: list[Any], tools: Any, prompt: bool, template: str | None = None) -> str:
        text: str = self.peer.apply_chat_template(
            self.hidden(messages), tools=self.hidden(tools), chat_template=template or self.template, tokenize=False,
            add_generation_prompt=prompt, **self.args,
        )  # fmt: skip
        return text

    def ids(self, text: str) -> list[int]:
        """The ids of a render: the specials in it, and the texts between them, in which none is left."""
        found: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, self.specials)) + ")", text):
            if part in self.specials:
                found.append(self.peer.convert_tokens_to_ids(part))
            elif part:
                for word, char in self.words.items():
                    part = part.replace(char, word)
                found += self.peer(part, add_special_tokens=False, split_special_tokens=True).input_ids
        if not any(char in text for char in self.words.values()):
            assert found == self.peer(text, add_special_tokens=False).input_ids, "as a server encodes it"
        self.used.update(found)
        return found

    def turns(self, messages: list[Any], tools: Any) -> list[tuple[list[int], list[int]]]:
        """For each turn of the assistant the ids of its prompt, and of what it says."""
        messages = with_objects(messages)
        turns = []
        for index in [i for i, message in enumerate(messages) if message["role"] == "assistant"]:
            prompt = self.render(messages[:index], tools, True)
            text = self.render(messages[: index + 1], tools, False)
            if not text.startswith(prompt):
                raise ValueError("the render does not begin with the prompt")
            target = text[len(prompt) :]
            stop = target.rindex(self.end) + len(self.end)
            assert not target[stop:].strip()
            turns.append((self.ids(prompt), self.ids(target[:stop])))
        return turns

    def agrees(self, messages: list[Any], tools: Any, turns: list[tuple[list[int], list[int]]]) -> bool:
        """Whether TRL's training template gives one sample of the last turn's ids; then its mask must be ours."""
        if self.training is None:
            return False
        found = self.peer.apply_chat_template(
            with_objects(messages), tools=tools, chat_template=self.training, tokenize=True, return_dict=True,
            return_assistant_tokens_mask=True, **self.args,
        )  # fmt: skip
        whole = turns[-1][0] + turns[-1][1]
        if found["input_ids"][: len(whole)] != whole:
            return False
        mask = [0] * len(whole)
        for prompt, target in turns:
            if whole[: len(prompt) + len(target)] != prompt + target:
                return False
            mask[len(prompt) : len(prompt) + len(target)] = [1] * len(target)
        # TRL's blocks also hold what the generation prompt has already said, and the line end after the turn.
        said = {
            i for text in ("\n", "<think>\n\n</think>\n\n") for i in self.peer(text, add_special_tokens=False).input_ids
        }
        theirs = found["assistant_masks"][: len(whole)]
        for number, a, b in zip(whole, theirs, mask, strict=True):
            assert a == b or (a == 1 and number in said), self.peer.convert_ids_to_tokens([number])
        return True


def cut_down(content: dict[str, Any], used: set[int]) -> dict[str, Any]:
    """The tokenizer with the bytes, and the tokens `used` with all that they could be merged of; each keeps its id."""
    model = content["model"]
    added = {token["content"]: token["id"] for token in content["added_tokens"]}
    texts = {text for text, number in model["vocab"].items() if number in used}
    parts = {text[i:j] for text in texts for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    kept = {text for text in model["vocab"] if len(text) == 1 or text in parts}
    vocab = {text: number for text, number in model["vocab"].items() if text in kept} | added
    merges = [list(pair) for pair in model["merges"] if {*pair, "".join(pair)} <= kept]
    return {**content, "model": {**model, "vocab": vocab, "merges": merges}}


def cases(scratch: Path) -> Iterator[tuple[str, Oracle]]:
    import trl
    from transformers import AutoTokenizer

    folder = Path(trl.__file__).parent / "chat_templates"
    for case, (name, args, kind, end) in CASES.items():
        content, config = tokenizer_content(kind)
        peer = AutoTokenizer.from_pretrained(folder_of(scratch / kind, content, config))
        training = folder / f"{name}_training.jinja"
        template = (folder / f"{name}.jinja").read_text()
        yield case, Oracle(peer, template, training.read_text() if training.exists() else None, args, end)


def main() -> None:
    """Write the fixture."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    golden: dict[str, dict[str, Any]] = {}
    used: dict[str, set[int]] = {}
    agreeing = 0
    with tempfile.TemporaryDirectory() as scratch:
        for case, oracle in cases(Path(scratch)):
            own = (HERE / "templates" / f"{CASES[case][0]}.jinja").read_text()
            golden[case] = {}
            for name, (messages, tools) in CONVERSATIONS.items():
                try:
                    turns = oracle.turns(messages, tools)
                except Exception as error:
                    print(f"{case}: {name}: {error}")
                    golden[case][name] = None
                    continue
                golden[case][name] = turns
                for prompt in (True, False):
                    plain = with_objects(messages)
                    assert oracle.render(plain, tools, prompt) == oracle.render(plain, tools, prompt, own), name
                agreeing += oracle.agrees(messages, tools, turns)
            used.setdefault(CASES[case][2], set()).update(oracle.used)
    print(f"TRL's masks agree with {agreeing} conversations")
    tokenizers = {}
    for kind, ids in used.items():
        content, config = tokenizer_content(kind)
        tokenizers[kind] = {"content": cut_down(content, ids), "config": config}
    data = json.dumps({"tokenizers": tokenizers, "turns": golden}, separators=(",", ":")).encode()
    FIXTURE.write_bytes(gzip.compress(data, 9, mtime=0))
    print(f"{FIXTURE.name}: {FIXTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
