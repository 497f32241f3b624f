"""The names that CGX scripts import from `cgx_utils`: `from torch_accl.compat.cgx_utils import CGXState, cgx_hook`."""

from .cgx import CGXState, cgx_hook

__all__ = ["CGXState", "cgx_hook"]
