"""`python -m genesis_cli` is `genesis`."""

from __future__ import annotations

import sys

from genesis_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
