// Calls from submission to completion, and the list that owns the calls in flight.
//
// A `WorkEntry` is one call: its ticket, tensors and future. The `InFlight` list of a backend owns every asynchronous
// entry until it is completed, so that no native thread drops a tensor's last reference. Exactly one thread claims an
// entry's completion, by compare-and-swap. Owns completion, hooks, ephemeral timeouts and batches; the handles that
// callers hold are in work.h.
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

#include "accelerator.h"
#include "hooks.h"
#include "process_lock.h"
#include "profile.h"
#include "torch_compat.h"

namespace accl {

using Tensors = std::vector<at::Tensor>;

// Result of a call as futures contain it: the tensors of the only output list, or a list of lists.
struct Outputs {
  std::vector<Tensors> lists;

  c10::TypePtr type() const;
  c10::IValue value() const;
};

// Result of a call, borrowed from the caller until a work needs it: one tensor, one list or a list of lists.
class Results {
 public:
  Results() = default;
  Results(const at::Tensor& tensor) : list_(tensor) {}                    // NOLINT: implicit on purpose
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

  // Returns true to exactly one thread, which then completes the call.
  bool claim() {
    uint8_t expected = kRunning;
    return state.compare_exchange_strong(expected, kClaimed, std::memory_order_acq_rel);
  }
  bool completed() const { return state.load(std::memory_order_acquire) == kCompleted; }
  // Whether the outputs are written or the call has failed. On an accelerator, a completed call may only be enqueued.
  bool ended() const;
  // Whether nothing accesses the tensors any more.
  bool through() const;
  // Returns why an ended call failed, or null.
  std::exception_ptr error() const;
  // Keeps the memory of all tensors alive independently of the tensors.
  void keep_memory();
  // Makes the profiler record the call's phases when its event is closed.
  void record_phases(const char* title);

  rust::Box<bridge::Ticket> ticket;
  uint64_t key = 0;        // identifies the call to completion hooks
  int64_t seq = -1;        // sequence number, if the ticket has none
  Outputs outputs;
  Tensors kept;  // other tensors that must live until the call completes
  std::vector<c10::Storage> memory;  // stays even if a tensor gets other storage
  std::shared_ptr<StagedTensors> accelerator;  // null if the tensors are in host memory
  AsyncEvent event;
  std::chrono::milliseconds timeout{0};
  std::atomic<uint8_t> state{kRunning};
  std::atomic<uint32_t> tasks{0};  // completion tasks that have yet to finish with the entry
  bool has_hook_task = false;      // one of them runs the hooks

  // Guarded by the list's lock.
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::optional<at::ThreadLocalState> caller;  // state of the thread that requested the future
  bool closed = false;   // the claiming thread has read `future`, which no longer changes
  bool watched = false;  // a completion thread will complete the entry
};

// In a forked child the list belongs to the parent: nothing is added, checked or completed, and it is never freed.
class InFlight : public std::enable_shared_from_this<InFlight> {
 public:
  static std::shared_ptr<InFlight> make() {
    return {new InFlight, [](InFlight* list) {
              if (list->lock_.is_ours()) delete list;
            }};
  }

  void add(std::shared_ptr<WorkEntry> entry);
  // Returns a key that is never used twice in a group.
  uint64_t next_key() { return keys_.fetch_add(1, std::memory_order_relaxed); }
  // Completes ended entries and drops completed ones, checking at most `budget` entries.
  void drain(size_t budget);
  // Completes an entry that this thread has claimed.
  void complete(WorkEntry& entry) noexcept;
  // Completes an ended entry, unless that could run other threads' callbacks. Returns whether it is completed. Never
  // waits.
  bool try_complete(WorkEntry& entry);
  // Waits, without the GIL, for another thread to complete the entry.
  void await_completed(const WorkEntry& entry, std::chrono::steady_clock::time_point deadline);
  c10::intrusive_ptr<c10::ivalue::Future> future_of(const std::shared_ptr<WorkEntry>& entry);
  // Makes a completion thread run the hooks of a call on an accelerator when the call is through, and let go of it.
  void end_when_through(const std::shared_ptr<WorkEntry>& entry);
  // Makes a completion thread complete the entry, unless one will already.
  void watch(const std::shared_ptr<WorkEntry>& entry);

  // Whether this thread is between the start and the end of coalescing.
  bool in_batch();
  // If this thread is coalescing, keeps the work for the end and returns true.
  bool collect(const c10::intrusive_ptr<c10d::Work>& work);
  void begin_batch();
  std::vector<c10::intrusive_ptr<c10d::Work>> end_batch();
  // Drops batches that were begun and never ended, once no caller can end them: their works hold this list.
  void drop_batches();

  // Ephemeral timeouts: extra time for calls, until the first call issued after `extend` has ended.
  void extend(std::chrono::milliseconds added);
  bool is_extended() const { return extended_.load(std::memory_order_relaxed); }
  std::chrono::milliseconds extension(uint64_t key);
  void expire(uint64_t key);

  Hooks<CompletionHook>& completion_hooks() { return completion_hooks_; }
  Hooks<AbortHook>& abort_hooks() { return abort_hooks_; }
  void run_abort_hooks() noexcept;
  // Schedules a drain on Python's main thread. Returns false if Python's queue has no room now.
  bool schedule_drain() noexcept;

 private:
  friend struct EntryCompletion;
  static int drain_now(void* list) noexcept;
  // Whether this thread is inside a callback of an entry of this list. Requires the lock.
  bool is_completer() const;
  void run_hooks(const WorkEntry& entry) noexcept;

  struct Extension {
    std::chrono::milliseconds added;
    std::optional<uint64_t> first;  // the call with which the extension ends
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
  // Open batches by thread.
  std::map<pthread_t, std::vector<c10::intrusive_ptr<c10d::Work>>> batches_;
  std::atomic<size_t> batch_count_{0};
};

}  // namespace accl
