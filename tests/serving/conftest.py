"""The model of the command line's tests."""

from tests.cli.conftest import chat_model

__all__ = ["chat_model"]
