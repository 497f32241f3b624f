"""A torch minor version and a version of the package. The version gate does not read them: it compares file names."""

__all__ = ["BUILT_FOR_TORCH", "VERSION"]

BUILT_FOR_TORCH = "2.15"
VERSION = "0.1.0"
