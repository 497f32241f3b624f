"""A bucket of gradients for hooks of DistributedDataParallel, without the model that it would come from."""

from __future__ import annotations


class Bucket:
    """What hooks ask of a bucket with one gradient; a hook that knows parameters is given that, too."""

    def __init__(self, buffer: object, gradient: object, parameter: object = None) -> None:
        self.buffer = lambda: buffer
        self.gradients = lambda: [gradient]
        self.parameters = lambda: [parameter]
        self.index = lambda: 0
        self.is_last = lambda: True
