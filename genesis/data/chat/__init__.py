"""Chat templates and targets: conversations become token ids and a mask of the tokens that the assistant produces.

`ChatTemplate` is the model's own Jinja text, `Renderer` runs it in a child process, `ChatEncoder` makes samples and
`ChatPrompts` makes prompts.
"""

from __future__ import annotations

from genesis.data.chat.renderer import Limits, Renderer
from genesis.data.chat.samples import ChatEncoder, ChatPrompts, Sample
from genesis.data.chat.template import ChatTemplate
from genesis.data.chat.turns import Loss

__all__ = ["ChatEncoder", "ChatPrompts", "ChatTemplate", "Limits", "Loss", "Renderer", "Sample"]
