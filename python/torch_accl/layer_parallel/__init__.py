"""Layer-parallel training: the layers of a deep net lie on several ranks, and all ranks work on one batch at once.

    net = LayerParallel([ode(lambda i: Block()) for i in range(64)], group=None, fwd=Cycle(factor=8), bwd=Cycle(factor=8, iterations=1))
    loss = net.step(x, target, loss_fn)

The layers are steps of a differential equation, `x + dt * f(x)`. The net is solved by multigrid over layers (MGRIT;
Guenther et al., "Layer-parallel training of deep residual neural networks", 2020), with as many iterations as the
caller asks for. It can also be solved exactly, as a wave or a pipeline over the same ranks. The package needs a process
group with `isend` and `irecv`; on one rank it needs no group.
"""

from ._change.mgopt import Correction, MGOpt
from ._change.nested import coarsened, refined
from ._gradients import GradScaler, clip_grad_norm_
from ._model import Evaluated
from ._net.blocks import Block, custom, ode, plain, residual, timed
from ._net.cells import Cell
from ._net.scaled import Scaled
from ._net.serial import Serial
from ._net.spatial import Spatial
from ._net.spline import Spline
from ._ranks.failures import LayerParallelError
from ._recurrent import RecurrentParallel
from ._solve.audit import Audit, Probe
from ._solve.auto import Choice
from ._solve.batch import Norms
from ._solve.cycle import Cycle
from ._solve.settings import Audits, Stop
from ._solve.step import step
from ._stack import LayerParallel

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
    "Spline",
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
