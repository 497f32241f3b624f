"""Reads from `describe()` which calls a group's device has run."""

import re

import torch
import torch.distributed as dist


def device_line(group: dist.ProcessGroup | None = None) -> str:
    """Returns the line of a group's device, or an empty string."""
    group = group or dist.distributed_c10d._get_default_group()
    lines = group._get_backend(torch.device("cpu")).describe().splitlines()
    return next((line for line in lines if line.startswith("device ")), "")


def device_calls(group: dist.ProcessGroup | None = None) -> dict[str, int]:
    """Returns the calls of a group's device, such as `{"all_reduce float32 SUM": 6}`; empty without a device."""
    parts = re.search(r": \d+ calls: (.*)$", device_line(group))
    return {name: int(count) for name, count in (part.rsplit(" ", 1) for part in parts[1].split(", "))} if parts else {}
