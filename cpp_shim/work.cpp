// Works, their completion, and the errors they raise.
#include "work.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <new>

#include <ATen/record_function.h>
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

void throw_status(const bridge::Status& status) {
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

std::exception_ptr to_exception(const bridge::Status& status) {
  if (is_ok(status)) return nullptr;
  try {
    throw_status(status);
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

namespace {

bool python_is_up() { return Py_IsInitialized() != 0 && Py_IsFinalizing() == 0; }

}  // namespace

void throw_python_error_if_set() {
  if (!python_is_up()) return;
  py::gil_scoped_acquire gil;
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
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
  throw_unless_done(without_gil([&] { return bridge::group_call(group, args); }));
}

bridge::Waited wait_without_gil(const bridge::Ticket& ticket, std::chrono::milliseconds timeout) {
  return without_gil([&] { return bridge::ticket_wait(ticket, timeout == kNoTimeout ? -1 : timeout.count()); });
}

void monitored_barrier_without_gil(const bridge::Group& group, std::chrono::milliseconds timeout, bool wait_all) {
  throw_unless_done(without_gil([&] { return bridge::group_monitored_barrier(group, timeout.count(), wait_all); }));
}

void run_without_gil(std::unique_ptr<bridge::Body> body) {
  const auto status = without_gil([&] { return bridge::run_body(std::move(body)); });
  throw_python_error_if_set();
  throw_unless_ok(status);
}

bridge::Status bridge::run_body(std::unique_ptr<Body> body) noexcept { return body->run(); }

// --- outputs ---

c10::TypePtr Outputs::type() const {
  auto flat = c10::ListType::create(c10::TensorType::get());
  return lists.size() > 1 ? c10::ListType::create(flat) : flat;
}

c10::IValue Outputs::value() const {
  if (lists.size() > 1) return c10::IValue(lists);
  return c10::IValue(lists.empty() ? Tensors() : lists[0]);
}

// --- flights ---

bool Flight::ended() const {
  return settled() || bridge::ticket_done(*ticket).how != Outcome::Running;
}

void Flight::keep_memory() {
  for (const auto& list : outputs.lists) {
    for (const auto& tensor : list) memory.push_back(tensor.storage());
  }
  for (const auto& tensor : kept) memory.push_back(tensor.storage());
}

std::exception_ptr Flight::error() const {
  return to_exception(bridge::ticket_error(*ticket));
}

namespace {

void complete(c10::ivalue::Future& future, const Flight& flight) {
  if (const auto error = flight.error()) {
    future.setError(error);
  } else {
    future.markCompleted(flight.outputs.value());
  }
}

}  // namespace

// Sent to a completion thread. Holds the list, and a plain pointer to the flight: the list keeps a watched flight until
// `arrived`, so that this thread never drops the last reference to it.
struct FlightArrival final : bridge::Arrival {
  FlightArrival(std::shared_ptr<InFlight> home, Flight* flight) : home(std::move(home)), flight(flight) {}

  bool arrive() noexcept override {
    if (flight != nullptr) {
      if (flight->claim()) home->settle(*flight);
      // The list may let it go from here on.
      std::exchange(flight, nullptr)->arrived.store(true, std::memory_order_release);
    }
    return home->schedule_drain();
  }

  std::shared_ptr<InFlight> home;
  Flight* flight;
};

bool bridge::arrive(Arrival& arrival) noexcept { return arrival.arrive(); }

void InFlight::add(std::shared_ptr<Flight> flight) {
  std::lock_guard<std::mutex> lock(mutex_);
  flights_.push_back(std::move(flight));
}

void InFlight::drain(size_t budget) {
  // Dropped after the lock: the last reference to a tensor may take the GIL.
  std::vector<std::shared_ptr<Flight>> leaving;
  std::vector<Flight*> claimed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t looked = std::min(budget, flights_.size()); looked > 0 && !flights_.empty(); --looked) {
      if (cursor_ >= flights_.size()) cursor_ = 0;
      auto& flight = flights_[cursor_];
      // A watched flight belongs to its completion thread until that thread has arrived.
      const bool mine = !flight->watched && flight->ended() && flight->claim();
      const bool free = flight->settled() && (!flight->watched || flight->arrived.load(std::memory_order_acquire));
      if (!mine && !free) {
        ++cursor_;
        continue;
      }
      if (mine) claimed.push_back(flight.get());
      leaving.push_back(std::move(flight));
      flight = std::move(flights_.back());
      flights_.pop_back();
    }
  }
  for (Flight* flight : claimed) settle(*flight);
}

void InFlight::settle(Flight& flight) noexcept {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    flight.closed = true;
  }
  // Once closed, nobody changes the future; it is used where it lies, so that this thread holds no reference of its own.
  if (flight.future) {
    try {
      at::ThreadLocalStateGuard as_caller(*flight.caller);
      complete(*flight.future, flight);
    } catch (const std::exception& thrown) {
      TORCH_WARN_ONCE("accl: a callback of a future raised: ", thrown.what());
    }
  }
  if (flight.end_event) {
    flight.end_event();
    flight.end_event = nullptr;
  }
  // The last touch: from here on another thread may free the flight.
  flight.state.store(Flight::kSettled, std::memory_order_release);
}

c10::intrusive_ptr<c10::ivalue::Future> InFlight::future_of(const std::shared_ptr<Flight>& flight) {
  at::ThreadLocalState caller;
  auto future = c10::make_intrusive<c10::ivalue::Future>(flight->outputs.type());
  bool closed = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (flight->future) return flight->future;
    closed = flight->closed;
    if (!closed) {
      flight->future = future;
      flight->caller = caller;
    }
  }
  if (closed) {
    complete(*future, *flight);
  } else {
    watch(flight);
  }
  return future;
}

void InFlight::watch(const std::shared_ptr<Flight>& flight) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (flight->closed || flight->watched) return;
    flight->watched = true;
  }
  // Without a completion thread the drains complete it, as if nobody had asked.
  const auto status =
      bridge::ticket_when_done(*flight->ticket, std::make_unique<FlightArrival>(shared_from_this(), flight.get()));
  if (is_ok(status)) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    flight->watched = false;
  }
  throw_status(status);
}

std::vector<c10::intrusive_ptr<AcclWork>>* InFlight::batch() {
  if (batch_count_.load(std::memory_order_acquire) == 0) return nullptr;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = batches_.find(::pthread_self());
  return found == batches_.end() ? nullptr : &found->second;
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
    : Work(rank, type, title, profiled), home_(std::move(home)), flight_(std::make_shared<Flight>()) {
  flight_->outputs = std::move(outputs);
  // The flight outlives a handle that was dropped, and its event must be closed all the same.
  flight_->end_event = std::exchange(recordFunctionEndCallback_, nullptr);
}

AcclWork::~AcclWork() {
  // Nobody can wait any more: somebody must come, so that the tensors are let go.
  if (flight_->state.load(std::memory_order_acquire) != Flight::kRunning) return;
  try {
    home_->watch(flight_);
  } catch (const std::exception& thrown) {
    // The next drain completes it.
    TORCH_WARN_ONCE("accl: a call cannot be watched: ", thrown.what());
  }
}

bool AcclWork::isCompleted() {
  if (flight_->settled()) return true;
  if (bridge::ticket_poll(*flight_->ticket).how == Outcome::Running) return false;
  home_->drain(8);
  return true;
}

bool AcclWork::isSuccess() const { return flight_->ended() && exception() == nullptr; }

std::exception_ptr AcclWork::exception() const { return flight_->ended() ? flight_->error() : nullptr; }

int AcclWork::sourceRank() const {
  const auto source = bridge::ticket_source(*flight_->ticket);
  throw_unless_ok(source.status);
  TORCH_CHECK(source.value >= 0, "sourceRank() may only be called on a receive that is complete");
  return static_cast<int>(source.value);
}

Tensors AcclWork::result() {
  TORCH_CHECK(flight_->ended(), "Work needs to be completed before calling result(). Should call wait() before result().");
  TORCH_CHECK(flight_->outputs.lists.size() <= 1,
              "work result does not support list of lists, use .getFuture() and value()");
  return flight_->outputs.lists.empty() ? Tensors() : flight_->outputs.lists[0];
}

bool AcclWork::wait(std::chrono::milliseconds timeout) {
  if (!flight_->settled()) {
    const auto waited = wait_without_gil(*flight_->ticket, timeout);
    // The call may run on: the wait's own time has passed, a signal handler raised, or the wait itself broke.
    if (waited.how == Outcome::Interrupted || !flight_->ended()) throw_unless_done(waited);
    if (flight_->claim()) home_->settle(*flight_);
    home_->drain(8);
  }
  if (const auto error = flight_->error()) std::rethrow_exception(error);
  return true;
}

void AcclWork::abort() { throw_unless_ok(bridge::ticket_abort(*flight_->ticket, "Work.abort() was called")); }

c10::intrusive_ptr<c10::ivalue::Future> AcclWork::getFuture() { return home_->future_of(flight_); }

float AcclWork::getDuration() const {
  const auto nanos = bridge::ticket_nanos(*flight_->ticket);
  throw_unless_ok(nanos.status);
  TORCH_CHECK(nanos.value >= 0, "getDuration() needs a completed call and timing, see enable_collectives_timing()");
  return static_cast<float>(nanos.value) / 1e6F;
}

uint64_t AcclWork::getSequencenumber() const {
  if (flight_->seq >= 0) return static_cast<uint64_t>(flight_->seq);
  const auto seq = bridge::ticket_seq(*flight_->ticket);
  throw_unless_ok(seq.status);
  return static_cast<uint64_t>(seq.value);
}

void AcclWork::settle_here() {
  if (flight_->claim()) home_->settle(*flight_);
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
