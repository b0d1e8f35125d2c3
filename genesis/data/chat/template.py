"""A model's chat template: its files, and the arguments that become its defaults. It does not render.

`template_args` are not passed to a render. They are written at the head of the text as `{% if x is not defined %}…`, so
that the saved model renders as in training with any program, and callers can still override them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any

from genesis.data.tokenizer import Tokenizer
from genesis.errors import ConfigError, ModelError, escape, nearest
from genesis.files.hf import read_chat_templates, read_template
from genesis.files.paths import is_folder
from genesis.files.strict_json import canonical_bytes

CHATML = "chatml"
NO_TEMPLATE = f"set data.template={CHATML}, or data.template=FILE to a Jinja template, or use a chat model"
_TURN_END = "<|im_end|>"
_CHATML_TEXT = """\
{%- for message in messages %}
    {%- if tools or message.tool_calls %}
        {{- raise_exception('the built-in ChatML knows no tools') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content %}
        {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content + TURN_END + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_TESTED = re.compile(r"([A-Za-z][A-Za-z0-9_]*) is (?:not )?defined")
# Variables that every render sets, and the reserved words of Jinja.
_RENDER_SETS = ("messages", "tools", "documents", "add_generation_prompt")
_JINJA_WORDS = ("and", "or", "not", "in", "is", "if", "else", "true", "false", "none")
_RESERVED = frozenset(_RENDER_SETS + _JINJA_WORDS)


class ChatTemplate:
    """The texts of a chat template and the defaults before them.

    Attributes:
        texts: name -> original Jinja text; `default`, and optionally `tool_use` for conversations with tools.
        args: the defaults.
        where: name of the template in errors.
        fingerprint: sha256 over texts and defaults.
    """

    def __init__(self, texts: Mapping[str, str], args: Mapping[str, Any] | None = None, *, where: str) -> None:
        """Raises: ConfigError, if a template cannot take an argument."""
        self.texts = dict(texts)
        self.args = dict(args or {})
        self.where = where
        head = "".join(_default(name, value) for name, value in sorted(self.args.items()))
        # `trim_blocks` removes the line end after the block, so the text begins as before.
        self._head = head and head + "\n"
        self.fingerprint = hashlib.sha256(canonical_bytes(self.texts_with_defaults)).hexdigest()

    def check_args(self) -> None:
        """Refuse an argument that has no effect, such as a misspelled one. Raises: ConfigError."""
        words = {word for text in self.texts.values() for word in _WORD.findall(text)}
        for name in sorted(self.args.keys() - words):
            asked = {word for text in self.texts.values() for word in _TESTED.findall(text)}
            meant = nearest(name, asked)
            next = f"did you mean {meant}?" if meant else "see the template, or remove the argument"
            what = f"the chat template in {self.where} reads no variable {name}"
            raise ConfigError(what, where="data.template_args", next=next)

    @classmethod
    def named(cls, name: str, tokenizer: Tokenizer, args: Mapping[str, Any] | None = None) -> ChatTemplate:
        """Return `chatml`, or the template that `read` finds at this path."""
        return cls.chatml(tokenizer, args) if name == CHATML else cls.read(name, args)

    @classmethod
    def read(cls, path: str | os.PathLike[str], args: Mapping[str, Any] | None = None) -> ChatTemplate:
        """Read the template of a model folder, or of a file with Jinja text.

        Raises:
            ModelError: the template is missing or cannot be read.
            ConfigError: a template cannot take an argument.
        """
        where = escape(path)
        if is_folder(path):
            texts = read_chat_templates(path)
            if not texts:
                what = "the model has no chat template, which converts conversations to text"
                raise ModelError(what, where=where, next=NO_TEMPLATE)
            return cls(texts, args, where=where)
        return cls.from_text(read_template(path, where), args, where=where)

    @classmethod
    def from_text(cls, text: str, args: Mapping[str, Any] | None = None, *, where: str = "template") -> ChatTemplate:
        """Return the template with this Jinja text."""
        return cls({"default": text}, args, where=where)

    @classmethod
    def chatml(cls, tokenizer: Tokenizer, args: Mapping[str, Any] | None = None) -> ChatTemplate:
        """Return ChatML, for base models. If `<|im_end|>` is not a special token, the end of text ends turns."""
        end = _TURN_END if tokenizer.special_text(_TURN_END) == _TURN_END else tokenizer.token(tokenizer.eos_id)
        return cls.from_text(_CHATML_TEXT.replace("TURN_END", _literal(end, "")), args, where=CHATML)

    @property
    def texts_with_defaults(self) -> dict[str, str]:
        """The texts that are rendered and saved, by name."""
        return {name: self._head + text for name, text in self.texts.items()}


def template_variables(tokenizer: Tokenizer) -> Mapping[str, str]:
    """Return the variables that templates get from a tokenizer: its special tokens by name, as in transformers."""
    return {name: text for name, text in tokenizer.named_tokens.items() if name not in _RENDER_SETS}


def _default(name: str, value: Any) -> str:
    where = "data.template_args"
    if not _NAME.fullmatch(name) or name.lower() in _RESERVED:
        raise ConfigError(f"{escape(name)!r} cannot name a template's argument", where=where, next="see the template")
    return f"{{% if {name} is not defined %}}{{% set {name} = {_literal(value, name)} %}}{{% endif %}}"


def _literal(value: Any, name: str) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        return "".join(c if ord(c) < 128 else f"\\U{ord(c):08x}" for c in text)
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    if isinstance(value, list):
        return "[" + ", ".join(_literal(inner, name) for inner in value) + "]"
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return "{" + ", ".join(f"{_literal(key, name)}: {_literal(inner, name)}" for key, inner in value.items()) + "}"
    what = f"the value of {name} cannot be written into a template"
    raise ConfigError(
        what, where="data.template_args", next="give text, a number, true, false, null, a list or a mapping"
    )
