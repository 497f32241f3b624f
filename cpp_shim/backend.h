// c10d::Backend over a group of the engine: check, translate, forward.
//
// May: check tensors, translate enums, keep tensors alive, map errors. May not: start threads, choose algorithms, copy
// payload, read the environment, log, keep statics, install signal handlers.
#pragma once

#include <pthread.h>

#include <atomic>
#include <map>
#include <optional>
#include <vector>

#include "checks.h"
#include "group_handle.h"
#include "torch_compat.h"
#include "work.h"

namespace accl {

// Options of a backend: torch's, and settings by the names of `torch_accl.Options`.
struct AcclOptions : c10d::Backend::Options {
  AcclOptions() : c10d::Backend::Options("accl") {}
  AcclOptions(const AcclOptions&) = default;

  c10::intrusive_ptr<c10d::Backend::Options> clone() const ACCL_OVERRIDE_2_14 {
    return c10::make_intrusive<AcclOptions>(*this);
  }

  std::map<std::string, std::string> settings;
};

class AcclBackend : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using TensorLists = std::vector<Tensors>;

  // Role of the group in the process: only the default process group has the device.
  enum class Role { Default, Other };

  // Collective: returns when all ranks are connected. `sibling` is another backend of this process, or null.
  AcclBackend(const bridge::Runtime* runtime, const AcclBackend* sibling, Role role, c10::intrusive_ptr<c10d::Store> store,
              int rank, int world, c10::intrusive_ptr<AcclOptions> options);
  ~AcclBackend() override;

  const std::string getBackendName() const override { return "accl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) ACCL_OVERRIDE_2_15;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr send(Tensors& tensors, int dst, int tag) override;
  WorkPtr recv(Tensors& tensors, int src, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // Links are created on first use; this creates them now.
  void eagerConnectSingleDevice(at::Device device) override;

  // Sequence numbers start at 0 on every rank, so the ranks need not agree on one.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;

  // False: if an operation raises, torch does not end the batch that it began, and then drops later calls. With false,
  // torch's batches make one work per operation, which is how operations run here anyway. Callers of start and end
  // still get one work.
  bool supportsCoalescing() const override { return false; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& opts) override;
  c10::intrusive_ptr<Backend> merge(const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<Options>& opts,
                                    const int& rank, const int& size) override;

  void setTimeout(std::chrono::milliseconds timeout) override;
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) ACCL_OVERRIDE_2_15 { in_flight_->extend(timeout); }

  bool supportsAbortHooks() const ACCL_OVERRIDE_2_15 { return true; }
  void registerAbortHook(int64_t id, AbortHook hook) ACCL_OVERRIDE_2_15 { in_flight_->abort_hooks().set(id, std::move(hook)); }
  void unregisterAbortHook(int64_t id) ACCL_OVERRIDE_2_15 { in_flight_->abort_hooks().erase(id); }
  bool supportsCompletionHooks() const ACCL_OVERRIDE_2_15 { return true; }
  void registerCompletionHook(int64_t id, CompletionHook hook) ACCL_OVERRIDE_2_15 {
    in_flight_->completion_hooks().set(id, std::move(hook));
  }
  void unregisterCompletionHook(int64_t id) ACCL_OVERRIDE_2_15 { in_flight_->completion_hooks().erase(id); }

  void enableCollectivesTiming() override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;

  // Facts about the group, one per line.
  std::string describe() const;
  // Current and past activity of the group, as JSON.
  std::string snapshot() const;
  // Message of the error that aborted the group, or empty.
  std::string first_error() const;

  // For benchmarks, which describe a call by its blocks, one tensor per block. Returns the algorithm that the call
  // uses.
  std::string algorithm_of(const std::string& collective, const Tensors& inputs, const Tensors& outputs,
                           const c10d::ReduceOp& op, uint32_t root) const;
  // Issues `samples` times `calls` blocking calls, without torch's dispatch. Returns the nanoseconds of each sample. If
  // `fenced`, an untimed barrier precedes each sample.
  std::vector<int64_t> time_calls(const std::string& collective, const Tensors& inputs, const Tensors& outputs,
                                  const c10d::ReduceOp& op, uint32_t root, uint32_t samples, uint32_t calls,
                                  bool fenced) const;

 private:
  // Facts about a call for the profiler, and the tensors to keep alive. Borrowed from the caller of the override.
  struct Event {
    c10d::OpType type;
    const char* title;
    at::TensorList shapes;  // shown by the profiler
    at::TensorList kept;    // must live until the call completes, in addition to the outputs
  };

  // Runs a call. A blocking call runs to its end here and has no work, as in torch's own backends. torch's handling of
  // a work takes longer than a small call.
  WorkPtr run(Call& call, const Event& event, const Results& results, bool async_op);
  // The same with the timeout and the mode of c10d's options.
  template <class CallOptions>
  WorkPtr run(Call& call, const Event& event, const Results& results, const CallOptions& opts);
  // Issues a call and waits for it. Keeps the memory of its tensors if the status demands it.
  bridge::Waited make_call(Call& call, const Event& event, const Results& results) const;
  bool wants_work(bool async_op) const;
  // Begins the synchronous event of issuing a call, which ends with `span`. Some styles of names have no such event.
  void record_call(const Event& event, Span& span) const;
  // Runs a call while its facts are recorded for execution traces, from which it can be repeated.
  template <class Run>
  WorkPtr recorded(const Event& event, const Results& results, bool async_op, Run run) const;
  WorkPtr run_recorded(Call& call, const Event& event, const Results& results, bool async_op);
  c10::intrusive_ptr<AcclWork> make_work(const Event& event, const Results& results) const;
  // Returns the milliseconds of the call's own timeout plus its ephemeral extensions, for the call with this key.
  int64_t extended_ms(int64_t timeout_ms, uint64_t key) const;
  // Runs a call that has no work.
  template <class Blocking>
  WorkPtr complete(const Event& event, int64_t& timeout_ms, Blocking blocking);
  // Runs the abort hooks if the group has failed with a timeout. Other errors do not run them: torch's flight recorder,
  // one of the hooks, takes seconds. A lost peer is known at once, and the process must not exit while the hook runs.
  void run_hooks_on_timeout() const noexcept;
  // Handles the result of a submission, which may have failed.
  void begun(const c10::intrusive_ptr<AcclWork>& work, const bridge::Status& status, bool async_op);
  WorkPtr reduce_sparse(const at::Tensor& tensor, const c10d::AllreduceOptions& opts);
  WorkPtr receive(Tensors& tensors, int src, int tag, const Event& event);

  // Options of a new group: `opts`, completed by this group's options.
  c10::intrusive_ptr<AcclOptions> options_for(const c10::intrusive_ptr<Options>& opts) const;

  c10::intrusive_ptr<AcclOptions> options_;
  std::shared_ptr<GroupHandle> group_ = std::make_shared<GroupHandle>();
  ProfileNames names_;
  std::shared_ptr<InFlight> in_flight_ = InFlight::make();
};

}  // namespace accl
