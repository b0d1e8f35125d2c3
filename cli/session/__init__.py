"""Implements the commands by combining model, data and loop. It neither parses options nor formats errors."""

from genesis_cli.session.data_preview import preview
from genesis_cli.session.exactness import check_exact
from genesis_cli.session.export import export
from genesis_cli.session.generation import generate
from genesis_cli.session.inference import evaluate
from genesis_cli.session.talk import talk
from genesis_cli.session.tasks import evaluate_task
from genesis_cli.session.training import train
from genesis_cli.session.validation import validate

__all__ = ["check_exact", "evaluate", "evaluate_task", "export", "generate", "preview", "talk", "train", "validate"]
