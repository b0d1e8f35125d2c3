"""`genesis validate`: checks configuration, data and model without training."""

from __future__ import annotations

import sys

from genesis.errors import ModelError
from genesis.files.boundary import fitting
from genesis_cli.options import ConfigName, Overrides


def validate(config: ConfigName, overrides: Overrides = None) -> None:
    """Check CONFIG, its data and its model.

    It trains nothing and writes nothing.
    """
    from genesis.train.output import Output
    from genesis_cli import recipes

    loaded = recipes.load(config, overrides or [])
    from genesis_cli import session

    console = Output(sys.stdout)
    with fitting(ModelError, "checking the model"):
        session.validate(loaded, console=console)
    console.check()
