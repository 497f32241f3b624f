"""Facades for scripts that were written for other libraries: after changing an import they run on accl.

`ccl` is for torch-ccl: `from torch_accl.compat import ccl`. `cgx` is for torch_cgx: `from torch_accl.compat import cgx as torch_cgx`. `accl_process_group` is for the process group of the ACCL project:
`from torch_accl.compat import accl_process_group as accl`. `torchbraid` is for torchbraid: `from torch_accl.compat import torchbraid`. Nothing here is imported by torch_accl itself.
"""

__all__: list[str] = []
