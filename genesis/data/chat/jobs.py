"""A conversation as a job for the renderer: the special tokens in its texts are marked, so that they stay text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from genesis.data.chat.marks import Marker
from genesis.data.chat.renderer import Job, Limits
from genesis.data.chat.turns import TurnError, template_messages

# What a render takes at the least for a byte of its conversation: JSON, characters of up to four bytes, and the output.
_MEMORY_A_BYTE = 16


def marked_job(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    turns: Sequence[int],
    *,
    marker: Marker,
    avoid: Sequence[str],
    limits: Limits,
) -> tuple[Job, str]:
    """The job, and the two characters that mark; "" where there is nothing to mark.

    Args:
        turns: the messages whose prompts are wanted; the one behind the last stands for what is to be generated.
        avoid: the template's texts, which must not hold the marks.

    Raises:
        TurnError: more than a template may be given. MarksError: no characters are left to mark with.
        ValueError, RecursionError: as in `Job.of`.
    """
    named = template_messages(messages)
    # Roles stay as they are: many templates make a special token of one, `'<|' + message.role + '|>'`.
    bare = [{**message, "role": ""} for message in named]
    (bare, tools), marks = marker.marked([bare, tools], avoid)
    job = Job.of(
        [{**message, "role": known.get("role")} for message, known in zip(bare, named, strict=True)], tools, turns
    )
    if len(job.data) > limits.memory_bytes // _MEMORY_A_BYTE:
        what = f"the conversation has {len(job.data):,} bytes, more than a template may be given"
        raise TurnError("huge conversation", what, "split it")
    return job, marks
