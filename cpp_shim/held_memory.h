// Memory of failed calls that somebody who cannot be stopped may still write to, such as an MPI library.
//
// Owns that it is never freed: nobody can tell when it would be safe. Who resizes the storage of such a tensor frees it all the same.
#pragma once

#include <vector>

#include <ATen/ATen.h>

#include "errors.h"

namespace accl {

// Keeps what a call works on for as long as the process lives, if its status says so.
inline void hold_memory(const bridge::Status& status, std::vector<c10::Storage> memory) {
  if (status.holds_memory) new std::vector<c10::Storage>(std::move(memory));
}

inline void hold_memory(const bridge::Status& status, at::TensorList tensors) {
  if (!status.holds_memory) return;
  std::vector<c10::Storage> memory;
  for (const auto& tensor : tensors) memory.push_back(tensor.storage());
  hold_memory(status, std::move(memory));
}

}  // namespace accl
