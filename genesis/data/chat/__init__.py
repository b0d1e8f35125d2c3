"""Chat templates and targets: conversations become token ids and a mask that says which of them a model would say.

`ChatTemplate` is the model's own Jinja text, `Renderer` runs it in a child process, and `ChatEncoder` makes samples,
`ChatPrompts` prompts.
"""

from __future__ import annotations

from genesis.data.chat.renderer import Limits, Renderer
from genesis.data.chat.samples import ChatEncoder, ChatPrompts, Sample
from genesis.data.chat.template import ChatTemplate
from genesis.data.chat.turns import Loss

__all__ = ["ChatEncoder", "ChatPrompts", "ChatTemplate", "Limits", "Loss", "Renderer", "Sample"]
