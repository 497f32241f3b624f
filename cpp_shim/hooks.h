// Functions that torch registers, by id, to be called when calls complete or a group aborts.
//
// Hooks are called without the lock: a hook may wait for the thread that is removing it. Functions are held by pointer,
// because copying or dropping one may take the GIL.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <vector>

#include "process_lock.h"

namespace accl {

template <class Hook>
class Hooks {
 public:
  explicit Hooks(const ProcessLock& lock) : lock_(lock) {}

  void set(int64_t id, Hook hook) {
    auto held = std::make_shared<const Hook>(std::move(hook));
    const auto lock = lock_.hold();
    if (!lock) return;
    hooks_[id].swap(held);
    any_.store(true, std::memory_order_release);
  }

  void erase(int64_t id) {
    std::shared_ptr<const Hook> dropped;
    const auto lock = lock_.hold();
    if (!lock) return;
    const auto found = hooks_.find(id);
    if (found == hooks_.end()) return;
    dropped.swap(found->second);
    hooks_.erase(found);
    any_.store(!hooks_.empty(), std::memory_order_release);
  }

  bool any() const { return any_.load(std::memory_order_acquire); }

  std::vector<std::shared_ptr<const Hook>> all() const {
    std::vector<std::shared_ptr<const Hook>> found;
    const auto lock = lock_.hold();
    if (!lock) return found;
    for (const auto& [id, hook] : hooks_) found.push_back(hook);
    return found;
  }

 private:
  const ProcessLock& lock_;
  std::map<int64_t, std::shared_ptr<const Hook>> hooks_;
  std::atomic<bool> any_{false};
};

}  // namespace accl
