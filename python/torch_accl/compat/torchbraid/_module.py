"""The common part of torchbraid's nets: their setters, statistics, timers and diagnostics, and the run of a batch.

Owns all that does not depend on the body, which is a stack of layers or a cell over a sequence. Settings of one
direction are in `_settings.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...layer_parallel import Norms
from ...layer_parallel.extension import Batch, Model, Wire
from ._communicator import Comm
from ._compose import Compose
from ._root import at_root
from ._settings import App, say_once
from ._timers import ContextTimerManager
from ._watch import Watch
from ._world import communicator_of

__all__ = ["Parallel", "explain_buffers"]


class Parallel(nn.Module):
    """A net over the ranks of a communicator. A subclass passes the body to `begin`."""

    body: Model
    fwd_app: App
    bwd_app: App

    def __init__(self, comm: Any) -> None:
        super().__init__()
        self.comm = comm
        self.ranks: Comm = communicator_of(comm)
        self.timer_manager = ContextTimerManager()
        self.exec_helper = Compose(self.ranks.rank)
        self._watching: list[Watch] = []
        # The last forward pass that a backward pass may follow, as long as its output exists.
        self._batch: weakref.ref[Batch] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy has had no forward pass.
        return {**self.__dict__, "_batch": None}

    def begin(
        self, body: Model, steps: list[tuple[str, bool]], Tf: float, levels: tuple[int, int], max_iters: int
    ) -> None:
        """Takes over a body with these steps, solved with the given number of levels forward and backward."""
        self.body = body
        apps = [
            App(name, self.ranks, self.timer_manager, steps, Tf, max_levels, max_iters)
            for name, max_levels in zip(("ForWD", "BckWD"), levels)
        ]
        self.fwd_app, self.bwd_app = apps
        self.dt = self.fwd_app.dt

    def extra_repr(self) -> str:
        """Returns this rank and the number of ranks as text."""
        return f"rank {self.ranks.rank} of {self.ranks.size}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        moved = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for parameter in self.parameters():
            _check_device(self.ranks, parameter.device)
        return moved

    # ---- a batch

    def settle(self) -> None:
        """Gives the body the cycles that the settings describe."""
        for name, app in (("fwd", self.fwd_app), ("bwd", self.bwd_app)):
            if getattr(self.body, name) != app.cycle():
                setattr(self.body, name, app.cycle())

    def run(
        self, ask: Callable[[], Any], watch: Watch, again: Watch, *, device: Any, is_everywhere: bool = False
    ) -> Any:
        """Runs `ask`, a forward pass of the body, and returns its output on rank 0.

        `watch` is active during the forward pass, `again` during its backward pass. `device` is a tensor on the states'
        device, for a rank where the body does not show it.
        """
        body, forward = self.body, self.fwd_app
        # Watches left over from a backward pass that failed.
        for left in self._watching:
            left.end()
        self._watching.clear()
        with watch:
            if forward.timings > 0:
                with self.timer_manager.timer("ForWD::runBraid"):
                    output = ask()
            else:
                output = ask()
        norms, form = body.norms, body.output_form
        assert form is not None, "the body has just set the form of its output"
        forward.solved(norms.forward, self._iterations("forward"))
        node = next((leaf.grad_fn for leaf in pytree.tree_leaves(output) if getattr(leaf, "grad_fn", None)), None)
        self._batch = None
        if node is not None:
            self._batch = weakref.ref(node.batch)
            self._await_backward(node, norms, again)
        where = self._device(device, output)

        def refuse(refusal: Exception) -> None:
            assert node is not None, "only the backward pass refuses"
            batch = node.batch
            batch.fail(f"the backward pass, batch {batch.number}", refusal)

        return at_root(output, form, body.wire, where, refuse, is_everywhere=is_everywhere)

    def _device(self, x: Any, output: Any) -> torch.device:
        """Returns the states' device, taken from the input, the output or the layers."""
        given = [*([x] if self.body.is_first else []), *([output] if self.body.is_last else []), *self.parameters(), x]
        tensors = (leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor))
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def _await_backward(self, node: Any, norms: Norms, watch: Watch) -> None:
        """Registers hooks around the body's backward pass, in which a coarse step may be evaluated again."""
        backward, iterations = self.bwd_app, self._iterations("backward")
        timer = self.timer_manager.timer("BckWD::runBraid") if backward.timings > 0 else None

        def begins(given: Any) -> None:
            self._watching.append(watch)
            watch.begin()
            if timer is not None:
                timer.start()

        def is_over(found: Any, given: Any) -> None:
            if timer is not None:
                timer.stop()
            watch.end()
            self._watching.remove(watch)
            backward.solved(norms.backward, iterations)

        node.register_prehook(begins)
        node.register_hook(is_over)

    def _iterations(self, pass_: str) -> int | None:
        """Returns the number of iterations of a pass; None if its norms give the number."""
        body = self.body
        mode: str = body.mode if body.training else body.evaluation
        if mode == "auto" and body.choice is not None:
            mode = body.choice.mode
        is_forward = pass_ == "forward"
        levels = (body.fwd if is_forward else body.bwd).levels
        if levels == 1 or mode in ("exact-wave", "exact-pipeline") or (is_forward and mode == "exact-forward"):
            return 1
        return None if mode == "converged" else (self.fwd_app if is_forward else self.bwd_app).max_iters

    # ---- head and tail

    def comp_op(self) -> Compose:
        """Returns the object that calls head, tail and loss on rank 0 alone."""
        return self.exec_helper

    # ---- settings of both directions, and of each

    def setMaxIters(self, max_iters: int) -> None:
        """See `App.setMaxIters`."""
        self.fwd_app.setMaxIters(max_iters)
        self.bwd_app.setMaxIters(max_iters)

    def setFwdMaxIters(self, max_iters: int) -> None:
        """See `App.setMaxIters`."""
        self.fwd_app.setMaxIters(max_iters)

    def setBwdMaxIters(self, max_iters: int) -> None:
        """See `App.setMaxIters`."""
        self.bwd_app.setMaxIters(max_iters)

    def getFwdMaxIters(self) -> int:
        """See `App.getMaxIters`."""
        return self.fwd_app.getMaxIters()

    def getBwdMaxIters(self) -> int:
        """See `App.getMaxIters`."""
        return self.bwd_app.getMaxIters()

    def setCFactor(self, cfactor: int | Mapping[int, int]) -> None:
        """See `App.setCFactor`."""
        self.fwd_app.setCFactor(cfactor)
        self.bwd_app.setCFactor(cfactor)

    def setFwdCFactor(self, cfactor: int | Mapping[int, int]) -> None:
        """See `App.setCFactor`."""
        self.fwd_app.setCFactor(cfactor)

    def setBwdCFactor(self, cfactor: int | Mapping[int, int]) -> None:
        """See `App.setCFactor`."""
        self.bwd_app.setCFactor(cfactor)

    def setNumRelax(self, relax: int, level: int = -1) -> None:
        """See `App.setNumRelax`."""
        self.fwd_app.setNumRelax(relax, level)
        self.bwd_app.setNumRelax(relax, level)

    def setFwdNumRelax(self, relax: int, level: int = -1) -> None:
        """See `App.setNumRelax`."""
        self.fwd_app.setNumRelax(relax, level)

    def setBwdNumRelax(self, relax: int, level: int = -1) -> None:
        """See `App.setNumRelax`."""
        self.bwd_app.setNumRelax(relax, level)

    def setSkipDowncycle(self, skip: bool | int) -> None:
        """See `App.setSkipDowncycle`."""
        self.fwd_app.setSkipDowncycle(skip)
        self.bwd_app.setSkipDowncycle(skip)

    def setSkipFwdDowncycle(self, skip: bool | int) -> None:
        """See `App.setSkipDowncycle`."""
        self.fwd_app.setSkipDowncycle(skip)

    def setSkipBwdDowncycle(self, skip: bool | int) -> None:
        """See `App.setSkipDowncycle`."""
        self.bwd_app.setSkipDowncycle(skip)

    def setFMG(self) -> None:
        """See `App.setFMG`."""
        self.fwd_app.setFMG()
        self.bwd_app.setFMG()

    def setMinCoarse(self, mc: int) -> None:
        """See `App.setMinCoarse`."""
        self.fwd_app.setMinCoarse(mc)
        self.bwd_app.setMinCoarse(mc)

    def setFwdResidualCompute(self, residual_compute: bool | int) -> None:
        """See `App.setResidualCompute`."""
        self.fwd_app.setResidualCompute(residual_compute)

    def setBwdResidualCompute(self, residual_compute: bool | int) -> None:
        """See `App.setResidualCompute`."""
        self.bwd_app.setResidualCompute(residual_compute)

    def setCRelaxWt(self, CWt: float) -> None:
        """See `App.setCRelaxWt`."""
        self.fwd_app.setCRelaxWt(CWt)
        self.bwd_app.setCRelaxWt(CWt)

    def setFwdCRelaxWt(self, CWt: float) -> None:
        """See `App.setCRelaxWt`."""
        self.fwd_app.setCRelaxWt(CWt)

    def setBwdCRelaxWt(self, CWt: float) -> None:
        """See `App.setCRelaxWt`."""
        self.bwd_app.setCRelaxWt(CWt)

    def setFwdRelaxOnlyCG(self, flag: bool | int) -> None:
        """See `App.setRelaxOnlyCG`."""
        self.fwd_app.setRelaxOnlyCG(flag)

    def setBwdRelaxOnlyCG(self, flag: bool | int) -> None:
        """See `App.setRelaxOnlyCG`."""
        self.bwd_app.setRelaxOnlyCG(flag)

    def setFwdStorage(self, storage: int) -> None:
        """See `App.setStorage`."""
        self.fwd_app.setStorage(storage)

    def setBwdStorage(self, storage: int) -> None:
        """See `App.setStorage`."""
        self.bwd_app.setStorage(storage)

    def setFwdFinalFCRelax(self) -> None:
        """See `App.finalRelax`."""
        self.fwd_app.finalRelax()

    def setBwdFinalFCRelax(self) -> None:
        """See `App.finalRelax`."""
        self.bwd_app.finalRelax()

    def setPrintLevel(self, print_level: int, tb_print: bool = False) -> None:
        """See `App.setPrintLevel`."""
        self.fwd_app.setPrintLevel(print_level, tb_print)
        self.bwd_app.setPrintLevel(print_level, tb_print)

    def setFwdInitialGuess(self, initial_guess: Any) -> None:
        """Sets an object whose `getState(t)` returns the state of time t for the start of a forward solve. None removes
        it.

        The guess replaces the coarsest level's solution, and `max_iters` cycles follow. Each rank asks for the states
        of its own layers.
        """
        self.fwd_app.has_guess = initial_guess is not None
        self.body.guess = None if initial_guess is None else _Guess(initial_guess, self.dt)

    # ---- results of a batch

    def getMPIComm(self) -> Any:
        """Returns the communicator that was passed to the net."""
        return self.comm

    def getFwdStats(self) -> tuple[int, float]:
        """See `App.getBraidStats`."""
        return self.fwd_app.getBraidStats()

    def getBwdStats(self) -> tuple[int, float]:
        """See `App.getBraidStats`."""
        return self.bwd_app.getBraidStats()

    def getTimerManager(self) -> ContextTimerManager:
        """Returns this rank's timers."""
        return self.timer_manager

    def getTimersString(self) -> str | None:
        """Returns the tables of all ranks on rank 0; None on the others. Collective."""
        of_all = self.ranks.gather(self.timer_manager.getResultString())
        if of_all is None:
            return None
        return "".join(f"\nrank {rank}\n{table}" for rank, table in enumerate(of_all))

    # ---- states

    def getFinalOnRoot(self, vec: Tensor) -> Tensor | None:
        """Returns on rank 0 the tensor that the last rank passes, on the device of rank 0's own tensor; None on the
        others. Collective."""
        if self.ranks.size == 1:
            return vec
        last = self.ranks.size - 1
        if self.ranks.rank == last:
            self.ranks.send(vec.detach().cpu(), 0)
        if self.ranks.rank != 0:
            return None
        found: Tensor = self.ranks.recv(source=last)
        return found.to(vec.device)

    def copyVectorFromRoot(self, vec: Any) -> Any:
        """Returns rank 0's argument on every rank, a tensor on the device of the rank's own. Collective."""
        given = vec.detach().cpu() if isinstance(vec, Tensor) else vec
        found = self.ranks.bcast(given, root=0)
        if self.ranks.rank == 0:
            return vec
        return found.to(vec.device) if isinstance(found, Tensor) and isinstance(vec, Tensor) else found

    # ---- exchanges of torchbraid that are not needed here

    def startStateCommunication(self) -> None:
        """Does nothing: each layer is evaluated on the rank where it lies."""

    def endStateCommunication(self) -> None:
        """Does nothing."""


class _Guess:
    """Returns a state by the number of a point, from an object that returns it by time."""

    def __init__(self, source: Any, dt: float) -> None:
        self._source = source
        self._dt = dt

    def __call__(self, point: int) -> Any:
        state = self._source.getState(point * self._dt)
        # torchbraid wraps a state of one tensor in a tuple.
        return state[0] if isinstance(state, tuple) and len(state) == 1 else state


def _check_device(ranks: Comm, device: torch.device) -> None:
    group = ranks.group
    if group is None or group.size() == 1 or device.type == "meta":
        return
    if Wire(group).route(device) is None:
        raise ValueError(
            f"the layers are on {device}, but the group {dist.get_backend_config(group)} has no backend for that device; create the group with one, "
            'as MPI.Init() or init_process_group("accl") does'
        )


def explain_buffers(ranks: Comm, *, is_wanted: bool) -> None:
    """Warns where `user_mpi_buf` has no effect."""
    group = ranks.group
    if not is_wanted or group is None or group.size() == 1:
        return
    wire = Wire(group)
    if not any(kind != "cpu" and wire.route(torch.device(kind)) is not None for kind in wire.device_types):
        say_once(
            ranks,
            f"user_mpi_buf=True has no effect: states are sent from their own memory, and the group {dist.get_backend_config(group)} "
            "sends from CPU memory only; MPI.Init() creates a group that also sends from the memory of GPUs",
        )
