"""Names for packages that build on layer-parallel nets, such as the facade for torchbraid.

Unlike the names of the package itself, these may change in any release. Their files document them. The package uses none
of them from here.
"""

from ._change.layer_facts import layer_facts
from ._change.level_transfer import (
    Field,
    added,
    combined,
    copied,
    dependents,
    exchanged,
    move,
    product_of,
    trained,
)
from ._change.optimizer_state import interpolate
from ._change.refinement import finer
from ._model import Mode, Model
from ._net.blocks import mixed, undisturbed
from ._net.device_numbers import generator_of, has_numbers
from ._net.drawing import Drawing, drawn_for
from ._net.evaluation import Record, States
from ._net.kinds import ODE, PLAIN, TIMED, Kind, kind_of
from ._net.own_generator import SEEDING_THEMSELVES
from ._net.spline import Interpolated
from ._net.tree import Form, Leaf, is_state, ordered
from ._ranks.failures import described, sentence
from ._ranks.wire import Wire, tried
from ._solve.batch import Batch, BatchPlan
from ._solve.unserved import of_backward, outside_of_transforms
from ._solve.walk import moved

__all__ = [
    "ODE",
    "PLAIN",
    "SEEDING_THEMSELVES",
    "TIMED",
    "Batch",
    "BatchPlan",
    "Drawing",
    "Field",
    "Form",
    "Interpolated",
    "Kind",
    "Leaf",
    "Mode",
    "Model",
    "Record",
    "States",
    "Wire",
    "added",
    "combined",
    "copied",
    "dependents",
    "described",
    "drawn_for",
    "exchanged",
    "finer",
    "generator_of",
    "has_numbers",
    "interpolate",
    "is_state",
    "kind_of",
    "layer_facts",
    "mixed",
    "move",
    "moved",
    "of_backward",
    "ordered",
    "outside_of_transforms",
    "product_of",
    "sentence",
    "trained",
    "tried",
    "undisturbed",
]
