"""Parameters of which several ranks of the layers have a copy: tied parameters, and the cell of a recurrent net.

Owns that copies stay equal to the bit. The rounding of a reduction depends on where a tensor lies in its buckets, and
the rounding of an optimizer on its processor. So equal copies drift apart in their last bits. A batch opens with hashes
of all copies. Where these differ, the lowest rank's copy is sent to the other ranks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._ranks.agreed import exchange
from .._ranks.failures import LayerParallelError, described, sentence
from .._ranks.wire import Wire
from .tree import digest

__all__ = ["Copied", "Copies", "hash_of"]


# Largest difference that counts as rounding, relative, in the 2-norm. Rounding in one step leaves copies much closer.
_ROUNDING = 1e-3
# The number that a rank without a copy contributes to a reduction: the least value, so it does not change a maximum.
_NONE = -(1 << 63)
# State of values that changed since copies were last compared: never initialized, or set from outside.
_UNSET, _GIVEN = 1, 2
# Parts of a message begin at multiples of this number of bytes.
_ALIGNED = 16
# Columns of the table of 4-byte words that `hash_of` sums.
_COLUMNS = 512
# Numbers in a header for each set.
_PAIRS = 8


@dataclass(frozen=True)
class Copied:
    """A parameter of which several ranks of the layers have a copy."""

    # The name that users know.
    name: str
    # The ranks that have a copy, the lowest first.
    ranks: tuple[int, ...]
    # The copies of this rank.
    mine: Sequence[Tensor]


@dataclass(frozen=True)
class _Set:
    """All parameters that the same ranks have, with this rank's tensors.

    evaluated, stored: the tensors that layers are evaluated with, and the tensors that the optimizer has.
    """

    copied: list[Copied]
    evaluated: list[list[Tensor]]
    stored: list[list[Tensor]]
    # Description of how the parameters are sharded; empty without FSDP2.
    layout: str

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have the parameters."""
        return self.copied[0].ranks


# A set whose tensors differ between ranks, with this rank's copies of each parameter.
_Differing = tuple[_Set, list[list[Tensor]]]


class Copies:
    """The copies of a net's parameters.

    copied: returns the current parameters with copies, the same names in the same order on all ranks.
    remedy: end of the error message where values from outside (set on construction, or loaded) differ.
    may_round: each rank made or saved these values itself, so that they may differ by rounding.
    """

    def __init__(
        self, wire: Wire, copied: Callable[[], Sequence[Copied]], remedy: str, *, may_round: bool = False
    ) -> None:
        self._wire = wire
        self._copied = copied
        self._remedy = remedy
        # Whether values from outside may differ by rounding.
        self._may_round = may_round
        # Whether values came from outside since copies were compared. Then a difference is an error.
        self.is_new = False
        # Whether the values are uninitialized, as they are when parameters leave the meta device.
        self._is_unset = False
        # The error that kept this rank from finding its copies in the last comparison.
        self._wrong: BaseException | None = None
        # Number of sets.
        self._count = len({each.ranks for each in copied()})
        # Names that have appeared in a warning.
        self._warned: set[str] = set()
        # Shards as the optimizer has them, by name and index. FSDP2 replaces them by the whole parameters during a
        # batch.
        self._shards: dict[tuple[str, int], Any] = {}

    def look(self) -> None:
        """Remembers shards. Called before FSDP2 gathers the whole parameters."""
        # A missing parameter is reported on all ranks when the batch opens.
        with contextlib.suppress(AttributeError):
            for copied in self._copied():
                for place, parameter in enumerate(copied.mine):
                    if _is_shard(parameter):
                        self._shards[copied.name, place] = parameter

    # ---- in a batch

    def numbers(self) -> list[int]:
        """Returns numbers that all ranks reduce to the maximum.

        The reduced numbers, which `settle` takes, show whether copies are equal.
        """
        return self._numbers(is_batch=True)

    def settle(self, greatest: Sequence[int], what: str) -> None:
        """Makes copies equal that drifted apart. All ranks call it together.

        Raises:
            ValueError: on all ranks, if copies differ whose values were set since the last comparison, or that differ
                in shape, dtype or sharding.
            LayerParallelError: on all ranks, if a rank does not find its copies.
        """
        differing = self._differing(greatest, what, is_batch=True)
        if differing and greatest[0]:
            raise ValueError(f"{what}: {self._difference()}")
        self.is_new = self._is_unset = False
        for found in differing:
            self._take_lowest(found, what)

    # ---- outside a batch

    def check(self, what: str) -> None:
        """Compares copies whose values came from outside, bit for bit. All ranks call it together.

        If values may differ by rounding, copies that differ by rounding become the lowest rank's.

        Raises:
            ValueError: on all ranks, if copies differ. Then the next batch refuses them too.
        """
        self.is_new, self._is_unset = True, False
        differing = self._differing(self._reduced(what), what)
        if differing and self._may_round:
            found = [self._from_lowest(each, what) for each in differing]
            largest = [far for each, winners in zip(differing, found) for *_, far in _compared(each, winners)]
            is_far = any(not far <= _ROUNDING for far in largest)
            [count] = self._wire.together(
                torch.tensor([int(is_far)], dtype=torch.int64, device=self._wire.device), what
            )
            if not count:
                for each, winners in zip(differing, found):
                    for _, copy, winner, _ in _compared(each, winners):
                        _set(copy, winner)
                differing = []
        if differing:
            raise ValueError(f"{what}: {self._difference()}")
        # Copies on the meta device have no values yet. They are compared when the first batch opens.
        self.is_new = self._is_unset = any(
            tensor.is_meta for each in self._sets(is_batch=False) for mine in each.stored for tensor in mine
        )

    def make_equal(self, what: str) -> None:
        """Makes copies equal that drifted apart. All ranks call it together.

        Copies that are not initialized yet stay as they are.

        Raises:
            ValueError: on all ranks, if copies differ whose values came from outside.
        """
        # The reduced flag decides, not this rank's own flag: some ranks have no copies.
        greatest = self._reduced(what)
        differing = self._differing(greatest, what)
        if differing and greatest[0] == _GIVEN:
            raise ValueError(f"{what}: {self._difference()}")
        if greatest[0] != _UNSET:
            for found in differing:
                self._take_lowest(found, what)

    # ---- comparing

    def _sets(self, *, is_batch: bool = True) -> list[_Set]:
        by_ranks: dict[tuple[int, ...], list[Copied]] = {}
        for copied in self._copied():
            by_ranks.setdefault(copied.ranks, []).append(copied)
        return [self._set_of(found, is_batch=is_batch) for found in by_ranks.values()]

    @torch.no_grad()
    def _set_of(self, found: list[Copied], *, is_batch: bool) -> _Set:
        shards: list[list[Any]] = [
            [
                parameter if _is_shard(parameter) else self._shards.get((copied.name, place))
                for place, parameter in enumerate(copied.mine)
            ]
            for copied in found
        ]
        stored = [
            [parameter if shard is None else shard.to_local() for parameter, shard in zip(copied.mine, mine)]
            for copied, mine in zip(found, shards)
        ]
        layout = ""
        if any(shard is not None for mine in shards for shard in mine):
            shown: Any = [
                [None if shard is None else (str(shard.placements), list(shard.to_local().shape)) for shard in mine]
                for mine in shards
            ]
            # If all copies of this rank have the same layout, it is named once, so that ranks with other numbers of
            # copies agree.
            layout = str([mine[0] if all(each == mine[0] for each in mine) else mine for mine in shown])
        evaluated = [list(copied.mine) for copied in found] if is_batch and layout else stored
        return _Set(found, evaluated, stored, layout)

    def _numbers(self, *, is_batch: bool) -> list[int]:
        """Returns this rank's numbers for the reduction.

        Their count is the same on all ranks, also if one rank fails.
        """
        self._wrong = None
        try:
            sets = self._sets(is_batch=is_batch)
            if len(sets) != self._count:
                raise ValueError("this rank lacks parameters that other ranks have copies of")
            found = [(_UNSET if self._is_unset else _GIVEN) if self.is_new else 0, 0]
            for each in sets:
                stored = _hash_pair(each.stored)
                evaluated = stored if each.evaluated is each.stored else _hash_pair(each.evaluated)
                layout = digest(each.layout.encode())
                found += [*stored, *evaluated, *((layout, -layout) if stored[0] != _NONE else (_NONE, _NONE))]
                found += _pair_of_forms(each)
        except Exception as error:
            self._wrong = error
            return [0, 1, *[_NONE] * (_PAIRS * self._count)]
        return found

    def _reduced(self, what: str) -> list[int]:
        numbers = torch.tensor(self._numbers(is_batch=False), dtype=torch.int64, device=self._wire.device)
        return self._wire.together(numbers, what, is_greatest=True)

    def _differing(self, greatest: Sequence[int], what: str, *, is_batch: bool = False) -> list[_Differing]:
        """Returns the sets that differ by the reduced numbers, the same on all ranks."""
        if greatest[1]:
            cause = None if self._wrong is None else f"{what}: {described(self._wrong)}"
            raise LayerParallelError(sentence(self._wire.gathered(cause))) from self._wrong
        sets = self._sets(is_batch=is_batch)
        found: list[_Differing] = []
        pairs_of = [greatest[2 + _PAIRS * place :][:_PAIRS] for place in range(self._count)]
        if any(pairs[6] not in (_NONE, -pairs[7]) for pairs in pairs_of):
            raise ValueError(f"{what}: {self._difference_of_forms(sets)}")
        for pairs, each in zip(pairs_of, sets):
            stored, evaluated, layout = (pairs[at] not in (_NONE, -pairs[at + 1]) for at in (0, 2, 4))
            if layout:
                names = ", ".join(copied.name for copied in each.copied)
                raise ValueError(
                    f"ranks of the layers shard their copies of {names} in different ways; give `fully_shard` the same mesh size and placement for all of them"
                )
            if stored:
                found.append((each, each.stored))
            if evaluated and each.evaluated is not each.stored:
                found.append((each, each.evaluated))
        return found

    def _difference_of_forms(self, sets: Sequence[_Set]) -> str:
        """Describes which copies differ in shape or dtype. All ranks call it together."""
        of_all = self._wire.gathered([_forms(each) for each in sets])
        for place, each in enumerate(sets):
            known = {rank: dict(of_all[rank][place]) for rank in each.ranks}
            for name in dict.fromkeys(name for forms in known.values() for name in forms):
                forms = {rank: " and ".join(of_rank.get(name, ["none"])) for rank, of_rank in known.items()}
                if len(set(forms.values())) > 1 or any(len(of_rank.get(name, [])) > 1 for of_rank in known.values()):
                    shown = ", ".join(f"{form} on rank {rank}" for rank, form in forms.items())
                    return f"copies of {name} have different shapes or types: {shown} of the layers; use modules with the same parameters on all ranks"
        raise AssertionError("equal forms were reported as different")

    def _difference(self) -> str:
        """Describes which copies differ in value. All ranks call it together."""
        mine = {
            copied.name: [hash_of(tensor) for tensor in tensors]
            for each in self._sets(is_batch=False)
            for copied, tensors in zip(each.copied, each.stored)
            if tensors
        }
        of_all = self._wire.gathered(mine)
        shown = []
        for copied in self._copied():
            known = {rank: of_all[rank][copied.name] for rank in copied.ranks}
            first = known[copied.ranks[0]][0]
            others = [str(rank) for rank, hashes in known.items() if any(each != first for each in hashes)]
            if others:
                shown.append((copied.name, copied.ranks[0], others))
        name, lowest, others = shown[0]
        one = len(others) == 1
        where = f"rank {others[0]}" if one else f"ranks {', '.join(others)}"
        more = f" (and of {len(shown) - 1} more parameters)" if len(shown) > 1 else ""
        return f"copies of {name}{more} have different values: {where} of the layers {'differs' if one else 'differ'} from rank {lowest}; {self._remedy}"

    # ---- the lowest rank's copies

    def _take_lowest(self, found: _Differing, what: str) -> None:
        each = found[0]
        for name, copy, winner, far in _compared(found, self._from_lowest(found, what)):
            _set(copy, winner)
            if not far <= _ROUNDING and name not in self._warned:
                self._warned.add(name)
                warnings.warn(
                    f"layer-parallel training, {what}: the copy of {name} on rank {self._wire.rank} of the layers was {far:.2g} (relative 2-norm) off rank {each.ranks[0]}'s copy, "
                    "which is more than rounding explains; all ranks now use the lowest rank's copy. Change copies alike on all ranks, and give all ranks the same optimizer",
                    stacklevel=2,
                )

    def _from_lowest(self, found: _Differing, what: str) -> list[Tensor]:
        """Returns the lowest rank's copy of each parameter, on the ranks that have a copy."""
        each, tensors = found
        wire, ranks = self._wire, each.ranks
        is_everywhere = len(ranks) == wire.size
        if wire.rank not in ranks or len(ranks) == 1:
            return [mine[0].detach() for mine in tensors if mine]
        message, parts = _message([mine[0] for mine in tensors])
        if wire.rank == ranks[0]:
            for part, mine in zip(parts, tensors):
                part.copy_(mine[0].detach())
        if is_everywhere:
            wire.spread(message, what)
        elif wire.rank == ranks[0]:
            exchange(wire, [(to, message) for to in ranks[1:]], [], what)
        else:
            exchange(wire, [], [(ranks[0], message)], what)
        return parts


def _hash_pair(tensors: Sequence[Sequence[Tensor]]) -> tuple[int, int]:
    """Returns a hash of all copies of this rank, and its negative.

    If this rank's copies differ among themselves, the second number is not the negative of the first.
    """
    if not any(tensors) or any(tensor.is_meta for mine in tensors for tensor in mine):
        return _NONE, _NONE
    hashes = [[hash_of(tensor) for tensor in mine] for mine in tensors]
    whole = hash(tuple(mine[0] for mine in hashes)) & _MASK
    is_one = all(each == mine[0] for mine in hashes for each in mine)
    return whole, -whole if is_one else 1 - whole


def _message(like: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Returns a message with room for tensors like these, and its parts, one for each tensor."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in like]
    ends = list(itertools.accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes))
    message = torch.zeros(ends[-1], dtype=torch.uint8, device=like[0].device)
    starts = [0, *ends[:-1]]
    parts = [
        message[start : start + size].view(tensor.dtype).view(tensor.shape)
        for tensor, start, size in zip(like, starts, sizes)
    ]
    return message, parts


def _compared(found: _Differing, winners: Sequence[Tensor]) -> Iterator[tuple[str, Tensor, Tensor, float]]:
    """Yields each copy of this rank that differs from the lowest rank's copy.

    Each item has the name, the copy, the lowest rank's copy, and their distance.
    """
    for copied, tensors, winner in zip(found[0].copied, found[1], winners):
        for copy in tensors:
            if not torch.equal(_bytes(copy), _bytes(winner)):
                yield copied.name, copy, winner, _distance(copy, winner)


@torch.no_grad()
def _distance(copy: Tensor, winner: Tensor) -> float:
    """Returns the relative distance in the 2-norm. Zeros of different sign have no distance."""
    if copy.element_size() == 1 or not (copy.is_floating_point() or copy.is_complex()):
        copy, winner = copy.double(), winner.double()
    wide = torch.complex128 if copy.is_complex() else torch.float64
    difference, size = (float(torch.linalg.vector_norm(of, dtype=wide)) for of in (copy - winner, winner))
    return difference / size if size else math.inf if difference else 0.0


@torch.no_grad()
def _set(copy: Tensor, winner: Tensor) -> None:
    copy.copy_(winner)


def _is_shard(parameter: Tensor) -> bool:
    return hasattr(parameter, "placements")


# ---- hashes and forms


def _forms(each: _Set) -> list[tuple[str, list[str]]]:
    """Returns the distinct dtypes and shapes of each parameter's copies on this rank, by name."""
    return [
        (
            copied.name,
            list(dict.fromkeys(f"{str(of.dtype).removeprefix('torch.')}{list(of.shape)}" for of in copied.mine)),
        )
        for copied in each.copied
        if copied.mine
    ]


def _pair_of_forms(each: _Set) -> tuple[int, int]:
    """Returns a hash of the forms, and its negative.

    If copies of one parameter on this rank differ, the second number is not the negative of the first.
    """
    forms = _forms(each)
    if not forms:
        return _NONE, _NONE
    found = digest(repr(forms).encode())
    return found, -found if all(len(form) == 1 for _, form in forms) else 1 - found


_MASK = (1 << 63) - 1


def hash_of(parameter: Tensor) -> int:
    """Returns a 63-bit hash of the values. Equal values give the same hash on any processor."""
    bytes_ = _bytes(parameter)
    device = bytes_.device
    # Words are summed by rows and by columns, weighted by their places. All sums are of integers modulo 2^64. A word
    # has 32 bits, so its highest bit counts as well. The sum is read once, because reading from a device waits for it.
    whole = bytes_.numel() // (4 * _COLUMNS) * 4 * _COLUMNS
    left = bytes_[whole:].to(torch.int64)
    total = (left * _weights(left.numel(), 0, device)).sum()
    if whole:
        table = bytes_[:whole].view(torch.int32).view(-1, _COLUMNS)
        total = total + (table.sum(1, dtype=torch.int64) * _weights(len(table), 1, device)).sum()
        # Column weights are even and row weights odd. So the weight of a word, the sum of both, is odd, and no bit of
        # the word is lost.
        total = total + (table.sum(0, dtype=torch.int64) * (_weights(_COLUMNS, 2, device) & ~1)).sum()
    return (int(total) + bytes_.numel()) & _MASK


def _bytes(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor's elements, in the order of their indices."""
    raw = tensor.detach().contiguous()
    raw = (torch.view_as_real(raw.resolve_conj()) if raw.is_complex() else raw).flatten()
    if raw.storage_offset() * raw.element_size() % 4:
        raw = raw.clone()
    return raw.view(torch.uint8)


@functools.lru_cache(maxsize=32)
def _weights(count: int, series: int, device: torch.device) -> Tensor:
    """Returns pseudo-random odd weights, the same on all ranks."""
    mixed = (
        torch.arange(1, count + 1, dtype=torch.int64, device=device) * 0x1E3779B97F4A7C15 + series * 0x3C6EF372FE94F82B
    )
    for factor in (0x3F58476D1CE4E5B9, 0x14D049BB133111EB):
        mixed = (mixed ^ (mixed >> 30)) * factor
    return (mixed ^ (mixed >> 31)) | 1
