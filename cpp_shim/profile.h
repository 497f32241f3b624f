// What torch's profiler sees of calls and of who waits for them.
//
// Owns the names of events, those events that begin and end in one thread, and what execution traces are told of a call. The asynchronous
// event of a call is made by torch of its work's title. Nothing here takes longer than a look where nobody profiles.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "bridge_types.h"

namespace accl {

// Elements of all tensors together.
int64_t elements_of(at::TensorList tensors);

// How events are called, by the setting `profile_names`: `accl:all_reduce`, or as others called theirs. Theirs are all synchronous.
class ProfileNames {
 public:
  using Style = bridge::ProfileNames;

  explicit ProfileNames(Style style = Style::Accl) : style_(style) {}

  // The title of a call's asynchronous event; null if it has none.
  const char* asynchronous(const char* title) const { return style_ == Style::Accl ? title : nullptr; }

  // The name of the synchronous event of making a call; titles are `accl:` and a collective.
  std::string call(const char* title) const;

  // The name of the event of waiting for a call of so many elements.
  std::string wait(const char* title, int64_t elements) const;

  bool has_synchronous_calls() const { return style_ != Style::Accl; }

  // Whether torch's profiler is on in this thread, and is told where the time of calls goes: with `record_shapes` it is.
  bool wants_phases() const;

 private:
  Style style_;
};

// A synchronous event of this thread, from here to the end of the scope.
class Span {
 public:
  Span() = default;
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

  // `name` is only asked while somebody profiles.
  template <class Name>
  void begin(Name name, at::TensorList shapes = {}) {
    auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
    if (!callbacks.has_value()) return;
    event_.emplace(std::move(*callbacks));
    const std::vector<c10::IValue> inputs(shapes.begin(), shapes.end());
    event_->before(std::string(name()), c10::ArrayRef<const c10::IValue>(inputs.data(), inputs.size()));
  }

 private:
  std::optional<at::RecordFunction> event_;
};

// An event of no length within that of a call, `accl:phases:all_reduce`: where its time went, in microseconds, as keyword arguments.
void record_phases(const char* title, const bridge::PhaseNanos& phases) noexcept;

// The asynchronous event of a call, which whoever completes the call closes, in whatever thread. Torch frees what the end of an event is
// written to when its profile ends, and does not look whether that has happened: so an event that outlives its profile is never closed.
// A profile ends under Python's lock, which is what keeps it from ending meanwhile.
class AsyncEvent {
 public:
  AsyncEvent() = default;
  // Of this thread's profile; `close` closes it, in this thread's name. It may be empty.
  explicit AsyncEvent(std::function<void()> close);
  ~AsyncEvent() { close(); }
  AsyncEvent(AsyncEvent&&) = delete;
  AsyncEvent& operator=(AsyncEvent&& other) noexcept;

  // Has this done, in this thread's name, before the event is closed.
  void before_close(std::function<void()> what);
  // Once; not while a lock is held.
  void close() noexcept;

 private:
  bool is_of_this_thread() const;
  bool is_on() const;

  std::function<void()> close_;
  std::shared_ptr<c10::ThreadLocalDebugInfo> infos_;  // has the state below as long as this event has it
  torch::profiler::impl::ProfilerStateBase* local_ = nullptr;
  std::shared_ptr<torch::profiler::impl::ProfilerStateBase> global_;
};

// What execution traces are told of a call, from which it can be made again.
struct CallFacts {
  int64_t seq;
  std::string group_name;
  std::string group_description;
  int64_t rank;
  int64_t world;
  int64_t first_global_rank;
  int64_t global_rank_stride;
  const char* title;
  bool is_async;
};

// The record of a call for execution traces, as ProcessGroupNCCL makes it (`record_param_comms`): from here to the end of the scope.
class CallRecord {
 public:
  CallRecord() = default;
  CallRecord(const CallRecord&) = delete;
  CallRecord& operator=(const CallRecord&) = delete;

  void begin(CallFacts facts, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs);

 private:
  std::optional<c10::DebugInfoGuard> facts_;
  std::optional<at::RecordFunction> event_;
};

}  // namespace accl
