"""Facades for scripts that were written for other libraries. After its import is changed, such a script runs on accl.

* torch-ccl: `from torch_accl.compat import ccl`
* torch_cgx: `from torch_accl.compat import cgx as torch_cgx`
* the process group of the ACCL project: `from torch_accl.compat import accl_process_group as accl`
* torchbraid: `from torch_accl.compat import torchbraid`

torch_accl itself imports nothing from this package.
"""

__all__: list[str] = []
