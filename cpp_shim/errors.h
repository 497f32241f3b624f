// Errors as data, and the one function that turns them into torch's exception classes.
#pragma once

#include <exception>
#include <string>

#include "accl-py/src/bridge.rs.h"

namespace accl {

inline bool is_ok(const bridge::Status& status) { return status.kind == bridge::Kind::Ok; }

// Throws the class that belongs to the status's kind.
[[noreturn]] void throw_status(const bridge::Status& status);

inline void throw_unless_ok(const bridge::Status& status) {
  if (!is_ok(status)) throw_status(status);
}

// The same as a value; null for success. Takes no GIL, so that a refused argument is torch's ValueError or TypeError here.
std::exception_ptr to_exception(const bridge::Status& status);

// What the exception being handled says, as data.
bridge::Status current_exception_status() noexcept;

// "accl: broadcast: message" as an error of `kind`.
[[noreturn]] void refuse(bridge::Kind kind, const char* call, const std::string& message);

// Before `shutdown` throws: lets torch forget the groups that it is just destroying.
void finish_destroy() noexcept;

// Throws the Python exception that is set on this thread, if there is one.
void throw_python_error_if_set();
// Adds the sentence as a note to the Python exception that is set on this thread.
void note_on_python_error(const bridge::Status& status);
// Also the exception that a signal handler has left.
void throw_unless_done(const bridge::Waited& waited);

}  // namespace accl
