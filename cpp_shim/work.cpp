// See work.h.
#include "work.h"

#include <algorithm>

#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "interpreter.h"
#include "timeouts.h"

namespace accl {

using bridge::Outcome;

AcclWork::AcclWork(int rank, c10d::OpType type, const char* title, const std::optional<Tensors>& profiled,
                   std::shared_ptr<InFlight> home, Outputs outputs, ProfileNames names, int64_t elements)
    : Work(rank, type, names.asynchronous(title), profiled),
      home_(std::move(home)),
      entry_(std::make_shared<WorkEntry>()),
      title_(title),
      names_(names),
      elements_(elements) {
  entry_->outputs = std::move(outputs);
  entry_->key = home_->next_key();
  // The entry outlives a dropped handle, and its event must still be closed.
  entry_->event = AsyncEvent(std::exchange(recordFunctionEndCallback_, nullptr));
}

AcclWork::~AcclWork() {
  // No caller can wait any more, so a completion thread must complete the call and release its tensors.
  if (entry_->state.load(std::memory_order_acquire) != WorkEntry::kRunning) return;
  try {
    home_->watch(entry_);
  } catch (const OutOfResources& thrown) {
    // The next drain completes the entry.
    TORCH_WARN_ONCE("accl: no thread can watch a call for completion: ", thrown.what());
  } catch (const std::exception&) {
    // The engine has shut down and has ended the call.
  }
}

bool AcclWork::isCompleted() {
  if (entry_->completed() && entry_->through()) return true;
  if (bridge::ticket_poll(*entry_->ticket).how == Outcome::Running) return false;
  const bool completed = home_->try_complete(*entry_);
  home_->drain(8);
  return completed;
}

bool AcclWork::isSuccess() const { return entry_->ended() && exception() == nullptr; }

std::exception_ptr AcclWork::exception() const { return entry_->ended() ? entry_->error() : nullptr; }

int AcclWork::sourceRank() const {
  const auto source = value_of(bridge::ticket_source(*entry_->ticket));
  TORCH_CHECK(source >= 0, "sourceRank() may only be called on a receive that is complete");
  return static_cast<int>(source);
}

Tensors AcclWork::result() {
  TORCH_CHECK(entry_->ended(), "Work needs to be completed before calling result(). Should call wait() before result().");
  TORCH_CHECK(entry_->outputs.lists.size() <= 1,
              "work result does not support list of lists, use .getFuture() and value()");
  return entry_->outputs.lists.empty() ? Tensors() : entry_->outputs.lists[0];
}

// While a graph is compiled, torch keeps works for a later wait. A caller that waits itself no longer needs that.
static void forget(c10d::Work& work) {
  if (!c10d::allow_inflight_collective_as_graph_input()) return;
  c10d::unregister_work(c10::intrusive_ptr<c10d::Work>::unsafe_reclaim_from_nonowning(&work));
}

bool AcclWork::wait(std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  Span waiting;
  if (at::hasCallbacks()) waiting.begin([this] { return names_.wait(title_, elements_); });
  if (!entry_->completed()) {
    const bool is_own = timeout <= kNoTimeout;
    const auto begun = is_own ? Clock::time_point() : Clock::now();
    const auto waited = without_gil([&] { return bridge::ticket_wait(*entry_->ticket, is_own ? -1 : timeout.count()); });
    // The call may still be running: the time of this wait has passed, a signal handler raised, or the wait itself
    // failed.
    if (waited.how == Outcome::Interrupted || !entry_->ended()) throw_unless_done(waited);
    if (entry_->claim()) {
      home_->complete(*entry_);
    } else if (!entry_->completed()) {
      home_->await_completed(*entry_, is_own ? deadline_after(entry_->timeout) : deadline_after(timeout, begun));
    }
    home_->drain(8);
  }
  forget(*this);
  throw_unless_ok(bridge::ticket_error(*entry_->ticket));
  if (entry_->accelerator) entry_->accelerator->block_current_stream();
  return true;
}

void AcclWork::blockCurrentStream() {
  TORCH_CHECK_NOT_IMPLEMENTED(retrieveOpType() != c10d::OpType::_ALLREDUCE_SPARSE,
                              "accl: block_current_stream: a sparse sum uses the stream itself; call wait()");
  if (!entry_->accelerator) return Work::blockCurrentStream();
  if (entry_->accelerator->copies_on_current_stream()) return static_cast<void>(wait());  // A block would hold up the copies.
  block_stream_until_through(entry_->accelerator, *getFuture(), entry_->timeout);
}

void AcclWork::abort() { throw_unless_ok(bridge::ticket_abort(*entry_->ticket, "Work.abort() was called")); }

c10::intrusive_ptr<c10::ivalue::Future> AcclWork::getFuture() { return home_->future_of(entry_); }

float AcclWork::getDuration() const {
  const auto nanos = value_of(bridge::ticket_nanos(*entry_->ticket));
  TORCH_CHECK(nanos >= 0, "getDuration() needs a completed call and timing, see enable_collectives_timing()");
  return static_cast<float>(nanos) / 1e6F;
}

uint64_t AcclWork::getSequencenumber() const {
  if (entry_->seq >= 0) return static_cast<uint64_t>(entry_->seq);
  return static_cast<uint64_t>(value_of(bridge::ticket_seq(*entry_->ticket)));
}

void AcclWork::complete_here() {
  if (entry_->claim()) home_->complete(*entry_);
}

// --- CoalescedWork ---

CoalescedWork::CoalescedWork(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> parts)
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
  const auto deadline = deadline_after(timeout);
  for (const auto& part : parts_) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    part->wait(timeout <= kNoTimeout ? timeout : std::max(left, std::chrono::milliseconds(1)));
  }
  forget(*this);
  return true;
}

void CoalescedWork::abort() {
  if (!parts_.empty()) parts_.front()->abort();
}

c10::intrusive_ptr<c10::ivalue::Future> CoalescedWork::getFuture() {
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(c10::FutureType::create(c10::ListType::ofTensors()));
  std::vector<c10::Device> devices;
  for (const auto& part : parts_) {
    futures.push_back(part->getFuture());
    for (const auto& device : futures.get(futures.size() - 1)->devices()) devices.push_back(device);
  }
  auto result = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), std::move(devices));
  c10::collectAll(futures)->addCallback(
      [result, futures](c10::ivalue::Future& all) {
        if (all.hasError()) return result->setError(all.exception_ptr());
        std::vector<c10::Stream> streams;
        for (const auto& device : result->devices()) {
          streams.push_back(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
        }
        const c10::MultiStreamGuard on(streams);
        Tensors tensors;
        for (const c10::IValue& future : all.value().toListRef()) {
          // The current streams wait for the results of a part on an accelerator.
          future.toFuture()->wait();
          for (const c10::IValue& item : future.toFuture()->value().toListRef()) {
            if (item.isTensor()) {
              tensors.push_back(item.toTensor());
            } else {
              for (const at::Tensor& tensor : item.toTensorVector()) tensors.push_back(tensor);
            }
          }
        }
        result->markCompleted(c10::IValue(std::move(tensors)));
      });
  return result;
}

void CoalescedWork::blockCurrentStream() {
  for (const auto& part : parts_) part->blockCurrentStream();
}

uint64_t CoalescedWork::getSequencenumber() const { return parts_.empty() ? 0 : parts_.back()->getSequencenumber(); }

}  // namespace accl
