"""The rank of this process in a run, and how the ranks of a launcher meet."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from torch_accl_launch import LaunchError, RankInfo, detect_launcher, find_store

from .._wrong import WrongInput

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["RankInfo", "given_rank_info", "leave", "meet"]


def given_rank_info() -> RankInfo | None:
    """Returns the rank, world size and host position that a launcher gave this process; None without a launcher.

    Raises:
        WrongInput: the launcher's variables are not numbers, or contradict each other.
    """
    try:
        return detect_launcher(os.environ)
    except LaunchError as error:
        raise WrongInput(str(error)) from None


def meet(rank_info: RankInfo, timeout_s: float) -> Store:
    """Returns the store in which the ranks of a launcher meet.

    Raises:
        WrongInput: no setting or launcher gives the address of rank 0.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    timeout = timedelta(seconds=timeout_s)
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host and port:
        is_master = rank_info.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        try:
            store = TCPStore(host, int(port), None, is_master, timeout, wait_for_workers=False)
        except ValueError:
            raise WrongInput(f"MASTER_PORT={port!r} is not a number") from None
        return PrefixStore(f"bench/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    try:
        return find_store(rank_info, timeout)
    except LaunchError as error:
        raise WrongInput(str(error)) from None


def leave(store: Store, rank: int, world: int) -> None:
    """Waits until no other rank uses the store. Rank 0, which may own the store, leaves last. No call may follow."""
    if rank:
        # `set` waits for no answer, so this rank may end at once.
        store.set(f"left/{rank}", "")
    elif world > 1:
        store.wait([f"left/{other}" for other in range(1, world)])
