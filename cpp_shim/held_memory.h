// Memory of failed calls to which a library (such as MPI) or a device that cannot be stopped may still write.
//
// Owns that this memory is never freed: no code can know when freeing would be safe. Resizing the storage of such a
// tensor still frees it.
#pragma once

#include <vector>

#include <ATen/ATen.h>

#include "errors.h"

namespace accl {

// Keeps a call's memory for the life of the process, if the call's status demands it.
inline void hold_memory(const bridge::Status& status, std::vector<c10::Storage> memory) {
  if (status.must_leak_memory) new std::vector<c10::Storage>(std::move(memory));
}

inline void hold_memory(const bridge::Status& status, at::TensorList tensors) {
  if (!status.must_leak_memory) return;
  std::vector<c10::Storage> memory;
  for (const auto& tensor : tensors) memory.push_back(tensor.storage());
  hold_memory(status, std::move(memory));
}

}  // namespace accl
