// Calls and waits in the caller's thread.
//
// Owns that Python keeps running meanwhile, and how an interrupt ends a call or wait. Completes no call.
#pragma once

#include <chrono>
#include <memory>

#include "errors.h"
#include "torch_compat.h"

namespace accl {

// Call and wait in the caller's thread, without the GIL. Functions that return void throw if the call fails.
bridge::Waited call_without_gil(const bridge::Group& group, const bridge::CallArgs& args);
bridge::Profiled profiled_call_without_gil(const bridge::Group& group, const bridge::CallArgs& args);
bridge::Waited wait_without_gil(const bridge::Ticket& ticket, std::chrono::milliseconds timeout);
void monitored_barrier_without_gil(const bridge::Group& group, std::chrono::milliseconds timeout, bool wait_all);
void connect_all_without_gil(const bridge::Group& group);
void run_without_gil(std::unique_ptr<bridge::Task> task);
bridge::Status shutdown_without_gil(const bridge::Group& group);

}  // namespace accl
