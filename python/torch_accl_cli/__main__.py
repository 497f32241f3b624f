"""`python -m torch_accl_cli` is the `accl` command."""

import sys

from . import main

sys.exit(main())
