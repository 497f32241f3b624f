"""Differences between the supported torch versions, as far as tests see them. No test compares versions itself.

Offers one spelling that works on all versions where one exists, and `needs` where an older torch lacks the feature. On
the newest torch nothing here changes a test.
"""

import pytest
import torch
import torch.distributed as dist

MINOR = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
# For example `2.15`.
NAME = ".".join(map(str, MINOR))

if MINOR < (2, 13):
    # Only the tests with a GPU have such a torch (decision 69). It knows these functions by older names.
    dist.all_gather_single, dist.reduce_scatter_single = dist.all_gather_into_tensor, dist.reduce_scatter_tensor

# Features that older versions lack: the first version with the feature, and what is missing before. It is missing for
# gloo as well, except where the text speaks of plug-ins.
_FIRST_WITH = {
    "numbers of works": ((2, 14), "Work binds no _get_sequence_number"),
    "numbers of plug-in groups": ((2, 14), "ProcessGroup refuses sequence numbers to plug-ins"),
    "split_group without an accelerator": ((2, 15), "split_group demands an accelerator"),
    "ephemeral timeouts": ((2, 14), "torch gives ephemeral timeouts to gloo and nccl by class"),
    "gather_single": ((2, 14), "there is no gather_single"),
    "abort hooks": ((2, 15), "plug-ins cannot say that they have abort hooks"),
    "completion hooks": ((2, 15), "there are no completion hooks"),
    "supports_window": ((2, 14), "Backend has no windows"),
    "enable_reconfigure": ((2, 15), "init_process_group has no enable_reconfigure"),
    "supports_reconfigure": ((2, 14), "Backend cannot be reconfigured"),
}


def needs(feature: str) -> pytest.MarkDecorator:
    """Skips the test if torch itself lacks the feature."""
    first, why = _FIRST_WITH[feature]
    return pytest.mark.skipif(first > MINOR, reason=f"torch {NAME}: {why} before {'.'.join(map(str, first))}")


def has(feature: str) -> bool:
    """Whether torch has the feature, for a test that needs it only in part."""
    return _FIRST_WITH[feature][0] <= MINOR


# Modules of this project that `import torch` loads: torch 2.13 has no other way to find plug-ins.
LOADED_WITH_TORCH = [] if MINOR >= (2, 14) else ["torch_accl_autoload"]

# For scripts, which have only torch: the default group's monitored barrier without arguments.
MONITORED_BARRIER = "dist.monitored_barrier()" if MINOR >= (2, 14) else "dist.group.WORLD.monitored_barrier()"


def monitored_barrier(group=None, timeout=None, wait_all_ranks=False) -> None:
    """`dist.monitored_barrier`, which torch 2.13 refuses to every backend name but gloo; its groups have the method."""
    if MINOR >= (2, 14):
        dist.monitored_barrier(group, timeout, wait_all_ranks)
    else:
        # A timeout of zero is a timeout, unlike None.
        timeout = dist.default_pg_timeout if timeout is None else timeout
        (group or dist.group.WORLD).monitored_barrier(timeout, wait_all_ranks)


def set_timeout(timeout, group) -> None:
    """`dist.set_timeout`, which torch 2.13 does not have; its groups do."""
    if MINOR >= (2, 14):
        dist.set_timeout(timeout, group)
    else:
        group.set_timeout(timeout)


def but_this(*versions: str) -> list[str]:
    """The versions that a build for this torch must refuse."""
    return [version for version in versions if not version.startswith(f"{NAME}.")]
