// Python as this process has it: whether it is there, its lock, its exceptions and signals.
//
// Owns every use of the GIL but those of the bindings. It is never needed for progress: whoever works or waits here lets Python run.
#pragma once

#include <optional>
#include <string>

#include <torch/csrc/utils/pybind.h>

namespace accl {

bool python_is_up();

// Lets Python run while this thread works or waits; most callers have released the GIL already.
template <class Work>
auto without_gil(Work work) {
  std::optional<py::gil_scoped_release> released;
  if (python_is_up() && PyGILState_Check() != 0) released.emplace();
  return work();
}

// Throws the Python exception that is set on this thread, if there is one.
void throw_python_error_if_set();
// Adds the sentence as a note to the Python exception that is set on this thread.
void note_on_python_error(const std::string& sentence);
// Throws an exception of the package's own class of this name, unless Python is not there.
void throw_python(const char* name, const std::string& message);

// Before `shutdown` throws: lets torch forget the groups that it is just destroying.
void finish_destroy() noexcept;

}  // namespace accl
