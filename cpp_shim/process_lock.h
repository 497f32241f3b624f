// A lock of this process, which its forked children leave alone.
//
// A fork may happen while another thread holds it: the child has no such thread, and what the lock guards is half changed. So a child neither
// takes the lock nor looks at what it guards. The shim's only mutex; to be held for a few steps, and never while anything is called out.
#pragma once

#include <mutex>

#include "accl-py/src/bridge.rs.h"

namespace accl {

class ProcessLock {
 public:
  // Owns nothing in a forked child.
  std::unique_lock<std::mutex> hold() const {
    return is_ours() ? std::unique_lock<std::mutex>(mutex_) : std::unique_lock<std::mutex>();
  }
  bool is_ours() const { return bridge::fork_generation() == generation_; }

 private:
  mutable std::mutex mutex_;
  const uint64_t generation_ = bridge::fork_generation();
};

}  // namespace accl
