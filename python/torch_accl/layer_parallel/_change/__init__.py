"""Nets of other depths: refinement, coarsening, the transfer of values between two nets, and optimization over depths."""

__all__: list[str] = []
