// Errors as data, and as torch's exception classes.
//
// Owns which class a kind of error becomes, and what an exception of somebody else says. Knows no calls.
#pragma once

#include <exception>
#include <memory>
#include <new>
#include <string>

#include "accl-py/src/bridge.rs.h"

namespace accl {

// A MemoryError that keeps its sentence.
class OutOfResources final : public std::bad_alloc {
 public:
  explicit OutOfResources(std::string message) : message_(std::make_shared<std::string>(std::move(message))) {}
  const char* what() const noexcept override { return message_->c_str(); }

 private:
  std::shared_ptr<const std::string> message_;
};

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

// Also the exception that a signal handler has left.
void throw_unless_done(const bridge::Waited& waited);

}  // namespace accl
