"""torchbraid's recurrent nets.

Owns the adapter of torchbraid's cells to cells of `layer_parallel`, and the exact loop over a sequence on one rank. A
cell is `cell(level, tstart, tstop, x, h) -> h`, with h a tuple of tensors. If it has `reduceX(x)` and
`fastForward(level, tstart, tstop, reduced, h)`, the products of all inputs are computed once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...layer_parallel import Cycle, Norms, RecurrentParallel
from ...layer_parallel.extension import Batch, BatchPlan, Mode
from ._module import Parallel
from ._settings import say_once
from ._timers import ContextTimer
from ._watch import Watch

__all__ = ["GRU_Parallel", "GRU_Serial"]

State = Tensor | tuple[Tensor, ...]


class GRU_Serial(nn.Module):
    """A cell over a whole sequence, one step of length `dt` after the other: the reference for `GRU_Parallel`."""

    def __init__(self, GRU_model: nn.Module, num_layers: int, hidden_size: int, dt: float = 1.0) -> None:
        super().__init__()
        self.num_layers = num_layers
        self.hidden_size = hidden_size
        self.dt = dt
        self.GRU_model = GRU_model

    def forward(self, x: Tensor, h: State | None = None) -> State:
        """Returns the state after the sequence x, of shape (samples, steps, features), from h, or from zeros."""
        state = _begun(x, h, self.num_layers, self.hidden_size)
        for number in range(x.shape[1]):
            state = self.GRU_model(0, 0.0, self.dt, x[:, number], state)
        return state if len(state) > 1 else state[0]


class GRU_Parallel(Parallel):
    """A cell over a sequence that lies on the ranks of a communicator.

    Each rank passes its own part of the sequence, and gets the state after the last step.

    comm: see `LayerParallel`.
    basic_block: the cell; all ranks take rank 0's weights, and get the same gradients.
    num_steps: steps of this rank's part. A batch may have another number, with a warning.
    hidden_size, num_layers: sizes of the initial state for a sequence that is passed without one.
    Tf: total time of all steps of a batch; dt is Tf divided by their number. A cell gets times from the beginning of
        its step.
    max_fwd_levels, max_bwd_levels, max_iters: see `LayerParallel`.

    Raises:
        ValueError: invalid lengths or communicator.
    """

    body: _Body

    def __init__(
        self,
        comm: Any,
        basic_block: nn.Module,
        num_steps: int,
        hidden_size: int,
        num_layers: int,
        Tf: float,
        max_fwd_levels: int = 1,
        max_bwd_levels: int = 1,
        max_iters: int = 10,
    ) -> None:
        super().__init__(comm)
        self.num_layers = num_layers
        self.hidden_size = hidden_size
        # Ranks may have parts of different lengths.
        of_all: list[int] = self.ranks.allgather(num_steps)
        if min(of_all) < 0 or sum(of_all) < 1:
            raise ValueError(
                f"GRU_Parallel(num_steps={of_all}) by rank: give at least one step on some rank, and no negative number"
            )
        self._make_alike(basic_block)
        kind = _FastCell if hasattr(basic_block, "fastForward") else _Cell
        cell = kind(basic_block, num_layers, hidden_size, Tf / sum(of_all), self._level)
        self._declared = sum(of_all)
        one = Cycle(levels=1)
        body = _Body(cell, group=self.ranks.group or "alone", fwd=one, bwd=one, auto_modes=("exact-wave", "inexact"))
        self.begin(body, _steps(sum(of_all)), Tf, (max_fwd_levels, max_bwd_levels), max_iters)
        self.fwd_app.has_fastforward = kind is _FastCell
        body.adapt = self._adapt_to
        for app in (self.fwd_app, self.bwd_app):
            app.owner = body.owner

    @property
    def GRU_models(self) -> nn.Module:
        """The cell."""
        return self.body.cell.cell  # type: ignore[return-value]

    def _make_alike(self, cell: nn.Module) -> None:
        """Sets all ranks' weights to rank 0's."""
        mine = [*cell.parameters(), *cell.buffers()]
        theirs = self.ranks.bcast([tensor.detach().cpu() for tensor in mine] if self.ranks.rank == 0 else None)
        for tensor, other in zip(mine, theirs, strict=True):
            tensor.detach().copy_(other)

    def _adapt_to(self, count: int) -> None:
        """Adapts the cycles' levels and dt to a sequence of `count` steps, which together take the time Tf."""
        if count != self._declared:
            say_once(
                self.ranks,
                f"GRU_Parallel: a batch has {count} steps, but num_steps of all ranks is {self._declared}; dt is Tf / {count}",
            )
        for app in (self.fwd_app, self.bwd_app):
            if len(app.steps) != count:
                app.steps = _steps(count)
                app.dt = app.Tf / count
        self.dt = self.fwd_app.dt
        cell: _Cell = self.body.cell  # type: ignore[assignment]
        cell.made = _Made(self.dt, self.fwd_app.has_fastforward)
        self.settle()

    def _await_backward(self, node: Any, norms: Norms, watch: Watch) -> None:
        cell: _Cell = self.body.cell  # type: ignore[assignment]
        made = cell.made

        def begins(given: Any) -> None:
            # Another batch may have gone forward since.
            cell.made = made

        node.register_prehook(begins)
        super()._await_backward(node, norms, watch)

    def _level(self, count: int) -> int:
        """Returns the level of a coarse step that spans `count` steps."""
        level, span = 0, 1
        for factor in self.fwd_app.cycle().factors():
            if span >= count:
                break
            level, span = level + 1, span * factor
        return level

    def forward(self, x: Tensor, h: State | None = None) -> State:
        """Returns, on all ranks, the state after the whole sequence, from rank 0's h, or from zeros.

        All ranks call `backward()` on what they computed from it, and rank 0's gradient counts. x: this rank's part, of
        shape (samples, steps, features).
        """
        state = (h,) if isinstance(h, Tensor) else h
        cell: _Cell = self.body.cell  # type: ignore[assignment]
        cell.timer = self.timer_manager.timer("ForWD::step") if self.fwd_app.timings > 1 else None
        nothing = Watch({}, (), {}, None, None)
        final: tuple[Tensor, ...] = self.run(
            lambda: self.body(x, state if self.body.is_first else None)[1],
            nothing,
            nothing,
            device=x,
            is_everywhere=True,
        )
        return final if len(final) > 1 else final[0]

    def getFastForwardInfo(self) -> tuple[float, int]:
        """Returns the seconds that `reduceX` took in the last batch, and the number of its calls; zeros for a cell
        without it."""
        return self.body.cell.reduced  # type: ignore[return-value]

    def diagnostics(self, enable: bool) -> None:
        """Accepts False only.

        Raises:
            NotImplementedError: `enable` is true.
        """
        if enable:
            raise NotImplementedError("GRU_Parallel.diagnostics(True): states of a sequence are not kept")


class _Body(RecurrentParallel):
    """The net, whose cycles are set once the length of the sequence is known."""

    adapt: Callable[[int], None] | None = None

    def batch_plan(self, batch: Batch) -> BatchPlan:
        """Returns how a batch is run, after setting the cycles, which are a part of that."""
        if self.adapt is not None:
            # The layers include one after the last step.
            self.adapt(len(self._plans.net.layers) - 1)
        return super().batch_plan(batch)

    def owner(self, layer: int) -> int:
        """Returns the rank of a step of the last batch."""
        return self._plans.net.owner(layer)

    def check_mode(self, mode: Mode, cycles: Mapping[str, Cycle] | None = None) -> None:
        if mode == "exact-pipeline":
            raise ValueError(
                "mode='exact-pipeline' of GRU_Parallel: the first dimension of its states is not a batch and cannot be split; use another mode"
            )
        super().check_mode(mode, cycles)


@dataclass(frozen=True)
class _Made:
    """How the steps of a batch are computed: the length of each, and whether all inputs' products are computed at
    once."""

    dt: float
    is_fast: bool


class _Cell(nn.Module):
    """Adapts torchbraid's cell to `layer_parallel`. A coarse step is a step of a longer time."""

    def __init__(
        self, cell: nn.Module, num_layers: int, hidden_size: int, dt: float, level: Callable[[int], int]
    ) -> None:
        super().__init__()
        self.cell = cell
        self.timer: ContextTimer | None = None
        self.reduced = (0.0, 0)
        self._size = num_layers, hidden_size
        self.made = _Made(dt, is_fast=True)
        self._level = level

    def initial(self, rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        layers, hidden = self._size
        return (torch.zeros(layers, rows, hidden, dtype=dtype, device=device),)

    def output(self, state: tuple[Tensor, ...]) -> Tensor:
        # The outputs of single steps are not used.
        return state[0].new_zeros(state[0].shape[1], 0)

    def final(self, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return state

    def forward(self, x: Any, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.coarse_step(x, state, 1)

    def coarse_step(self, x: Any, state: tuple[Tensor, ...], count: int) -> tuple[Tensor, ...]:
        level = 0 if count == 1 else self._level(count)
        if self.timer is None:
            return self._stepped(level, count * self.made.dt, x, state)
        with self.timer:
            return self._stepped(level, count * self.made.dt, x, state)

    def _stepped(self, level: int, dt: float, x: Any, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(self.cell(level, 0.0, dt, x, state))


class _FastCell(_Cell):
    """A cell that computes the products of all inputs at once."""

    def prepare(self, x: Tensor) -> Any:
        if not self.made.is_fast:
            self.reduced = (0.0, 0)
            return x
        began = time.perf_counter()
        # Flatten to the shape of one step: samples and features.
        reduced = self.cell.reduceX(x.flatten(0, 1))  # type: ignore[operator]
        found = pytree.tree_map(lambda leaf: leaf.view(*x.shape[:2], *leaf.shape[1:]), reduced)
        self.reduced = (time.perf_counter() - began, 1)
        return found

    def _stepped(self, level: int, dt: float, x: Any, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        step: Callable[..., State] = self.cell.fastForward if self.made.is_fast else self.cell  # type: ignore[assignment]
        return tuple(step(level, 0.0, dt, x, state))


def _steps(count: int) -> list[tuple[str, bool]]:
    return [("custom", False)] * count


def _begun(x: Tensor, h: State | None, num_layers: int, hidden_size: int) -> tuple[Tensor, ...]:
    """Returns the initial state of a sequence, as a tuple."""
    if h is None:
        return (torch.zeros(num_layers, x.shape[0], hidden_size, dtype=x.dtype, device=x.device),)
    return (h,) if isinstance(h, Tensor) else tuple(h)
