"""Recurrent cells as steps of a sequence.

Owns torch's GRU and LSTM written as one step at a time, with the coarse step that each of them has; their weights stay those of torch's module. What a cell of somebody
else must have is in `Cell`.

A coarse step over n steps takes the gates of the first one for all of them: then the old state fades as it does in n steps, and however many they are, it stays
within bounds. With n = 1 it is the step itself.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Cell", "CoarseCell", "FinalCell", "PreparedCell", "Stepped", "stepped"]


class Cell(Protocol):
    """A module `cell(x, state)` that returns the next state, like the one before; x is the input of one step, its first dimension that of the batch."""

    def initial(self, rows: int, dtype: torch.dtype, device: torch.device) -> Any:
        """The state before the first step."""

    def output(self, state: Any) -> Tensor:
        """The part of a state that is the output of a step. It has no parameters."""


@runtime_checkable
class CoarseCell(Protocol):
    """A cell that can go several steps at once, which the inexact modes need."""

    def coarse_step(self, x: Any, state: Any, count: int) -> Any:
        """Roughly the state after so many steps, of the input of the first one."""


@runtime_checkable
class PreparedCell(Protocol):
    """A cell that does a part of its work for all steps at once."""

    def prepare(self, x: Any) -> Any:
        """What steps are given instead of x: of all inputs of this rank, their first dimension the steps, the second the batch."""


@runtime_checkable
class FinalCell(Protocol):
    """A cell of which something else than an output is wanted after the last step."""

    def final(self, state: Any) -> Any:
        """What the tail is given of the last state, or the user where there is no tail."""


class Stepped(nn.Module):
    """torch's recurrent module as a cell. Its state is a tuple of tensors of shape (batch, hidden), one for each layer, those of `c` after those of `h`."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        # Whether it is in training is said of that module, not of this one.
        self.rnn = rnn
        self.layers = getattr(rnn, "num_layers", 1)
        self.dropout = getattr(rnn, "dropout", 0.0)
        self.hidden: int = rnn.hidden_size  # type: ignore[assignment]

    # Tensors of a layer's state: `h`, and of an LSTM `c`.
    each = 1

    def taken(self, state: Any) -> tuple[Tensor, ...]:
        """A state as a user gives it: as this cell has it, or as torch's module takes it, `h` or `(h, c)` of shape (layers, batch, hidden)."""
        given = (state,) if isinstance(state, Tensor) else tuple(state)
        if len(given) == self.each and all(isinstance(leaf, Tensor) and leaf.dim() == 3 for leaf in given):
            given = tuple(layer for leaf in given for layer in leaf.unbind(0))
        if len(given) != self.each * self.layers or any(
            not isinstance(leaf, Tensor) or leaf.dim() != 2 or leaf.shape[1] != self.hidden for leaf in given
        ):
            shown = [list(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in given]
            whole = "h" if self.each == 1 else "(h, c)"
            raise ValueError(
                f"the state has the shapes {shown}; give {whole} of shape ({self.layers}, batch, {self.hidden}), or {self.each * self.layers} tensors of shape (batch, {self.hidden})"
            )
        return given

    def returned(self, state: tuple[Tensor, ...]) -> Any:
        """A state as torch's module returns it: `h` or `(h, c)`, of shape (layers, batch, hidden), and of a cell of shape (batch, hidden)."""
        if hasattr(self.rnn, "num_layers"):
            count = self.layers
            state = tuple(torch.stack(state[part * count : (part + 1) * count]) for part in range(self.each))
        return state[0] if self.each == 1 else state

    def output(self, state: tuple[Tensor, ...]) -> Tensor:
        """`h` of the last layer."""
        return state[self.layers - 1]

    def prepare(self, x: Tensor) -> Tensor:
        """The products of all inputs and the first layer's weights."""
        weights = self._weights(0)
        return functional.linear(x, weights[0], weights[2])

    def forward(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.coarse_step(x, state, 1)

    def coarse_step(self, x: Tensor, state: tuple[Tensor, ...], count: int) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def _weights(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        end = f"_l{layer}" if hasattr(self.rnn, "num_layers") else ""
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        return tuple(getattr(self.rnn, name + end, None) for name in names)  # type: ignore[return-value]

    def _input(self, layer: int, below: Tensor) -> Tensor:
        """The products of a layer's input, which is `h` of the layer below."""
        if self.dropout > 0:
            below = functional.dropout(below, self.dropout, self.rnn.training)
        weights = self._weights(layer)
        return functional.linear(below, weights[0], weights[2])


class SteppedGRU(Stepped):
    """`h' = z h + (1 - z) n`; over several steps z to that power."""

    def initial(self, rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(rows, self.hidden, dtype=dtype, device=device) for _ in range(self.layers))

    def coarse_step(self, x: Tensor, state: tuple[Tensor, ...], count: int) -> tuple[Tensor, ...]:
        made: list[Tensor] = []
        for layer, h in enumerate(state):
            given = x if layer == 0 else self._input(layer, made[-1])
            _, weight, _, bias = self._weights(layer)
            own = functional.linear(h, weight, bias)
            size = 2 * self.hidden
            r, z = torch.sigmoid(given[:, :size] + own[:, :size]).chunk(2, 1)
            n = torch.tanh(given[:, size:] + r * own[:, size:])
            kept = z if count == 1 else z**count
            made.append(n + kept * (h - n))
        return tuple(made)


class SteppedLSTM(Stepped):
    """`c' = f c + i g`, `h' = o tanh(c')`; over several steps f to that power, and as much of `i g` as they add up to."""

    each = 2

    def initial(self, rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(rows, self.hidden, dtype=dtype, device=device) for _ in range(2 * self.layers))

    def coarse_step(self, x: Tensor, state: tuple[Tensor, ...], count: int) -> tuple[Tensor, ...]:
        hs: list[Tensor] = []
        cs: list[Tensor] = []
        for layer in range(self.layers):
            h, c = state[layer], state[self.layers + layer]
            given = x if layer == 0 else self._input(layer, hs[-1])
            _, weight, _, bias = self._weights(layer)
            i, f, g, o = (given + functional.linear(h, weight, bias)).chunk(4, 1)
            i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
            power, total = _geometric(f, count)
            c = power * c + i * g * total if count > 1 else f * c + i * g
            cs.append(c)
            hs.append(o * torch.tanh(c))
        return (*hs, *cs)


def _geometric(f: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`f` to the power of `count`, and 1 + f + f^2 + ... of as many terms: by doubling, which no f between 0 and 1 harms."""
    power, total = f, torch.ones_like(f)
    for bit in bin(count)[3:]:
        total, power = total * (1 + power), power * power
        if bit == "1":
            total, power = 1 + f * total, power * f
    return power, total


def stepped(cell: nn.Module) -> nn.Module:
    """The cell of a module: torch's recurrent ones one step at a time, and any other as it is."""
    if isinstance(cell, nn.RNNBase):
        if cell.bidirectional:
            raise ValueError(f"{cell}: a sequence is gone through in one direction; give one that is not bidirectional")
        if cell.proj_size > 0:
            raise ValueError(f"{cell}: proj_size is not supported; put a layer after it")
        if not cell.batch_first:
            raise ValueError(f"{cell}: inputs have the batch first, then the steps; give batch_first=True")
    if isinstance(cell, nn.GRU | nn.GRUCell):
        return SteppedGRU(cell)
    if isinstance(cell, nn.LSTM | nn.LSTMCell):
        return SteppedLSTM(cell)
    for name in ("initial", "output"):
        if not callable(getattr(cell, name, None)):
            raise TypeError(
                f"the cell {type(cell).__name__} has no method `{name}`; give a GRU, an LSTM or their cells, or a module with `initial` and `output`"
            )
    return cell
