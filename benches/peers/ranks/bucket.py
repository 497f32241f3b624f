"""A bucket of gradients for hooks of DistributedDataParallel, without a model."""

from __future__ import annotations


class Bucket:
    """The interface that hooks use, for a bucket with one gradient. `parameter` is for hooks that identify
    parameters."""

    def __init__(self, buffer: object, gradient: object, parameter: object = None) -> None:
        self.buffer = lambda: buffer
        self.gradients = lambda: [gradient]
        self.parameters = lambda: [parameter]
        self.index = lambda: 0
        self.is_last = lambda: True
