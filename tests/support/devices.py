"""What a group's device has done, as `describe()` says it."""

import re

import torch
import torch.distributed as dist


def device_line(group: dist.ProcessGroup | None = None) -> str:
    """The line of a group's device, or nothing."""
    group = group or dist.distributed_c10d._get_default_group()
    lines = group._get_backend(torch.device("cpu")).describe().splitlines()
    return next((line for line in lines if line.startswith("device ")), "")


def device_calls(group: dist.ProcessGroup | None = None) -> dict[str, int]:
    """Calls of a group's device: `{"all_reduce float32 SUM": 6}`; none without one."""
    parts = re.search(r": \d+ calls: (.*)$", device_line(group))
    return {name: int(count) for name, count in (part.rsplit(" ", 1) for part in parts[1].split(", "))} if parts else {}
