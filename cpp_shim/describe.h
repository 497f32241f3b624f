// Describes tensors and operators as the plain data that crosses the bridge. Never reads or copies tensor memory.
#pragma once

#include <list>
#include <string>
#include <vector>

#include <c10/util/SmallVector.h>

#include "errors.h"
#include "torch_compat.h"

namespace accl {

// Names every scalar type explicitly, so that none is mapped to another by default.
inline bridge::Dtype to_dtype(at::ScalarType type, const char* call) {
  using bridge::Dtype;
  using at::ScalarType;
  switch (type) {
    case ScalarType::Bool: return Dtype::Bool;
    case ScalarType::Byte: return Dtype::U8;
    case ScalarType::Char: return Dtype::I8;
    case ScalarType::UInt16: return Dtype::U16;
    case ScalarType::Short: return Dtype::I16;
    case ScalarType::UInt32: return Dtype::U32;
    case ScalarType::Int: return Dtype::I32;
    case ScalarType::UInt64: return Dtype::U64;
    case ScalarType::Long: return Dtype::I64;
    case ScalarType::Half: return Dtype::F16;
    case ScalarType::BFloat16: return Dtype::BF16;
    case ScalarType::Float: return Dtype::F32;
    case ScalarType::Double: return Dtype::F64;
    case ScalarType::ComplexHalf: return Dtype::C32;
    case ScalarType::ComplexFloat: return Dtype::C64;
    case ScalarType::ComplexDouble: return Dtype::C128;
    case ScalarType::Float8_e4m3fn: return Dtype::F8E4M3Fn;
    case ScalarType::Float8_e5m2: return Dtype::F8E5M2;
    case ScalarType::Float8_e4m3fnuz: return Dtype::F8E4M3FnUz;
    case ScalarType::Float8_e5m2fnuz: return Dtype::F8E5M2FnUz;
    case ScalarType::Float8_e8m0fnu: return Dtype::F8E8M0Fnu;
    case ScalarType::Float4_e2m1fn_x2: return Dtype::F4E2M1FnX2;
    ACCL_CASES_OF_NEWER_SCALAR_TYPES
    // One byte per element, whatever its bits mean.
    case ScalarType::Bits1x8: case ScalarType::Bits2x4: case ScalarType::Bits4x2: case ScalarType::Bits8:
    case ScalarType::UInt1: case ScalarType::UInt2: case ScalarType::UInt3: case ScalarType::UInt4:
    case ScalarType::UInt5: case ScalarType::UInt6: case ScalarType::UInt7:
    case ScalarType::Int1: case ScalarType::Int2: case ScalarType::Int3: case ScalarType::Int4:
    case ScalarType::Int5: case ScalarType::Int6: case ScalarType::Int7: return Dtype::Bits8;
    case ScalarType::Bits16: return Dtype::Bits16;
    // Quantized types: the scale would not be sent with the values.
    case ScalarType::QInt8: case ScalarType::QUInt8: case ScalarType::QInt32: case ScalarType::QUInt4x2:
    case ScalarType::QUInt2x4: case ScalarType::Undefined: case ScalarType::NumOptions: break;
  }
  refuse(bridge::Kind::Unsupported, call, std::string("tensors of type ") + c10::toString(type) + " cannot be sent");
}

inline bridge::ReduceOp to_reduce_op(const c10d::ReduceOp& op, const char* call) {
  using bridge::ReduceOp;
  using Torch = c10d::ReduceOp;
  switch (op.op_) {
    case Torch::SUM: return ReduceOp::Sum;
    case Torch::AVG: return ReduceOp::Avg;
    case Torch::PRODUCT: return ReduceOp::Product;
    case Torch::MIN: return ReduceOp::Min;
    case Torch::MAX: return ReduceOp::Max;
    case Torch::BAND: return ReduceOp::Band;
    case Torch::BOR: return ReduceOp::Bor;
    case Torch::BXOR: return ReduceOp::Bxor;
    case Torch::PREMUL_SUM: return ReduceOp::PremulSum;
    case Torch::UNUSED: break;
  }
  refuse(bridge::Kind::Unsupported, call, "unknown reduce operator");
}

// The factor of PREMUL_SUM, from a number or a tensor of one element; 1 for other operators.
inline double factor_of(const c10d::ReduceOp& op, const char* call) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return 1.0;
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (supplement == nullptr) refuse(bridge::Kind::InvalidArgument, call, "PREMUL_SUM has no factor");
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>() : supplement->double_factor;
}

// Whether the call writes the described memory.
enum class Access { kRead, kWrite };

// The tensors of one side of a call, as blocks of pieces. Borrows the tensors' shapes, so the tensors must outlive it.
class Blocks {
 public:
  Blocks(Access access, const char* call) : access_(access), call_(call) {}

  void open_block() { counts_.push_back(0); }

  // Adds a whole tensor as the next piece of the open block.
  void piece(const at::Tensor& tensor) {
    if (tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) {
      push(dense(tensor, 0, tensor.numel()));
    } else {
      push(strided(tensor, tensor.sizes().data(), 0));
    }
  }

  void block(const at::Tensor& tensor) {
    open_block();
    piece(tensor);
  }

  // Adds rows [first, first + count) along dimension 0.
  void rows(const at::Tensor& tensor, int64_t first, int64_t count) {
    const int64_t row = tensor.size(0) == 0 ? 0 : tensor.numel() / tensor.size(0);
    if (tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) {
      push(dense(tensor, first * row, count * row));
      return;
    }
    auto& sizes = narrowed_.emplace_back(tensor.sizes().vec());
    sizes[0] = count;
    push(strided(tensor, sizes.data(), first * tensor.stride(0)));
  }

  // Adds part `index` of `parts` equal parts, in row-major order.
  void part(const at::Tensor& tensor, int64_t index, int64_t parts) {
    const int64_t count = tensor.numel() / parts;
    if (tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) {
      push(dense(tensor, index * count, count));
    } else if (tensor.dim() > 0 && tensor.size(0) % parts == 0) {
      rows(tensor, index * (tensor.size(0) / parts), tensor.size(0) / parts);
    } else {
      refuse(bridge::Kind::InvalidArgument, call_,
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
  bool empty() const { return views_.empty(); }
  bridge::Dtype dtype() const { return views_[0].dtype; }

 private:
  void push(const bridge::TensorView& view) {
    views_.push_back(view);
    ++counts_.back();
  }

  bridge::TensorView base(const at::Tensor& tensor, int64_t offset) {
    bridge::TensorView view{};
    view.dtype = to_dtype(tensor.scalar_type(), call_);
    if (tensor.numel() > 0) {
      const void* data = access_ == Access::kWrite ? tensor.mutable_data_ptr() : tensor.const_data_ptr();
      view.data = reinterpret_cast<size_t>(data) + offset * static_cast<int64_t>(tensor.element_size());
    }
    return view;
  }

  bridge::TensorView dense(const at::Tensor& tensor, int64_t offset, int64_t count) {
    auto view = base(tensor, offset);
    view.count = count;
    return view;
  }

  bridge::TensorView strided(const at::Tensor& tensor, const int64_t* sizes, int64_t offset) {
    auto view = base(tensor, offset);
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
  const char* call_;
  c10::SmallVector<bridge::TensorView, 2> views_;
  c10::SmallVector<uint32_t, 4> counts_;
  std::list<std::vector<int64_t>> narrowed_;  // a list: pointers into it stay valid, and an empty one allocates nothing
};

// A call while it is being described.
struct Call {
  Call(bridge::Collective collective, const char* name, int64_t root = 0)
      : name(name), inputs(Access::kRead, name), outputs(Access::kWrite, name) {
    args.collective = collective;
    args.root = static_cast<uint32_t>(root);
    args.factor = 1.0;
    args.peer = -1;
    args.timeout_ms = -1;
    args.equal_blocks = true;
    args.seq = -1;
    args.is_profiled = false;
  }

  void reduce(const c10d::ReduceOp& op) {
    args.op = to_reduce_op(op, name);
    args.factor = factor_of(op, name);
  }

  // The result is valid as long as this call and its tensors live.
  const bridge::CallArgs& finish() {
    args.inputs = inputs.views();
    args.input_blocks = inputs.counts();
    args.outputs = outputs.views();
    args.output_blocks = outputs.counts();
    args.dtype = !inputs.empty() ? inputs.dtype() : !outputs.empty() ? outputs.dtype() : bridge::Dtype::U8;
    return args;
  }

  const char* name;
  bridge::CallArgs args{};
  Blocks inputs;
  Blocks outputs;
};

}  // namespace accl
