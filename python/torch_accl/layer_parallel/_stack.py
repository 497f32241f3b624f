"""A list of layers over ranks.

Owns the net's construction, its placement, parameters that ranks share, and its conversion to one rank and back.
`_model.py` runs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from numbers import Real
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torch_accl import _native

from ._model import WAVE, Mode, Model, Schedule, group_of, replica_of
from ._net.blocks import Block, built
from ._net.copies import Copied, Copies
from ._net.evaluation import Layers
from ._net.kinds import Kind, LayerKind, functions_of_kinds, kind_of
from ._net.pickled import loaded, saved
from ._net.serial import Serial
from ._net.spatial import Spatial
from ._net.spline import Interpolated, Section, Spline
from ._net.ties import Ties, shared_names
from ._ranks.agreed import agreed
from ._ranks.failures import LayerParallelError, described, sentence
from ._ranks.wire import Wire
from ._solve.batch import Batch
from ._solve.cycle import Cycle, check_type, check_whole
from ._solve.plans import Net, Plans, specs_of
from ._solve.settings import Audits, Stop, with_old_keywords, without_old_keywords
from ._solve.solver import Guess, Solver

__all__ = ["LayerParallel"]


@with_old_keywords
class LayerParallel(Model):
    """A net whose layers are spread over ranks, all of which work on one batch at once.

    All of these ranks build it together. A state, which layers pass on, is a tensor or a tuple, list or dict of
    tensors, all of them dense. Steps keep its shapes and dtypes; plain layers may change both. Floating-point and
    complex tensors are computed with, integer and bool tensors are constants.

    layers: one entry per layer, the same on all ranks: `ode(f)`, `timed(f)`, `residual(block)`, `custom(layer)`,
        `plain(layer)`, or a module, which is a plain layer. Each takes a module, or a function that builds one from the
        layer's number. Only the owner calls such a function, with a seed of its own. A `Spline` is several layers.
    mesh, group: the ranks that the layers lie on, in order: a mesh of one dimension, or a process group. `"alone"` is
        this rank by itself. The default is the default process group.
    horizon: length of time of all steps together. dt is `horizon` divided by the number of layers that are not plain.
    seed: seed from which layers are built and draw random numbers, together with their number.
    mode: `"inexact"`, `"exact-forward"`, `"converged"`, `"exact-wave"`, `"exact-pipeline"` or `"auto"`. It may be
        changed between batches.
    fwd, bwd: cycles of the forward and the backward pass in inexact modes.
    guess: first states for `Cycle(start="guess")`: a function from the number of a point to a state. Point i is before
        layer i.
    spatial: `Spatial(coarsen, refine)`, which makes states coarser and finer on the levels that `Cycle(coarser=...)`
        names.
    buffer_layers: numbers of steps at the beginning and at the end that are never part of a coarse step.
    placement: `"aligned"`, `"even"`, or the number of layers of each rank.
    micro_batches: number of parts into which `"exact-pipeline"` splits a batch, by default one for each rank.
    schedule: schedule of `"exact-pipeline"`, `"1f1b"` or `"gpipe"`.
    side_per_sample: names of side inputs that are split into micro-batches along their first dimension, as the input
        is. Other side inputs are given whole.
    checkpoint: keeps the graph of only the first layer of each coarse step. Of every other layer it keeps the input,
        and evaluates the layer again in the backward pass. Exact modes keep no graph.
    auto_modes: modes from which `"auto"` chooses by measured times. By default these are `"exact-wave"` and
        `"inexact"`, and `"exact-pipeline"` if `micro_batches` is given. The first one is taken unless another is faster
        by 3 %.
    stop: when a pass of `"converged"` ends.
    tie: groups of names of parameters, `("layers.0.weight", "layers.9.weight")`, that are one. They start with the
        first one's values, and each gets the sum of their gradients. A parameter that occurs in several of the given
        modules is tied without being named.
    replica: index of this data-parallel copy, each of which draws other random numbers. By default, the index of
        `group` among the groups like it.
    audit: which batches of an inexact mode are checked, and the reaction. By default none is.

    `tolerance` and `max_iterations` are old keywords for settings of `stop`, and `audit_every`, `audit_limit`,
    `on_excess`, `probe_every` and `on_stall` for settings of `audit`. Each causes a DeprecationWarning.

    Raises:
        TypeError: an entry of `layers` is no layer, or a function that builds one does not return a module.
        ValueError: an argument is not accepted, or ranks have different values of tied parameters.
        LayerParallelError: building a layer failed on some ranks. If it failed alike on all, they raise the error itself.
    """

    instead_of_pickling = "net.state_dict(), or net.to_serial(), the whole net as a module of one rank"

    def __init__(
        self,
        layers: Sequence[Block | Spline | nn.Module],
        *,
        mesh: DeviceMesh | None = None,
        group: dist.ProcessGroup | Literal["alone"] | None = None,
        horizon: float = 1.0,
        seed: int = 0,
        mode: Mode = "inexact",
        fwd: Cycle = Cycle(),  # noqa: B008  it is frozen
        bwd: Cycle = Cycle(iterations=1),  # noqa: B008
        guess: Guess | None = None,
        spatial: Spatial | None = None,
        buffer_layers: tuple[int, int] = (0, 0),
        placement: str | Sequence[int] = "aligned",
        micro_batches: int | None = None,
        schedule: Schedule = "1f1b",
        side_per_sample: Collection[str] = (),
        checkpoint: bool = False,
        auto_modes: Sequence[Mode] | None = None,
        stop: Stop = Stop(),  # noqa: B008
        tie: Sequence[Sequence[str]] = (),
        replica: int | None = None,
        audit: Audits = Audits(),  # noqa: B008
    ) -> None:
        super().__init__(
            Wire(group_of(mesh, group)),
            mode=mode,
            fwd=fwd,
            bwd=bwd,
            micro_batches=micro_batches,
            schedule=schedule,
            checkpoint=checkpoint,
            auto_modes=auto_modes,
            stop=stop,
            audit=audit,
        )
        _check(horizon, spatial, side_per_sample, replica)
        listed, splines = _blocks(layers, seed)
        blocks = _apart(listed, buffer_layers)
        kinds = [kind_of(block.kind) for block in blocks]
        placed = tuple((kind, block.is_apart) for kind, block in zip(kinds, blocks))
        aligned = fwd if mode in ("inexact", "converged") else bwd if mode == "exact-forward" else WAVE
        counts = _placed(placed, placement, self._wire.size, aligned)
        net = Net(placed, counts)
        steps = sum(kind.is_step for kind in kinds)
        own: dict[int, nn.Module] = {}

        def build() -> None:
            own.update({layer: built(blocks[layer], layer, seed) for layer in net.owned(self._wire.rank)})

        agreed(self._wire, "building its layers", "", build, is_for_all=True)
        self.layers = nn.ModuleDict({str(layer): module for layer, module in own.items()})
        self._solver = Solver(
            self._wire,
            Plans(net, self._wire.rank),
            Layers(self.layers, kinds, horizon / max(steps, 1), seed),
            _names(blocks, own),
            replica_of(self._wire.ranks) if replica is None else replica,
        )
        given = [block.module for block in blocks]
        of_splines = _names_of_splines(splines, net.owner, self._wire)
        shared = [*shared_names(given, net.owner), *of_splines]
        self._ties = Ties([*tie, *shared], net.owner, self._solver.layers.modules, self._wire)
        self._solver.layers.tied = self._ties.members
        self._solver.layers.are_added_in_order = True
        if self._ties.names:
            self._solver.copies = self._copies = Copies(self._wire, self.copied, "give all copies the same values")
            self._copies.check("building the net")
            self.register_state_dict_pre_hook(_made_equal)  # type: ignore[no-untyped-call]
        self._horizon, self._placement = horizon, placement
        self.guess = guess
        self._solver.shared.spatial = spatial
        self._solver.shared.per_sample = frozenset(side_per_sample)
        specs = tuple((block.kind, block.is_apart) for block in blocks)
        self._settings += f"; layers {specs}; placement {counts}; horizon {horizon}; seed {seed}; parts {sorted(side_per_sample)}; tie {self._ties.names}; spatial {spatial is not None}"
        self.mode = mode

    @property
    def owned(self) -> range:
        """The numbers of this rank's layers."""
        return self._plans.net.owned(self._wire.rank)

    def owner(self, layer: int) -> int:
        """Returns the rank that has a layer, as a rank of the net."""
        return self._plans.net.owner(layer)

    def copied(self) -> list[Copied]:
        """Returns the tied parameters."""
        return self._ties.copied(self._solver.layers.modules)

    def tied_names(self) -> dict[str, str]:
        """Returns the first name of the group for each tied parameter of this rank.

        Compression of all copies goes by that name.
        """
        own = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        return {name: names[0] for names in self._ties.names for name in names if name in own}

    def settle(self, batch: Batch) -> None:
        """Adds up the gradients of shared parameters, and the gradients of side inputs over ranks."""
        try:
            self._ties.add_up(batch.evaluation, f"batch {batch.number}")
            batch.evaluation.add_layers()
        except dist.DistError:
            # Other ranks cannot be reached.
            raise
        except Exception as error:
            batch.fail(f"adding up gradients, batch {batch.number}", error)
        super().settle(batch)

    # ---- the same net on one rank

    @classmethod
    def from_serial(cls, layers: Serial | nn.ModuleList, kind: Kind = "residual", **settings: Any) -> LayerParallel:
        """Builds a net of these layers, which are the same on all ranks.

        `layers` is the result of `to_serial`, or a list of layers of one kind. Each rank releases the layers of the
        others.
        """
        settings = without_old_keywords(settings, "from_serial", stacklevel=2)
        if isinstance(layers, Serial):
            blocks = layers.blocks()
            steps = sum(kind_of(name).is_step for name in layers.kinds)
            settings.setdefault("horizon", layers.dt * max(steps, 1))
        else:
            blocks = [Block(layer, kind) for layer in layers]
        return cls(blocks, **settings)

    def to_serial(self) -> Serial:
        """Returns a copy of the whole net, with parameters, buffers and dt, on all ranks.

        Layers on an accelerator come to the device of this rank's layers. All ranks call it together.

        Raises:
            LayerParallelError: a layer cannot be pickled.
        """
        layers = self._solver.layers
        if self._copies is not None:
            self._copies.make_equal("to_serial()")
        try:
            mine, cause = saved(layers.modules), None
        except Exception as error:
            mine, cause = b"", described(error)
        of_all = self._wire.gathered((mine, cause))
        if any(cause is not None for _, cause in of_all):
            causes = [f"exporting its layers: {cause}" if cause else None for _, cause in of_all]
            raise LayerParallelError(sentence(causes, "Layers that are exported must be picklable."))
        found = {layer: module for part, _ in of_all for layer, module in loaded(part, layers.modules.values()).items()}
        modules = [found[layer] for layer in range(len(found))]
        kinds = [kind.name for kind in layers.kinds]
        return Serial(modules, kinds, layers.dt, self._ties.names_in(found)).train(self.training)


# ---- construction


def _made_equal(net: LayerParallel, prefix: str, keep_vars: bool) -> None:
    """Makes copies equal before they are saved. They were last compared before the last step of the optimizer."""
    if net._copies is not None:
        net._copies.make_equal(
            "state_dict() of a net with tied parameters (all ranks of the layers must call it together)"
        )


def _check(horizon: Any, spatial: Any, side_per_sample: Any, replica: Any) -> None:
    """Raises `TypeError` or `ValueError` for arguments that would fail later."""
    if not isinstance(horizon, Real) or not math.isfinite(horizon):
        raise ValueError(f"horizon={horizon!r}: give a finite number")
    if spatial is not None:
        check_type("spatial", spatial, Spatial, "Spatial(coarsen, refine)")
    if isinstance(side_per_sample, str):
        raise TypeError(f"side_per_sample={side_per_sample!r}: give a list of names, such as [{side_per_sample!r}]")
    if replica is not None:
        check_whole("LayerParallel", replica=replica)


def _blocks(layers: Sequence[Block | Spline | nn.Module], seed: int) -> tuple[list[Block], list[Section]]:
    """Returns one block for each layer, and the splines among them."""
    blocks: list[Block] = []
    splines: list[Section] = []
    for number, layer in enumerate(layers):
        if isinstance(layer, Spline):
            splines.append(Section(layer, len(blocks), seed))
            blocks += splines[-1].blocks()
            continue
        if isinstance(layer, nn.Module):
            layer = Block(layer)
        if not isinstance(layer, Block):
            raise TypeError(
                f"entry {number} of the layers is {type(layer).__name__}; give a module, {functions_of_kinds()}, each with a module or a function that builds it from "
                "the layer's number, or a Spline of them"
            )
        blocks.append(layer)
    if not blocks:
        raise ValueError("a net without layers; give at least one")
    return blocks, splines


def _names_of_splines(splines: Sequence[Section], owner: Callable[[int], int], wire: Wire) -> list[list[str]]:
    """Returns the groups of names of control points that lie on several ranks."""
    if not splines:
        return []
    # A rank without layers of a spline does not know the names of its parameters.
    of_all = wire.gathered([spline.form() for spline in splines])
    groups = []
    for place, spline in enumerate(splines):
        known = [of_rank[place] for of_rank in of_all if of_rank[place] is not None]
        for each in known[1:]:
            spline.check(*each, *known[0])
        groups += spline.members([name for name, *_ in known[0][1]] if known else [], owner)
    return groups


def _apart(blocks: list[Block], buffer_layers: tuple[int, int]) -> list[Block]:
    steps = [number for number, block in enumerate(blocks) if kind_of(block.kind).is_step]
    first, last = buffer_layers
    if first < 0 or last < 0:
        raise ValueError(f"buffer_layers={buffer_layers}: give two numbers of at least 0")
    outside = set(steps[:first]) | set(steps[len(steps) - last :] if last else [])
    return [block.apart() if number in outside else block for number, block in enumerate(blocks)]


def _placed(
    layers: Sequence[tuple[LayerKind, bool]], placement: str | Sequence[int], ranks: int, cycle: Cycle
) -> tuple[int, ...]:
    if not isinstance(placement, str):
        counts = tuple(placement)
        if len(counts) != ranks or sum(counts) != len(layers) or min(counts) < 0:
            raise ValueError(
                f"placement={list(counts)}: give {ranks} numbers, one per rank, with a sum of {len(layers)} layers"
            )
        return counts
    return tuple(_native.layer_placement(specs_of(layers), cycle.factors(), ranks, placement))


def _names(blocks: Sequence[Block], own: dict[int, nn.Module]) -> list[str]:
    def name(number: int, block: Block) -> str:
        module = own.get(number, block.module)
        if not isinstance(module, nn.Module):
            return getattr(module, "__name__", "layer")
        return type(module.block if isinstance(module, Interpolated) else module).__name__

    return [name(number, block) for number, block in enumerate(blocks)]
