"""Runs PyTorch's own DistributedTest suite on a chosen backend and compares the results with gloo.

Start with `__main__.py` for the command line, and with `suite.py` for how the stock suite is loaded.
"""
