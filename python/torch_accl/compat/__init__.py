"""Facades for scripts that were written for other libraries: after changing an import they run on accl.

`cgx` is for torch_cgx: `from torch_accl.compat import cgx as torch_cgx`. Nothing here is imported by torch_accl itself.
"""
