// A mutex that forked children do not use.
//
// A fork may happen while another thread holds the mutex. The child does not have that thread, and the guarded data may
// be half changed. So a child neither takes the mutex nor reads the data. This is the shim's only mutex. Hold it for a
// few steps, and never while calling out.
#pragma once

#include <mutex>

#include "accl-py/src/bridge.rs.h"

namespace accl {

class ProcessLock {
 public:
  // Returns an empty lock in a forked child.
  std::unique_lock<std::mutex> hold() const {
    return is_ours() ? std::unique_lock<std::mutex>(mutex_) : std::unique_lock<std::mutex>();
  }
  bool is_ours() const { return bridge::fork_generation() == generation_; }

 private:
  mutable std::mutex mutex_;
  const uint64_t generation_ = bridge::fork_generation();
};

}  // namespace accl
