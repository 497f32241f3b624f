// Checks of arguments before a call is submitted, so that the call raises, not `wait`.
//
// Messages come from c10d/Utils.hpp where it has the check; the exception classes are ours (see `throw_status`).
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "describe.h"
#include "errors.h"
#include "torch_compat.h"

namespace accl {

class Check {
 public:
  explicit Check(const char* call) : call_(call) {}

  // The failure function that c10d's assert functions expect.
  std::function<void(const std::string&)> fail() const {
    return [call = call_](const std::string& message) { refuse(bridge::Kind::InvalidArgument, call, message); };
  }

  void that(bool holds, const char* message) const {
    if (!holds) refuse(bridge::Kind::InvalidArgument, call_, message);
  }

  // Checks that every tensor is dense and in this machine's memory.
  void memory(at::TensorList tensors) const {
    for (size_t i = 0; i < tensors.size(); ++i) one(tensors[i], i);
  }

  void one_tensor(at::TensorList tensors) const {
    c10d::assertNonEmpty(fail(), tensors);
    c10d::assertSingleElement(fail(), tensors);
  }

  const at::Tensor& single(at::TensorList tensors) const {
    one_tensor(tensors);
    memory(tensors);
    return tensors[0];
  }

  const at::Tensor& single_input(at::TensorList tensors) const {
    c10d::assertSingleElementInput(fail(), tensors);
    memory(tensors);
    return tensors[0];
  }

  const at::Tensor& single_output(at::TensorList tensors) const {
    c10d::assertSingleElementOutput(fail(), tensors);
    memory(tensors);
    return tensors[0];
  }

  // Checks the tensors of a coalesced call.
  void list(at::TensorList tensors) const {
    c10d::assertNonEmpty(fail(), tensors);
    memory(tensors);
  }

  void same_type(const at::Tensor& expected, at::TensorList tensors) const {
    for (size_t i = 0; i < tensors.size(); ++i) c10d::assertTypeMatch(fail(), expected.options(), tensors, i);
  }

  // Checks the tensors that a call joins into one; messages as in gloo.
  void one_type(at::TensorList tensors) const {
    for (const auto& tensor : tensors) {
      if (tensor.scalar_type() == tensors[0].scalar_type()) continue;
      refuse(bridge::Kind::InvalidArgument, call_,
             "tensors must all have the same type (found " + std::string(c10::toString(tensors[0].scalar_type())) + " and " +
                 c10::toString(tensor.scalar_type()) + ")");
    }
  }

  void same_type_and_size(const at::Tensor& expected, at::TensorList tensors) const {
    c10d::assertTypeAndSizesMatch(fail(), tensors, expected.options(), expected.sizes());
  }

  // Checks that `tensors[index]` has as many elements as `expected`.
  void same_count(const at::Tensor& expected, at::TensorList tensors, size_t index) const {
    if (tensors[index].numel() != expected.numel()) c10d::assertSizesMatch(fail(), expected.sizes(), tensors, index);
  }

  // Checks that a flat tensor holds one block for each of `world` ranks.
  void flat(const at::Tensor& many, const at::Tensor& one, int world, const char* type_text, const char* size_text) const {
    that(many.scalar_type() == one.scalar_type(), type_text);
    that(many.numel() == one.numel() * world, size_text);
  }

  // Checks output `index` of a coalesced all_gather; messages as in gloo.
  void same_output(const at::Tensor& input, const at::Tensor& output, size_t index) const {
    if (output.scalar_type() != input.scalar_type()) {
      refuse(bridge::Kind::InvalidArgument, call_,
             "invalid tensor type at index " + std::to_string(index) + " (expected " + c10::toString(input.scalar_type()) +
                 ", got " + c10::toString(output.scalar_type()) + ")");
    }
    if (output.sizes() != input.sizes()) {
      refuse(bridge::Kind::InvalidArgument, call_,
             "invalid size of output tensor at index " + std::to_string(index) + " (expected length " +
                 c10d::toString(input.sizes()) + ", got " + c10d::toString(output.sizes()) + ")");
    }
  }

  // Checks the outputs and inputs of several calls on flat tensors.
  void pairs(at::TensorList outputs, at::TensorList inputs) const {
    c10d::assertNonEmptyInputTensorList(fail(), inputs.size());
    c10d::assertInputOutputTensorListsSameSize(fail(), outputs.size(), inputs.size());
    memory(inputs);
    memory(outputs);
  }

  // Checks that a rank's block for itself is as long in the input as in the output.
  void own_block(const Blocks& inputs, const Blocks& outputs, int rank) const {
    if (inputs.count_elems(rank) != outputs.count_elems(rank)) {
      refuse(bridge::Kind::InvalidArgument, call_,
             "rank " + std::to_string(rank) + " sends itself " + std::to_string(inputs.count_elems(rank)) +
                 " elements and expects " + std::to_string(outputs.count_elems(rank)));
    }
  }

  void root(int64_t rank, int64_t world) const { c10d::assertRootRank(fail(), rank, world); }

  void root(int64_t rank, int64_t world, int64_t tensor, at::TensorList tensors) const {
    root(rank, world);
    c10d::assertRootTensor(fail(), tensor, static_cast<int64_t>(tensors.size()));
  }

  // Checks the outputs of an all_gather; messages as in gloo.
  void output_list(at::TensorList outputs, int world) const {
    if (outputs.size() == static_cast<size_t>(world)) return;
    refuse(bridge::Kind::InvalidArgument, call_,
           "invalid output tensor list at index 0 (expected length " + std::to_string(world) + ", got " +
               std::to_string(outputs.size()) + ")");
  }

  void splits(const std::vector<int64_t>& sizes, const at::Tensor& tensor, int world) const {
    that(tensor.dim() > 0, "a zero-dimensional tensor cannot be split");
    for (const int64_t size : sizes) {
      if (size < 0 || size > tensor.size(0)) {
        refuse(bridge::Kind::InvalidArgument, call_,
               "split size " + std::to_string(size) + " is out of range for a tensor with " +
                   std::to_string(tensor.size(0)) + " rows");
      }
    }
    try {
      c10d::checkSplitSizes(sizes, tensor, world);
    } catch (const c10::Error& error) {
      refuse(bridge::Kind::InvalidArgument, call_, error.msg());
    }
  }

  void peer(int rank, int world, int tag) const {
    if (rank < 0 || rank >= world) {
      refuse(bridge::Kind::InvalidArgument, call_,
             "invalid rank: " + std::to_string(rank) + " (the group has " + std::to_string(world) + " ranks)");
    }
    that(tag >= 0, "tag must be nonnegative");
  }

 private:
  void one(const at::Tensor& tensor, size_t index) const {
    const auto bad = [&](const std::string& message) {
      refuse(bridge::Kind::InvalidType, call_, "tensor at index " + std::to_string(index) + " " + message);
    };
    if (!tensor.defined()) bad("is undefined");
    if (tensor.layout() != at::kStrided) {
      refuse(bridge::Kind::InvalidType, call_,
             "invalid tensor layout at index " + std::to_string(index) + " (expected Strided, got " +
                 c10d::toString(tensor.layout()) + "): unsupported layout, only dense tensors are taken");
    }
    if (!tensor.device().is_cpu()) bad("is on device " + tensor.device().str() + "; accl takes CPU tensors");
    if (!tensor.has_storage() || tensor._is_zerotensor()) bad("has no memory of its own; call contiguous() or clone() first");
    if (tensor.numel() > 0) {
      const auto end = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size(), tensor.storage_offset());
      const auto bytes = tensor.storage().nbytes();
      if (end > bytes) {
        refuse(bridge::Kind::InvalidArgument, call_,
               "tensor at index " + std::to_string(index) + " needs " + std::to_string(end) + " bytes and its storage has " +
                   std::to_string(bytes) + "; it was resized or freed");
      }
    }
  }

  const char* call_;
};

}  // namespace accl
