"""torchbraid's net of layers.

Owns its construction: the translation of functors and counts to layers of `torch_accl.layer_parallel`, the seed of the
layers, and the conversion to a module of one rank.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...layer_parallel import Block, Cycle, LayerParallelError, Serial, Spline
from ...layer_parallel import LayerParallel as Body
from ...layer_parallel.extension import (
    ODE,
    PLAIN,
    TIMED,
    Interpolated,
    Kind,
    described,
    kind_of,
    sentence,
    undisturbed,
)
from ._module import Parallel, explain_buffers
from ._points import recorded
from ._spatial import levels_of
from ._watch import Seen, Watch, norm_of
from .braid_vector import BraidVector

__all__ = ["LayerParallel"]

Functor = Callable[[], nn.Module]


class LayerParallel(Parallel):
    """A net whose layers lie on the ranks of a communicator; its input and its output are on rank 0.

    comm: a communicator of this package's `MPI`, a process group, a mesh of one dimension, or a communicator of mpi4py
        with the ranks of the job.
    layer_blocks, global_steps: a functor and the number of layers that it builds, or lists of both. If the number is
        above 1, layers are steps `x + dt * layer(x)`, or `layer(x, dt)` if the layer's `forward` has a second argument.
        A single layer is `layer(x)`, which may change the shape.
    Tf: total time of all layers, including single ones; dt is Tf divided by their number.
    max_fwd_levels, max_bwd_levels: levels of each pass's solve; 1 is exact, one rank after the other.
    max_iters: iterations of both passes, see `setMaxIters`.
    spatial_ref_funcs, levels_to_coarsen: `coarsen(tensor, level)`, `refine(tensor, level)` and `shape(lengths, level)`,
        which returns the shape that `coarsen` produces. States become coarser on the way from each listed level to the
        next, 0 being the finest. Levels that the net does not have are ignored. Both passes do so.
    user_mpi_buf: see `docs/migrating-torchbraid.md`; states are sent from the memory where they are stored.
    nsplines, splinedegree: number of control points and degree of splines. If `nsplines` is above 0, the parameters of
        the steps of each functor are a spline in time (`torch_accl.layer_parallel.Spline`), and the functor builds
        control points. Single layers keep their own parameters.

    Raises:
        ValueError: invalid counts, levels, splines or communicator.
        LayerParallelError: a functor failed on some rank.
    """

    body: Body

    def __init__(
        self,
        comm: Any,
        layer_blocks: Functor | Sequence[Functor],
        global_steps: int | Sequence[int],
        Tf: float,
        max_fwd_levels: int = 1,
        max_bwd_levels: int = 1,
        max_iters: int = 10,
        spatial_ref_funcs: Sequence[Callable[..., Any]] | None = None,
        levels_to_coarsen: Sequence[int] | None = None,
        user_mpi_buf: bool = False,
        nsplines: int = 0,
        splinedegree: int = 1,
    ) -> None:
        coarsened = levels_of(spatial_ref_funcs, levels_to_coarsen)
        functors, counts = _listed(layer_blocks, global_steps)
        super().__init__(comm)
        explain_buffers(self.ranks, is_wanted=user_mpi_buf)
        seed, kinds = self._agreed(functors, counts)
        dt = Tf / sum(counts)
        blocks: list[Block | Spline] = []
        self.kinds: list[Kind] = []
        for functor, count, kind in zip(functors, counts, kinds):
            if kind == "timed plain":
                blocks.append(Block(_Builder(functor, dt), PLAIN.name))
                self.kinds.append(PLAIN.name)
                continue
            block = Block(_Builder(functor, None), kind)
            is_spline = nsplines > 0 and kind_of(kind).is_step
            blocks += [_spline(block, count, nsplines, splinedegree)] if is_spline else [block] * count
            self.kinds += [block.kind] * count
        steps = sum(kind_of(kind).is_step for kind in self.kinds)
        if nsplines > 0 and not steps:
            raise ValueError(
                f"LayerParallel(nsplines={nsplines}): all layers are single ones, which have no spline; leave nsplines at 0"
            )
        body, cause = None, None
        try:
            body = Body(
                blocks,
                group=self.ranks.group or "alone",
                # The body's dt counts steps only, not single layers.
                horizon=Tf * steps / len(self.kinds),
                seed=seed,
                fwd=Cycle(levels=1),
                bwd=Cycle(levels=1),
                spatial=coarsened,
                # Coarsening factors are set later, and the layers need a placement now.
                placement="even",
            )
        except Exception as error:
            cause = error
        causes = self.ranks.allgather(None if cause is None else f"building its layers: {described(cause)}")
        if body is None or any(causes):
            raise LayerParallelError(sentence(causes, "No net was built.")) from cause
        self.begin(body, [(kind, False) for kind in self.kinds], Tf, (max_fwd_levels, max_bwd_levels), max_iters)
        self.fwd_app.points = self.getFineTimePoints
        for app in (self.fwd_app, self.bwd_app):
            app.owner = body.owner
            app.coarsened = () if coarsened is None else tuple(coarsened.levels)
        self.enable_diagnostics = False
        # Inputs and outputs of layers in the last forward pass, if diagnostics are enabled.
        self._seen: dict[int, Seen] = {}

    def _agreed(self, functors: Sequence[Functor], counts: Sequence[int]) -> tuple[int, list[Any]]:
        """Returns the seed of all layers, and the kind of each functor's layers, which rank 0 finds out by building
        one."""
        # Each rank draws a number, so that all random generators advance alike.
        drawn = int(torch.randint(1 << 62, (), dtype=torch.int64, device="cpu"))
        found: tuple[int, list[str]] | str | None = None
        error: Exception | None = None
        if self.ranks.rank == 0:
            try:
                with undisturbed():
                    found = drawn, [_kind(functor(), count) for functor, count in zip(functors, counts)]
            except Exception as caught:
                error, found = caught, f"a functor failed on rank 0: {described(caught)}"
        found = self.ranks.bcast(found)
        if not isinstance(found, tuple):
            raise LayerParallelError(f"LayerParallel: {found}") from error
        return found

    # ---- a batch

    def forward(self, x: Any, *extra_args: Any, **extra_kwargs: Any) -> Any:
        """Returns the net's output for rank 0's x on rank 0.

        The last rank returns the output as well; the other ranks return zeros of its shape. All ranks call `backward()`
        on what they computed from it. On other ranks x is ignored. Extra arguments are passed to each layer after its
        own; they are the same on all ranks, and get no gradient.
        """
        own, forward = self._own(), self.fwd_app
        self.settle()
        self._seen = {}
        timer = self.timer_manager.timer("ForWD::step") if forward.timings > 1 else None
        keep = self._seen if self.enable_diagnostics else None
        return self.run(
            lambda: self.body(x if self.body.is_first else None),
            Watch(own, extra_args, extra_kwargs, timer, keep),
            Watch(own, extra_args, extra_kwargs, None, None),
            device=x,
        )

    def _own(self) -> dict[int, nn.Module]:
        return {int(number): layer for number, layer in self.body.layers.items()}

    # ---- states of the last batch

    def diagnostics(self, enable: bool) -> None:
        """Sets whether forward passes keep the input and output of each layer, for `getDiagnostics` and
        `getFineTimePoints`."""
        self.enable_diagnostics = enable
        if not enable:
            self._seen = {}

    def getDiagnostics(self) -> dict[str, Any]:
        """Returns, on rank 0, data of the last forward pass by layer: its number, and the 2-norms of its input, its
        output and each parameter. Collective.

        Raises:
            RuntimeError: diagnostics are not enabled.
        """
        self._check_kept("getDiagnostics")
        mine = {
            number: (norm_of(seen.state), norm_of(self._after(number, seen)), self._parameter_norms(number))
            for number, seen in self._seen.items()
        }
        of_all = self.ranks.gather(mine) or []
        found = sorted((number, *norms) for part in of_all for number, norms in part.items())
        return {
            "rank": self.ranks.rank,
            "timestep_index": [number for number, _, _, _ in found],
            "step_in": [norm for _, norm, _, _ in found],
            "step_out": [norm for _, _, norm, _ in found],
            "params": [norms for _, _, _, norms in found],
        }

    def getFineTimePoints(self) -> tuple[list[float], list[BraidVector]]:
        """Returns the times of this rank's points, and their states in the last forward pass.

        Without `diagnostics(True)`, states exist between a forward pass with gradients and its backward pass.

        Raises:
            RuntimeError: the states no longer exist.
        """
        batch = None if self._batch is None else self._batch()
        points: dict[int, Any] = {}
        if self.enable_diagnostics:
            for number, seen in sorted(self._seen.items()):
                if number == 0:
                    points[0] = seen.state
                points[number + 1] = self._after(number, seen)
        elif batch is not None:
            points = recorded(batch)
            # A rank without layers has no points, even while the batch exists.
            batch = batch if points or not self.layer_models else None
        if batch is None and not self.enable_diagnostics:
            raise RuntimeError(
                "getFineTimePoints: states are kept only between a forward pass with gradients and its backward pass; call it in between, or call "
                "diagnostics(True) on all ranks before the forward pass"
            )
        vectors = [
            BraidVector(leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor))
            for state in points.values()
        ]
        return [number * self.dt for number in points], vectors

    def _check_kept(self, what: str) -> None:
        if not self.enable_diagnostics:
            raise RuntimeError(f"{what}: nothing was kept; call diagnostics(True), on all ranks, before a forward pass")

    def _after(self, number: int, seen: Seen) -> Any:
        return kind_of(self.kinds[number]).next_state(seen.state, seen.returned, self.dt)

    def _parameter_norms(self, number: int) -> list[float]:
        layer = self.body.layers[str(number)]
        own: Iterable[Tensor] = layer.interpolated().values() if isinstance(layer, Interpolated) else layer.parameters()
        return [float(torch.linalg.vector_norm(parameter.detach())) for parameter in own]

    # ---- layers

    @property
    def layer_models(self) -> list[nn.Module]:
        """This rank's layers."""
        return list(self._own().values())

    @property
    def local_layers(self) -> nn.Sequential:
        """This rank's layers one after the other, without their steps."""
        return nn.Sequential(*self.layer_models)

    def buildSequentialOnRoot(self) -> nn.Sequential | None:
        """Returns on rank 0 a copy of the whole net as a sequence of steps, with its current parameters and buffers;
        None on the others. Collective.

        Raises:
            LayerParallelError: layers of some rank cannot be pickled.
        """
        serial = self.body.to_serial()
        if self.ranks.rank != 0:
            return None
        steps = [Serial([layer], [kind], serial.dt) for layer, kind in zip(serial.layers, serial.kinds)]
        return nn.Sequential(*steps).train(self.training)


class _Builder:
    """Builds a layer by its number from a functor, which takes no number."""

    def __init__(self, functor: Functor, dt: float | None) -> None:
        self._functor = functor
        self._dt = dt
        self.__name__ = getattr(functor, "__name__", type(functor).__name__)

    def __call__(self, number: int) -> nn.Module:
        layer = self._functor()
        return layer if self._dt is None else _WithStep(layer, self._dt)


class _WithStep(nn.Module):
    """A single layer whose `forward` takes dt."""

    def __init__(self, layer: nn.Module, dt: float) -> None:
        super().__init__()
        self.layer = layer
        self.dt = dt

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return self.layer(x, self.dt, *args, **kwargs)


def _spline(block: Block, count: int, nsplines: int, degree: int) -> Spline:
    """Returns `count` steps whose parameters are a spline in time."""
    try:
        return Spline(block, layers=count, control_points=nsplines, degree=degree)
    except ValueError as error:
        raise ValueError(f"LayerParallel(nsplines={nsplines}, splinedegree={degree}): {error}") from error


def _listed(
    layer_blocks: Functor | Sequence[Functor], global_steps: int | Sequence[int]
) -> tuple[list[Functor], list[int]]:
    functors: list[Any] = list(layer_blocks) if isinstance(layer_blocks, list | tuple) else [layer_blocks]
    counts: list[Any] = list(global_steps) if isinstance(global_steps, list | tuple) else [global_steps]
    if len(functors) != len(counts) or not functors:
        raise ValueError(
            f"LayerParallel: {len(functors)} layer_blocks and {len(counts)} global_steps; give the same number of both, at least one"
        )
    for number, (functor, count) in enumerate(zip(functors, counts)):
        if not hasattr(count, "__index__") or count < 1:
            raise ValueError(f"LayerParallel: global_steps[{number}]={count!r}; give at least 1 layer")
        if isinstance(functor, nn.Module) or not callable(functor):
            raise TypeError(
                f"LayerParallel: layer_blocks[{number}] is {type(functor).__name__}; give a function that builds a layer, such as lambda: Layer()"
            )
    return functors, [operator.index(count) for count in counts]


def _kind(layer: nn.Module, count: int) -> str:
    """Returns the kind of `count` layers like this; "timed plain" is a single layer that takes dt."""
    if not isinstance(layer, nn.Module):
        raise TypeError(f"the functor returned {type(layer).__name__}; return a torch.nn.Module")
    taken = [
        parameter
        for parameter in inspect.signature(layer.forward).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if count > 1:
        return TIMED.name if len(taken) > 1 else ODE.name
    # The `forward` of a single layer may have other optional arguments.
    return "timed plain" if len(taken) > 1 and taken[1].default is inspect.Parameter.empty else PLAIN.name
