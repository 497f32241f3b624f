"""Every virtual function of torch's backend and work classes: overridden by this package, or left for a reason.

The functions are read from the headers of the torch that runs. A new version of torch therefore shows its additions by
itself.
"""

import re
from pathlib import Path

import pytest
import torch

HEADERS = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "distributed" / "c10d"
SHIM = Path(__file__).parent.parent / "cpp_shim"

OURS = "overridden"

BACKEND = {
    "abort": OURS,
    "addEphemeralTimeout": OURS,
    "all_gather_single": "forwards to _allgather_base, the name that all versions have",
    "all_gather_single_coalesced": "forwards to allgather_into_tensor_coalesced",
    "all_to_all_single": "forwards to alltoall_base",
    "allgather": OURS,
    "_allgather_base": OURS,
    "allgather_coalesced": OURS,
    "allgather_into_tensor_coalesced": OURS,
    "allocateTensor": OURS,
    "allreduce": OURS,
    "allreduce_coalesced": OURS,
    "allreduce_sparse": OURS,
    "alltoall": OURS,
    "alltoall_base": OURS,
    "barrier": OURS,
    "broadcast": OURS,
    "eagerConnectSingleDevice": OURS,
    "enableCollectivesTiming": OURS,
    "endCoalescing": OURS,
    "endTimeEstimate": "refuses: no estimates of times through torch; `accl simulate` has them",
    "gather": OURS,
    "gather_into_tensor": "forwards to gather_single",
    "gather_single": OURS,
    "getBackendName": OURS,
    "getBackendOptions": OURS,
    "getBoundDeviceId": "keeps what torch set; the CPU has nothing to bind",
    "getError": OURS,
    "getMemAllocator": OURS,
    "getMemoryStats": "refuses: no memory that could be off-loaded",
    "getSequenceNumberForGroup": OURS,
    "get_reconfigure_handle": "refuses, see supportsReconfigure",
    "isInitialized": "true, as a group is when it has been made",
    "merge": OURS,
    "monitoredBarrier": OURS,
    "new_window": "refuses, see supportsWindow",
    "reconfigure": "refuses, see supportsReconfigure",
    "recv": OURS,
    "recvAnysource": OURS,
    "reduce": OURS,
    "reduce_scatter": OURS,
    "_reduce_scatter_base": OURS,
    "reduce_scatter_single": "forwards to _reduce_scatter_base",
    "reduce_scatter_single_coalesced": "forwards to reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_coalesced": OURS,
    "registerAbortHook": OURS,
    "registerCompletionHook": OURS,
    "registerOnCompletionHook": "refuses: of NCCL only, and it would make destroy_process_group wait for pending works",
    "resume": "refuses: no memory that could be off-loaded",
    "scatter": OURS,
    "send": OURS,
    "setBoundDeviceId": "keeps what torch sets; the CPU has nothing to bind",
    "setGroupUid": "keeps the name, which options_ have as well",
    "setSequenceNumberForGroup": OURS,
    "setTimeout": OURS,
    "shrink": "refuses, see supportsShrinking",
    "shutdown": OURS,
    "split": OURS,
    "startCoalescing": OURS,
    "startTimeEstimate": "refuses, see endTimeEstimate",
    "supportsAbortHooks": OURS,
    "supportsCoalescing": OURS,
    "supportsCompletionHooks": OURS,
    "supportsReconfigure": "false: a group whose ranks change is made anew",
    "supportsShrinking": "false: torch rebuilds the smaller group as another type than a plug-in's",
    "supportsSplitting": OURS,
    "supportsTensorAlloc": OURS,
    "supportsTimeEstimation": "false, see endTimeEstimate",
    "supportsWindow": "false: no one-sided operations yet",
    "suspend": "refuses: no memory that could be off-loaded",
    "unregisterAbortHook": OURS,
    "unregisterCompletionHook": OURS,
    "waitForPendingWorks": "refuses, see registerOnCompletionHook",
}

WORK = {
    "abort": OURS,
    "blockCurrentStream": OURS,
    "exception": OURS,
    "getCompletionKey": OURS,
    "getDuration": OURS,
    "getFuture": OURS,
    "getFutureResult": "refuses, as gloo's; getFuture carries the outcome",
    "getSequencenumber": OURS,
    "getTimeout": OURS,
    "isCompleted": OURS,
    "isSuccess": OURS,
    "result": OURS,
    "sourceRank": OURS,
    "synchronize": OURS,
    "wait": OURS,
}


def class_body(text, name):
    """Returns the text of a class between its braces, without comments."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    start = re.search(rf"\b(class|struct)\s+(TORCH_API\s+)?{name}\b[^;{{]*\{{", text).end()
    depth, end = 1, start
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    return text[start : end - 1]


def virtuals(text, name):
    body = class_body(text, name)
    # `Options` inside `Backend` has virtual functions of its own.
    inner = re.search(r"\bstruct\s+(TORCH_API\s+)?Options\b", body)
    if inner:
        body = body.replace(class_body(body, "Options"), "")
    return set(re.findall(r"\bvirtual\b[^;{()]*?(\w+)\s*\(", body))


def overridden(name, base):
    """Returns the functions of `base` that our class declares."""
    text = "".join((SHIM / file).read_text() for file in ("backend.h", "work.h"))
    return base & set(re.findall(r"(\w+)\s*\(", class_body(text, name)))


@pytest.mark.parametrize(
    ("header", "name", "ours", "table"),
    [("Backend.hpp", "Backend", "AcclBackend", BACKEND), ("Work.hpp", "Work", "AcclWork", WORK)],
)
def test_every_virtual_of_this_torch_is_overridden_or_left_for_a_reason(header, name, ours, table):
    found = virtuals((HEADERS / header).read_text(), name)
    assert len(found) > 12
    assert found <= set(table), "torch has new virtuals: override them, or say why not"
    done = overridden(ours, found)
    assert done == {function for function in found if table[function] == OURS}


def test_the_forwarding_names_of_this_torch_reach_our_overrides():
    # In each pair, one name calls the other, so one override serves both. We override the same name for all torch
    # versions.
    found = virtuals((HEADERS / "Backend.hpp").read_text(), "Backend")
    for name, why in BACKEND.items():
        if name in found and (target := re.match(r"forwards to (\w+)", why)):
            assert BACKEND[target[1]] == OURS and target[1] in found
