// The overrides of c10d::Backend.
#include "backend.h"

#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "held_memory.h"
#include "interpreter.h"
#include "sparse.h"
#include "store.h"
#include "timeouts.h"

namespace accl {

using bridge::Collective;
using c10d::OpType;

namespace {

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

void add_tensors(Call& call, const Tensors& inputs, const Tensors& outputs, const c10d::ReduceOp& op) {
  call.check.memory(inputs);
  call.check.memory(outputs);
  for (const auto& tensor : inputs) call.inputs.block(tensor);
  for (const auto& tensor : outputs) call.outputs.block(tensor);
  call.check.that(!call.placement.tensors(), "takes CPU tensors");
  call.reduce(op);
}

std::string text_of(const bridge::Described& described) {
  throw_unless_ok(described.status);
  return std::string(described.text);
}

bool same_counts(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor& tensor) { return tensor.numel() == tensors[0].numel(); });
}

}  // namespace

// --- the path of every call ---

c10::intrusive_ptr<AcclWork> AcclBackend::make_work(const Event& event, const Results& results) const {
  // Only the profiler needs the shapes, and copying a list of tensors is not free.
  std::optional<Tensors> profiled;
  int64_t elements = 0;
  if (at::hasCallbacks()) {
    profiled = event.shapes.vec();
    elements = elements_of(event.shapes);
  }
  auto work = c10::make_intrusive<AcclWork>(rank_, event.type, event.title, profiled, in_flight_, results.outputs(), names_,
                                            elements);
  work->entry()->timeout = options_->timeout;
  work->entry()->kept = event.kept.vec();
  return work;
}

bool AcclBackend::wants_work(bool async_op) const {
  // While torch compiles a graph, it tracks the works of all calls.
  return async_op || in_flight_->in_batch() || c10d::allow_inflight_collective_as_graph_input();
}

void AcclBackend::record_call(const Event& event, Span& span) const {
  if (names_.has_synchronous_calls()) span.begin([&] { return names_.call(event.title); }, event.shapes);
}

template <class Run>
AcclBackend::WorkPtr AcclBackend::recorded(const Event& event, const Results& results, bool async_op, Run run) const {
  if (!at::hasCallbacks()) return run();
  const Tensors inputs = event.shapes.vec(), outputs = flat(results.outputs().lists);
  const auto& sample = !inputs.empty() ? inputs : outputs;
  const auto& global = options_->global_ranks_in_group;
  const int first = global.empty() ? 0 : static_cast<int>(global.front());
  const int stride = global.size() > 1 ? static_cast<int>(global[1]) - first : 1;
  const std::string name(bridge::event_name({}, bridge::EventName::C10d, event.title, 0).text);
  const std::vector<int64_t> no_splits;
  RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP(
      std::make_tuple(bridge::group_next_seq(*group_->group).value, false), std::make_tuple(getGroupUid(), getGroupDesc()), inputs,
      outputs, rank_, std::string(name), elements_of(inputs), elements_of(outputs), sample.empty() ? at::kByte : sample[0].scalar_type(), no_splits,
      no_splits, first, stride, size_, async_op);
  return run();
}

template <class CallOptions>
AcclBackend::WorkPtr AcclBackend::run(Call& call, const Event& event, const Results& results, const CallOptions& opts) {
  if (opts.timeout != c10d::kUnsetTimeout) call.args.timeout_ms = opts.timeout.count();
  return run(call, event, results, opts.asyncOp);
}

AcclBackend::WorkPtr AcclBackend::run(Call& call, const Event& event, const Results& results, bool async_op) {
  return recorded(event, results, async_op, [&] { return run_recorded(call, event, results, async_op); });
}

AcclBackend::WorkPtr AcclBackend::run_recorded(Call& call, const Event& event, const Results& results, bool async_op) {
  call.args.is_profiled = at::hasCallbacks() && names_.wants_phases();
  const auto& accelerator = call.placement.tensors();
  call.args.waits_for_device = call.args.is_profiled;  // The profiler reports when the device has done the call.
  if (!wants_work(async_op)) {
    return complete(event, call.args.timeout_ms, [&] {
      throw_unless_done(make_call(call, event, results));
    });
  }
  Span making;
  if (at::hasCallbacks()) record_call(event, making);
  auto work = make_work(event, results);
  auto& entry = work->entry();
  if (in_flight_->is_extended()) call.args.timeout_ms = extended_ms(call.args.timeout_ms, entry->key);
  if (call.args.timeout_ms >= 0) entry->timeout = std::chrono::milliseconds(call.args.timeout_ms);
  entry->keep_memory();
  entry->accelerator = accelerator;
  if (call.args.is_profiled) entry->record_phases(event.title);
  begun(work, without_gil([&] { return bridge::group_submit(*group_->group, call.finish(), accelerator, *entry->ticket); }), async_op);
  return work;
}

bridge::Waited AcclBackend::make_call(Call& call, const Event& event, const Results& results) const {
  const auto& accelerator = call.placement.tensors();
  auto ended = without_gil([&] { return bridge::group_call(*group_->group, call.finish(), accelerator); });
  if (ended.waited.how == bridge::Outcome::Interrupted) note_on_python_error(std::string(ended.waited.status.message));
  // Memory is kept first, because the statements below may throw.
  settle(ended.waited.status, accelerator.get(), [&] { return memory_of(results.outputs().lists, event.kept); });
  if (call.args.is_profiled) record_phases(event.title, ended.phases);
  return std::move(ended.waited);
}

template <class Blocking>
AcclBackend::WorkPtr AcclBackend::complete(const Event& event, int64_t& timeout_ms, Blocking blocking) {
  c10::intrusive_ptr<Recorded> whole;
  Span making, waiting;
  if (at::hasCallbacks()) {
    if (!names_.has_synchronous_calls()) whole = c10::make_intrusive<Recorded>(rank_, event.type, event.title, event.shapes.vec());
    record_call(event, making);
    waiting.begin([&] { return names_.wait(event.title, elements_of(event.shapes)); });
  }
  std::optional<uint64_t> key;
  if (in_flight_->is_extended()) timeout_ms = extended_ms(timeout_ms, key.emplace(in_flight_->next_key()));
  try {
    blocking();
  } catch (const std::exception&) {
    if (key) in_flight_->expire(*key);
    run_hooks_on_timeout();
    throw;
  }
  if (key) in_flight_->expire(*key);
  return {};
}

int64_t AcclBackend::extended_ms(int64_t timeout_ms, uint64_t key) const {
  const auto own = timeout_ms >= 0 ? std::chrono::milliseconds(timeout_ms) : options_->timeout;
  return sum_of(own, in_flight_->extension(key)).count();
}

void AcclBackend::run_hooks_on_timeout() const noexcept {
  if (!in_flight_->abort_hooks().any()) return;
  if (bridge::group_first_error(*group_->group).kind == bridge::Kind::Timeout) in_flight_->run_abort_hooks();
}

void AcclBackend::begun(const c10::intrusive_ptr<AcclWork>& work, const bridge::Status& status, bool async_op) {
  if (!is_ok(status)) {
    work->complete_here();
    run_hooks_on_timeout();
    throw_python_error_if_set();
    throw_status(status);
  }
  if (work->entry()->accelerator) in_flight_->end_when_through(work->entry());
  in_flight_->add(work->entry());
  in_flight_->drain(8);
  if (!in_flight_->collect(work) && !async_op) work->wait();
}

// --- collectives ---

AcclBackend::WorkPtr AcclBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  Call call({"broadcast", rank_}, Collective::Broadcast, opts.rootRank);
  call.check.root(opts.rootRank, size_, opts.rootTensor, tensors);
  call.outputs.block(call.check.single(tensors));
  return run(call, {OpType::BROADCAST, "accl:broadcast", tensors, {}}, tensors, opts);
}

AcclBackend::WorkPtr AcclBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  Call call({"all_reduce", rank_}, Collective::AllReduce);
  if (tensors.size() == 1 && tensors[0].layout() == at::kSparse) return reduce_sparse(tensors[0], opts);
  call.reduce_in_place(tensors, opts.reduceOp);
  return run(call, {OpType::ALLREDUCE, "accl:all_reduce", tensors, {}}, tensors, opts);
}

AcclBackend::WorkPtr AcclBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return allreduce(tensors, opts);
}

AcclBackend::WorkPtr AcclBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  Call call({"all_reduce", rank_}, Collective::AllReduce);
  call.check.list(tensors);
  call.check.one_type(tensors);
  call.outputs.open_block();
  for (const auto& tensor : tensors) call.outputs.piece(tensor);
  call.reduce(opts.reduceOp);
  return run(call, {OpType::ALLREDUCE_COALESCED, "accl:all_reduce", tensors, {}}, tensors, opts);
}

AcclBackend::WorkPtr AcclBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  Call call({"reduce", rank_}, Collective::Reduce, opts.rootRank);
  call.check.root(opts.rootRank, size_, opts.rootTensor, tensors);
  call.reduce_in_place(tensors, opts.reduceOp);
  return run(call, {OpType::REDUCE, "accl:reduce", tensors, {}}, tensors, opts);
}

AcclBackend::WorkPtr AcclBackend::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  Call call({"all_gather", rank_}, Collective::AllGather);
  c10d::assertNonEmptyInputTensorList(call.check.fail(), inputs.size());
  const auto& input = call.check.single_input(inputs);
  call.check.that(outputs.size() == 1, "requires input/output tensor lists to have the same length");
  call.check.output_list(outputs[0], size_);
  call.check.memory(outputs[0]);
  call.check.same_type(input, outputs[0]);
  call.check.same_count(input, outputs[0], rank_);
  call.inputs.block(input);
  for (const auto& output : outputs[0]) call.outputs.block(output);
  call.args.equal_blocks = same_counts(outputs[0]);
  return run(call, {OpType::ALLGATHER, "accl:all_gather", inputs, inputs}, outputs, opts);
}

AcclBackend::WorkPtr AcclBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  Call call({"all_gather", rank_}, Collective::AllGather);
  call.check.memory({output, input});
  call.check.flat_output(output, input, size_);
  call.inputs.block(input);
  call.outputs.parts(output, size_);
  return run(call, {OpType::_ALLGATHER_BASE, "accl:all_gather", input, input}, output, opts);
}

AcclBackend::WorkPtr AcclBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& opts) {
  Call call({"all_gather", rank_}, Collective::AllGather);
  c10d::assertNonEmptyInputTensorList(call.check.fail(), inputs.size());
  call.check.memory(inputs);
  c10d::assertAllgatherCoalescedOutputTensorLists(call.check.fail(), outputs, inputs.size(), size_);
  call.inputs.open_block();
  for (const auto& input : inputs) call.inputs.piece(input);
  for (const auto& list : outputs) {
    call.check.memory(list);
    call.outputs.open_block();
    for (size_t i = 0; i < list.size(); ++i) {
      call.check.same_output(inputs[i], list[i], i);
      call.outputs.piece(list[i]);
    }
  }
  return run(call, {OpType::ALLGATHER_COALESCED, "accl:all_gather", inputs, inputs}, outputs, opts);
}

AcclBackend::WorkPtr AcclBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                  const c10d::AllgatherOptions& opts) {
  Call call({"all_gather", rank_}, Collective::AllGather);
  call.check.pairs(outputs, inputs);
  call.inputs.open_block();
  for (size_t i = 0; i < inputs.size(); ++i) {
    call.check.flat_output(outputs[i], inputs[i], size_);
    call.inputs.piece(inputs[i]);
  }
  call.outputs.parts(outputs, size_);
  return run(call, {OpType::COALESCED, "accl:all_gather", inputs, inputs}, outputs, opts);
}

AcclBackend::WorkPtr AcclBackend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  Call call({"gather", rank_}, Collective::Gather, opts.rootRank);
  call.check.root(opts.rootRank, size_);
  const auto& input = call.check.single_input(inputs);
  call.inputs.block(input);
  if (rank_ == opts.rootRank) {
    c10d::assertGatherOutputTensorList(call.check.fail(), outputs, size_);
    call.check.memory(outputs[0]);
    call.check.same_type_and_size(input, outputs[0]);
    for (const auto& output : outputs[0]) call.outputs.block(output);
  } else {
    c10d::assertEmptyOutputTensorList(call.check.fail(), outputs);
  }
  return run(call, {OpType::GATHER, "accl:gather", inputs, inputs}, outputs, opts);
}

AcclBackend::WorkPtr AcclBackend::gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) {
  Call call({"gather", rank_}, Collective::Gather, opts.rootRank);
  call.check.root(opts.rootRank, size_);
  call.check.memory(input);
  call.inputs.block(input);
  const bool is_root = rank_ == opts.rootRank;
  if (is_root) {
    call.check.memory(output);
    call.check.flat_output(output, input, size_);
    call.outputs.parts(output, size_);
  }
  // On other ranks the output is an empty placeholder that the call does not write.
  return run(call, {OpType::GATHER, "accl:gather", input, input}, is_root ? Results(output) : Results(), opts);
}

AcclBackend::WorkPtr AcclBackend::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) {
  Call call({"scatter", rank_}, Collective::Scatter, opts.rootRank);
  call.check.root(opts.rootRank, size_);
  const auto& output = call.check.single_output(outputs);
  call.outputs.block(output);
  if (rank_ == opts.rootRank) {
    c10d::assertScatterInputTensorList(call.check.fail(), inputs, size_);
    call.check.memory(inputs[0]);
    call.check.same_type_and_size(output, inputs[0]);
    for (const auto& input : inputs[0]) call.inputs.block(input);
  } else {
    c10d::assertEmptyInputTensorList(call.check.fail(), inputs);
  }
  const Tensors sent = flat(inputs);
  return run(call, {OpType::SCATTER, "accl:scatter", sent, sent}, outputs, opts);
}

AcclBackend::WorkPtr AcclBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                 const c10d::ReduceScatterOptions& opts) {
  Call call({"reduce_scatter", rank_}, Collective::ReduceScatter);
  const auto& output = call.check.single_output(outputs);
  c10d::assertScatterInputTensorList(call.check.fail(), inputs, size_);
  call.check.memory(inputs[0]);
  call.check.same_type(output, inputs[0]);
  call.check.same_count(output, inputs[0], rank_);
  for (const auto& input : inputs[0]) call.inputs.block(input);
  call.outputs.block(output);
  call.args.equal_blocks = same_counts(inputs[0]);
  call.reduce(opts.reduceOp);
  return run(call, {OpType::REDUCE_SCATTER, "accl:reduce_scatter", inputs[0], inputs[0]}, outputs, opts);
}

AcclBackend::WorkPtr AcclBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                       const c10d::ReduceScatterOptions& opts) {
  Call call({"reduce_scatter", rank_}, Collective::ReduceScatter);
  call.check.memory({output, input});
  call.check.flat_input(input, output, size_);
  call.inputs.parts(input, size_);
  call.outputs.block(output);
  call.reduce(opts.reduceOp);
  return run(call, {OpType::_REDUCE_SCATTER_BASE, "accl:reduce_scatter", input, input}, output, opts);
}

AcclBackend::WorkPtr AcclBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                  const c10d::ReduceScatterOptions& opts) {
  Call call({"reduce_scatter", rank_}, Collective::ReduceScatter);
  call.check.pairs(outputs, inputs);
  call.check.same_type(outputs[0], outputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    call.check.flat_input(inputs[i], outputs[i], size_);
  }
  call.inputs.parts(inputs, size_);
  call.outputs.open_block();
  for (const auto& output : outputs) call.outputs.piece(output);
  call.reduce(opts.reduceOp);
  return run(call, {OpType::COALESCED, "accl:reduce_scatter", inputs, inputs}, outputs, opts);
}

AcclBackend::WorkPtr AcclBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                                std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) {
  Call call({"all_to_all", rank_}, Collective::AllToAll);
  call.check.memory({output, input});
  call.check.same_type(input, output);
  call.check.splits(input_splits, input, size_);
  call.check.splits(output_splits, output, size_);
  call.inputs.split(input, input_splits, size_);
  call.outputs.split(output, output_splits, size_);
  call.check.own_block(call.inputs, call.outputs, rank_);
  call.args.equal_blocks = input_splits.empty() && output_splits.empty();
  return run(call, {OpType::ALLTOALL_BASE, "accl:all_to_all", input, input}, output, opts);
}

AcclBackend::WorkPtr AcclBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  Call call({"all_to_all", rank_}, Collective::AllToAll);
  c10d::assertAllToAllTensorListSizes(call.check.fail(), outputs.size(), inputs.size(), size_);
  call.check.memory(inputs);
  call.check.memory(outputs);
  call.check.same_type(inputs[0], inputs);
  call.check.same_type(inputs[0], outputs);
  call.check.same_count(inputs[rank_], outputs, rank_);
  for (const auto& input : inputs) call.inputs.block(input);
  for (const auto& output : outputs) call.outputs.block(output);
  // Sizes may differ from pair to pair, and no rank knows the sizes of other ranks' blocks.
  call.args.equal_blocks = false;
  return run(call, {OpType::ALLTOALL, "accl:all_to_all", inputs, inputs}, outputs, opts);
}

AcclBackend::WorkPtr AcclBackend::barrier(const c10d::BarrierOptions& opts) {
  Call call({"barrier", rank_}, Collective::Barrier);
  return run(call, {OpType::BARRIER, "accl:barrier", {}, {}}, {}, opts);
}

void AcclBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  in_flight_->drain(8);
  const auto timeout = opts.timeout == c10d::kUnsetTimeout ? options_->timeout : opts.timeout;
  throw_unless_done(without_gil([&] { return bridge::group_monitored_barrier(*group_->group, timeout.count(), wait_all_ranks); }));
}

void AcclBackend::eagerConnectSingleDevice(at::Device) {
  in_flight_->drain(8);
  throw_unless_done(without_gil([&] { return bridge::group_connect_all(*group_->group); }));
}

// --- point-to-point ---

AcclBackend::WorkPtr AcclBackend::send(Tensors& tensors, int dst, int tag) {
  Call call({"send", rank_}, Collective::Send);
  call.check.peer(dst, size_, tag);
  call.inputs.block(call.check.single(tensors));
  call.args.peer = dst;
  call.args.tag = static_cast<uint32_t>(tag);
  return run(call, {OpType::SEND, "accl:send", tensors, tensors}, {}, true);
}

AcclBackend::WorkPtr AcclBackend::recv(Tensors& tensors, int src, int tag) {
  Check({"recv", rank_}).peer(src, size_, tag);
  return receive(tensors, src, tag, {OpType::RECV, "accl:recv", tensors, {}});
}

AcclBackend::WorkPtr AcclBackend::recvAnysource(Tensors& tensors, int tag) {
  Check({"recv", rank_}).that(tag >= 0, "tag must be nonnegative");
  return receive(tensors, -1, tag, {OpType::RECVANYSOURCE, "accl:recvAnySource", tensors, {}});
}

AcclBackend::WorkPtr AcclBackend::receive(Tensors& tensors, int src, int tag, const Event& event) {
  Call call({"recv", rank_}, Collective::Recv);
  call.outputs.block(Check({"recv", rank_}).single(tensors));
  call.args.peer = src;
  call.args.tag = static_cast<uint32_t>(tag);
  return run(call, event, tensors, true);
}

// --- sparse ---

AcclBackend::WorkPtr AcclBackend::reduce_sparse(const at::Tensor& tensor, const c10d::AllreduceOptions& opts) {
  const Origin origin{"all_reduce", rank_};
  Check(origin).memory({tensor._indices(), tensor._values()});
  if (opts.reduceOp.op_ != c10d::ReduceOp::SUM) refuse(bridge::Kind::Unsupported, origin, "sparse tensors support only SUM");
  const Tensors tensors{tensor};
  // Keeps the replaced tensors alive: these may be the last references to tensors that Python knows.
  const Tensors replaced{tensor._indices(), tensor._values()};
  const Event event{OpType::_ALLREDUCE_SPARSE, "accl:sparse_all_reduce", tensors, replaced};
  return recorded(event, tensors, opts.asyncOp, [&]() -> WorkPtr {
    int64_t timeout_ms = opts.timeout == c10d::kUnsetTimeout ? -1 : opts.timeout.count();
    // The sequence numbers are taken last, after everything that may throw: the other ranks wait for calls with them.
    if (!wants_work(opts.asyncOp)) {
      return complete(event, timeout_ms, [&] {
        auto task = std::make_unique<SparseSum>(group_, tensor, rank_, size_, timeout_ms);
        task->reserve();
        const auto status = without_gil([&] { return std::exchange(task, nullptr)->run(); });
        throw_python_error_if_set();
        throw_unless_ok(status);
      });
    }
    auto work = make_work(event, tensors);
    if (in_flight_->is_extended()) timeout_ms = extended_ms(timeout_ms, work->entry()->key);
    if (timeout_ms >= 0) work->entry()->timeout = std::chrono::milliseconds(timeout_ms);
    auto task = std::make_unique<SparseSum>(group_, tensor, rank_, size_, timeout_ms);
    work->entry()->seq = task->reserve();
    const auto spawned = bridge::group_spawn(*group_->group, std::move(task), *work->entry()->ticket);
    if (!is_ok(spawned)) bridge::group_conclude(*group_->group, work->entry()->seq, SparseSum::kCalls, spawned);
    begun(work, spawned, opts.asyncOp);
    return work;
  });
}

// --- coalescing ---

void AcclBackend::startCoalescing() { in_flight_->begin_batch(); }

// Without a matching `startCoalescing` the returned work is empty: torch itself ends batches that an abort has ended.
AcclBackend::WorkPtr AcclBackend::endCoalescing() {
  return c10::make_intrusive<CoalescedWork>(rank_, in_flight_->end_batch());
}

// --- life of the group ---

AcclBackend::AcclBackend(const bridge::Runtime* runtime, const AcclBackend* sibling, Role role,
                         c10::intrusive_ptr<c10d::Store> store, int rank, int world, c10::intrusive_ptr<AcclOptions> options)
    : Backend(rank, world), options_(std::move(options)) {
  rust::Vec<rust::String> settings;
  for (const auto& [name, value] : options_->settings) {
    settings.push_back(name);
    settings.push_back(value);
  }
  bridge::GroupArgs args;
  args.name = options_->group_name;
  args.rank = static_cast<uint32_t>(rank);
  args.world = static_cast<uint32_t>(world);
  args.timeout_ms = options_->timeout.count();
  args.global_ranks = {options_->global_ranks_in_group.data(), options_->global_ranks_in_group.size()};
  args.is_default = role == Role::Default;
  args.settings = {settings.data(), settings.size()};
  const bridge::StoreRef handle(store);
  const auto master = handle.master();
  args.master = master;
  const auto status = sibling != nullptr
                          ? bridge::group_create_sibling(*group_->group, *sibling->group_->group, args, handle)
                          : bridge::group_create(*group_->group, *runtime, args, handle);
  if (!is_ok(status)) {
    throw_python_error_if_set();
    throw_status(status);
  }
  names_ = ProfileNames(static_cast<ProfileNames::Style>(value_of(bridge::group_profile_names(*group_->group))));
  init();
}

AcclBackend::~AcclBackend() {
  // Calls in flight fail here, so that nothing writes to a tensor that the list releases. Callers learn of the failure
  // from the work.
  bridge::group_shutdown(*group_->group, false);
  in_flight_->drop_batches();
  in_flight_->drain(std::numeric_limits<size_t>::max());
}

c10::intrusive_ptr<c10d::Backend> AcclBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                     const std::vector<int>& ranks, const c10::intrusive_ptr<Options>& opts) {
  const auto place = std::find(ranks.begin(), ranks.end(), rank_);
  if (place == ranks.end()) return nullptr;
  auto options = options_for(opts);
  options->global_ranks_in_group.clear();
  for (const int rank : ranks) {
    const auto& global = options_->global_ranks_in_group;
    options->global_ranks_in_group.push_back(global.empty() ? rank : global.at(rank));
  }
  return c10::make_intrusive<AcclBackend>(nullptr, this, Role::Other, store, static_cast<int>(place - ranks.begin()),
                                          static_cast<int>(ranks.size()), std::move(options));
}

c10::intrusive_ptr<c10d::Backend> AcclBackend::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                     const c10::intrusive_ptr<Options>& opts, const int& rank,
                                                     const int& size) {
  return c10::make_intrusive<AcclBackend>(nullptr, this, Role::Other, store, rank, size, options_for(opts));
}

c10::intrusive_ptr<AcclOptions> AcclBackend::options_for(const c10::intrusive_ptr<Options>& opts) const {
  // Options of another class only contain c10d's common fields; all other settings are copied from this group.
  auto options = c10::make_intrusive<AcclOptions>(*options_);
  if (!opts) return options;
  if (const auto* ours = dynamic_cast<const AcclOptions*>(opts.get())) options->settings = ours->settings;
  options->timeout = opts->timeout;
  options->group_name = opts->group_name;
  options->group_desc = opts->group_desc;
  options->global_ranks_in_group = opts->global_ranks_in_group;
  return options;
}

uint64_t AcclBackend::getSequenceNumberForGroup() {
  return static_cast<uint64_t>(value_of(bridge::group_next_seq(*group_->group)));
}

void AcclBackend::setTimeout(std::chrono::milliseconds timeout) {
  throw_unless_ok(bridge::group_set_timeout(*group_->group, timeout.count()));
  options_->timeout = timeout;
}

void AcclBackend::enableCollectivesTiming() { throw_unless_ok(bridge::group_enable_timing(*group_->group)); }

c10d::ErrorType AcclBackend::getError() {
  using bridge::ErrorType;
  static_assert(static_cast<int>(ErrorType::Success) == static_cast<int>(c10d::ErrorType::SUCCESS));
  static_assert(static_cast<int>(ErrorType::Timeout) == static_cast<int>(c10d::ErrorType::TIMEOUT));
  static_assert(static_cast<int>(ErrorType::CommError) == static_cast<int>(c10d::ErrorType::COMM_ERROR));
  static_assert(static_cast<int>(ErrorType::RemoteError) == static_cast<int>(c10d::ErrorType::REMOTE_ERROR));
  return static_cast<c10d::ErrorType>(bridge::group_error_type(*group_->group));
}

void AcclBackend::abort() {
  throw_unless_ok(bridge::group_abort(*group_->group, "abort() was called"));
}

void AcclBackend::shutdown() {
  const auto status = without_gil([&] { return bridge::group_shutdown(*group_->group, true); });
  throw_python_error_if_set();
  if (is_ok(status)) return;
  finish_destroy();
  throw_status(status);
}

std::string AcclBackend::describe() const { return text_of(bridge::group_describe(*group_->group)); }

std::string AcclBackend::snapshot() const { return text_of(bridge::group_snapshot(*group_->group)); }

std::string AcclBackend::first_error() const { return std::string(bridge::group_first_error(*group_->group).message); }

std::string AcclBackend::algorithm_of(const std::string& collective, const Tensors& inputs, const Tensors& outputs,
                                      const c10d::ReduceOp& op, uint32_t root) const {
  Call call({"algorithm_of", rank_}, static_cast<Collective>(value_of(bridge::collective_code(collective))), root);
  add_tensors(call, inputs, outputs, op);
  return text_of(bridge::group_algorithm(*group_->group, call.finish()));
}

std::vector<int64_t> AcclBackend::time_calls(const std::string& collective, const Tensors& inputs, const Tensors& outputs,
                                             const c10d::ReduceOp& op, uint32_t root, uint32_t samples, uint32_t calls,
                                             bool fenced) const {
  Call call({"time_calls", rank_}, static_cast<Collective>(value_of(bridge::collective_code(collective))), root);
  add_tensors(call, inputs, outputs, op);
  const auto repeated = bridge::group_repeat(*group_->group, call.finish(), samples, calls, fenced);
  settle(repeated.status, nullptr, [&] { return memory_of({inputs}, outputs); });
  throw_python_error_if_set();
  throw_unless_ok(repeated.status);
  return {repeated.nanos.begin(), repeated.nanos.end()};
}

// --- memory ---

at::Tensor AcclBackend::allocateTensor(long size, at::TensorOptions options) {
  return at::empty({size}, options);
}

std::shared_ptr<c10::Allocator> AcclBackend::getMemAllocator() {
  // torch's own allocator. The pointer does not own it, because it must not be deleted here.
  return {std::shared_ptr<c10::Allocator>(), c10::GetAllocator(c10::kCPU)};
}

}  // namespace accl
