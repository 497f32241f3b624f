"""Where a process stands among the ranks of a run, and how those of a launcher meet."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from torch_accl_launch import LaunchError, Place, find_store, place

from .._wrong import WrongInput

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Place", "leave", "meet", "place_given"]


def place_given() -> Place | None:
    """The place that a launcher gave this process; None without a launcher.

    Raises:
        WrongInput: its variables are not numbers, or contradict.
    """
    try:
        return place(os.environ)
    except LaunchError as error:
        raise WrongInput(str(error)) from None


def meet(place: Place, timeout_s: float) -> Store:
    """The store in which the ranks of a launcher meet.

    Raises:
        WrongInput: nothing says where rank 0 is.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    timeout = timedelta(seconds=timeout_s)
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host and port:
        is_master = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        try:
            store = TCPStore(host, int(port), None, is_master, timeout, wait_for_workers=False)
        except ValueError:
            raise WrongInput(f"MASTER_PORT={port!r} is not a number") from None
        return PrefixStore(f"bench/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    try:
        return find_store(place, timeout)
    except LaunchError as error:
        raise WrongInput(str(error)) from None


def leave(store: Store, rank: int, world: int) -> None:
    """The last thing that is said over a store. Rank 0, which may own it, leaves last."""
    if rank:
        # Nothing is answered to it.
        store.set(f"left/{rank}", "")
    elif world > 1:
        store.wait([f"left/{other}" for other in range(1, world)])
