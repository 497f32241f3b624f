"""The sections of the page, in its order. A new section is a file here and a row of `SECTIONS`."""

from __future__ import annotations

from ..report import Section
from . import (
    all_reduce,
    choice,
    collectives,
    compression,
    compression_policy,
    compression_shm,
    costs,
    ddp,
    four_ranks,
    kernels,
    lanes,
    layer_parallel,
    mpi,
    outstanding,
    predictions,
    signature,
    sixteen_bits,
    tcp,
    two_hosts,
)

SECTIONS: tuple[Section, ...] = (
    all_reduce.SECTION,
    four_ranks.SECTION,
    *lanes.ALL,
    *tcp.ALL,
    *two_hosts.ALL,
    mpi.SECTION,
    compression.SECTION,
    compression_shm.SECTION,
    compression_policy.SECTION,
    *collectives.ALL,
    sixteen_bits.SECTION,
    outstanding.SECTION,
    signature.SECTION,
    ddp.SECTION,
    layer_parallel.SECTION,
    costs.SECTION,
    choice.SECTION,
    *predictions.ALL,
    kernels.SECTION,
)
BY_NAME = {section.name: section for section in SECTIONS}
