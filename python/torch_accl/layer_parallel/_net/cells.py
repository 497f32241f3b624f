"""Recurrent cells as steps of a sequence.

Owns torch's GRU and LSTM written as one step at a time, each with its coarse step; the weights remain in torch's
module. `Cell` describes what a user's own cell must have.

A coarse step over n steps uses the gates of the first step for all n. Then the old state decays as in n steps, and
stays bounded for any n. With n = 1 it is the step itself.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Cell", "CoarseCell", "FinalCell", "PreparedCell", "Stepped", "stepped"]


class Cell(Protocol):
    """A module `cell(x, state)` that returns the next state, which has the same form as `state`.

    `x` is the input of one step, and its first dimension is the batch.
    """

    def initial(self, rows: int, dtype: torch.dtype, device: torch.device) -> Any:
        """Returns the state before the first step: `rows` is the size of the batch, `dtype` and `device` are the input's.

        If the input is not floating-point, `dtype` is torch's default dtype.
        """

    def output(self, state: Any) -> Tensor:
        """Returns the part of a state that is the output of a step. It has no parameters."""


@runtime_checkable
class CoarseCell(Protocol):
    """A cell that can go several steps at once, which the inexact modes need."""

    def coarse_step(self, x: Any, state: Any, count: int) -> Any:
        """Returns an approximation of the state after `count` steps, from the input of the first one."""


@runtime_checkable
class PreparedCell(Protocol):
    """A cell that does a part of its work for all steps at once."""

    def prepare(self, x: Any) -> Any:
        """Returns the inputs that the steps of this rank get instead of `x`.

        The first dimension of `x` and of the result is the steps, the second is the batch.
        """


@runtime_checkable
class FinalCell(Protocol):
    """A cell whose result after the last step is not its output."""

    def final(self, state: Any) -> Any:
        """Returns the part of the last state that the tail gets, or the user if there is no tail."""


class Stepped(nn.Module):
    """torch's recurrent module as a cell.

    Its state is a tuple of tensors of shape (batch, hidden), one for each layer; all `h` come before all `c`.
    """

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        # The `training` flag of `rnn` counts, not the flag of this wrapper.
        self.rnn = rnn
        self.layers = getattr(rnn, "num_layers", 1)
        self.dropout = getattr(rnn, "dropout", 0.0)
        self.hidden: int = rnn.hidden_size  # type: ignore[assignment]

    # Number of tensors in a layer's state: 1 for `h`, 2 for the `h` and `c` of an LSTM.
    each = 1

    def taken(self, state: Any) -> tuple[Tensor, ...]:
        """Converts a state from the user, in this cell's form or in the form of torch's module.

        torch's form is `h` or `(h, c)` of shape (layers, batch, hidden).
        """
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
        """Converts a state to the form of torch's module: `h` or `(h, c)` of shape (layers, batch, hidden).

        For `GRUCell` and `LSTMCell` the shape is (batch, hidden).
        """
        if hasattr(self.rnn, "num_layers"):
            count = self.layers
            state = tuple(torch.stack(state[part * count : (part + 1) * count]) for part in range(self.each))
        return state[0] if self.each == 1 else state

    def output(self, state: tuple[Tensor, ...]) -> Tensor:
        """Returns `h` of the last layer."""
        return state[self.layers - 1]

    def prepare(self, x: Tensor) -> Tensor:
        """Returns the products of all inputs and the first layer's weights."""
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
        """Returns the products of a layer's weights and its input, which is `h` of the layer below."""
        if self.dropout > 0:
            below = functional.dropout(below, self.dropout, self.rnn.training)
        weights = self._weights(layer)
        return functional.linear(below, weights[0], weights[2])


class SteppedGRU(Stepped):
    """GRU: `h' = z h + (1 - z) n`. A coarse step over `count` steps uses `z` to the power of `count`."""

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
    """LSTM: `c' = f c + i g`, `h' = o tanh(c')`.

    A coarse step over `count` steps uses `f` to the power of `count`, and `i g` times the sum of the lower powers of
    `f`.
    """

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
    """Returns `f` to the power of `count`, and the sum `1 + f + f^2 + ...` with `count` terms.

    Doubling computes both, and is stable for every f between 0 and 1.
    """
    power, total = f, torch.ones_like(f)
    for bit in bin(count)[3:]:
        total, power = total * (1 + power), power * power
        if bit == "1":
            total, power = 1 + f * total, power * f
    return power, total


def stepped(cell: nn.Module) -> nn.Module:
    """Returns the cell of a module: torch's recurrent modules become steps, any other module is returned unchanged."""
    if isinstance(cell, nn.RNNBase):
        if cell.bidirectional:
            raise ValueError(f"{cell}: a sequence is processed in one direction only; give bidirectional=False")
        if cell.proj_size > 0:
            raise ValueError(f"{cell}: proj_size is not supported; put a layer after it")
        if not cell.batch_first:
            raise ValueError(f"{cell}: inputs have the dimensions batch, then steps; give batch_first=True")
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
