// See interpreter.h.
#include "interpreter.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "accl-py/src/bridge.rs.h"

namespace accl {

bool python_is_up() { return Py_IsInitialized() != 0 && Py_IsFinalizing() == 0; }

// Throws a class of the Python package. A refused argument is also a RuntimeError, as with gloo, and no C++ exception
// class maps to both.
void throw_python(const char* name, const std::string& message) {
  if (!python_is_up()) return;
  py::gil_scoped_acquire gil;
  const py::object type = py::module_::import("torch_accl._errors").attr(name);
  PyErr_SetString(type.ptr(), message.c_str());
  throw py::error_already_set();
}

void throw_python_error_if_set() {
  if (!python_is_up()) return;
  py::gil_scoped_acquire gil;
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
}

void finish_destroy() noexcept {
  if (!python_is_up()) return;
  py::gil_scoped_acquire gil;
  try {
    py::module_::import("torch_accl._register").attr("finish_destroy")();
  } catch (const std::exception& thrown) {
    TORCH_WARN_ONCE("accl: torch could not unregister a destroyed group: ", thrown.what());
  }
}

void note_on_python_error(const std::string& sentence) {
  if (!python_is_up()) return;
  py::gil_scoped_acquire gil;
  if (PyErr_Occurred() == nullptr) return;
  py::error_already_set raised;
  try {
    raised.value().attr("add_note")(sentence);
  } catch (const py::error_already_set&) {
    // A user's exception class may refuse notes; then the exception is raised unchanged.
  }
  raised.restore();
}

namespace {

// Python runs signal handlers on its main thread only, so no other thread needs the GIL for them.
bool raises_on_main_thread(int (*run)()) noexcept {
  if (::syscall(SYS_gettid) != ::getpid() || !python_is_up()) return false;
  const PyGILState_STATE gil = PyGILState_Ensure();
  const bool raised = run() != 0;
  PyGILState_Release(gil);
  return raised;
}

}  // namespace

bool bridge::python_interrupted() noexcept { return raises_on_main_thread(PyErr_CheckSignals); }

// Also runs pending calls. Python's queue of pending calls is short: without this, completions of many groups would
// wait for room until the deadline.
bool bridge::python_interrupted_at_end() noexcept { return raises_on_main_thread(Py_MakePendingCalls); }

}  // namespace accl
