// Describes tensors as the plain data that crosses the bridge. Never reads or copies tensor memory.
#pragma once

#include <list>
#include <string>
#include <vector>

#include <c10/util/SmallVector.h>

#include "accelerator.h"
#include "torch_compat.h"

namespace accl {

// The code of a tensor's dtype.
inline uint8_t to_dtype(at::ScalarType type, Origin origin) {
  const auto code = bridge::dtype_code(static_cast<int8_t>(type));
  if (code == 255) refuse(bridge::Kind::Unsupported, origin, c10::str("tensors of type ", type, " cannot be sent"));
  return code;
}

// Whether the call writes the described memory.
enum class Access { kRead, kWrite };

// The device of a call's tensors. All tensors of a call are on one device.
class Placement {
 public:
  explicit Placement(Origin origin) : origin_(origin) {}

  // Returns the dense form of a tensor on an accelerator; null in host memory.
  const at::Tensor* place(const at::Tensor& tensor, bool is_written) {
    if (tensor.device().is_cpu() && !tensors_) {
      has_host_ = true;
      return nullptr;
    }
    return &on_device(tensor, is_written);
  }

  // Null if the tensors are in host memory.
  const std::shared_ptr<StagedTensors>& tensors() const { return tensors_; }

 private:
  const at::Tensor& on_device(const at::Tensor& tensor, bool is_written) {
    const auto device = tensor.device();
    if (!tensors_ && !has_host_) tensors_ = std::make_shared<StagedTensors>(device, origin_);
    if (!tensors_ || tensors_->device() != device) {
      const auto other = tensors_ ? tensors_->device().str() : std::string("cpu");
      refuse(bridge::Kind::InvalidType, origin_,
             "tensors of the call are on " + other + " and on " + device.str() + "; put all tensors of a call on one device");
    }
    return tensors_->dense(tensor, is_written);
  }

  Origin origin_;
  bool has_host_ = false;
  std::shared_ptr<StagedTensors> tensors_;
};

// The tensors of one side of a call, as blocks of pieces. Borrows the tensors' shapes, so the tensors must outlive it.
class Blocks {
 public:
  Blocks(Access access, Origin origin, Placement& placement) : access_(access), origin_(origin), placement_(placement) {}

  void open_block() { counts_.push_back(0); }

  // Adds a whole tensor as the next piece of the open block.
  void piece(const at::Tensor& tensor) {
    if (is_dense(tensor)) {
      push(dense(tensor, 0, tensor.numel()));
    } else {
      push(strided(tensor, tensor.sizes().data(), 0, 0));
    }
  }

  void block(const at::Tensor& tensor) {
    open_block();
    piece(tensor);
  }

  // Adds rows [first, first + count) along dimension 0.
  void rows(const at::Tensor& tensor, int64_t first, int64_t count) {
    const int64_t row = tensor.size(0) == 0 ? 0 : tensor.numel() / tensor.size(0);
    if (is_dense(tensor)) {
      push(dense(tensor, first * row, count * row));
      return;
    }
    auto& sizes = narrowed_.emplace_back(tensor.sizes().vec());
    sizes[0] = count;
    push(strided(tensor, sizes.data(), first * tensor.stride(0), first * row));
  }

  // Adds part `index` of `parts` equal parts, in row-major order.
  void part(const at::Tensor& tensor, int64_t index, int64_t parts) {
    const int64_t count = tensor.numel() / parts;
    if (is_dense(tensor)) {
      push(dense(tensor, index * count, count));
    } else if (tensor.dim() > 0 && tensor.size(0) % parts == 0) {
      rows(tensor, index * (tensor.size(0) / parts), tensor.size(0) / parts);
    } else {
      refuse(bridge::Kind::InvalidArgument, origin_,
             "a non-contiguous tensor must divide into the ranks' blocks along dimension 0; call contiguous() first");
    }
  }

  // Adds one block per rank, with an equal part of each tensor.
  void parts(at::TensorList tensors, int world) {
    for (int rank = 0; rank < world; ++rank) {
      open_block();
      for (const auto& tensor : tensors) part(tensor, rank, world);
    }
  }

  // Adds one block per rank along dimension 0: `sizes` rows each, or equal blocks if `sizes` is empty.
  void split(const at::Tensor& tensor, const std::vector<int64_t>& sizes, int world) {
    int64_t first = 0;
    for (int rank = 0; rank < world; ++rank) {
      const int64_t count = sizes.empty() ? tensor.size(0) / world : sizes[rank];
      open_block();
      rows(tensor, first, count);
      first += count;
    }
  }

  // Number of elements in a block of one piece.
  int64_t count_elems(size_t block) const {
    const auto& view = views_[block];
    if (view.sizes == 0) return view.count;
    return c10::multiply_integers(reinterpret_cast<const int64_t*>(view.sizes),
                                  reinterpret_cast<const int64_t*>(view.sizes) + view.dim);
  }

  rust::Slice<const bridge::TensorView> views() const { return {views_.data(), views_.size()}; }
  rust::Slice<const uint32_t> counts() const { return {counts_.data(), counts_.size()}; }

 private:
  void push(const bridge::TensorView& view) {
    views_.push_back(view);
    ++counts_.back();
  }

  // Describes the elements from memory offset `offset`; in row-major order the first of them is number `index`.
  bridge::TensorView base(const at::Tensor& tensor, int64_t offset, int64_t index) {
    bridge::TensorView view{};
    view.dtype = to_dtype(tensor.scalar_type(), origin_);
    const bool is_written = access_ == Access::kWrite;
    const auto* there = placement_.place(tensor, is_written);
    if (tensor.numel() == 0) return view;
    const void* data = is_written ? tensor.mutable_data_ptr() : tensor.const_data_ptr();
    const auto size = static_cast<int64_t>(tensor.element_size());
    view.data = reinterpret_cast<size_t>(data) + offset * size;
    if (there != nullptr) view.dense = reinterpret_cast<size_t>(there->const_data_ptr()) + index * size;
    return view;
  }

  bridge::TensorView dense(const at::Tensor& tensor, int64_t offset, int64_t count) {
    auto view = base(tensor, offset, offset);
    view.count = count;
    return view;
  }

  bridge::TensorView strided(const at::Tensor& tensor, const int64_t* sizes, int64_t offset, int64_t index) {
    auto view = base(tensor, offset, index);
    const int64_t* strides = tensor.strides().data();
    view.dim = static_cast<size_t>(tensor.dim());
    if (view.dim == 0) {
      // A zero-dimensional tensor has no sizes to point to; it is described as one element along one dimension.
      sizes = strides = narrowed_.emplace_back(1, 1).data();
      view.dim = 1;
    }
    view.sizes = reinterpret_cast<size_t>(sizes);
    view.strides = reinterpret_cast<size_t>(strides);
    view.conj = tensor.is_conj();
    view.neg = tensor.is_neg();
    return view;
  }

  Access access_;
  Origin origin_;
  Placement& placement_;
  c10::SmallVector<bridge::TensorView, 2> views_;
  c10::SmallVector<uint32_t, 4> counts_;
  std::list<std::vector<int64_t>> narrowed_;  // a list: pointers into it stay valid, and an empty one allocates nothing
};

}  // namespace accl
