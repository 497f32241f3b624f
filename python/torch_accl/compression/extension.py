"""Names for packages that build on compressed collectives, such as the facade for torch_cgx.

Unlike the names of the package itself, these may change in any release. Their files document them. The package uses none
of them from here.
"""

from ._futures import WorkOfSeveral
from ._plans import Plan, cut, plan_of
from ._scope import FLOATS, Coded, accl_backend, codecs_of, encoded, exact, has_override
from ._settings import RAW
from ._state import names_of

__all__ = [
    "FLOATS",
    "RAW",
    "Coded",
    "Plan",
    "WorkOfSeveral",
    "accl_backend",
    "codecs_of",
    "cut",
    "encoded",
    "exact",
    "has_override",
    "names_of",
    "plan_of",
]
