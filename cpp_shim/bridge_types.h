// Declarations of the shim that the bridge's generated code needs. No torch header here, so that the generated unit
// compiles fast.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "rust/cxx.h"

namespace accl::bridge {

struct Status;
struct Runtime;

// A c10d store, used while a group is created.
class StoreRef;
using Bytes = rust::Slice<const std::uint8_t>;
void store_set(const StoreRef& store, rust::Str key, Bytes value);
rust::Vec<std::uint8_t> store_get(const StoreRef& store, rust::Str key);
rust::Vec<std::uint8_t> store_compare_set(const StoreRef& store, rust::Str key, Bytes expected, Bytes desired);
std::int64_t store_add(const StoreRef& store, rust::Str key, std::int64_t delta);
bool store_check(const StoreRef& store, rust::Str key);
bool store_delete(const StoreRef& store, rust::Str key);
std::uint64_t store_identity(const StoreRef& store) noexcept;

// A task that issues several calls and waits for them. One thread runs it once and destroys it. So it must not hold the
// last reference to a tensor that Python may know.
class Task {
 public:
  virtual ~Task() = default;
  virtual Status run() noexcept = 0;
};
Status run_task(std::unique_ptr<Task> task) noexcept;

// Completes a call that has ended while no caller waits for it. Runs on a completion thread, with no lock held.
class CompletionTask {
 public:
  virtual ~CompletionTask() = default;
  // Returns false if something is left to do that cannot be done now; it is called again soon.
  virtual bool run() noexcept = 0;
};
bool run_completion(CompletionTask& task) noexcept;

bool python_interrupted() noexcept;
bool python_interrupted_at_end() noexcept;

rust::Str built_with() noexcept;
bool define_classes(std::size_t module) noexcept;
std::size_t create_backend(const Runtime& runtime, std::size_t store, std::int32_t rank, std::int32_t world,
                           std::size_t options, bool is_default) noexcept;

}  // namespace accl::bridge
