"""torchbraid's utilities by their own names: `from torch_accl.compat.torchbraid import utils`, or `import
torch_accl.compat.torchbraid.utils`.

Owns the small ones. Timers, layers, communicators and data parallelism have their own modules, and are re-exported
here.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import pickle
import subprocess
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch_accl_launch import LaunchError, detect_launcher

from .... import _native
from .. import _mpi as MPI
from .._buffers import tensor_of
from .._layers import LPBatchNorm2d, LPDropout
from .._timers import ContextTimer, ContextTimerManager
from .._world import communicator_of
from .data_parallel import Partioner, Partition, average_gradients, split_communicator

__all__ = [
    "MPI",
    "ContextTimer",
    "ContextTimerManager",
    "LPBatchNorm2d",
    "LPDropout",
    "MeanInitialGuessStorage",
    "Partioner",
    "Partition",
    "average_gradients",
    "buffer_size",
    "getDevice",
    "git_rev",
    "l2_reg",
    "pack_buffer",
    "pickle_size",
    "seed_from_rank",
    "split_communicator",
    "stack_string",
    "tensor_memory",
    "unpack_buffer",
]

_MIB = 1 << 20

Tensors = Tensor | Sequence[Tensor | None]


# ---- ranks


def getDevice(comm: Any) -> tuple[torch.device, torch.device]:
    """Returns this rank's device, which becomes torch's current one, and the host's. Ranks of a host share its GPUs
    round-robin."""
    host = torch.device("cpu")
    if not torch.cuda.is_available():
        return host, host
    rank = communicator_of(comm).Get_rank()
    try:
        found = detect_launcher(os.environ)
    except LaunchError:
        found = None
    if found is not None and found.local_rank is not None:
        rank = found.local_rank
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device, host


def seed_from_rank(seed: int, rank: int) -> int:
    """Returns a seed of 32 bits for a rank, the same number that torchbraid computes."""
    return (1664525 * (seed + rank) + 1013904113) % (1 << 32)


def l2_reg(net: nn.Module, comm: Any = None) -> Tensor:
    """Returns the sum of the squares of all parameters. With a communicator, rank 0 gets the sum over all ranks; the
    gradient is always this rank's own."""
    parameters = list(net.parameters())
    squares = [parameter.square().sum() for parameter in parameters]
    own = (
        torch.stack([square.reshape(()) for square in squares]).sum()
        if squares
        else torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
    )
    if comm is None:
        return own
    ranks = communicator_of(comm)
    of_all = ranks.gather([float(square) for square in squares])
    if of_all is None:
        return own
    # Exactly rounded, so the sum does not depend on where the layers lie.
    total = math.fsum(value for values in of_all for value in values)
    with torch.no_grad():
        own.fill_(total)
    return own


# ---- memory, buffers


def tensor_memory(prefix: str, min_size: int = 0, total_only: bool = False) -> None:
    """Prints the bytes of all existing tensors, and lists those above `min_size` bytes."""
    # Check the type, not `isinstance`: some objects are proxies of deleted ones.
    found: list[Tensor] = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    sizes = [tensor.numel() * tensor.element_size() for tensor in found]
    above = [(size, tensor) for size, tensor in zip(sizes, found) if size > min_size]
    if not total_only:
        for size, tensor in above:
            label = getattr(tensor, "label", "")
            print(
                f"  {prefix}: {size / _MIB:.2f} MiB, {list(tensor.shape)} {tensor.dtype}{f', {label}' if label else ''}"
            )
    total = sum(size for size, _ in above)
    print(
        f"  {prefix}: {len(found)} tensors, {sum(sizes) / _MIB:.2f} MiB; above {min_size} bytes {len(above)}, {total / _MIB:.2f} MiB"
    )


def pickle_size(obj: Any) -> int:
    """Returns the bytes of an object when it is sent."""
    return len(pickle.dumps(obj))


def buffer_size(tens: Tensors) -> int:
    """Returns the number of elements that `pack_buffer` makes of tensors; None counts as empty."""
    return sum(tensor.numel() for tensor in _listed(tens))


def pack_buffer(tens: Tensors) -> Tensor:
    """Returns the elements of tensors, one after the other, in a type that holds all of them exactly.

    Raises:
        TypeError: no type does, for example for int64 and float32.
    """
    tensors = _listed(tens)
    dtype = _holding([tensor.dtype for tensor in tensors])
    parts = [tensor.detach().flatten().to("cpu", dtype) for tensor in tensors]
    return torch.cat([*parts, torch.empty(0, dtype=dtype, device="cpu")])


def unpack_buffer(tens: Tensors, buf: Any) -> None:
    """Fills tensors from the elements of `pack_buffer`.

    Raises:
        ValueError: the number of elements differs.
    """
    into, given = _listed(tens), tensor_of(buf, "unpack_buffer", is_written=False).flatten()
    if given.numel() != buffer_size(into):
        raise ValueError(
            f"unpack_buffer: the buffer has {given.numel()} elements, but the tensors have {buffer_size(into)}"
        )
    for tensor, part in zip(into, torch.split(given, [tensor.numel() for tensor in into])):
        tensor.detach().copy_(part.view(tensor.shape))


def _holding(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Returns a type that holds the elements of all these types exactly; float32 for an empty list."""
    if not dtypes:
        return torch.float32
    promoted = functools.reduce(torch.promote_types, dtypes)
    for dtype in (promoted, torch.complex128 if promoted.is_complex else torch.float64):
        if all(_holds(dtype, each) for each in dtypes):
            return dtype
    raise TypeError(
        f"pack_buffer: no type holds {' and '.join(sorted({str(each) for each in dtypes}))} exactly; pack them in separate buffers"
    )


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Returns whether `wide` holds all values of `narrow` exactly; `wide` was promoted from `narrow`."""
    is_whole = not (narrow.is_floating_point or narrow.is_complex)
    if not is_whole or narrow == torch.bool or not (wide.is_floating_point or wide.is_complex):
        return True
    return torch.iinfo(narrow).max <= 2 / torch.finfo(wide).eps


def _listed(tens: Tensors) -> list[Tensor]:
    return [tens] if isinstance(tens, Tensor) else [tensor for tensor in tens if tensor is not None]


# ---- states


def _numbers(classes: Sequence[int] | Tensor) -> Tensor:
    return classes if isinstance(classes, Tensor) else torch.tensor(classes, dtype=torch.int64, device="cpu")


class MeanInitialGuessStorage:
    """Running means of states by time and class: a new state has the weight `average_weight`, the previous mean the
    rest. Means start at zero."""

    def __init__(self, class_count: int, average_weight: float) -> None:
        if class_count < 1:
            raise _BadArgument(f"MeanInitialGuessStorage(class_count={class_count}): give 1 or more")
        if not 0 <= average_weight <= 1:
            raise _BadArgument(f"MeanInitialGuessStorage(average_weight={average_weight}): give a number from 0 to 1")
        self.class_count = class_count
        self.average_weight = average_weight
        self.state_map: dict[float, tuple[Tensor, ...]] = {}

    def getTimeStamps(self) -> Iterable[float]:
        """Returns the times for which there are states."""
        return self.state_map.keys()

    @torch.no_grad()
    def getState(self, t: float, classes: Sequence[int] | Tensor) -> tuple[Tensor, ...]:
        """Returns the mean state at a time for each sample, by its class.

        Raises:
            KeyError: no state was added for that time.
        """
        if t not in self.state_map:
            raise KeyError(f"there is no state for time {t}; addState has added states for {sorted(self.state_map)}")
        chosen = _numbers(classes)
        return tuple(mean[chosen.to(mean.device)].clone() for mean in self.state_map[t])

    @torch.no_grad()
    def addState(self, t: float, state: Tensor | Sequence[Tensor], classes: Sequence[int] | Tensor) -> None:
        """Adds the states of a batch at a time to the means of their classes.

        Raises:
            ValueError: a class is out of range, or states and classes differ in number.
        """
        if t in self.state_map:
            self._average(self.state_map[t], state, classes, self.average_weight)
        else:
            self.state_map[t] = self._initialize(state, classes, self.average_weight)

    def _initialize(
        self, new_state: Tensor | Sequence[Tensor], classes: Sequence[int] | Tensor, average_weight: float
    ) -> tuple[Tensor, ...]:
        """Returns the means after a first batch, starting from zeros."""
        states = (new_state,) if isinstance(new_state, Tensor) else tuple(new_state)
        means = tuple(
            torch.zeros((self.class_count, *each.shape[1:]), dtype=each.dtype, device=each.device) for each in states
        )
        self._average(means, states, classes, average_weight)
        return means

    @torch.no_grad()
    def _average(
        self,
        old_mean: Sequence[Tensor],
        new_state: Tensor | Sequence[Tensor],
        classes: Sequence[int] | Tensor,
        average_weight: float,
    ) -> None:
        """Adds the states of a batch to means, in place."""
        states = (new_state,) if isinstance(new_state, Tensor) else tuple(new_state)
        chosen = _numbers(classes).flatten()
        if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < self.class_count:
            raise ValueError(
                f"addState: got classes {int(chosen.min())} to {int(chosen.max())}, but class_count is {self.class_count}"
            )
        if any(len(each) != chosen.numel() for each in states):
            raise ValueError(
                f"addState: {chosen.numel()} classes for states of {[len(each) for each in states]} samples"
            )
        for number in sorted(set(chosen.tolist())):
            for mean, each in zip(old_mean, states):
                mean[number].mul_(1 - average_weight)
                mean[number].add_(each[chosen.to(each.device) == number].mean(0), alpha=average_weight)


class _BadArgument(ValueError, AssertionError):
    """An invalid value. torchbraid asserts where Python has a ValueError, and scripts catch either."""


# ---- source and stack


def git_rev() -> str:
    """Returns the commit of the source tree that this package is imported from; its version if it was installed from a
    wheel."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        # An environment may lie inside an unrelated git tree.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("rev-parse", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return _native.built_for()["version"]


def stack_string(prefix: str | None = None) -> str:
    """Returns the caller's stack trace, each line after `prefix`."""
    lines = [line for entry in traceback.format_stack()[:-1] for line in entry.splitlines()]
    return "\n".join(f"{prefix or ''}{line}" for line in lines)
