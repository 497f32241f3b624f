"""torchbraid by its own names, on accl: `from torch_accl.compat import torchbraid`, where a script has `import torchbraid`.

    from torch_accl.compat import torchbraid
    from torch_accl.compat.torchbraid import MPI  # in place of mpi4py's, which knows of one rank under torchrun

    net = torchbraid.LayerParallel(MPI.COMM_WORLD, lambda: StepLayer(), 64, Tf=1.0, max_fwd_levels=2, max_bwd_levels=2)
    compose = net.comp_op()
    head, tail = compose(Head), compose(Tail)  # None on the other ranks
    y = compose(tail, net(compose(head, x)))
    compose(criterion, y, target).backward()  # on all ranks

Scripts run under torchrun, and under mpirun or srun; neither MPI, XBraid nor Cython is needed. A net is one of `torch_accl.layer_parallel`, which stands in its
`body`: an exception in a layer is raised on all ranks, results do not depend on their number, and states are of any type and shape.

`docs/migrating-torchbraid.md` has every name, and what differs.
"""

from . import _mpi as MPI
from . import gru_layer_parallel, layer_parallel, mgopt, utils
from ._layer_parallel import LayerParallel
from ._layers import LPBatchNorm2d, LPDropout
from ._recurrent import GRU_Parallel, GRU_Serial
from .braid_vector import BraidVector
from .utils import getDevice

__all__ = [
    "MPI",
    "BraidVector",
    "GRU_Parallel",
    "GRU_Serial",
    "LPBatchNorm2d",
    "LPDropout",
    "LayerParallel",
    "getDevice",
    "gru_layer_parallel",
    "layer_parallel",
    "mgopt",
    "utils",
]
