"""PyTorch's own DistributedTest suite, run on a backend of our choice and compared with gloo.

Start with `__main__.py` for the command line, `suite.py` for how the stock suite is loaded.
"""
