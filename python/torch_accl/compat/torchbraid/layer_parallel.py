"""`LayerParallel` by the name of torchbraid's own module."""

from ._layer_parallel import LayerParallel

__all__ = ["LayerParallel"]
