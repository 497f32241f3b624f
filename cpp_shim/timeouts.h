// Sums of timeouts, which saturate.
//
// torch counts milliseconds in 64 bits; clocks count nanoseconds in 64 bits, which is 292 years. Owns every conversion
// between the two.
#pragma once

#include <chrono>
#include <limits>

namespace accl {

// Returns `begun` plus the timeout, at most the last moment of the clock; `begun` itself for a negative timeout.
inline std::chrono::steady_clock::time_point deadline_after(
    std::chrono::milliseconds timeout, std::chrono::steady_clock::time_point begun = std::chrono::steady_clock::now()) {
  using Moment = std::chrono::steady_clock::time_point;
  if (timeout.count() < 0) return begun;
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(Moment::max() - begun);
  return timeout < left ? begun + timeout : Moment::max();
}

// Returns the sum of two timeouts, limited to the representable range.
inline std::chrono::milliseconds sum_of(std::chrono::milliseconds one, std::chrono::milliseconds other) {
  using Count = std::chrono::milliseconds::rep;
  Count sum = 0;
  if (!__builtin_add_overflow(one.count(), other.count(), &sum)) return std::chrono::milliseconds(sum);
  return other.count() < 0 ? std::chrono::milliseconds::min() : std::chrono::milliseconds::max();
}

}  // namespace accl
