// Sum of sparse tensors over all ranks: indices and values are gathered, joined and coalesced.
//
// Runs on a completion thread, or in the thread of a blocking call. The sequence numbers of its calls are reserved at
// submission, so that the calls keep their order among the group's other calls. A later barrier waits for their end. If
// this rank cannot issue all calls, it reports that to the group, because the other ranks wait for them.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/SparseTensorImpl.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "checks.h"
#include "errors.h"
#include "group_handle.h"
#include "held_memory.h"

namespace accl {

class SparseSum final : public bridge::Task {
 public:
  // Number of calls that the sum issues.
  static constexpr uint64_t kCalls = 3;

  SparseSum(std::shared_ptr<GroupHandle> group, at::Tensor tensor, int rank, int world, int64_t timeout_ms)
      : group_(std::move(group)), tensor_(std::move(tensor)), rank_(rank), world_(world), timeout_ms_(timeout_ms) {
    const auto device = tensor_.device();
    if (!device.is_cpu()) stream_ = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  }

  // Reserves the sequence numbers of its calls and returns the first.
  int64_t reserve() {
    return first_ = seq_ = value_of(bridge::group_reserve(*group_->group, kCalls));
  }

  bridge::Status run() noexcept override {
    auto status = sum_or_status();
    auto concluded = bridge::group_conclude(*group_->group, first_, kCalls, status);
    return is_ok(status) ? concluded : status;
  }

 private:
  struct Failed {
    bridge::Status status;
  };

  // Number of entries, of sparse dimensions and of all dimensions, then the sizes.
  static constexpr int64_t kFacts = 3 + 64;

  bridge::Status sum_or_status() noexcept {
    try {
      const at::NoGradGuard no_grad;
      c10::OptionalStreamGuard on;
      if (stream_) on.reset_stream(*stream_);
      sum();
      if (stream_) stream_->synchronize();
    } catch (const Failed& failed) {
      return failed.status;
    } catch (...) {
      return current_exception_status();
    }
    return {bridge::Kind::Ok, {}, -1, -1};
  }

  void sum() {
    const auto mine = tensor_.coalesce();
    const auto facts = gather_facts(mine);
    const auto indices = mine.indices();
    const auto values = mine.values();
    std::vector<at::Tensor> all_indices;
    std::vector<at::Tensor> all_values;
    for (int rank = 0; rank < world_; ++rank) {
      const int64_t count = facts[rank].const_data_ptr<int64_t>()[0];
      auto sizes = values.sizes().vec();
      sizes[0] = count;
      all_indices.push_back(at::empty({mine.sparse_dim(), count}, indices.options()));
      all_values.push_back(at::empty(sizes, values.options()));
    }
    all_gather(indices, all_indices);
    all_gather(values, all_values);
    const auto joined = at::_sparse_coo_tensor_unsafe(at::cat(all_indices, 1), at::cat(all_values, 0), mine.sizes(),
                                                      mine.options());
    const auto total = joined.coalesce();
    // Set directly: an operator would change the autograd history of the tensor.
    auto* impl = static_cast<at::SparseTensorImpl*>(tensor_.unsafeGetTensorImpl());
    impl->set_indices_and_values_unsafe(total.indices(), total.values());
    impl->set_coalesced(true);
    // autograd may have saved the old indices and values, so the version changes. An inference tensor has no version.
    if (!tensor_.is_inference()) impl->bump_version();
  }

  std::vector<at::Tensor> gather_facts(const at::Tensor& mine) {
    if (mine.dim() > kFacts - 3) {
      throw Failed{{bridge::Kind::Unsupported, "accl: all_reduce: sparse tensor with more than 64 dimensions", rank_, -1}};
    }
    auto own = at::zeros({kFacts}, at::kLong);
    auto* facts = own.mutable_data_ptr<int64_t>();
    facts[0] = mine._nnz();
    facts[1] = mine.sparse_dim();
    facts[2] = mine.dim();
    for (int64_t dim = 0; dim < mine.dim(); ++dim) facts[3 + dim] = mine.size(dim);
    std::vector<at::Tensor> all;
    for (int rank = 0; rank < world_; ++rank) all.push_back(at::empty_like(own));
    all_gather(own, all);
    for (int rank = 0; rank < world_; ++rank) {
      if (!all[rank].slice(0, 1).equal(own.slice(0, 1))) {
        throw Failed{{bridge::Kind::Mismatch,
                      "accl: sparse all_reduce: rank " + std::to_string(rank) + " has a different shape than rank " +
                          std::to_string(rank_) + ", which has " + c10d::toString(mine.sizes()),
                      rank_, rank}};
      }
    }
    return all;
  }

  // Blocks until the call completes; allowed, because another thread moves the bytes.
  void all_gather(const at::Tensor& input, const std::vector<at::Tensor>& outputs) {
    Call call({"all_reduce", rank_}, bridge::Collective::AllGather);
    call.inputs.block(input);
    for (const auto& output : outputs) call.outputs.block(output);
    call.args.equal_blocks = std::all_of(outputs.begin(), outputs.end(), [&](const auto& t) { return t.numel() == input.numel(); });
    call.args.timeout_ms = timeout_ms_;
    call.args.seq = seq_++;
    const auto& accelerator = call.placement.tensors();
    const auto waited = bridge::group_call(*group_->group, call.finish(), accelerator).waited;
    settle(waited.status, accelerator.get(), [&] { return memory_of({outputs}, input); });
    if (waited.how != bridge::Outcome::Done) throw Failed{waited.status};
  }

  std::shared_ptr<GroupHandle> group_;
  at::Tensor tensor_;
  int rank_;
  int world_;
  int64_t first_ = -1;
  int64_t seq_ = -1;
  int64_t timeout_ms_;
  std::optional<c10::Stream> stream_;  // the caller's, if the tensor is on an accelerator
};

}  // namespace accl
