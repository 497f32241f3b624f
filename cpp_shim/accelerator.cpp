// See accelerator.h.
#include "accelerator.h"

#include <stdexcept>

#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/cuda/StreamBlock.hpp>

#include "torch_compat.h"

namespace accl {

using bridge::Kind;
using c10::impl::VirtualGuardImpl;

namespace {

class TorchMemory final : public bridge::PinnedMemory {
 public:
  explicit TorchMemory(c10::DataPtr data) : data_(std::move(data)) {}
  size_t address() const noexcept override { return reinterpret_cast<uintptr_t>(data_.get()); }

 private:
  c10::DataPtr data_;
};

// Keeps copies from autograd and from the profiler.
struct Quiet {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::DisableRecordFunctionGuard unrecorded;
};

at::Tensor bytes_at(uintptr_t address, int64_t count, c10::Device device) {
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  return at::for_blob(reinterpret_cast<void*>(address), {count}).options(options).target_device(device).make_tensor();
}

// Runs a function of the bridge: an exception crosses it as text, which must not contain a C++ stack trace.
template <class Run>
auto plainly(Run run) {
  try {
    return run();
  } catch (const c10::Error& error) {
    throw std::runtime_error(error.what_without_backtrace());
  }
}

}  // namespace

// --- events ---

StreamEvent::StreamEvent(const c10::Stream& stream) : device_(stream.device()), event_(stream.device_type()) {
  const c10::DeviceGuard on(stream.device());
  event_->record(stream);
}

StreamEvent::~StreamEvent() {
  try {
    // CUDA restores the thread's device, and would create a context there.
    const c10::DeviceGuard on(device_);
    event_.reset();
  } catch (const std::exception&) {  // The device has failed.
  }
}

bool StreamEvent::has_come() const {
  return plainly([&] { return event_->query(); });
}

void StreamEvent::block(const c10::Stream& stream) const {
  const c10::DeviceGuard on(stream.device());
  event_->block(stream);
}

// --- one call ---

StagedTensors::StagedTensors(c10::Device device, Origin origin)
    : origin_(origin), stream_(VirtualGuardImpl(device.type()).getStream(device)) {
  if (is_capturing(stream_)) {
    refuse(Kind::Unsupported, origin,
           "the current stream of " + device.str() + " captures a graph, and a call of accl cannot be part of one; issue it outside of the capture");
  }
}

const at::Tensor& StagedTensors::dense(const at::Tensor& tensor, bool is_written) {
  if (is_dense(tensor)) return tensor;
  for (auto& packed : packed_) {
    if (!packed.tensor.is_same(tensor)) continue;
    packed.is_written = packed.is_written || is_written;
    return packed.dense;
  }
  packed_.push_back({tensor, at::empty(tensor.sizes(), tensor.options()), is_written});
  return packed_.back().dense;
}

rust::String StagedTensors::device_name() const noexcept { return rust::String::lossy(device().str()); }

bridge::AcceleratorStream StagedTensors::stream() const noexcept {
  return {static_cast<int8_t>(device().type()), device().index(), stream_.id(), at::Context::hasROCM()};
}

int64_t StagedTensors::pool_stream() const {
  return plainly([&] { return VirtualGuardImpl(device().type()).getStreamFromGlobalPool(device(), /*isHighPriority=*/true).id(); });
}

void StagedTensors::begin(int64_t in, int64_t out) const {
  plainly([&] {
    const Quiet quiet;
    for (const auto& packed : packed_) packed.dense.copy_(packed.tensor, /*non_blocking=*/true);
    in_.emplace(c10::Stream::UNSAFE, device(), in);
    out_.emplace(c10::Stream::UNSAFE, device(), out);
    if (is_own_stream()) return;
    ready_ = std::make_unique<StreamEvent>(stream_);
    if (!at::Context::hasROCM()) ready_->block(*in_);
  });
}

bool StagedTensors::may_copy(bool out) const {
  // Under ROCm a stream that waits for an event holds up other threads' calls to the device (ROCm/rocm-systems#11678).
  return (!out && !at::Context::hasROCM()) || ready_->has_come();
}

void StagedTensors::copy(bool out, size_t tensor, size_t host, uint64_t bytes, bool is_pinned) const {
  plainly([&] {
    const Quiet quiet;
    const c10::StreamGuard on(side(out));
    const auto count = static_cast<int64_t>(bytes);
    const auto there = bytes_at(tensor, count, device()), here = bytes_at(host, count, c10::kCPU);
    (out ? there : here).copy_(out ? here : there, /*non_blocking=*/is_pinned);
  });
}

std::unique_ptr<bridge::AcceleratorEvent> StagedTensors::record(bool out) const {
  return plainly([&] { return std::make_unique<StreamEvent>(side(out)); });
}

void StagedTensors::finish() const {
  plainly([&] {
    const Quiet quiet;
    const c10::StreamGuard on(side(true));
    for (const auto& packed : packed_) {
      if (packed.is_written) packed.tensor.copy_(packed.dense, /*non_blocking=*/true);
    }
    if (!is_own_stream()) done_ = std::make_unique<StreamEvent>(*out_);
  });
  // The caller still has the tensors.
  release();
}

std::unique_ptr<bridge::PinnedMemory> StagedTensors::allocate(uint64_t bytes, uint64_t& stream) const {
  return plainly([&]() -> std::unique_ptr<bridge::PinnedMemory> {
    const c10::StreamGuard on(side(true));
    stream = reinterpret_cast<uintptr_t>(side(true).native_handle());
    if (bytes == 0) return nullptr;
    return std::make_unique<TorchMemory>(c10::GetAllocator(device().type())->allocate(bytes));
  });
}

void StagedTensors::follow(const bridge::AcceleratorCall& earlier) const {
  plainly([&] { static_cast<const StagedTensors&>(earlier).block_current_stream(); });
}

void StagedTensors::block_current_stream() const {
  if (done_) done_->block(current_stream());
}

void StagedTensors::outlive(const bridge::Status& status, bridge::Status& held, const std::vector<c10::Storage>& memory) const noexcept {
  if (!is_ok(status) && out_) {
    try {
      const VirtualGuardImpl guard(device().type());
      const auto keep = [&](const c10::Storage& storage) {
        for (const bool out : {false, true}) guard.recordDataPtrOnStream(storage.data_ptr(), side(out));
      };
      for (const auto& storage : memory) keep(storage);
      for (const auto& packed : packed_) keep(packed.dense.storage());
    } catch (const std::exception&) {
      held.must_leak_memory = true;
    }
    // The allocator of a device that has failed would ask it for events, in a function that must not throw.
    held.must_leak_memory = held.must_leak_memory || status.kind == Kind::Device;
  }
  release();
}

void StagedTensors::release() const {
  for (auto& packed : packed_) packed.tensor.reset();
}

void block_stream_until_through(std::shared_ptr<StagedTensors> tensors, c10::ivalue::Future& future,
                                std::chrono::milliseconds timeout) {
  const c10::DeviceGuard on(tensors->device());
  // torch has one implementation for each type of device that has any.
  const auto type = c10::DeviceTypeName(tensors->device().type());
  std::shared_ptr<c10d::cuda::StreamBlock> block = c10d::cuda::StreamBlockRegistry()->Create(type, timeout);
  TORCH_CHECK_NOT_IMPLEMENTED(block, "accl: block_current_stream: torch cannot block streams of ", type, "; call wait()");
  future.addCallback([block, tensors](c10::ivalue::Future&) {
    try {
      tensors->synchronize();
    } catch (const std::exception&) {  // The device has failed, and reports that to the next call.
    }
    block->abort();
  });
}

// --- pinned memory ---

std::unique_ptr<bridge::PinnedMemory> bridge::pin_memory(int8_t device_type, size_t bytes) {
  return plainly([&] {
    auto* allocator = at::getHostAllocator(static_cast<c10::DeviceType>(device_type));
    TORCH_CHECK(allocator != nullptr, "no allocator of pinned memory");
    return std::make_unique<TorchMemory>(allocator->allocate(bytes));
  });
}

}  // namespace accl
