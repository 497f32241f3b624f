"""Events that the profiler records: one asynchronous event per call, with its title and shapes."""

import json
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support import BACKEND, init_group, on_ranks


def calls(rank, world, **how):
    one = torch.ones(4, 3)
    flat, parts = torch.zeros(4 * world, 3), [torch.zeros(4, 3) for _ in range(world)]
    sparse = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (4,))
    root = parts if rank == 0 else None
    return {
        "broadcast": lambda: dist.broadcast(one, 0, **how),
        "all_reduce": lambda: dist.all_reduce(one, **how),
        "reduce": lambda: dist.reduce(one, 0, **how),
        "all_gather": lambda: dist.all_gather(parts, one, **how),
        "gather": lambda: dist.gather(one, root, dst=0, **how),
        "scatter": lambda: dist.scatter(one, root, src=0, **how),
        "reduce_scatter": lambda: dist.reduce_scatter(one, [torch.ones(4, 3)] * world, **how),
        "all_to_all": lambda: dist.all_to_all_single(flat, torch.ones(4 * world, 3), **how),
        "barrier": lambda: dist.barrier(**how),
        "sparse_all_reduce": lambda: dist.all_reduce(sparse, **how),
    }


@on_ranks(1, 2)
@pytest.mark.parametrize("title", list(calls(0, 1)))
def test_every_collective_is_one_event_with_its_title(rank, world, title):
    call = calls(rank, world)[title]
    call()
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        call()
        call()
    events = [event for event in profile.function_events if event.name == f"{BACKEND}:{title}"]
    assert len(events) == 2, [event.name for event in profile.function_events]
    assert all(event.is_async for event in events)
    assert all(event.count == 1 for event in events)


@on_ranks(1, 2)
def test_events_have_the_shapes_of_the_tensors(rank, world):
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(4, 3))
    (event,) = [event for event in profile.function_events if event.name == f"{BACKEND}:all_reduce"]
    assert event.input_shapes == [[4, 3]]


@on_ranks(2)
@pytest.mark.parametrize("any_source", [False, True])
def test_point_to_point_calls_have_their_titles(rank, world, any_source):
    tensor = torch.ones(4)
    with torch.autograd.profiler.profile() as profile:
        if rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, None if any_source else 0)
    title = "send" if rank == 0 else "recvAnySource" if any_source else "recv"
    assert [event.name for event in profile.function_events].count(f"{BACKEND}:{title}") == 1


@on_ranks(2)
def test_asynchronous_calls_are_closed_before_the_profiler_is(rank, world):
    with torch.autograd.profiler.profile() as profile:
        works = [dist.all_reduce(torch.ones(1000 * i), async_op=True) for i in range(1, 6)]
        for work in works:
            work.wait()
    assert [event.name for event in profile.function_events].count(f"{BACKEND}:all_reduce") == 5


@on_ranks(1, 2)
def test_a_name_given_with_record_comm_replaces_the_title(rank, world):
    with torch.autograd.profiler.profile() as profile:
        with dist.record_comm("gradients of layer 3"):
            dist.all_reduce(torch.ones(3))
    assert any("gradients of layer 3" in event.name for event in profile.function_events)


@on_ranks(1, 2)
@pytest.mark.skipif(BACKEND != "accl", reason="gloo has no events of waits")
@pytest.mark.parametrize("title", list(calls(0, 1)))
def test_a_blocking_call_has_a_synchronous_event_of_its_wait(rank, world, title):
    call = calls(rank, world)[title]
    with torch.autograd.profiler.profile() as profile:
        call()
    (whole,) = [event for event in profile.function_events if event.name == f"accl:{title}"]
    (wait,) = [event for event in profile.function_events if event.name == f"accl:wait:{title}"]
    assert not wait.is_async and wait.self_cpu_time_total > 0
    assert whole.time_range.start <= wait.time_range.start and wait.time_range.end <= whole.time_range.end


@on_ranks(2)
@pytest.mark.skipif(BACKEND != "accl", reason="gloo has no events of waits")
def test_each_wait_for_an_asynchronous_call_is_an_event(rank, world):
    with torch.autograd.profiler.profile() as profile:
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        work.wait()
        work.wait()
    names = [event.name for event in profile.function_events]
    assert (names.count("accl:all_reduce"), names.count("accl:wait:all_reduce")) == (1, 2)
    assert "accl:wait:all_reduce" in profile.key_averages().table(sort_by="self_cpu_time_total")


# Event names that users of torch-ccl look for, by naming style.
STYLES = {
    "ccl": ("oneccl_bindings_for_pytorch::allreduce", "oneccl_bindings_for_pytorch::wait::cpu::allreduce"),
    "pg": ("pg::allreduce", "pg::wait::allreduce::sz:16"),
}


@on_ranks(2, fresh=True, init=False)
@pytest.mark.skipif(BACKEND != "accl", reason="about this package only")
@pytest.mark.parametrize("style", sorted(STYLES))
def test_events_can_have_the_names_of_torch_ccl(rank, world, style):
    import os

    os.environ["ACCL_PROFILE_NAMES"] = style
    init_group()
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(4, 4))
        dist.all_reduce(torch.ones(4, 4), async_op=True).wait()
        dist.all_to_all_single(torch.zeros(2), torch.ones(2))
        dist.reduce_scatter_tensor(torch.zeros(1), torch.ones(2))
    dist.destroy_process_group()
    call, wait = STYLES[style]
    events = [event for event in profile.function_events if event.name in STYLES[style]]
    assert [event.name for event in events if not event.is_async].count(call) == 2
    assert [event.name for event in events if not event.is_async].count(wait) == 2
    assert [event.input_shapes for event in events if event.name == call] == [[[4, 4]]] * 2
    prefix = call.removesuffix("allreduce")
    others = {event.name for event in profile.function_events if event.name.startswith(prefix)}
    assert {prefix + "alltoall", prefix + "reduce_scatter"} <= others
    assert not any(event.name.startswith("accl:") for event in profile.function_events)


@on_ranks(2)
def test_execution_traces_have_what_a_call_was_made_with(rank, world, tmp_path):
    if BACKEND != "accl":
        pytest.skip("about this package only")
    file = tmp_path / f"trace{rank}.json"
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(file))
    gathered = torch.zeros(4 * world, 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], execution_trace_observer=observer):
        dist.all_reduce(torch.ones(4, 3))
        dist.all_gather_into_tensor(gathered, torch.ones(4, 3), async_op=True).wait()
    calls = [node for node in json.loads(file.read_text())["nodes"] if node["name"] == "record_param_comms"]
    facts = [{each["name"]: each["value"] for each in node["attrs"]} for node in calls]
    assert [(each["collective_name"], each["in_msg_nelems"], each["out_msg_nelems"]) for each in facts] == [
        ("allreduce", 12, 12),
        ("allgather", 12, 12 * world),
    ], facts
    for each in facts:
        assert each["dtype"] == "Float" and each["pg_size"] == world, facts
    # The events name the tensors themselves, so the operator that made each tensor is known.
    assert all("Tensor(float)" in str(node["inputs"]["types"]) for node in calls), calls


@on_ranks(2)
def test_calls_are_recorded_for_traces_under_a_profiler_alone(rank, world):
    if BACKEND != "accl":
        pytest.skip("about this package only")
    with torch.autograd.profiler.profile() as profile:
        dist.barrier()
        dist.all_reduce(torch.ones(3))
    assert [event.name for event in profile.function_events].count("record_param_comms") == 2


def phases(profile, collective):
    """Returns, for each call of `collective` in the profile, the time per phase in microseconds."""
    found = [event for event in profile.function_events if event.name == f"accl:phases:{collective}"]
    for event in found:
        assert set(event.kwinputs) == {"queue_us", "bus_us", "peers_us", "transfer_us", "reduce_us"}, event.kwinputs
        assert all(value >= 0 for value in event.kwinputs.values()), event.kwinputs
    return [event.kwinputs for event in found]


about_phases = pytest.mark.skipif(BACKEND != "accl", reason="gloo says nothing of phases")


@on_ranks(1, 2)
@about_phases
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("title", [title for title in calls(0, 1) if title != "sparse_all_reduce"])
def test_recorded_inputs_include_the_phases_of_a_call(rank, world, title, async_op):
    call = calls(rank, world, async_op=async_op)[title]
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        for work in (call(), call()):
            if async_op:
                work.wait()
    events = [event for event in profile.function_events if event.name == f"accl:{title}"]
    found = phases(profile, title)
    assert len(events) == len(found) == 2
    # The phases together are no longer than the event of the call. Two threads may close two events at once, so events
    # are paired by length.
    lengths = sorted(event.time_range.elapsed_us() for event in events)
    for length, total in zip(lengths, sorted(sum(times.values()) for times in found)):
        assert 0 < total <= length + 1, (found, events)


@on_ranks(2)
@about_phases
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_phases_are_the_whole_call_that_packs_tensors_too(rank, world, layout, async_op):
    tensor = torch.ones(1 << 21, 2)
    tensor = tensor[:, 0] if layout == "strided" else tensor
    dist.all_reduce(tensor)
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        for _ in range(5):
            work = dist.all_reduce(tensor, async_op=async_op)
            if async_op:
                work.wait()
    calls = [event.time_range.elapsed_us() for event in profile.function_events if event.name == "accl:all_reduce"]
    # This holds for at least one call, because the operating system may suspend a thread between the two measurements.
    assert any(sum(times.values()) > 0.8 * call for call, times in zip(calls, phases(profile, "all_reduce"))), calls


@on_ranks(2)
@about_phases
def test_messages_and_calls_that_are_refused_have_no_phases(rank, world):
    tensor = torch.ones(4)
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        if rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
        for async_op in (False, True):
            with pytest.raises(RuntimeError, match="AVG"):
                dist.all_reduce(torch.ones(4, dtype=torch.bool), op=dist.ReduceOp.AVG, async_op=async_op)
    assert not any(event.name.startswith("accl:phases") for event in profile.function_events)


@on_ranks(2)
@about_phases
def test_a_call_that_no_peer_joined_shows_its_wait_for_peers(rank, world):
    group, store = dist.new_group(timeout=timedelta(seconds=0.5)), dist.distributed_c10d._get_default_store()
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        if rank == 0:
            with pytest.raises(dist.DistBackendError, match="Timed out"):
                dist.all_reduce(torch.ones(4), group=group)
    if rank == 1:
        store.wait(["phases: rank 0 has waited enough"])
    else:
        store.set("phases: rank 0 has waited enough", "")
        (times,) = phases(profile, "all_reduce")
        assert times["peers_us"] > 400_000 > times["transfer_us"], times


def ends_before_its_calls(how, tensors):
    if how == "waited for by futures":
        for future in [dist.all_reduce(tensor, async_op=True).get_future() for tensor in tensors]:
            future.wait()
        return []
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    return [] if how == "never waited for" else works


@on_ranks(2)
@pytest.mark.parametrize("shapes", [False, True])
@pytest.mark.parametrize("how", ["waited for by futures", "never waited for", "waited for after it"])
def test_a_profile_that_ends_before_its_calls_do_does_not_crash_the_process(rank, world, how, shapes):
    tensors = [torch.ones(1 << 14) for _ in range(8)]
    left = []
    for _ in range(30):
        with torch.autograd.profiler.profile(record_shapes=shapes) as profile:
            # Wait also inside a profile that began after the calls.
            for work in left:
                work.wait()
            left = ends_before_its_calls(how, tensors)
        names = [event.name for event in profile.function_events]
        if how == "waited for by futures" and BACKEND == "accl":
            assert names.count("accl:all_reduce") == len(tensors)
            assert names.count("accl:phases:all_reduce") == (len(tensors) if shapes else 0)
    for work in left:
        work.wait()
    dist.barrier()


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("scheduled", [False, True])
def test_ddp_under_a_profiler_does_not_crash_the_process(rank, world, scheduled):
    layers = [torch.nn.Linear(200, 200) for _ in range(10)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.2)
    batch = torch.randn(8, 200)
    model(batch).sum().backward()
    if scheduled:
        schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=10)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, schedule=schedule
        ) as profile:
            for _ in range(40):
                model(batch).sum().backward()
                profile.step()
        return
    for _ in range(30):
        with torch.autograd.profiler.profile(record_shapes=True) as profile:
            model(batch).sum().backward()
        if BACKEND == "accl":
            names = [event.name for event in profile.function_events]
            assert names.count("accl:all_reduce") == names.count("accl:phases:all_reduce") > 1


@on_ranks(2)
@about_phases
def test_phases_separate_a_late_peer_from_arithmetic(rank, world):
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.ones(1 << 20)
    dist.all_reduce(tensor)
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        if rank == 0:
            store.set("phases: rank 0 makes the call", "")
        else:
            store.wait(["phases: rank 0 makes the call"])
            time.sleep(0.5)
        dist.all_reduce(tensor)
    (times,) = phases(profile, "all_reduce")
    assert times["reduce_us"] > 0
    if rank == 0:
        assert times["peers_us"] > 250_000 > times["queue_us"] + times["reduce_us"], times
    else:
        assert times["peers_us"] < 250_000, times


@on_ranks(2)
@about_phases
def test_phases_of_calls_that_are_compressed(rank, world):
    from torch_accl.compression import all_reduce_quantized

    gradient = torch.randn(1 << 18)
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        all_reduce_quantized(gradient, compression="maxmin:4")
    (times,) = phases(profile, "all_reduce")
    assert times["reduce_us"] > 0


@on_ranks(2)
@about_phases
def test_phases_are_in_the_trace_that_is_exported(rank, world, tmp_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        dist.all_reduce(torch.ones(1000))
        dist.all_reduce(torch.ones(1000), async_op=True).wait()
    file = tmp_path / f"trace{rank}.json"
    profile.export_chrome_trace(str(file))
    events = [
        each for each in json.loads(file.read_text())["traceEvents"] if each.get("name") == "accl:phases:all_reduce"
    ]
    assert len(events) == 2
    assert all(
        float(each["args"][name]) >= 0
        for each in events
        for name in ("queue_us", "bus_us", "peers_us", "transfer_us", "reduce_us")
    ), events


@on_ranks(2)
@about_phases
def test_phases_are_not_reported_without_recorded_inputs(rank, world):
    with torch.autograd.profiler.profile() as profile:
        dist.all_reduce(torch.ones(1000))
        dist.all_reduce(torch.ones(1000), async_op=True).wait()
    assert phases(profile, "all_reduce") == []
