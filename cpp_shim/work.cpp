// Works, their completion, and the errors they raise.
#include "work.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/utils/pybind.h>

namespace accl {

using bridge::Kind;
using bridge::Outcome;

// --- errors ---

namespace {

// A MemoryError that keeps its sentence.
class OutOfResources final : public std::bad_alloc {
 public:
  explicit OutOfResources(std::string message) : message_(std::make_shared<std::string>(std::move(message))) {}
  const char* what() const noexcept override { return message_->c_str(); }

 private:
  std::shared_ptr<const std::string> message_;
};

}  // namespace

namespace {

bool python_is_up() { return Py_IsInitialized() != 0 && Py_IsFinalizing() == 0; }

// A class of the Python package: what is refused is a RuntimeError, too, as with gloo, and no class of C++ is both.
void throw_python(const char* name, const std::string& message) {
  if (!python_is_up()) return;
  py::gil_scoped_acquire gil;
  const py::object type = py::module_::import("torch_accl._errors").attr(name);
  PyErr_SetString(type.ptr(), message.c_str());
  throw py::error_already_set();
}

[[noreturn]] void throw_native(const bridge::Status& status) {
  const std::string message(status.message);
  switch (status.kind) {
    case Kind::InvalidArgument:
    case Kind::Configuration: C10_THROW_ERROR(ValueError, message);
    case Kind::InvalidType: C10_THROW_ERROR(TypeError, message);
    case Kind::Unsupported: C10_THROW_ERROR(NotImplementedError, message);
    case Kind::PeerLost:
    case Kind::Network: C10_THROW_ERROR(DistNetworkError, message);
    case Kind::Rendezvous: C10_THROW_ERROR(DistStoreError, message);
    case Kind::Exhausted: throw OutOfResources(message);
    case Kind::Mismatch:
    case Kind::Timeout:
    case Kind::Protocol:
    case Kind::Device:
    case Kind::Aborted:
    case Kind::Internal:
    case Kind::Ok: break;
  }
  C10_THROW_ERROR(DistBackendError, message);
}

}  // namespace

void throw_status(const bridge::Status& status) {
  if (status.kind == Kind::InvalidArgument) throw_python("InvalidArgumentError", std::string(status.message));
  if (status.kind == Kind::InvalidType) throw_python("InvalidTypeError", std::string(status.message));
  throw_native(status);
}

std::exception_ptr to_exception(const bridge::Status& status) {
  if (is_ok(status)) return nullptr;
  try {
    throw_native(status);
  } catch (...) {
    return std::current_exception();
  }
}

void refuse(Kind kind, const char* call, const std::string& message) {
  throw_status({kind, "accl: " + std::string(call) + ": " + message, -1, -1});
}

bridge::Status current_exception_status() noexcept {
  bridge::Status status{Kind::Internal, "accl: unknown exception in the shim", -1, -1};
  try {
    throw;
  } catch (const c10::Error& error) {
    if (dynamic_cast<const c10::NotImplementedError*>(&error) != nullptr) status.kind = Kind::Unsupported;
    if (dynamic_cast<const c10::ValueError*>(&error) != nullptr) status.kind = Kind::InvalidArgument;
    status.message = rust::String::lossy(error.what_without_backtrace());
  } catch (const std::bad_alloc& error) {
    status.kind = Kind::Exhausted;
    status.message = rust::String::lossy(error.what());
  } catch (const std::exception& error) {
    status.message = rust::String::lossy(error.what());
  } catch (...) {
    // Not an exception of ours or of torch: the message above stands.
  }
  return status;
}

// --- Python ---

void throw_python_error_if_set() {
  if (!python_is_up()) return;
  py::gil_scoped_acquire gil;
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
}

void finish_destroy() noexcept {
  if (!python_is_up()) return;
  py::gil_scoped_acquire gil;
  try {
    py::module_::import("torch_accl._register").attr("finish_destroy")();
  } catch (const std::exception& thrown) {
    TORCH_WARN_ONCE("accl: torch could not forget a group that was destroyed: ", thrown.what());
  }
}

void note_on_python_error(const bridge::Status& status) {
  if (!python_is_up()) return;
  py::gil_scoped_acquire gil;
  if (PyErr_Occurred() == nullptr) return;
  py::error_already_set raised;
  raised.value().attr("add_note")(std::string(status.message));
  raised.restore();
}

void throw_unless_done(const bridge::Waited& waited) {
  if (waited.how == Outcome::Interrupted) throw_python_error_if_set();
  throw_unless_ok(waited.status);
}

bool bridge::python_interrupted() noexcept {
  // Python runs signal handlers on its main thread only; no other thread needs to take the GIL for them.
  if (::syscall(SYS_gettid) != ::getpid() || !python_is_up()) return false;
  const PyGILState_STATE gil = PyGILState_Ensure();
  const bool raised = PyErr_CheckSignals() != 0;
  PyGILState_Release(gil);
  return raised;
}

namespace {

// Lets Python run while this thread works or waits; most callers have released the GIL already.
template <class Work>
auto without_gil(Work work) {
  std::optional<py::gil_scoped_release> released;
  if (python_is_up() && PyGILState_Check() != 0) released.emplace();
  return work();
}

}  // namespace

void call_without_gil(const bridge::Group& group, const bridge::CallArgs& args) {
  const auto waited = without_gil([&] { return bridge::group_call(group, args); });
  if (waited.how == Outcome::Interrupted) note_on_python_error(waited.status);
  throw_unless_done(waited);
}

bridge::Waited wait_without_gil(const bridge::Ticket& ticket, std::chrono::milliseconds timeout) {
  return without_gil([&] { return bridge::ticket_wait(ticket, timeout == kNoTimeout ? -1 : timeout.count()); });
}

void monitored_barrier_without_gil(const bridge::Group& group, std::chrono::milliseconds timeout, bool wait_all) {
  throw_unless_done(without_gil([&] { return bridge::group_monitored_barrier(group, timeout.count(), wait_all); }));
}

void connect_all_without_gil(const bridge::Group& group) {
  throw_unless_done(without_gil([&] { return bridge::group_connect_all(group); }));
}

void run_without_gil(std::unique_ptr<bridge::Task> task) {
  const auto status = without_gil([&] { return bridge::run_task(std::move(task)); });
  throw_python_error_if_set();
  throw_unless_ok(status);
}

bridge::Status shutdown_without_gil(const bridge::Group& group) {
  auto status = without_gil([&] { return bridge::group_shutdown(group, true); });
  throw_python_error_if_set();
  return status;
}

bridge::Status bridge::run_task(std::unique_ptr<Task> task) noexcept { return task->run(); }

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

bool WorkEntry::ended() const {
  return completed() || bridge::ticket_done(*ticket).how != Outcome::Running;
}

void WorkEntry::keep_memory() {
  for (const auto& list : outputs.lists) {
    for (const auto& tensor : list) memory.push_back(tensor.storage());
  }
  for (const auto& tensor : kept) memory.push_back(tensor.storage());
}

std::exception_ptr WorkEntry::error() const {
  return to_exception(bridge::ticket_error(*ticket));
}

namespace {

void complete_future(c10::ivalue::Future& future, const WorkEntry& entry) {
  if (const auto error = entry.error()) {
    future.setError(error);
  } else {
    future.markCompleted(entry.outputs.value());
  }
}

}  // namespace

// Sent to a completion thread. Holds the list, and a plain pointer to the entry: the list keeps a watched entry until
// `task_has_run`, so that this thread never drops the last reference to it.
struct EntryCompletion final : bridge::CompletionTask {
  EntryCompletion(std::shared_ptr<InFlight> home, WorkEntry* entry) : home(std::move(home)), entry(entry) {}

  bool run() noexcept override {
    if (entry != nullptr) {
      if (entry->claim()) home->complete(*entry);
      // The list may let it go from here on.
      std::exchange(entry, nullptr)->task_has_run.store(true, std::memory_order_release);
    }
    return home->schedule_drain();
  }

  std::shared_ptr<InFlight> home;
  WorkEntry* entry;
};

bool bridge::run_completion(CompletionTask& task) noexcept { return task.run(); }

void InFlight::add(std::shared_ptr<WorkEntry> entry) {
  std::lock_guard<std::mutex> lock(mutex_);
  entries_.push_back(std::move(entry));
}

void InFlight::drain(size_t budget) {
  // Dropped after the lock: the last reference to a tensor may take the GIL.
  std::vector<std::shared_ptr<WorkEntry>> leaving;
  std::vector<WorkEntry*> claimed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t looked = std::min(budget, entries_.size()); looked > 0 && !entries_.empty(); --looked) {
      if (cursor_ >= entries_.size()) cursor_ = 0;
      auto& entry = entries_[cursor_];
      // A watched entry belongs to its completion thread until that thread has run its task.
      const bool mine = !entry->watched && entry->ended() && entry->claim();
      const bool free = entry->completed() && (!entry->watched || entry->task_has_run.load(std::memory_order_acquire));
      if (!mine && !free) {
        ++cursor_;
        continue;
      }
      if (mine) {
        claimed.push_back(entry.get());
        // Here, since it leaves the list: nobody may hand it to a completion thread any more, which has only its address.
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
  const bool has_hooks = completion_hooks_.any() || abort_hooks_.any();
  bool calls_out = has_hooks;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    entry.closed = true;
    calls_out = calls_out || entry.future;
    // For hooks and callbacks of this call it is over.
    if (calls_out) completers_.push_back(::pthread_self());
  }
  if (has_hooks) tell_hooks(entry);
  // Once closed, nobody changes the future; it is used where it lies, so that this thread holds no reference of its own.
  if (entry.future) {
    try {
      at::ThreadLocalStateGuard as_caller(*entry.caller);
      complete_future(*entry.future, entry);
    } catch (const std::exception& thrown) {
      TORCH_WARN_ONCE("accl: a callback of a future raised: ", thrown.what());
    }
  }
  if (calls_out) {
    std::lock_guard<std::mutex> lock(mutex_);
    completers_.erase(std::find(completers_.rbegin(), completers_.rend(), ::pthread_self()).base() - 1);
  }
  if (entry.end_event) {
    entry.end_event();
    entry.end_event = nullptr;
  }
  if (is_extended()) expire(entry.key);
  // The last touch: from here on another thread may free the entry. In one order with the count of waiters: either they
  // see the state, or they are seen here.
  entry.state.store(WorkEntry::kCompleted, std::memory_order_seq_cst);
  if (waiters_.load(std::memory_order_seq_cst) == 0) return;
  // Under the lock, or it could fall between a waiter's look and its sleep.
  std::lock_guard<std::mutex> lock(mutex_);
  completed_.notify_all();
}

bool InFlight::is_completer() const {
  return std::find(completers_.begin(), completers_.end(), ::pthread_self()) != completers_.end();
}

bool InFlight::try_complete(WorkEntry& entry) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // For its own callbacks a call is over: they would wait for themselves.
    if (is_completer()) return true;
    // The completion thread runs callbacks, unless there was none.
    if ((entry.future && entry.watched) || !entry.claim()) return entry.completed();
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
    std::unique_lock<std::mutex> lock(mutex_);
    // Callbacks of several calls may wait for these calls in turn; for them the outputs are enough.
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
                    "ms for a callback of this call's future; the call itself is over",
                -1, -1});
}

// --- hooks ---

void InFlight::tell_hooks(const WorkEntry& entry) noexcept {
  const auto report = bridge::ticket_report(*entry.ticket);
  if (!is_ok(report.status)) {
    if (report.status.kind == Kind::Timeout) run_abort_hooks();
    return;
  }
  if (report.value < -1) return;  // it failed alone
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
  std::lock_guard<std::mutex> lock(mutex_);
  extensions_.push_back({added, std::nullopt});
  extended_.store(true, std::memory_order_relaxed);
}

std::chrono::milliseconds InFlight::extension(uint64_t key) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::chrono::milliseconds sum{0};
  for (auto& one : extensions_) {
    if (!one.first) one.first = key;
    sum += one.added;
  }
  return sum;
}

void InFlight::expire(uint64_t key) {
  std::lock_guard<std::mutex> lock(mutex_);
  extensions_.erase(std::remove_if(extensions_.begin(), extensions_.end(), [&](const auto& one) { return one.first == key; }),
                    extensions_.end());
  extended_.store(!extensions_.empty(), std::memory_order_relaxed);
}

c10::intrusive_ptr<c10::ivalue::Future> InFlight::future_of(const std::shared_ptr<WorkEntry>& entry) {
  at::ThreadLocalState caller;
  auto future = c10::make_intrusive<c10::ivalue::Future>(entry->outputs.type());
  bool closed = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (entry->future) return entry->future;
    closed = entry->closed;
    if (!closed) {
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

void InFlight::watch(const std::shared_ptr<WorkEntry>& entry) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (entry->closed || entry->watched) return;
    entry->watched = true;
  }
  // Without a completion thread the drains complete it, as if nobody had asked.
  const auto status =
      bridge::ticket_when_done(*entry->ticket, std::make_unique<EntryCompletion>(shared_from_this(), entry.get()));
  if (is_ok(status)) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    entry->watched = false;
  }
  throw_status(status);
}

// --- batches ---

bool InFlight::in_batch() {
  if (batch_count_.load(std::memory_order_acquire) == 0) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  return batches_.count(::pthread_self()) != 0;
}

bool InFlight::collect(const c10::intrusive_ptr<AcclWork>& work) {
  if (batch_count_.load(std::memory_order_acquire) == 0) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = batches_.find(::pthread_self());
  if (found == batches_.end()) return false;
  found->second.push_back(work);
  return true;
}

void InFlight::begin_batch() {
  end_batch();
  std::lock_guard<std::mutex> lock(mutex_);
  batches_.try_emplace(::pthread_self());
  batch_count_.store(batches_.size(), std::memory_order_release);
}

std::vector<c10::intrusive_ptr<AcclWork>> InFlight::end_batch() {
  std::lock_guard<std::mutex> lock(mutex_);
  auto node = batches_.extract(::pthread_self());
  batch_count_.store(batches_.size(), std::memory_order_release);
  return node.empty() ? std::vector<c10::intrusive_ptr<AcclWork>>() : std::move(node.mapped());
}

void InFlight::drop_batches() {
  // Dropped after the lock: a work takes it when it goes.
  decltype(batches_) dropped;
  std::lock_guard<std::mutex> lock(mutex_);
  dropped.swap(batches_);
  batch_count_.store(0, std::memory_order_release);
}

bool InFlight::schedule_drain() noexcept {
  // While Python ends nothing would run it any more.
  if (!python_is_up()) return true;
  // One at a time: Python's queue of pending calls is short.
  if (scheduled_.exchange(true)) return true;
  auto* list = new (std::nothrow) std::shared_ptr<InFlight>(shared_from_this());
  if (list != nullptr && Py_AddPendingCall(&InFlight::drain_now, list) == 0) return true;
  // Not the last reference: the caller has one.
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

// --- AcclWork ---

AcclWork::AcclWork(int rank, c10d::OpType type, const char* title, const std::optional<Tensors>& profiled,
                   std::shared_ptr<InFlight> home, Outputs outputs)
    : Work(rank, type, title, profiled), home_(std::move(home)), entry_(std::make_shared<WorkEntry>()) {
  entry_->outputs = std::move(outputs);
  entry_->key = home_->next_key();
  // The entry outlives a handle that was dropped, and its event must be closed all the same.
  entry_->end_event = std::exchange(recordFunctionEndCallback_, nullptr);
}

AcclWork::~AcclWork() {
  // Nobody can wait any more: somebody must come, so that the tensors are let go.
  if (entry_->state.load(std::memory_order_acquire) != WorkEntry::kRunning) return;
  try {
    home_->watch(entry_);
  } catch (const OutOfResources& thrown) {
    // The next drain completes it.
    TORCH_WARN_ONCE("accl: a call cannot be watched: ", thrown.what());
  } catch (const std::exception&) {
    // The engine has ended, and the call with it.
  }
}

bool AcclWork::isCompleted() {
  if (entry_->completed()) return true;
  if (bridge::ticket_poll(*entry_->ticket).how == Outcome::Running) return false;
  const bool completed = home_->try_complete(*entry_);
  home_->drain(8);
  return completed;
}

bool AcclWork::isSuccess() const { return entry_->ended() && exception() == nullptr; }

std::exception_ptr AcclWork::exception() const { return entry_->ended() ? entry_->error() : nullptr; }

int AcclWork::sourceRank() const {
  const auto source = bridge::ticket_source(*entry_->ticket);
  throw_unless_ok(source.status);
  TORCH_CHECK(source.value >= 0, "sourceRank() may only be called on a receive that is complete");
  return static_cast<int>(source.value);
}

Tensors AcclWork::result() {
  TORCH_CHECK(entry_->ended(), "Work needs to be completed before calling result(). Should call wait() before result().");
  TORCH_CHECK(entry_->outputs.lists.size() <= 1,
              "work result does not support list of lists, use .getFuture() and value()");
  return entry_->outputs.lists.empty() ? Tensors() : entry_->outputs.lists[0];
}

// Who waits itself is nobody that torch keeps the work for, while a graph is compiled.
static void forget(c10d::Work& work) {
  if (!c10d::allow_inflight_collective_as_graph_input()) return;
  c10d::unregister_work(c10::intrusive_ptr<c10d::Work>::unsafe_reclaim_from_nonowning(&work));
}

bool AcclWork::wait(std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  if (!entry_->completed()) {
    const auto begun = timeout == kNoTimeout ? Clock::time_point() : Clock::now();
    const auto waited = wait_without_gil(*entry_->ticket, timeout);
    // The call may run on: the wait's own time has passed, a signal handler raised, or the wait itself broke.
    if (waited.how == Outcome::Interrupted || !entry_->ended()) throw_unless_done(waited);
    if (entry_->claim()) {
      home_->complete(*entry_);
    } else if (!entry_->completed()) {
      home_->await_completed(*entry_, timeout == kNoTimeout ? Clock::now() + entry_->timeout : begun + timeout);
    }
    home_->drain(8);
  }
  forget(*this);
  throw_unless_ok(bridge::ticket_error(*entry_->ticket));
  return true;
}

void AcclWork::abort() { throw_unless_ok(bridge::ticket_abort(*entry_->ticket, "Work.abort() was called")); }

c10::intrusive_ptr<c10::ivalue::Future> AcclWork::getFuture() { return home_->future_of(entry_); }

float AcclWork::getDuration() const {
  const auto nanos = bridge::ticket_nanos(*entry_->ticket);
  throw_unless_ok(nanos.status);
  TORCH_CHECK(nanos.value >= 0, "getDuration() needs a completed call and timing, see enable_collectives_timing()");
  return static_cast<float>(nanos.value) / 1e6F;
}

uint64_t AcclWork::getSequencenumber() const {
  if (entry_->seq >= 0) return static_cast<uint64_t>(entry_->seq);
  const auto seq = bridge::ticket_seq(*entry_->ticket);
  throw_unless_ok(seq.status);
  return static_cast<uint64_t>(seq.value);
}

void AcclWork::complete_here() {
  if (entry_->claim()) home_->complete(*entry_);
}

// --- CoalescedWork ---

CoalescedWork::CoalescedWork(int rank, std::vector<c10::intrusive_ptr<AcclWork>> parts)
    : Work(rank, c10d::OpType::COALESCED), parts_(std::move(parts)) {}

bool CoalescedWork::isCompleted() {
  bool all = true;
  for (const auto& part : parts_) all = part->isCompleted() && all;
  return all;
}

bool CoalescedWork::isSuccess() const {
  return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->isSuccess(); });
}

std::exception_ptr CoalescedWork::exception() const {
  for (const auto& part : parts_) {
    if (auto error = part->exception()) return error;
  }
  return nullptr;
}

Tensors CoalescedWork::result() {
  Tensors all;
  for (const auto& part : parts_) {
    for (auto& tensor : part->result()) all.push_back(std::move(tensor));
  }
  return all;
}

bool CoalescedWork::wait(std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + timeout;
  for (const auto& part : parts_) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    part->wait(timeout == kNoTimeout ? kNoTimeout : std::max(left, std::chrono::milliseconds(1)));
  }
  forget(*this);
  return true;
}

void CoalescedWork::abort() {
  if (!parts_.empty()) parts_.front()->abort();
}

c10::intrusive_ptr<c10::ivalue::Future> CoalescedWork::getFuture() {
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(c10::FutureType::create(c10::ListType::ofTensors()));
  for (const auto& part : parts_) futures.push_back(part->getFuture());
  return c10::collectAll(futures)->then(
      [](c10::ivalue::Future& all) {
        Tensors tensors;
        for (const c10::IValue& future : all.value().toListRef()) {
          for (const c10::IValue& item : future.toFuture()->value().toListRef()) {
            if (item.isTensor()) {
              tensors.push_back(item.toTensor());
            } else {
              for (const at::Tensor& tensor : item.toTensorVector()) tensors.push_back(tensor);
            }
          }
        }
        return c10::IValue(std::move(tensors));
      },
      c10::ListType::ofTensors());
}

uint64_t CoalescedWork::getSequencenumber() const { return parts_.empty() ? 0 : parts_.back()->getSequencenumber(); }

}  // namespace accl
