"""Written by the build; read by the version gate before the native module is loaded."""

__all__ = ["BUILT_FOR_TORCH", "VERSION"]

BUILT_FOR_TORCH = "2.15"
VERSION = "0.1.0"
