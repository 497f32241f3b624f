"""How a batch opens and closes, on all ranks together.

Owns the comparison of all that must be the same on all ranks, the agreement on the forms of all states, and that an error
of one rank is raised on all. Between opening and closing, all ranks execute their programs (`passes.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._net.blocks import undisturbed
from .._net.copies import hash_of
from .._net.device_numbers import generator_of, has_numbers
from .._net.evaluation import Evaluation, States, form_returned
from .._net.side import NO_SIDE, Side, SideForm, names_of_layers, side_of
from .._net.spatial import Meshes
from .._net.tree import Form, digest, packed, zeros
from .._ranks.agreed import agreed
from .._ranks.failures import LayerParallelError, described, sentence
from .._ranks.wire import Wire, bits_of, numbers_of
from .batch import Batch, MicroBatch, split
from .solver import KindOfBatch, Solver

__all__ = ["close", "key_of", "opened"]


# The least integer of 64 bits. The maximum over ranks ignores it, so it stands for a number that a rank does not give.
_ABSENT = -(1 << 63)
# Number of batches at the beginning in which the first and the last rank's inputs are compared, if both have one.
_COMPARED_INPUTS = 2
# Batch numbers are compared modulo this number, so that sums of their squares do not overflow.
_MODULUS = 1 << 20
_CPU = torch.device("cpu")


@dataclass
class _Header:
    """Numbers with which a rank opens a batch. One reduction makes their maxima known to all ranks.

    Numbers that must be equal are sent twice, once negated: they are if the maximum is the negative of the other one.
    """

    # Hash of the settings, which are equal on all ranks.
    settings: int
    # Whether this rank's layers have changed since its last batch.
    has_changed: bool
    # Hash of the input, on the first and the last rank.
    input_hash: int | None
    # Whether this rank cannot begin.
    has_failed: bool = False
    # Key of the kind of batch, and its number: given by the first rank.
    kind: int = _ABSENT
    number: int = _ABSENT
    # Hash of the type of the first rank's device, for ranks whose layers show no device.
    device_type: int = _ABSENT
    # Hash of the backend that sends this rank's states; absent if no device shows.
    route: int | None = None
    # Numbers with which copies of parameters are compared.
    copies: list[int] = field(default_factory=list)

    def numbers(self) -> list[int]:
        """Returns the numbers in the order of `_Maxima`."""
        flags = [int(self.has_failed), int(self.has_changed)]
        pairs = [*_pair(self.settings), *_pair(self.input_hash), *_pair(self.route)]
        return [*pairs, *flags, self.kind, self.number, self.device_type, *self.copies]


def _pair(number: int | None) -> tuple[int, int]:
    """Returns a number and its negative, for a comparison of all ranks that give one."""
    return (_ABSENT, _ABSENT) if number is None else (number, -number)


def _is_equal(greatest: int, greatest_negated: int) -> bool:
    """Returns whether all ranks that gave a number gave the same, also if no rank or only one gave any."""
    return greatest in (_ABSENT, -greatest_negated)


class _Maxima:
    """The maxima of all ranks' headers."""

    def __init__(self, numbers: Sequence[int]) -> None:
        pairs, (has_failed, has_changed, self.kind, self.number, self.device_type, *self.copies) = (
            numbers[:6],
            numbers[6:],
        )
        self.has_equal_settings, self.has_equal_inputs, self.has_one_route = (
            _is_equal(*pairs[at : at + 2]) for at in (0, 2, 4)
        )
        self.has_failed, self.has_changed = bool(has_failed), bool(has_changed)


@contextmanager
def opened(batch: Batch, *, is_recorded: bool, refusal: BaseException | None = None) -> Iterator[None]:
    """Opens a batch, and closes it at the end of the context.

    `is_recorded` says whether a backward pass may follow. `refusal` is a further error that keeps this rank from
    beginning.
    """
    try:
        batch.prepare(is_recorded=is_recorded)
    except BaseException as error:
        refusal = refusal or error
    with undisturbed():
        _open(batch, batch.refusal or refusal, is_recorded=is_recorded)
        yield
        close(batch)


def close(batch: Batch) -> None:
    """Closes a batch or one of its passes.

    All ranks then know the loss, and an error of any rank is raised on all.
    """
    solver, wire = batch.solver, batch.solver.wire
    # All are integers. Loss and dtype are zero on all ranks but one, so that sums are exact.
    # Batch numbers are equal on all ranks if the mean of their squares is the square of their mean.
    numbers = [batch.number % _MODULUS, (batch.number % _MODULUS) ** 2]
    status = torch.tensor(
        [int(batch.cause is not None), *bits_of([batch.loss]), batch.loss_dtype, *numbers],
        dtype=torch.int64,
        device=wire.device,
    )
    failed, bits, batch.loss_dtype, total, squares = wire.together(status, f"the end of batch {batch.number}")
    if failed:
        # A layer may return other forms than before, although its parameters do not show it. The next batch
        # determines the forms again.
        solver.kinds.clear()
        causes = wire.gathered(batch.cause)
        # The error's traceback refers to the batch, whose memory would otherwise stay until garbage is collected.
        error, batch.error = batch.error, None
        _raise(sentence(causes), error)
    if total**2 != wire.size * squares:
        of_all = wire.gathered(batch.number)
        raise LayerParallelError(
            f"ranks of the layers are at different batches: {of_all}; call backward() of several batches in the same order on all ranks"
        )
    (batch.loss,) = numbers_of([bits])


def key_of(solver: Solver, x: Any, side: dict[str, Any] | None) -> int:
    """Returns the key that batches of one kind share."""
    return _key(solver, split(x, 1)[0], side_of(side)[0])


def _key(solver: Solver, form: Form, side_form: SideForm) -> int:
    return digest(packed((form, side_form, _autocast(), solver.plans.net.counts)))


def _open(batch: Batch, refusal: BaseException | None, *, is_recorded: bool) -> None:
    solver, shared, wire, plan = batch.solver, batch.solver.shared, batch.solver.wire, batch.plan
    due = shared.due(is_training=batch.is_training)
    what = f"the start of batch {due}"
    settings = f"{plan.settings}; called by {batch.call} with gradients {'on' if is_recorded else 'off'}; {'; '.join(_autocast())}"
    state = solver.layers.state()
    header = _Header(
        settings=digest(settings.encode()),
        has_changed=state != solver.state_of_kinds,
        input_hash=_input_hash(batch) if batch.is_training and due < _COMPARED_INPUTS else None,
        copies=[] if solver.copies is None else solver.copies.numbers(),
    )
    # The device of this rank's states, as far as it shows before ranks agree.
    own = solver.device
    form, side_form = None, NO_SIDE
    side_tensors: States = []
    by_micro_batch: list[MicroBatch] = []
    if wire.rank == 0:
        header.number = due
        if refusal is None:
            try:
                form, by_micro_batch = split(batch.inputs.x, plan.micro_batches)
                side_form, side_tensors = side_of(batch.inputs.side)
                _check_parts(side_form, shared.per_sample, plan.micro_batches)
                header.kind = _key(solver, form, side_form)
                own = next((t.device for states, constants in by_micro_batch[:1] for t in (*states, *constants)), own)
            except BaseException as error:
                refusal = error
    if own is not None:
        refusal = refusal or _refusal_of(batch, own)
        header.route = digest((wire.route(own) or "").encode())
        header.device_type = digest(own.type.encode()) if wire.rank == 0 else _ABSENT
    header.has_failed = refusal is not None
    numbers = torch.tensor(header.numbers(), dtype=torch.int64, device=wire.device)
    maxima = _Maxima(wire.together(numbers, what, is_greatest=True))
    if maxima.has_failed:
        cause = None if refusal is None else f"{what}: {described(refusal)}"
        _raise(sentence(wire.gathered(cause)), refusal)
    if not maxima.has_equal_settings:
        raise ValueError(_difference(wire.gathered(settings)))
    if not maxima.has_one_route:
        shown = dict.fromkeys(device for device in wire.gathered(None if own is None else str(own)) if device)
        raise ValueError(
            f"ranks of the layers have states on {' and on '.join(shown)}, which different backends of the group {wire.backends} send; put the "
            "input and all layers on one kind of device, or create the group with one backend for all, such as accl"
        )
    if solver.copies is not None:
        solver.copies.settle(maxima.copies, what)
    number = maxima.number
    if batch.is_training:
        shared.number = number + 1
    else:
        shared.evaluations = number + 1
    if not maxima.has_equal_inputs and wire.rank == 0:
        warnings.warn(
            f"layer-parallel training, batch {number}: the last rank's input differs from the first rank's, but the target is compared with the output for the first rank's input. Give all ranks of the layers "
            "the same batches in the same order, by a seeded generator or a sampler with the data-parallel rank. Or give None as input on all ranks but the first",
            stacklevel=2,
        )
    if maxima.has_changed:
        # If the layers of any rank have changed, the forms may have changed too.
        solver.kinds.clear()
        solver.state_of_kinds = state
    kind = solver.kinds.get(maxima.kind)
    if kind is None:
        form, side_form = wire.pass_on((form, side_form), 0)
        _check_names(solver, side_form)
    else:
        side_form = kind.side
    if own is None or kind is None:
        # An error of one rank alone would leave the others in the batch. Later batches of this kind have no such error.
        remedy = "give each rank of the layers a device of the input's type, or put the net on the CPU"

        def settled() -> torch.device:
            return own or _current_of(maxima.device_type, wire)

        device = agreed(wire, what, remedy, settled)[wire.rank] if kind is None else settled()
    else:
        device = own
    layer_inputs = batch.layer_inputs
    if side_form.names:
        layer_inputs = Side(
            side_form,
            side_tensors,
            names_of_layers(solver.layers, side_form.names),
            device,
            wire,
            plan.micro_batches,
            shared.per_sample,
        )
    evaluation = Evaluation(
        solver.layers,
        batch.found,
        (number, solver.replica) if batch.is_training else (number, solver.replica, 1),
        device,
        is_recorded=is_recorded,
        layer_inputs=layer_inputs,
        keeps_graph=plan.keeps_graph,
        is_in_parts=plan.micro_batches > 1,
    )
    if kind is None:
        assert form is not None
        kind = KindOfBatch(_forms_from(solver, form, by_micro_batch, evaluation), side_form)
        solver.remember(maxima.kind, kind)
    if plan.micro_batches > 1 and any(not leaf.shape for leaf in kind.forms[-1].leaves):
        raise ValueError(
            "the net returns a scalar, but results of micro-batches are joined along a batch dimension; use another mode"
        )
    meshes = _on_meshes(solver, kind, plan.meshes, device)
    batch.begin(number, kind.forms, device, evaluation, meshes, by_micro_batch)


def _refusal_of(batch: Batch, device: torch.device) -> BaseException | None:
    """Returns the error that keeps a batch from running with states on a device, or None."""
    wire = batch.solver.wire
    if wire.route(device) is None:
        return ValueError(
            f"states are on {device}, but the group {wire.backends} has no backend that sends tensors of {device.type}; create it with one, such as accl"
        )
    if batch.plan.pipeline is not None and wire.size > 1 and wire.is_in_one_stream(device):
        return NotImplementedError(
            f"step() in mode exact-pipeline over the group {wire.backends}: its backend for {device.type} holds up sends behind receives, "
            "so ranks would wait for each other; use mode exact-wave, or the backend accl for that device"
        )
    try:
        if has_numbers(device):
            generator_of(device)
    except NotImplementedError as error:
        return error
    return None


def _current_of(device_type: int, wire: Wire) -> torch.device:
    """Returns this rank's current device of the type that is given by its hash, for a rank whose layers show none."""
    kind = next((kind for kind in wire.device_types if digest(kind.encode()) == device_type), "cpu")
    found = torch.accelerator.current_accelerator(check_available=True)
    if kind != "cpu" and (found is None or found.type != kind) and wire.route(torch.device(kind)) == wire.route(_CPU):
        # The same backend sends tensors of the CPU, so this rank computes there.
        return _CPU
    # Only the device of a tensor has its index.
    return torch.empty(0, dtype=torch.uint8, device=kind).device


def _input_hash(batch: Batch) -> int | None:
    """Returns a hash of the input on the first and the last rank, for which equal batches give equal hashes; else None."""
    wire = batch.solver.wire
    if wire.size == 1 or not (wire.rank == 0 or wire.is_last):
        return None
    leaves = pytree.tree_leaves(batch.inputs.x)
    if not leaves or any(not isinstance(leaf, Tensor) or not leaf.dim() or leaf.is_meta for leaf in leaves):
        return None
    try:
        return digest(repr([(leaf.shape, hash_of(leaf)) for leaf in leaves]).encode())
    except Exception:
        return None


def _raise(text: str, cause: BaseException | None) -> NoReturn:
    """Raises an error that all ranks raise. A rank's interrupt, or another request to end the process, is raised itself."""
    try:
        if cause is not None and not isinstance(cause, Exception):
            raise cause
        raise LayerParallelError(text) from cause
    finally:
        # An error must not refer to itself through this frame.
        del cause


def _on_meshes(solver: Solver, kind: KindOfBatch, count: int, device: torch.device) -> Meshes:
    # Whether meshes are known is the same on all ranks.
    if count in kind.meshes:
        return kind.meshes[count]
    if count == 0:
        # No function of the user is called.
        kind.meshes[0] = Meshes(None, kind.forms, 0, device)
        return kind.meshes[0]
    made: list[Meshes] = []

    def make() -> int:
        made.append(Meshes(solver.shared.spatial, kind.forms, count, device))
        return digest(packed(made[0].forms[1:]))

    remedy = "Functions of `spatial` must work on all ranks."
    of_all = agreed(solver.wire, "coarsening states", remedy, make, is_for_all=True)
    if len(set(of_all)) > 1:
        raise ValueError(
            "`coarsen` returns different shapes on different ranks of the layers; give all ranks the same functions"
        )
    kind.meshes[count] = made[0]
    return made[0]


def _check_names(solver: Solver, side_form: SideForm) -> None:
    """Raises `ValueError` for a side input that no layer takes, which is usually a misspelt name."""
    if not side_form.names:
        return
    mine = names_of_layers(solver.layers, side_form.names).values()
    unknown = set(side_form.names).difference(*solver.wire.gathered(frozenset().union(*mine)))
    if unknown:
        names = ", ".join(f"`{name}`" for name in sorted(unknown))
        raise ValueError(f"no layer's forward has an argument {names}; layers take side inputs by argument name")


def _forms_from(solver: Solver, form: Form, by_micro_batch: Sequence[MicroBatch], evaluation: Evaluation) -> list[Form]:
    """Returns the form of each point's state.

    Only plain layers change it, and their owners evaluate them to find it.
    """
    forms = [form]
    net, wire = solver.plans.net, solver.wire
    for layer, (kind, _) in enumerate(net.layers):
        if not kind.is_step:
            owner = net.owner(layer)
            # The form, or the error of the owner.
            answer: Form | str | None = None
            error: BaseException | None = None
            if owner == wire.rank:
                try:
                    given = by_micro_batch[0] if layer == 0 and by_micro_batch else zeros(form, evaluation.device)
                    returned = evaluation.evaluate_temporary(layer, 1, 0, form, *given)
                    answer = form_returned(returned, layer, solver.names[layer])
                    packed(answer)
                except BaseException as caught:
                    answer, error = described(caught), caught
            answer = wire.pass_on(answer, owner)
            if not isinstance(answer, Form):
                text = f"rank {owner} of the layers: layer {layer} ({solver.names[layer]}) cannot take {form}: {answer}"
                _raise(text, error)
            form = answer
        forms.append(form)
    return forms


def _check_parts(form: SideForm, per_sample: Collection[str], micro_batches: int) -> None:
    for index, leaf, _ in form.flat():
        name = form.names[index]
        if micro_batches > 1 and name in per_sample and (not leaf.shape or leaf.shape[0] % micro_batches):
            raise ValueError(
                f"the side input `{name}` has a leaf {leaf}, whose first dimension is not divisible by {micro_batches} micro-batches"
            )


def _autocast() -> tuple[str, ...]:
    """Returns the autocast settings, which change the dtypes that layers return."""
    accelerator = torch.accelerator.current_accelerator()
    other = "none" if accelerator is None or accelerator.type == "cuda" else accelerator.type
    on = {
        kind: str(torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda", other)
        if kind != "none" and torch.is_autocast_enabled(kind)
    }
    # A rank without another accelerator agrees with a rank on which autocast of it is off.
    of_other = f"{other} {on[other]}" if other in on else "others off"
    return (
        f"autocast of cpu {on.get('cpu', 'off')}",
        f"autocast of cuda {on.get('cuda', 'off')}",
        f"autocast of {of_other}",
    )


def _difference(of_all: Sequence[str]) -> str:
    """Describes how the settings of another rank differ from the first rank's."""
    other = next(rank for rank, settings in enumerate(of_all) if settings != of_all[0])
    theirs, ours = of_all[other].split("; "), of_all[0].split("; ")
    pairs = [f"`{a}` and `{b}`" for a, b in zip(ours, theirs) if a != b] or ["their number"]
    return f"ranks 0 and {other} of the layers differ in {', '.join(pairs)}; all ranks must build the same net and issue the same calls"
