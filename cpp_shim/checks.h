// Checks of arguments before a call is submitted, so that the call raises, not `wait`.
//
// Messages come from c10d/Utils.hpp where it has the check; the exception classes are ours (see `throw_status`). Owns the
// call while it is checked, with its operator; describe.h describes its tensors.
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
  explicit Check(Origin origin) : origin_(origin) {}

  // The failure function that c10d's assert functions expect.
  std::function<void(const std::string&)> fail() const {
    return [origin = origin_](const std::string& message) { refuse(bridge::Kind::InvalidArgument, origin, message); };
  }

  void that(bool holds, const char* message) const {
    if (!holds) bad(message);
  }

  // Checks that every tensor is strided, in memory that calls can use.
  void memory(at::TensorList tensors) const {
    for (size_t i = 0; i < tensors.size(); ++i) one(tensors[i], i);
  }

  const at::Tensor& single(at::TensorList tensors) const {
    c10d::assertNonEmpty(fail(), tensors);
    c10d::assertSingleElement(fail(), tensors);
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
      bad("tensors must all have the same type (found ", tensors[0].scalar_type(), " and ", tensor.scalar_type(), ")");
    }
  }

  void same_type_and_size(const at::Tensor& expected, at::TensorList tensors) const {
    c10d::assertTypeAndSizesMatch(fail(), tensors, expected.options(), expected.sizes());
  }

  // Checks that `tensors[index]` has as many elements as `expected`.
  void same_count(const at::Tensor& expected, at::TensorList tensors, size_t index) const {
    if (tensors[index].numel() != expected.numel()) c10d::assertSizesMatch(fail(), expected.sizes(), tensors, index);
  }

  // Check that a flat tensor holds one block for each of `world` ranks.
  void flat_output(const at::Tensor& output, const at::Tensor& input, int world) const {
    that(output.scalar_type() == input.scalar_type(), "output tensor must have the same type as input tensor");
    that(output.numel() == input.numel() * world, "output tensor size must be equal to world_size times input tensor size");
  }
  void flat_input(const at::Tensor& input, const at::Tensor& output, int world) const {
    that(input.scalar_type() == output.scalar_type(), "input tensor must be the same type as the output tensor");
    that(input.numel() == output.numel() * world, "input tensor must be the same size as output size times world size");
  }

  // Checks output `index` of a coalesced all_gather; messages as in gloo.
  void same_output(const at::Tensor& input, const at::Tensor& output, size_t index) const {
    if (output.scalar_type() != input.scalar_type()) {
      bad("invalid tensor type at index ", index, " (expected ", input.scalar_type(), ", got ", output.scalar_type(), ")");
    }
    if (output.sizes() != input.sizes()) {
      bad("invalid size of output tensor at index ", index, " (expected length ", c10d::toString(input.sizes()), ", got ",
          c10d::toString(output.sizes()), ")");
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
    const auto sent = inputs.count_elems(rank), expected = outputs.count_elems(rank);
    if (sent != expected) bad("rank ", rank, " sends itself ", sent, " elements and expects ", expected);
  }

  void root(int64_t rank, int64_t world) const { c10d::assertRootRank(fail(), rank, world); }

  void root(int64_t rank, int64_t world, int64_t tensor, at::TensorList tensors) const {
    root(rank, world);
    c10d::assertRootTensor(fail(), tensor, static_cast<int64_t>(tensors.size()));
  }

  // Checks the outputs of an all_gather; messages as in gloo.
  void output_list(at::TensorList outputs, int world) const {
    if (outputs.size() == static_cast<size_t>(world)) return;
    bad("invalid output tensor list at index 0 (expected length ", world, ", got ", outputs.size(), ")");
  }

  void splits(const std::vector<int64_t>& sizes, const at::Tensor& tensor, int world) const {
    that(tensor.dim() > 0, "a zero-dimensional tensor cannot be split");
    for (const int64_t size : sizes) {
      if (size < 0 || size > tensor.size(0)) {
        bad("split size ", size, " is out of range for a tensor with ", tensor.size(0), " rows");
      }
    }
    try {
      c10d::checkSplitSizes(sizes, tensor, world);
    } catch (const c10::Error& error) {
      bad(error.msg());
    }
  }

  void peer(int rank, int world, int tag) const {
    if (rank < 0 || rank >= world) bad("invalid rank: ", rank, " (the group has ", world, " ranks)");
    that(tag >= 0, "tag must be nonnegative");
  }

 private:
  template <class... Parts>
  [[noreturn]] void bad(const Parts&... parts) const {
    refuse(bridge::Kind::InvalidArgument, origin_, c10::str(parts...));
  }

  void one(const at::Tensor& tensor, size_t index) const {
    const auto wrong = [&](const auto&... message) { refuse(bridge::Kind::InvalidType, origin_, c10::str(message...)); };
    if (!tensor.defined()) wrong("tensor at index ", index, " is undefined");
    if (tensor.layout() != at::kStrided) {
      wrong("invalid tensor layout at index ", index, " (expected Strided, got ", c10d::toString(tensor.layout()),
            "): unsupported layout, only dense tensors are taken");
    }
    if (!tensor.device().is_cpu() && !has_streams(tensor.device())) {
      wrong("tensor at index ", index, " is on device ", tensor.device(), "; accl takes tensors of the CPU and of accelerators");
    }
    if (!tensor.has_storage() || tensor._is_zerotensor()) {
      wrong("tensor at index ", index, " has no memory of its own; call contiguous() or clone() first");
    }
    if (tensor.numel() > 0) {
      const auto end = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size(), tensor.storage_offset());
      const auto bytes = tensor.storage().nbytes();
      if (end > bytes) {
        bad("tensor at index ", index, " needs ", end, " bytes and its storage has ", bytes, "; it was resized or freed");
      }
    }
  }

  Origin origin_;
};

// The factor of PREMUL_SUM, from a number or a tensor of one element; 1 for other operators.
inline double factor_of(const c10d::ReduceOp& op, Origin origin) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return 1.0;
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (supplement == nullptr) refuse(bridge::Kind::InvalidArgument, origin, "PREMUL_SUM has no factor");
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>() : supplement->double_factor;
}

// A call while it is being checked and described.
struct Call {
  Call(Origin origin, bridge::Collective collective, int64_t root = 0)
      : origin(origin),
        check(origin),
        placement(origin),
        inputs(Access::kRead, origin, placement),
        outputs(Access::kWrite, origin, placement) {
    args.collective = collective;
    args.root = static_cast<uint32_t>(root);
    args.factor = 1.0;
    args.peer = -1;
    args.timeout_ms = -1;
    args.equal_blocks = true;
    args.seq = -1;
    args.is_profiled = false;
  }

  Call(const Call&) = delete;

  void reduce(const c10d::ReduceOp& op) {
    // torch's codes of operators are also the engine's.
    args.op = static_cast<uint8_t>(op.op_);
    args.factor = factor_of(op, origin);
  }

  // Describes a reduction of the only tensor of the list, in place.
  void reduce_in_place(at::TensorList tensors, const c10d::ReduceOp& op) {
    outputs.block(check.single(tensors));
    reduce(op);
  }

  // The result is valid as long as this call and its tensors live.
  const bridge::CallArgs& finish() {
    args.inputs = inputs.views();
    args.input_blocks = inputs.counts();
    args.outputs = outputs.views();
    args.output_blocks = outputs.counts();
    return args;
  }

  const Origin origin;
  const Check check;
  bridge::CallArgs args{};
  Placement placement;
  Blocks inputs;
  Blocks outputs;
};

}  // namespace accl
