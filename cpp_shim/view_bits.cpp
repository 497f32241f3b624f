// Conjugate and negative views on their way to our backend.
//
// torch's dispatcher replaces such views by resolved copies before an operation sees them. c10d's operations write into
// lists of tensors, so results of in-place calls would be lost with the copies. The kernels here run before that
// replacement. For our groups they pass the views unchanged, and the engine resolves them while packing. For other
// groups they follow torch's own rule.
#include <algorithm>
#include <optional>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include "view_bits.h"

namespace accl {

namespace {

// The device that selects the backend: the first tensor's device.
std::optional<c10::DeviceType> device_of(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().device().type();
  if (!value.isList()) return std::nullopt;
  for (const c10::IValue& element : value.toListRef()) {
    if (const auto device = device_of(element)) return device;
  }
  return std::nullopt;
}

bool is_ours(c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::DeviceType> device;
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  for (const c10::IValue& value : arguments) {
    if (!device) device = device_of(value);
    if (group || !value.isCustomClass()) continue;
    const auto type = value.type()->cast<c10::ClassType>();
    if (type && type->name() && type->name()->name() == "ProcessGroup") group = value.toCustomClass<c10d::ProcessGroup>();
  }
  if (!device || !group || !group->hasBackends()) return false;
  const auto types = group->getDeviceTypes();
  const bool serves = std::any_of(types.begin(), types.end(), [&](const auto& type) { return type.type() == *device; });
  return serves && group->getBackend(*device)->getBackendName() == "accl";
}

void resolve(c10::IValue& value, at::Tensor (*resolved)(const at::Tensor&)) {
  if (value.isTensor()) {
    value = resolved(value.toTensor());
  } else if (value.isTensorList()) {
    auto list = value.toTensorVector();
    for (auto& tensor : list) tensor = resolved(tensor);
    value = std::move(list);
  }
  // Lists of lists stay unchanged, as in torch.
}

template <c10::DispatchKey key>
void pass_view(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  if (!is_ours(arguments)) {
    const auto first = stack->size() - arguments.size();
    const auto resolved = key == c10::DispatchKey::Negative
                              ? +[](const at::Tensor& tensor) { return tensor.resolve_neg(); }
                              : +[](const at::Tensor& tensor) { return tensor.resolve_conj(); };
    for (auto i = first; i < stack->size(); ++i) resolve((*stack)[i], resolved);
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key), stack);
}

template <c10::DispatchKey key>
void install() {
  // Never unregistered: operations may still run while the process exits.
  auto* library = new torch::Library(torch::Library::IMPL, "c10d", key, __FILE__, __LINE__);
  for (const char* name :
       {"send", "recv_", "recv_any_source_", "reduce_", "broadcast_", "allreduce_", "allreduce_coalesced_", "allgather_",
        "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_",
        "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "gather_", "gather_into_tensor_", "scatter_", "alltoall_",
        "alltoall_base_"}) {
    library->impl(name, torch::CppFunction::makeFromBoxedFunction<&pass_view<key>>());
  }
}

}  // namespace

void install_view_kernels() {
  const auto op = c10::Dispatcher::singleton().findSchema({"c10d::allreduce_", ""});
  if (op && op->hasKernelForDispatchKey(c10::DispatchKey::Conjugate)) return;
  install<c10::DispatchKey::Conjugate>();
  install<c10::DispatchKey::Negative>();
}

}  // namespace accl
