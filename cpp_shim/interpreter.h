// Python in this process: whether it runs, its lock, its exceptions and its signals.
//
// Owns every use of the GIL outside the bindings. Progress never needs the GIL: a thread that works or waits here
// releases it.
#pragma once

#include <optional>
#include <string>

#include <torch/csrc/utils/pybind.h>

namespace accl {

bool python_is_up();

// Releases the GIL while this thread works or waits. Most callers have released it already.
template <class Work>
auto without_gil(Work work) {
  std::optional<py::gil_scoped_release> released;
  if (python_is_up() && PyGILState_Check() != 0) released.emplace();
  return work();
}

// Throws the Python exception that is set on this thread, if any.
void throw_python_error_if_set();
// Adds the sentence as a note to the Python exception that is set on this thread.
void note_on_python_error(const std::string& sentence);
// Throws the package's own exception class of this name, unless Python is not running.
void throw_python(const char* name, const std::string& message);

// Called before `shutdown` throws: makes torch forget the groups that it is destroying.
void finish_destroy() noexcept;

}  // namespace accl
