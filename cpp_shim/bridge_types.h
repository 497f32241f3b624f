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

// Completes a call that has ended while no caller waits for it. Runs on a completion thread, with no lock held.
class CompletionTask {
 public:
  virtual ~CompletionTask() = default;
  // Returns false if something is left to do that cannot be done now; it is called again soon.
  virtual bool run() noexcept = 0;
};

// A point in a stream of an accelerator.
class AcceleratorEvent {
 public:
  virtual ~AcceleratorEvent() = default;
  virtual bool has_come() const = 0;
};

// Host memory from which and to which accelerators copy without the processor.
class PinnedMemory {
 public:
  virtual ~PinnedMemory() = default;
  virtual std::size_t address() const noexcept = 0;
};
std::unique_ptr<PinnedMemory> pin_memory(std::int8_t device_type, std::size_t bytes);

// The copies of one call on an accelerator: see accelerator.h. `out` is the direction to the tensors.
struct AcceleratorStream;
class AcceleratorCall {
 public:
  virtual ~AcceleratorCall() = default;
  virtual rust::String device_name() const noexcept = 0;
  virtual AcceleratorStream stream() const noexcept = 0;
  virtual std::int64_t pool_stream() const = 0;
  virtual void begin(std::int64_t in, std::int64_t out) const = 0;
  virtual bool may_copy(bool out) const = 0;
  virtual void copy(bool out, std::size_t tensor, std::size_t host, std::uint64_t bytes, bool is_pinned) const = 0;
  virtual std::unique_ptr<AcceleratorEvent> record(bool out) const = 0;
  virtual void finish() const = 0;
  virtual std::unique_ptr<PinnedMemory> allocate(std::uint64_t bytes, std::uint64_t& stream) const = 0;
  virtual void follow(const AcceleratorCall& earlier) const = 0;
};

bool python_interrupted() noexcept;
bool python_interrupted_at_end() noexcept;

rust::Str built_with() noexcept;
bool define_classes(std::size_t module) noexcept;
std::size_t create_backend(const Runtime& runtime, std::size_t store, std::int32_t rank, std::int32_t world,
                           std::size_t options, bool is_default) noexcept;

}  // namespace accl::bridge
