// The only place that knows differences between torch versions.
//
// The shim overrides c10d's old method names everywhere: newer versions forward their new names to them.
#pragma once

#include <torch/version.h>

#include <functional>
#include <optional>

#include <torch/csrc/distributed/c10d/Backend.hpp>

// Compared as a pair, so that 3.0 is newer than 2.9.
#define ACCL_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

#if !ACCL_TORCH_AT_LEAST(2, 13)
#include "old_torch.h"  // in tests/gpu: users need torch 2.13 or newer
#endif

// Versions of torch and of pybind11's internals that a module is compiled for, one per line, from the headers.
#define ACCL_BUILT_WITH TORCH_VERSION "\n" PYBIND11_INTERNALS_ID

#if ACCL_TORCH_AT_LEAST(2, 14)
// `Backend::Options::clone`, `Work::getTimeout`, and `get_error` and timing bound on the base class.
#define ACCL_OVERRIDE_2_14 override
#define ACCL_BASE_BINDS_ERROR_AND_TIMING 1
#else
#define ACCL_OVERRIDE_2_14
#define ACCL_BASE_BINDS_ERROR_AND_TIMING 0
#endif

namespace accl {

// Whether the stream captures a graph. Older versions cannot say so: there the device refuses the copies.
inline bool is_capturing(const c10::Stream& stream) {
#if ACCL_TORCH_AT_LEAST(2, 15)
  return stream.is_capturing();
#else
  return static_cast<void>(stream), false;
#endif
}

// Hook types for failed groups and completed calls. Before 2.15, torch registers no completion hook.
using AbortHook = std::function<void()>;
#if ACCL_TORCH_AT_LEAST(2, 15)
#define ACCL_OVERRIDE_2_15 override
using c10d::CompletionHook;
using c10d::CompletionHookArgs;
#else
// Some of these methods exist since 2.14: there they override without the keyword.
#define ACCL_OVERRIDE_2_15
struct CompletionHookArgs {
  uint64_t completionKey = 0;
  std::optional<float> duration_ms;
};
using CompletionHook = std::function<void(const CompletionHookArgs&)>;
#endif

}  // namespace accl
