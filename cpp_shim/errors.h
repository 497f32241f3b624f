// Errors as data, and as torch's exception classes.
//
// Owns the mapping from error kinds to classes, and the translation of foreign exceptions to data. Knows nothing of
// calls.
#pragma once

#include <exception>
#include <memory>
#include <new>
#include <string>

#include "accl-py/src/bridge.rs.h"

namespace accl {

// A MemoryError that keeps its message.
class OutOfResources final : public std::bad_alloc {
 public:
  explicit OutOfResources(std::string message) : message_(std::make_shared<std::string>(std::move(message))) {}
  const char* what() const noexcept override { return message_->c_str(); }

 private:
  std::shared_ptr<const std::string> message_;
};

inline bool is_ok(const bridge::Status& status) { return status.kind == bridge::Kind::Ok; }

// Throws the exception class of the status's kind.
[[noreturn]] void throw_status(const bridge::Status& status);

inline void throw_unless_ok(const bridge::Status& status) {
  if (!is_ok(status)) throw_status(status);
}

// Returns the number, or throws the error instead of it.
inline int64_t value_of(const bridge::Numbered& numbered) {
  throw_unless_ok(numbered.status);
  return numbered.value;
}

// Returns the status as an exception, or null for success. Takes no GIL, so a refused argument becomes torch's plain
// ValueError or TypeError.
std::exception_ptr to_exception(const bridge::Status& status);

// Converts the exception being handled to a status.
bridge::Status current_exception_status() noexcept;

// Name of a call and the rank that issues it, for messages.
struct Origin {
  const char* call;
  int rank;
};

// Throws "accl: [rank 1] broadcast: message" as an error of `kind`.
[[noreturn]] void refuse(bridge::Kind kind, Origin origin, const std::string& message);

// Throws unless the call succeeded; after an interrupt, the exception that the signal handler raised.
void throw_unless_done(const bridge::Waited& waited);

}  // namespace accl
