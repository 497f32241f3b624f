"""Makes `python -m torch_accl.cli` run the `accl` command, whose code is in `torch_accl_cli`."""

import sys

from torch_accl_cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
