"""torchbraid by its own names, on accl: `from torch_accl.compat import torchbraid` replaces `import torchbraid`.

    from torch_accl.compat import torchbraid
    from torch_accl.compat.torchbraid import MPI  # replaces mpi4py's, which knows of one rank only under torchrun

    net = torchbraid.LayerParallel(MPI.COMM_WORLD, lambda: StepLayer(), 64, Tf=1.0, max_fwd_levels=2, max_bwd_levels=2)
    compose = net.comp_op()
    head, tail = compose(Head), compose(Tail)  # None on the other ranks
    y = compose(tail, net(compose(head, x)))
    compose(criterion, y, target).backward()  # on all ranks

Scripts run under torchrun, mpirun or srun; neither MPI, XBraid nor Cython is needed. A net's `body` is a net of
`torch_accl.layer_parallel`. An exception in a layer is raised on all ranks. Results do not depend on the number of
ranks, and states have any type and shape.

`docs/migrating-torchbraid.md` lists every name and the differences.
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
