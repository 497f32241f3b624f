"""What all ranks know about each other's layers, after an exchange.

Owns which layers are alike, and which parameters are one: parameters that the net ties, and objects that occur in
several layers of a rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from .._net.spline import Interpolated
from .._ranks.agreed import agreed
from .._stack import LayerParallel
from .refinement import make_of

__all__ = ["ParameterIndex", "check_net", "layer_facts", "places_of", "slots_of"]


# A parameter: its layer, and the index of its first name among all names of that layer's parameters.
ParameterIndex = tuple[int, int]


def places_of(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters of a layer by all of their names, in order."""
    return list(module.named_parameters(remove_duplicate=False))


def slots_of(module: nn.Module, places: Collection[int]) -> set[int]:
    """Returns the indices of the parameters at some places, in the layer's list of parameters without duplicates."""
    named = places_of(module)
    wanted = {id(named[place][1]) for place in places}
    return {slot for slot, parameter in enumerate(module.parameters()) if id(parameter) in wanted}


def check_net(net: object) -> None:
    """Raises `TypeError` unless `net` is a net itself, without a wrapper."""
    if not isinstance(net, LayerParallel):
        raise TypeError(f"net is {type(net).__name__}; give the LayerParallel itself, not a wrapper")


def layer_facts(net: LayerParallel) -> tuple[list[int], list[list[ParameterIndex]]]:
    """Returns a number for each layer, equal for layers that are alike, and the groups of parameters that are one.

    All ranks call it together.
    """
    layers, names = net._solver.layers, net._solver.names

    def own() -> tuple[dict[int, int], list[list[ParameterIndex]], dict[str, ParameterIndex]]:
        modules = layers.modules
        _check(modules, names)
        makes = {layer: make_of(module, layers.kinds[layer]) for layer, module in modules.items()}
        known = {
            f"layers.{layer}.{name}": (layer, place)
            for layer, module in modules.items()
            for (name, _), place in zip(places_of(module), _first_places(module))
        }
        wanted = {name for group in net._ties.names for name in group}
        return makes, _shared(modules), {name: known[name] for name in wanted & known.keys()}

    of_all = agreed(net._wire, "inspecting its layers", "Nothing was changed; fix the cause and repeat the call.", own)
    makes = {layer: make for each, _, _ in of_all for layer, make in each.items()}
    known = {name: place for _, _, each in of_all for name, place in each.items()}
    groups = [[known[name] for name in group] for group in net._ties.names]
    groups += [group for _, shared, _ in of_all for group in shared]
    return [makes[layer] for layer in range(len(layers.kinds))], _joined(groups)


def _shared(modules: Mapping[int, nn.Module]) -> list[list[ParameterIndex]]:
    """Returns the groups of places that hold one parameter in several layers of this rank.

    A control point of a spline is a group also if one layer alone has it.
    """
    found: dict[int, list[ParameterIndex]] = {}
    of_splines: set[int] = set()
    for layer, module in modules.items():
        for place, parameter in zip(dict.fromkeys(_first_places(module)), module.parameters()):
            found.setdefault(id(parameter), []).append((layer, place))
        splines = [each.control_points for each in module.modules() if isinstance(each, Interpolated)]
        of_splines |= {id(parameter) for points in splines for parameter in points.parameters()}
    return [group for key, group in found.items() if len(group) > 1 or key in of_splines]


def _first_places(module: nn.Module) -> list[int]:
    """Returns for each parameter name the index of the first name of the same parameter."""
    first: dict[int, int] = {}
    return [first.setdefault(id(parameter), place) for place, (_, parameter) in enumerate(places_of(module))]


def _joined(groups: Sequence[Sequence[ParameterIndex]]) -> list[list[ParameterIndex]]:
    """Merges groups that have a member in common."""
    found: list[set[ParameterIndex]] = []
    for group in groups:
        own = set(group)
        apart = [each for each in found if not each & own]
        found = [*apart, own.union(*(each for each in found if each & own))]
    return sorted(sorted(each) for each in found)


def _check(modules: Mapping[int, nn.Module], names: Sequence[str]) -> None:
    for layer, module in modules.items():
        for name, parameter in module.named_parameters():
            if hasattr(parameter, "placements"):
                raise TypeError(
                    f"layer {layer} ({names[layer]}) has a parameter {name} that is sharded over ranks; pass the net before you apply fully_shard"
                )
