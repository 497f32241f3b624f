// Memory of failed calls that may still be in use.
//
// Owns that memory is never freed if a library (such as MPI) or a device that cannot be stopped may still write to it: no
// code can know when freeing would be safe. Resizing the storage of such a tensor still frees it.
#pragma once

#include <vector>

#include <ATen/ATen.h>

#include "errors.h"

namespace accl {

// Keeps a call's memory for the life of the process, if the call's status demands it.
inline void hold_memory(const bridge::Status& status, std::vector<c10::Storage> memory) {
  if (status.must_leak_memory) new std::vector<c10::Storage>(std::move(memory));
}

// The memory of the results and of other tensors of a call.
inline std::vector<c10::Storage> memory_of(const std::vector<std::vector<at::Tensor>>& results, at::TensorList others) {
  std::vector<c10::Storage> memory;
  for (const auto& list : results) {
    for (const auto& tensor : list) memory.push_back(tensor.storage());
  }
  for (const auto& tensor : others) memory.push_back(tensor.storage());
  return memory;
}

}  // namespace accl
