// c10d::Work over calls of the engine: the handles that callers hold.
//
// Owns a handle's answers and how long it waits. A handle may be dropped at any time: the list of calls in flight
// (in_flight.h) keeps the call.
#pragma once

#include <memory>
#include <vector>

#include "in_flight.h"
#include "profile.h"
#include "torch_compat.h"

namespace accl {

class AcclWork : public c10d::Work {
 public:
  // `names` and `elements` are used for the events of waits.
  AcclWork(int rank, c10d::OpType type, const char* title, const std::optional<Tensors>& profiled,
           std::shared_ptr<InFlight> home, Outputs outputs, ProfileNames names, int64_t elements);
  ~AcclWork() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  Tensors result() override;
  void synchronize() override {
    if (entry_->accelerator) wait();
  }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  // On an accelerator, the stream continues when the results are there or the call has failed.
  void blockCurrentStream() override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override;
  std::chrono::milliseconds getTimeout() const ACCL_OVERRIDE_2_14 { return entry_->timeout; }
  uint64_t getCompletionKey() const ACCL_OVERRIDE_2_15 { return entry_->key; }

  const std::shared_ptr<WorkEntry>& entry() const { return entry_; }
  // Completes a call that was never started.
  void complete_here();

 private:
  std::shared_ptr<InFlight> home_;
  std::shared_ptr<WorkEntry> entry_;
  const char* title_;
  ProfileNames names_;
  int64_t elements_;
};

// Several works as one: the result of `endCoalescing`.
class CoalescedWork : public c10d::Work {
 public:
  CoalescedWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> parts);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  Tensors result() override;
  void synchronize() override {
    for (const auto& part : parts_) part->synchronize();
  }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void blockCurrentStream() override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override;

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> parts_;
};

// The profiler's event of a call without a work: begins and ends with this object.
class Recorded final : public c10d::Work {
 public:
  using Work::Work;
  ~Recorded() override { finish(); }
};

}  // namespace accl
