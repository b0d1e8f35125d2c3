"""`genesis` as a rank in Triton's interpreter whose NCCL is the fake; the first argument is where ranks meet."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

from genesis.backend.cuda.simulated import HostDriver
from genesis.distributed import nccl as groups
from genesis_cli.main import main
from tests.distributed import fake_nccl
from tests.interpreter import hasten

if __name__ == "__main__":
    hasten()
    fake_nccl.folder = Path(sys.argv.pop(1))
    groups.is_interpreted = lambda: False
    groups.bindings = lambda: fake_nccl
    HostDriver.is_linked = lambda self, devices: True
    sys.exit(main())
