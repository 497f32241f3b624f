"""What gloo is known not to do. Read only when the tests run with ACCL_TEST_BACKEND=gloo, to prove the tests themselves.

Each row is a pattern of test ids and the reason. A row never applies to accl.
"""

import fnmatch

GLOO = []


def gloo_gap(nodeid: str) -> str | None:
    """The reason why gloo is not asked to pass the test, if there is one."""
    name = nodeid.rsplit("/", 1)[-1]
    return next((reason for pattern, reason in GLOO if fnmatch.fnmatchcase(name, pattern)), None)
