// See profile.h.
#include "profile.h"

#include <numeric>
#include <string_view>
#include <unordered_map>

#include "interpreter.h"

namespace accl {

namespace {

using ProfilerState = torch::profiler::impl::ProfilerStateBase;

// The profiler of this thread, or null.
ProfilerState* local_profiler() {
  return static_cast<ProfilerState*>(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE));
}

// The profiler of all threads, or null. Older torch releases return a plain pointer.
template <class State>
auto global_profiler(int) -> decltype(std::shared_ptr<ProfilerState>(State::getGlobal())) {
  return State::getGlobal();
}
template <class State>
auto global_profiler(long) -> decltype(State::get(true), std::shared_ptr<ProfilerState>()) {
  return {std::shared_ptr<ProfilerState>(), State::get(true)};
}

// Gives access to the callback handle. A profile that ends removes its callback before anything else.
struct OpenState : ProfilerState {
  static bool is_on(const ProfilerState& state) { return state.*(&OpenState::handle_) != 0; }
};

}  // namespace

int64_t elements_of(at::TensorList tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), int64_t{0},
                         [](int64_t sum, const at::Tensor& tensor) { return sum + tensor.numel(); });
}

std::string ProfileNames::call(const char* title) const {
  return std::string(bridge::event_name(style_, bridge::EventName::Call, title, 0).text);
}

std::string ProfileNames::wait(const char* title, int64_t elements) const {
  return std::string(bridge::event_name(style_, bridge::EventName::Wait, title, elements).text);
}

bool ProfileNames::wants_phases() const {
  if (style_ != Style::Accl) return false;
  const auto global = global_profiler<ProfilerState>(0);
  const auto* state = global != nullptr ? global.get() : local_profiler();
  return state != nullptr && state->config().report_input_shapes;
}

AsyncEvent::AsyncEvent(std::function<void()> close) : close_(std::move(close)) {
  if (!close_) return;
  infos_ = c10::ThreadLocalDebugInfo::current();
  local_ = local_profiler();
  global_ = global_profiler<ProfilerState>(0);
}

AsyncEvent& AsyncEvent::operator=(AsyncEvent&& other) noexcept {
  close();
  close_ = std::exchange(other.close_, nullptr);
  infos_ = std::move(other.infos_);
  local_ = other.local_;
  global_ = std::move(other.global_);
  return *this;
}

void AsyncEvent::before_close(std::function<void()> what) {
  if (!close_) return;
  close_ = at::wrapPropagateTLSState([what = std::move(what), close = std::move(close_)] {
    what();
    close();
  });
}

bool AsyncEvent::is_of_this_thread() const { return global_ == nullptr && local_profiler() == local_; }

bool AsyncEvent::is_on() const {
  if (global_ != nullptr && (global_profiler<ProfilerState>(0) != global_ || !OpenState::is_on(*global_))) return false;
  return local_ == nullptr || OpenState::is_on(*local_);
}

void AsyncEvent::close() noexcept {
  if (!close_) return;
  auto close = std::exchange(close_, nullptr);
  try {
    // The thread that began a profile also ends it. Here it is busy, so the profile cannot end now.
    if (is_of_this_thread()) return close();
    if (python_is_up()) {
      py::gil_scoped_acquire gil;
      if (is_on()) return close();
    }
    // torch closes an event when its closure is destroyed, unless it finds no profiler. With a global profiler the
    // closure is leaked; otherwise it is destroyed while this thread shows no profiler.
    if (global_ != nullptr) {
      new std::function<void()>(std::move(close));
      return;
    }
    auto mine = c10::ThreadLocalDebugInfo::current();
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(nullptr);
    close = nullptr;
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(mine));
  } catch (const std::exception& thrown) {
    TORCH_WARN_ONCE("accl: a profiler event is lost: ", thrown.what());
  }
}

void record_phases(const char* title, const bridge::PhaseNanos& phases) noexcept {
  if (!phases.is_known) return;
  try {
    auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
    if (!callbacks.has_value()) return;
    const auto us = [](int64_t nanos) { return c10::IValue(static_cast<double>(nanos) / 1e3); };
    const std::unordered_map<std::string, c10::IValue> times{
        {"queue_us", us(phases.queue)},       {"bus_us", us(phases.bus)},       {"peers_us", us(phases.peers)},
        {"transfer_us", us(phases.transfer)}, {"reduce_us", us(phases.reduce)}};
    const std::string name(bridge::event_name({}, bridge::EventName::Phases, title, 0).text);
    at::RecordFunction event(std::move(*callbacks));
    event.before(std::string_view(name), c10::ArrayRef<const c10::IValue>(), &times);
  } catch (const std::exception& thrown) {
    TORCH_WARN_ONCE("accl: a profiler event is lost: ", thrown.what());
  }
}

}  // namespace accl
