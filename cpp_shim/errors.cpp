// See errors.h.
#include "errors.h"

#include <c10/util/Exception.h>

#include "interpreter.h"

namespace accl {

using bridge::Kind;
using bridge::Outcome;

namespace {

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

// A refused argument raises a Python class that is also a RuntimeError, as with gloo. No C++ exception class maps to
// both.
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

void refuse(Kind kind, Origin origin, const std::string& message) {
  throw_status({kind, "accl: [rank " + std::to_string(origin.rank) + "] " + origin.call + ": " + message, origin.rank, -1});
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
    // Neither our exception nor torch's: the message above stays.
  }
  return status;
}

void throw_unless_done(const bridge::Waited& waited) {
  if (waited.how == Outcome::Interrupted) throw_python_error_if_set();
  throw_unless_ok(waited.status);
}

}  // namespace accl
