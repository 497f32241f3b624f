"""Proof with a GPU: parts that run on a real card, or in small form on the stand-in for an accelerator.

`run.py` chooses parts and gives each a process; `report.py` collects what a part found; `device.py` has the little in which
a card and the stand-in differ. Each other module is one part. `.ci/gpu_bundle` packs this folder with all that it needs
for a machine that has no network, no Rust and another torch.
"""
