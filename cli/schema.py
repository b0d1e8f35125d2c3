"""`genesis schema`: the configuration schema, for editors and readers."""

from __future__ import annotations

import json


def schema() -> None:
    """Print the JSON schema of configurations.

    It has each setting's meaning, default and bounds.

    Editors with a YAML language server complete and check a file that starts with the line
    `# yaml-language-server: $schema=genesis.schema.json`.
    """
    from genesis.train.config import json_schema

    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
