"""The layers of a net on one rank: their kinds, their evaluation, the forms of their states, and parameters that ranks share.

Knows nothing of plans or batches.
"""

__all__: list[str] = []
