// See in_flight.h.
#include "in_flight.h"

#include <algorithm>
#include <limits>
#include <new>

#include <c10/core/StreamGuard.h>

#include "held_memory.h"
#include "interpreter.h"
#include "timeouts.h"

namespace accl {

using bridge::Kind;
using bridge::Outcome;

// --- outputs ---

c10::TypePtr Outputs::type() const {
  auto flat = c10::ListType::create(c10::TensorType::get());
  return lists.size() > 1 ? c10::ListType::create(flat) : flat;
}

c10::IValue Outputs::value() const {
  if (lists.size() > 1) return c10::IValue(lists);
  return c10::IValue(lists.empty() ? Tensors() : lists[0]);
}

// --- entries ---

bool WorkEntry::ended() const { return completed() || through(); }

bool WorkEntry::through() const {
  if (completed() && !accelerator) return true;
  return bridge::ticket_done(*ticket).how != Outcome::Running;
}

WorkEntry::~WorkEntry() {
  if (memory.empty()) return;
  auto held = bridge::ticket_held(*ticket);
  // If the status is unknown, keep the memory: no error can be reported here.
  held.must_leak_memory = held.must_leak_memory || !is_ok(held);
  if (accelerator) accelerator->outlive(bridge::ticket_error(*ticket), held, memory);
  hold_memory(held, std::move(memory));
}

void WorkEntry::keep_memory() { memory = memory_of(outputs.lists, kept); }

void WorkEntry::record_phases(const char* title) {
  // The thread that closes the event holds this entry.
  event.before_close([this, title] { accl::record_phases(title, bridge::ticket_phases(*ticket)); });
}

std::exception_ptr WorkEntry::error() const {
  return to_exception(bridge::ticket_error(*ticket));
}

namespace {

void complete_future(c10::ivalue::Future& future, const WorkEntry& entry) {
  if (const auto error = entry.error()) return future.setError(error);
  try {
    // On an accelerator, callbacks run behind the results.
    c10::OptionalStreamGuard on;
    if (entry.accelerator) on.reset_stream(entry.accelerator->results_stream());
    future.markCompleted(entry.outputs.value());
  } catch (const std::exception&) {
    // A device that has failed since: threads that wait for the future must not wait for ever.
    if (!future.completed()) return future.setError(std::current_exception());
    throw;
  }
}

}  // namespace

// Runs on a completion thread. Holds the list, and a plain pointer to the entry. The list keeps a watched entry until
// `task_has_run`, so that this thread never drops the last reference to it.
struct EntryCompletion final : bridge::CompletionTask {
  // The entry's `tasks` counts the task already.
  EntryCompletion(std::shared_ptr<InFlight> home, WorkEntry* entry, bool runs_hooks)
      : home(std::move(home)), entry(entry), runs_hooks(runs_hooks) {}

  bool run() noexcept override {
    if (entry != nullptr) {
      if (entry->claim()) home->complete(*entry);
      if (runs_hooks) home->run_hooks(*entry);
      // From here on the list may release the entry.
      std::exchange(entry, nullptr)->tasks.fetch_sub(1, std::memory_order_release);
    }
    return home->schedule_drain();
  }

  std::shared_ptr<InFlight> home;
  WorkEntry* entry;
  bool runs_hooks;
};

void InFlight::add(std::shared_ptr<WorkEntry> entry) {
  const auto lock = lock_.hold();
  if (lock) entries_.push_back(std::move(entry));
}

void InFlight::drain(size_t budget) {
  // Destroyed after the lock is released: dropping the last reference to a tensor may take the GIL.
  std::vector<std::shared_ptr<WorkEntry>> leaving;
  std::vector<WorkEntry*> claimed;
  {
    const auto lock = lock_.hold();
    if (!lock) return;
    for (size_t looked = std::min(budget, entries_.size()); looked > 0 && !entries_.empty(); --looked) {
      if (cursor_ >= entries_.size()) cursor_ = 0;
      auto& entry = entries_[cursor_];
      // An entry belongs to its completion tasks until they have run.
      const bool is_ours = entry->tasks.load(std::memory_order_acquire) == 0;
      const bool mine = is_ours && entry->ended() && entry->claim();
      const bool free = is_ours && entry->completed() && entry->through();
      if (!mine && !free) {
        ++cursor_;
        continue;
      }
      if (mine) {
        claimed.push_back(entry.get());
        // Closed here because the entry leaves the list: a completion thread would only have its address, so it must
        // not get the entry any more.
        entry->closed = true;
      }
      leaving.push_back(std::move(entry));
      entry = std::move(entries_.back());
      entries_.pop_back();
    }
  }
  for (WorkEntry* entry : claimed) complete(*entry);
}

void InFlight::complete(WorkEntry& entry) noexcept {
  // Closed first, because a thread that waits for the call may end the profile next.
  entry.event.close();
  if (!lock_.is_ours()) return entry.state.store(WorkEntry::kCompleted, std::memory_order_seq_cst);
  const bool has_hooks = !entry.has_hook_task && (completion_hooks_.any() || abort_hooks_.any());
  bool calls_out = has_hooks;
  {
    const auto lock = lock_.hold();
    entry.closed = true;
    calls_out = calls_out || entry.future;
    // Inside hooks and callbacks of this call, the call counts as complete.
    if (calls_out) completers_.push_back(::pthread_self());
  }
  if (has_hooks) run_hooks(entry);
  // Once the entry is closed, no thread changes the future. It is used in place, so that this thread holds no reference
  // of its own.
  if (entry.future) {
    try {
      at::ThreadLocalStateGuard as_caller(*entry.caller);
      complete_future(*entry.future, entry);
    } catch (const std::exception& thrown) {
      TORCH_WARN_ONCE("accl: a callback of a future raised: ", thrown.what());
    }
  }
  if (calls_out) {
    const auto lock = lock_.hold();
    completers_.erase(std::find(completers_.rbegin(), completers_.rend(), ::pthread_self()).base() - 1);
  }
  if (is_extended()) expire(entry.key);
  // The last access: from here on another thread may free the entry. Both this store and the count of waiters are
  // sequentially consistent: either a waiter sees the state, or this thread sees the waiter.
  entry.state.store(WorkEntry::kCompleted, std::memory_order_seq_cst);
  if (waiters_.load(std::memory_order_seq_cst) == 0) return;
  // Taken under the lock: otherwise the notification could come between a waiter's check and its sleep.
  const auto lock = lock_.hold();
  completed_.notify_all();
}

bool InFlight::is_completer() const {
  return std::find(completers_.begin(), completers_.end(), ::pthread_self()) != completers_.end();
}

bool InFlight::try_complete(WorkEntry& entry) {
  {
    const auto lock = lock_.hold();
    // Inside a callback, calls count as complete: otherwise the callback would wait for itself.
    if (lock && is_completer()) return true;
    // A completion thread that watches the entry runs the callbacks. Without one, this thread claims the entry.
    if ((lock && entry.future && entry.watched) || !entry.claim()) return entry.completed();
    entry.closed = true;
  }
  complete(entry);
  return true;
}

void InFlight::await_completed(const WorkEntry& entry, std::chrono::steady_clock::time_point deadline) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kSignalCheck{50};
  const auto begun = Clock::now();
  const auto how = without_gil([&] {
    auto lock = lock_.hold();
    // In a forked child, the thread that claimed the call does not exist.
    if (!lock) return Outcome::Done;
    // Callbacks of several calls may wait for each other's calls. For a callback it is enough that the outputs are
    // written.
    if (is_completer()) return Outcome::Done;
    waiters_.fetch_add(1, std::memory_order_seq_cst);
    auto how = Outcome::Done;
    while (!entry.completed()) {
      if (Clock::now() >= deadline) {
        how = Outcome::Running;
        break;
      }
      completed_.wait_until(lock, std::min(deadline, Clock::now() + kSignalCheck));
      lock.unlock();
      const bool raised = bridge::python_interrupted();
      lock.lock();
      if (raised) {
        how = Outcome::Interrupted;
        break;
      }
    }
    waiters_.fetch_sub(1, std::memory_order_relaxed);
    return how;
  });
  if (how == Outcome::Interrupted) throw_python_error_if_set();
  if (how == Outcome::Done || entry.completed()) return;
  const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begun).count();
  throw_status({Kind::Timeout,
                "accl: wait: Timed out waiting " + std::to_string(waited) +
                    "ms for a callback of this call's future; the call itself has completed",
                -1, -1});
}

// --- hooks ---

void InFlight::run_hooks(const WorkEntry& entry) noexcept {
  const auto report = bridge::ticket_report(*entry.ticket);
  if (!is_ok(report.status)) {
    if (report.status.kind == Kind::Timeout) run_abort_hooks();
    return;
  }
  if (report.value < -1) return;  // only this call failed, not the group
  CompletionHookArgs ended;
  ended.completionKey = entry.key;
  if (report.value >= 0) ended.duration_ms = static_cast<float>(report.value) / 1e6F;
  without_gil([&] {
    for (const auto& hook : completion_hooks_.all()) {
      try {
        (*hook)(ended);
      } catch (const std::exception& thrown) {
        TORCH_WARN_ONCE("accl: a completion hook raised: ", thrown.what());
      }
    }
  });
}

void InFlight::run_abort_hooks() noexcept {
  without_gil([&] {
    for (const auto& hook : abort_hooks_.all()) {
      try {
        (*hook)();
      } catch (const std::exception& thrown) {
        TORCH_WARN_ONCE("accl: an abort hook raised: ", thrown.what());
      }
    }
  });
}

// --- ephemeral timeouts ---

void InFlight::extend(std::chrono::milliseconds added) {
  const auto lock = lock_.hold();
  if (!lock) return;
  extensions_.push_back({added, std::nullopt});
  extended_.store(true, std::memory_order_relaxed);
}

std::chrono::milliseconds InFlight::extension(uint64_t key) {
  const auto lock = lock_.hold();
  std::chrono::milliseconds sum{0};
  if (!lock) return sum;
  for (auto& one : extensions_) {
    if (!one.first) one.first = key;
    sum = sum_of(sum, one.added);
  }
  return sum;
}

void InFlight::expire(uint64_t key) {
  const auto lock = lock_.hold();
  if (!lock) return;
  extensions_.erase(std::remove_if(extensions_.begin(), extensions_.end(), [&](const auto& one) { return one.first == key; }),
                    extensions_.end());
  extended_.store(!extensions_.empty(), std::memory_order_relaxed);
}

c10::intrusive_ptr<c10::ivalue::Future> InFlight::future_of(const std::shared_ptr<WorkEntry>& entry) {
  at::ThreadLocalState caller;
  std::vector<c10::Device> devices;
  if (entry->accelerator) devices.push_back(entry->accelerator->device());
  auto future = c10::make_intrusive<c10::ivalue::Future>(entry->outputs.type(), std::move(devices));
  bool closed = false;
  {
    const auto lock = lock_.hold();
    if (lock && entry->future) return entry->future;
    closed = lock ? entry->closed : entry->completed();
    if (lock && !closed) {
      entry->future = future;
      entry->caller = caller;
    }
  }
  if (closed) {
    complete_future(*future, *entry);
  } else {
    watch(entry);
  }
  return future;
}

void InFlight::end_when_through(const std::shared_ptr<WorkEntry>& entry) {
  entry->has_hook_task = true;
  entry->tasks.fetch_add(1, std::memory_order_relaxed);
  auto task = std::make_unique<EntryCompletion>(shared_from_this(), entry.get(), true);
  if (is_ok(bridge::ticket_when_through(*entry->ticket, std::move(task)))) return;
  // Without a completion thread, the thread that completes the entry runs the hooks.
  entry->tasks.fetch_sub(1, std::memory_order_relaxed);
  entry->has_hook_task = false;
}

void InFlight::watch(const std::shared_ptr<WorkEntry>& entry) {
  {
    const auto lock = lock_.hold();
    // In a forked child the ticket refuses the request below.
    if (lock && (entry->closed || entry->watched)) return;
    if (lock) entry->watched = true;
    // Under the lock, so that no drain takes the entry before the task has it.
    entry->tasks.fetch_add(1, std::memory_order_relaxed);
  }
  // If there is no completion thread, the drains complete the entry, as for an entry that is not watched.
  const auto status =
      bridge::ticket_when_done(*entry->ticket, std::make_unique<EntryCompletion>(shared_from_this(), entry.get(), false));
  if (is_ok(status)) return;
  {
    const auto lock = lock_.hold();
    entry->tasks.fetch_sub(1, std::memory_order_relaxed);
    if (lock) entry->watched = false;
  }
  throw_status(status);
}

// --- batches ---

bool InFlight::in_batch() {
  if (batch_count_.load(std::memory_order_acquire) == 0) return false;
  const auto lock = lock_.hold();
  return lock && batches_.count(::pthread_self()) != 0;
}

bool InFlight::collect(const c10::intrusive_ptr<c10d::Work>& work) {
  if (batch_count_.load(std::memory_order_acquire) == 0) return false;
  const auto lock = lock_.hold();
  if (!lock) return false;
  const auto found = batches_.find(::pthread_self());
  if (found == batches_.end()) return false;
  found->second.push_back(work);
  return true;
}

void InFlight::begin_batch() {
  end_batch();
  const auto lock = lock_.hold();
  if (!lock) return;
  batches_.try_emplace(::pthread_self());
  batch_count_.store(batches_.size(), std::memory_order_release);
}

std::vector<c10::intrusive_ptr<c10d::Work>> InFlight::end_batch() {
  const auto lock = lock_.hold();
  if (!lock) return {};
  auto node = batches_.extract(::pthread_self());
  batch_count_.store(batches_.size(), std::memory_order_release);
  return node.empty() ? std::vector<c10::intrusive_ptr<c10d::Work>>() : std::move(node.mapped());
}

void InFlight::drop_batches() {
  // Destroyed after the lock is released: the destructor of a work takes the lock.
  decltype(batches_) dropped;
  const auto lock = lock_.hold();
  if (!lock) return;
  dropped.swap(batches_);
  batch_count_.store(0, std::memory_order_release);
}

bool InFlight::schedule_drain() noexcept {
  // While Python finalizes, it runs no pending calls.
  if (!python_is_up()) return true;
  // At most one at a time: Python's queue of pending calls is short.
  if (scheduled_.exchange(true)) return true;
  auto* list = new (std::nothrow) std::shared_ptr<InFlight>(shared_from_this());
  if (list != nullptr && Py_AddPendingCall(&InFlight::drain_now, list) == 0) return true;
  // Not the last reference: the caller holds one.
  delete list;
  scheduled_.store(false);
  return false;
}

int InFlight::drain_now(void* list) noexcept {
  std::unique_ptr<std::shared_ptr<InFlight>> home(static_cast<std::shared_ptr<InFlight>*>(list));
  (*home)->scheduled_.store(false);
  (*home)->drain(std::numeric_limits<size_t>::max());
  return 0;
}

}  // namespace accl
