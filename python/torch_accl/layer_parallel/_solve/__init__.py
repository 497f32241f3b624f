"""One batch of a net: its plan, its passes over the ranks, and its results. Start at `batch.py`.

Knows nothing of the classes for users, which are above this folder.
"""

__all__: list[str] = []
