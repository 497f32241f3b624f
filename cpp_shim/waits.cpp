// See waits.h.
#include "waits.h"

#include "interpreter.h"

namespace accl {

using bridge::Outcome;

bridge::Waited call_without_gil(const bridge::Group& group, const bridge::CallArgs& args) {
  auto waited = without_gil([&] { return bridge::group_call(group, args); });
  if (waited.how == Outcome::Interrupted) note_on_python_error(std::string(waited.status.message));
  return waited;
}

bridge::Profiled profiled_call_without_gil(const bridge::Group& group, const bridge::CallArgs& args) {
  auto ended = without_gil([&] { return bridge::group_call_profiled(group, args); });
  if (ended.waited.how == Outcome::Interrupted) note_on_python_error(std::string(ended.waited.status.message));
  return ended;
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

}  // namespace accl
