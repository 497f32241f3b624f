// Checks and a macro of c10d that torch before 2.13 lacks, for the tests with a GPU: decision 69. Users cannot build for such a torch.
//
// Included by cpp_shim/torch_compat.h. The build has this folder among its include folders only if ACCL_TEST_OLD_TORCH is set.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

// Records no asynchrony.
#define RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP(number, group, inputs, outputs, rank, name, count_in, count_out, type, splits_in, splits_out, first, \
                                              stride, world, is_async)                                                                             \
  RECORD_PARAM_COMMS_DATA(number, group, inputs, outputs, rank, name, count_in, count_out, type, splits_in, splits_out, first, stride, world);     \
  static_cast<void>(is_async)

namespace c10d {

using Failure = std::function<void(const std::string&)>;
using TensorLists = std::vector<std::vector<at::Tensor>>;

inline void check_list_of_ranks(const Failure& fail, const char* kind, const TensorLists& lists, int64_t world) {
  if (lists.size() != 1 || lists[0].size() != static_cast<size_t>(world)) {
    fail(std::string("expected one list of ") + kind + " tensors with a tensor for each of " + std::to_string(world) + " ranks");
  }
}

inline void assertGatherOutputTensorList(const Failure& fail, const TensorLists& outputs, int64_t world) {
  check_list_of_ranks(fail, "output", outputs, world);
}

inline void assertScatterInputTensorList(const Failure& fail, const TensorLists& inputs, int64_t world) {
  check_list_of_ranks(fail, "input", inputs, world);
}

template <class List>
void assertEmptyOutputTensorList(const Failure& fail, const List& outputs) {
  if (!outputs.empty()) fail("requires empty output on non-root");
}

template <class List>
void assertEmptyInputTensorList(const Failure& fail, const List& inputs) {
  if (!inputs.empty()) fail("requires empty input on non-root");
}

inline void assertNonEmptyInputTensorList(const Failure& fail, size_t inputs) {
  if (inputs == 0) fail("requires non-empty input tensor list");
}

inline void assertInputOutputTensorListsSameSize(const Failure& fail, size_t outputs, size_t inputs) {
  if (outputs != inputs) fail("requires input/output tensor lists to have the same length");
}

inline void assertAllgatherCoalescedOutputTensorLists(const Failure& fail, const TensorLists& lists, size_t inputs, int64_t world) {
  if (lists.size() != static_cast<size_t>(world)) fail("output lists should be equal to world size");
  for (const auto& list : lists) {
    if (list.size() != inputs) fail("expected " + std::to_string(inputs) + " output tensors per rank, got " + std::to_string(list.size()));
  }
}

inline void assertAllToAllTensorListSizes(const Failure& fail, size_t outputs, size_t inputs, int64_t world) {
  for (const size_t count : {inputs, outputs}) {
    if (count != static_cast<size_t>(world)) fail("expected a tensor for each of " + std::to_string(world) + " ranks, got " + std::to_string(count));
  }
}

}  // namespace c10d
