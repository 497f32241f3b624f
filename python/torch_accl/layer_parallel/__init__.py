"""Layer-parallel training: the layers of a deep net lie on several ranks, and all ranks work on one batch at once.

    net = LayerParallel([ode(lambda i: Block()) for i in range(64)], group=None, fwd=Cycle(factor=8), bwd=Cycle(factor=8, iterations=1))
    loss = net.step(x, target, loss_fn)

The layers are steps of a differential equation, `x + dt * f(x)`. The net is solved by multigrid over layers (MGRIT;
Guenther et al., "Layer-parallel training of deep residual neural networks", 2020), with as many iterations as the
caller asks for. It can also be solved exactly, as a wave or a pipeline over the same ranks. The package needs a process
group with `isend` and `irecv`; on one rank it needs no group.
"""

from ._audit import Audit, Probe
from ._auto import Choice
from ._batch import Norms
from ._blocks import Block, custom, ode, plain, residual, timed
from ._cells import Cell
from ._cycle import Cycle
from ._failures import LayerParallelError
from ._gradients import GradScaler, clip_grad_norm_
from ._mgopt import Correction, MGOpt
from ._model import Evaluated
from ._nested import coarsened, refined
from ._recurrent import RecurrentParallel
from ._scaled import Scaled
from ._serial import Serial
from ._settings import Audits, Stop
from ._spatial import Spatial
from ._stack import LayerParallel
from ._step import step

__all__ = [
    "Audit",
    "Audits",
    "Block",
    "Cell",
    "Choice",
    "Correction",
    "Cycle",
    "Evaluated",
    "GradScaler",
    "LayerParallel",
    "LayerParallelError",
    "MGOpt",
    "Norms",
    "Probe",
    "RecurrentParallel",
    "Scaled",
    "Serial",
    "Spatial",
    "Stop",
    "clip_grad_norm_",
    "coarsened",
    "custom",
    "ode",
    "plain",
    "refined",
    "residual",
    "step",
    "timed",
]
