"""Makes `python -m torch_accl_cli` run the `accl` command."""

import sys

from . import main

sys.exit(main())
