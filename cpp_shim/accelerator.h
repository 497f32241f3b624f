// Tensors on accelerators: streams, events, byte views and pinned memory, through torch's interface for all devices.
//
// Owns the copies of one call, its side streams and its events. Decides nothing: the crate accl-accelerator decides which
// bytes are copied, when and in what order. The only unit that copies payload. Takes no lock and no GIL.
#pragma once

#include <chrono>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "bridge_types.h"
#include "errors.h"
#include "held_memory.h"

namespace accl {

// A point in a stream.
class StreamEvent final : public bridge::AcceleratorEvent {
 public:
  explicit StreamEvent(const c10::Stream& stream);
  ~StreamEvent() override;
  bool has_come() const override;
  // Makes a stream wait for the event.
  void block(const c10::Stream& stream) const;
  void synchronize() const { event_->synchronize(); }

 private:
  c10::Device device_;
  std::optional<c10::Event> event_;
};

// The tensors of one call, and the streams on which they are copied.
//
// The call's thread calls `dense` and `begin`. From then on the lock of the call's streams in Rust guards all but the
// functions after `finish`.
class StagedTensors final : public bridge::AcceleratorCall {
 public:
  // For a call that is issued on this device's current stream.
  StagedTensors(c10::Device device, Origin origin);

  c10::Device device() const { return stream_.device(); }
  // Returns a dense tensor for the values of this one: the tensor itself, or a temporary, which `begin` fills and `finish`
  // copies back if `is_written`. Valid as long as this object.
  const at::Tensor& dense(const at::Tensor& tensor, bool is_written);

  rust::String device_name() const noexcept override;
  bridge::AcceleratorStream stream() const noexcept override;
  int64_t pool_stream() const override;
  // Packs tensors that are not dense. With the call's own stream for both, the call follows that stream by itself.
  void begin(int64_t in, int64_t out) const override;
  bool may_copy(bool out) const override;
  void copy(bool out, size_t tensor, size_t host, uint64_t bytes, bool is_pinned) const override;
  std::unique_ptr<bridge::AcceleratorEvent> record(bool out) const override;
  // Copies temporaries back, and records the event behind all results.
  void finish() const override;
  // Sets the native handle of the stream of copies out. Returns memory of the device for kernels there, unless `bytes` is 0.
  std::unique_ptr<bridge::PinnedMemory> allocate(uint64_t bytes, uint64_t& stream) const override;
  // Makes the current stream wait for an earlier call.
  void follow(const bridge::AcceleratorCall& earlier) const override;

  // Makes the current stream wait for the results, if the call has any on this device.
  void block_current_stream() const;
  void end_on_current_stream() const {
    block_current_stream();
    release();
  }
  void synchronize() const {
    if (done_) done_->synchronize();
  }
  c10::Stream results_stream() const { return out_.value_or(stream_); }  // where results are written
  bool copies_on_current_stream() const { return in_ == current_stream() || out_ == current_stream(); }
  c10::Stream current_stream() const { return c10::impl::VirtualGuardImpl(device().type()).getStream(device()); }
  // Ends the call for its caller. If it has failed, copies may be in flight: the device's allocator keeps the memory until
  // they have been made, or `held` says that the memory must never be freed.
  void outlive(const bridge::Status& status, bridge::Status& held, const std::vector<c10::Storage>& memory) const noexcept;

 private:
  struct Packed {  // a tensor that is not dense
    at::Tensor tensor;
    at::Tensor dense;
    bool is_written;
  };

  // Drops references to the caller's tensors, so that Rust never drops the last one.
  void release() const;
  c10::Stream side(bool out) const { return (out ? out_ : in_).value(); }
  bool is_own_stream() const { return *in_ == stream_ && *out_ == stream_; }  // whether it makes the copies

  Origin origin_;
  c10::Stream stream_;
  // Rust shares the object, and has only constant references.
  mutable std::list<Packed> packed_;
  mutable std::optional<c10::Stream> in_, out_;
  mutable std::unique_ptr<StreamEvent> ready_, done_;
};

// Follows a blocking call on the tensors whose memory `memory` returns. `accelerator` is null in host memory.
template <class Memory>
void settle(const bridge::Status& status, const StagedTensors* accelerator, Memory memory) {
  if (is_ok(status)) return accelerator != nullptr ? accelerator->end_on_current_stream() : void();
  auto kept = memory();
  auto held = status;
  if (accelerator != nullptr) accelerator->outlive(status, held, kept);
  hold_memory(held, std::move(kept));
}

// Makes the current stream wait until a call is through or has failed. `future` completes when the call is enqueued.
void block_stream_until_through(std::shared_ptr<StagedTensors> tensors, c10::ivalue::Future& future,
                                std::chrono::milliseconds timeout);

// Whether the memory holds the values themselves in row-major order.
inline bool is_dense(const at::Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(); }

// Whether tensors can be copied on streams of the device.
inline bool has_streams(const c10::Device& device) {
  return !device.is_meta() && c10::impl::hasDeviceGuardImpl(device.type());
}

}  // namespace accl
