"""Checks that all ranks have the same settings, and reports them as given: a variable and its value, or an argument.

Works on a group that is being created. torch does not know such a group yet, so this module calls its backend of accl.
That takes host memory, whichever devices it serves in the group.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..compression.extension import accl_backend, exact

__all__ = ["Said", "check_same"]


class Said(NamedTuple):
    """A setting.

    Attributes:
        value: the value that is compared.
        text: the setting as the user gave it, such as `CGX_INTRA_COMPRESS=1`.
    """

    value: str
    text: str


def check_same(settings: Mapping[str, Said], group: dist.ProcessGroup) -> None:
    """Compares settings, by name, over all ranks of a group. Collective.

    Raises:
        RuntimeError: the settings differ. Raised on all ranks, with the settings of two of them.
    """
    if group.size() == 1:
        return
    hashed = zlib.crc32(json.dumps({name: said.value for name, said in settings.items()}).encode())
    text = json.dumps(settings).encode()
    most = torch.tensor([hashed, -hashed, len(text)], dtype=torch.int64, device="cpu")
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    options.asyncOp = True
    # torch's stub of a backend lacks its collectives.
    backend: Any = accl_backend(group)
    with exact():
        backend.allreduce([most], options).wait()
    if most[0] == -most[1]:
        return
    mine = torch.zeros(int(most[2]), dtype=torch.uint8, device="cpu")
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    with exact():
        backend.allgather([rows], [mine]).wait()
    ranks = [
        {name: Said(*said) for name, said in json.loads(bytes(row.tolist()).rstrip(b"\0")).items()} for row in rows
    ]
    values = [{name: said.value for name, said in rank.items()} for rank in ranks]
    other = next(rank for rank, theirs in enumerate(values) if theirs != values[0])
    names = [name for name in ranks[0] if values[0][name] != values[other].get(name)]
    has = [", ".join(ranks[rank][name].text for name in names) for rank in (0, other)]
    raise RuntimeError(
        f"cgx: rank {group.rank()} cannot go on, since ranks have different settings: rank 0 has {has[0]}, and rank {other} has {has[1]}; "
        "give all ranks the same"
    )
