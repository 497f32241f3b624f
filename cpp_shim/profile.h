// Events that torch's profiler records for calls and for waits.
//
// Owns the events that begin and end in one thread. Rust has the names of events. torch creates a call's asynchronous
// event from the title of its work, and records the facts of a call for execution traces. Without a profiler, everything
// here costs only a check.
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

// Sum of the elements of all tensors.
int64_t elements_of(at::TensorList tensors);

// The names of events, by the setting `profile_names`: `accl:all_reduce`, or the names that other backends use. The
// latter are all synchronous.
class ProfileNames {
 public:
  using Style = bridge::ProfileNames;

  explicit ProfileNames(Style style = Style::Accl) : style_(style) {}

  // The title of a call's asynchronous event, or null if the style has none.
  const char* asynchronous(const char* title) const { return style_ == Style::Accl ? title : nullptr; }

  // The name of the synchronous event of issuing a call. Titles are `accl:` and a collective.
  std::string call(const char* title) const;

  // The name of the event of waiting for a call of `elements` elements.
  std::string wait(const char* title, int64_t elements) const;

  bool has_synchronous_calls() const { return style_ != Style::Accl; }

  // Whether torch's profiler is on in this thread and records the phases of calls, which needs `record_shapes`.
  bool wants_phases() const;

 private:
  Style style_;
};

// A synchronous event of this thread, from `begin` to the end of the scope.
class Span {
 public:
  Span() = default;
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

  // Calls `name` only if a profiler is on.
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

// Records an event of zero length within the call's event, `accl:phases:all_reduce`: the times of the call's phases in
// microseconds, as keyword arguments.
void record_phases(const char* title, const bridge::PhaseNanos& phases) noexcept;

// The asynchronous event of a call. The thread that completes the call closes it, whichever thread that is. When a
// profile ends, torch frees the memory to which the ends of events are written, without checking for open events. So an
// event that outlives its profile is never closed. A profile ends under the GIL; holding the GIL keeps it from ending
// during `close`.
class AsyncEvent {
 public:
  AsyncEvent() = default;
  // An event of this thread's profile. `close` closes it on behalf of this thread, and may be empty.
  explicit AsyncEvent(std::function<void()> close);
  ~AsyncEvent() { close(); }
  AsyncEvent(AsyncEvent&&) = delete;
  AsyncEvent& operator=(AsyncEvent&& other) noexcept;

  // Runs `what` on behalf of this thread before the event is closed.
  void before_close(std::function<void()> what);
  // Closes the event, once. Must not be called while a lock is held.
  void close() noexcept;

 private:
  bool is_of_this_thread() const;
  bool is_on() const;

  std::function<void()> close_;
  std::shared_ptr<c10::ThreadLocalDebugInfo> infos_;  // keeps the state below alive as long as this event
  torch::profiler::impl::ProfilerStateBase* local_ = nullptr;
  std::shared_ptr<torch::profiler::impl::ProfilerStateBase> global_;
};

}  // namespace accl
