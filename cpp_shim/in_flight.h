// Calls from their submission to their completion, and the list that owns those in flight.
//
// A `WorkEntry` is one call: its ticket, its tensors, its future. The `InFlight` list of a backend owns every asynchronous entry until it is
// completed, so that no native thread drops a tensor's last reference. Exactly one thread claims an entry's completion, by
// compare-and-swap. Owns completion, hooks, ephemeral timeouts and batches; the handles that callers hold are in work.h.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/ThreadLocalState.h>

#include "errors.h"
#include "hooks.h"
#include "process_lock.h"
#include "profile.h"
#include "torch_compat.h"

namespace accl {

using Tensors = std::vector<at::Tensor>;

// Result of a call as futures carry it: the tensors of the only output list, or a list of lists.
struct Outputs {
  std::vector<Tensors> lists;

  c10::TypePtr type() const;
  c10::IValue value() const;
};

// The same, borrowed from the caller until a work needs it: one tensor, one list or a list of lists.
class Results {
 public:
  Results() = default;
  Results(const at::Tensor& tensor) : list_(tensor) {}                    // NOLINT: as a call writes it
  Results(const Tensors& list) : list_(list) {}                           // NOLINT
  Results(const std::vector<Tensors>& lists) : lists_(&lists) {}          // NOLINT
  Outputs outputs() const {
    if (lists_ != nullptr) return {*lists_};
    return list_.empty() ? Outputs{} : Outputs{{list_.vec()}};
  }

 private:
  at::TensorList list_;
  const std::vector<Tensors>* lists_ = nullptr;
};

struct WorkEntry {
  enum State : uint8_t { kRunning, kClaimed, kCompleted };

  WorkEntry() : ticket(bridge::new_ticket()) {}
  ~WorkEntry();

  // True for the one thread that completes the call.
  bool claim() {
    uint8_t expected = kRunning;
    return state.compare_exchange_strong(expected, kClaimed, std::memory_order_acq_rel);
  }
  bool completed() const { return state.load(std::memory_order_acquire) == kCompleted; }
  // Outputs are written, or the call failed.
  bool ended() const;
  // Of an ended call: why it failed, or null.
  std::exception_ptr error() const;
  // Holds the memory of all tensors by itself.
  void keep_memory();
  // Lets the profiler be told where the call's time went when its event is closed.
  void record_phases(const char* title);

  rust::Box<bridge::Ticket> ticket;
  uint64_t key = 0;        // names the call to completion hooks
  int64_t seq = -1;        // where the ticket knows none
  Outputs outputs;
  Tensors kept;  // what else must live until the end
  std::vector<c10::Storage> memory;  // stays although a tensor may be given another
  AsyncEvent event;
  std::chrono::milliseconds timeout{0};
  std::atomic<uint8_t> state{kRunning};
  std::atomic<bool> task_has_run{false};  // the completion thread is through with it

  // Guarded by the list's lock.
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::optional<at::ThreadLocalState> caller;  // of who asked for the future
  bool closed = false;   // the claimer has looked for a future
  bool watched = false;  // a completion thread will come
};

// In a forked child it is the parent's: nothing is added, looked at or completed there, and it is never freed.
class InFlight : public std::enable_shared_from_this<InFlight> {
 public:
  static std::shared_ptr<InFlight> make() {
    return {new InFlight, [](InFlight* list) {
              if (list->lock_.is_ours()) delete list;
            }};
  }

  void add(std::shared_ptr<WorkEntry> entry);
  // Never used twice in a group.
  uint64_t next_key() { return keys_.fetch_add(1, std::memory_order_relaxed); }
  // Completes what has ended and drops what is completed, looking at no more than `budget` entries.
  void drain(size_t budget);
  // Completes an entry that this thread has claimed.
  void complete(WorkEntry& entry) noexcept;
  // Completes an entry that has ended, unless that could run callbacks of others; says whether it is completed. Never waits.
  bool try_complete(WorkEntry& entry);
  // Waits for another thread to complete the entry, without the GIL.
  void await_completed(const WorkEntry& entry, std::chrono::steady_clock::time_point deadline);
  c10::intrusive_ptr<c10::ivalue::Future> future_of(const std::shared_ptr<WorkEntry>& entry);
  // Lets a completion thread complete the entry, unless one will already.
  void watch(const std::shared_ptr<WorkEntry>& entry);

  // Whether this thread is between start and end of coalescing,
  bool in_batch();
  // and if so, keeps the work for the end.
  bool collect(const c10::intrusive_ptr<c10d::Work>& work);
  void begin_batch();
  std::vector<c10::intrusive_ptr<c10d::Work>> end_batch();
  // What was begun and never ended, when nobody can end it any more: its works hold this list.
  void drop_batches();

  // Ephemeral timeouts: what a call gets on top of its timeout, until the first call made after `extend` has ended.
  void extend(std::chrono::milliseconds added);
  bool is_extended() const { return extended_.load(std::memory_order_relaxed); }
  std::chrono::milliseconds extension(uint64_t key);
  void expire(uint64_t key);

  Hooks<CompletionHook>& completion_hooks() { return completion_hooks_; }
  Hooks<AbortHook>& abort_hooks() { return abort_hooks_; }
  void run_abort_hooks() noexcept;
  // Drains on Python's main thread, soon; false when Python has no room for that now.
  bool schedule_drain() noexcept;

 private:
  friend struct EntryCompletion;
  static int drain_now(void* list) noexcept;
  // Whether this thread is inside a callback of an entry of this list. Under the lock.
  bool is_completer() const;
  void tell_hooks(const WorkEntry& entry) noexcept;

  struct Extension {
    std::chrono::milliseconds added;
    std::optional<uint64_t> first;  // the call that it ends with
  };

  ProcessLock lock_;
  std::condition_variable completed_;
  std::atomic<uint32_t> waiters_{0};
  std::vector<pthread_t> completers_;  // threads inside callbacks
  std::atomic<uint64_t> keys_{0};
  std::vector<Extension> extensions_;
  std::atomic<bool> extended_{false};
  Hooks<CompletionHook> completion_hooks_{lock_};
  Hooks<AbortHook> abort_hooks_{lock_};
  std::vector<std::shared_ptr<WorkEntry>> entries_;
  size_t cursor_ = 0;
  std::atomic<bool> scheduled_{false};
  // By thread.
  std::map<pthread_t, std::vector<c10::intrusive_ptr<c10d::Work>>> batches_;
  std::atomic<size_t> batch_count_{0};
};

}  // namespace accl
