"""Messages between the ranks of a net, and errors that all of them raise. Knows nothing of layers or states."""

__all__: list[str] = []
