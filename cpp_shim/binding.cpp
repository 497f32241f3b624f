// The shim's Python classes, the creator, and the store's functions.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include "backend.h"
#include "store.h"
#include "view_bits.h"

namespace accl {

using OptionsState = std::tuple<std::map<std::string, std::string>, std::chrono::milliseconds, std::vector<uint64_t>, std::string, std::string>;

rust::Str bridge::built_with() noexcept { return ACCL_BUILT_WITH; }

bool bridge::define_classes(std::size_t module_address) noexcept {
  HANDLE_TH_ERRORS
  auto module = py::reinterpret_borrow<py::module_>(reinterpret_cast<PyObject*>(module_address));
  const auto copy = [](const AcclOptions& self) { return c10::make_intrusive<AcclOptions>(self); };
  py::class_<AcclOptions, c10d::Backend::Options, c10::intrusive_ptr<AcclOptions>>(module, "BackendOptions")
      .def(py::init<>())
      .def_readwrite("settings", &AcclOptions::settings)
      .def("__copy__", copy)
      .def("__deepcopy__", [copy](const AcclOptions& self, const py::dict&) { return copy(self); })
      .def(py::pickle(
          [](const AcclOptions& self) {
            return std::make_tuple(self.settings, self.timeout, self.global_ranks_in_group, self.group_name, self.group_desc);
          },
          [](const OptionsState& state) {
            auto options = c10::make_intrusive<AcclOptions>();
            std::tie(options->settings, options->timeout, options->global_ranks_in_group, options->group_name,
                     options->group_desc) = state;
            return options;
          }));

  // Dropped without the GIL: threads that a backend waits for may need it.
  py::class_<AcclBackend, c10d::Backend, c10::intrusive_ptr<AcclBackend>> backend(module, "Backend",
                                                                                 py::release_gil_before_calling_cpp_dtor());
  backend.def_property_readonly("options", [](AcclBackend& self) { return self.getBackendOptions(); })
      .def("_set_default_timeout", &AcclBackend::setTimeout, py::arg("timeout"), py::call_guard<py::gil_scoped_release>())
      .def("describe", &AcclBackend::describe)
      .def("snapshot", [](const AcclBackend& self) { return py::module_::import("json").attr("loads")(self.snapshot()); })
      .def("first_error", &AcclBackend::first_error)
      .def("algorithm_of", &AcclBackend::algorithm_of, py::arg("collective"), py::arg("inputs"), py::arg("outputs"),
           py::arg("op"), py::arg("root"), py::call_guard<py::gil_scoped_release>())
      .def("time_calls", &AcclBackend::time_calls, py::arg("collective"), py::arg("inputs"), py::arg("outputs"),
           py::arg("op"), py::arg("root"), py::arg("samples"), py::arg("calls"), py::arg("fenced"),
           py::call_guard<py::gil_scoped_release>());
#if !ACCL_BASE_BINDS_ERROR_AND_TIMING
  backend.def("get_error", &AcclBackend::getError)
      .def("_enable_collectives_timing", &AcclBackend::enableCollectivesTiming);
#endif
  return true;
  END_HANDLE_TH_ERRORS_RET(false)
}

std::size_t bridge::create_backend(const Runtime& runtime, std::size_t store_address, std::int32_t rank,
                                   std::int32_t world, std::size_t options_address, bool is_default) noexcept {
  HANDLE_TH_ERRORS
  const auto object = [](std::size_t address) { return py::handle(reinterpret_cast<PyObject*>(address)); };
  auto store = py::cast<c10::intrusive_ptr<c10d::Store>>(object(store_address));
  auto options = py::cast<c10::intrusive_ptr<AcclOptions>>(object(options_address));
  install_view_kernels();
  c10::intrusive_ptr<c10d::Backend> backend;
  {
    // torch holds the GIL around the creator. Other threads of this process may need it before the other ranks can
    // join.
    py::gil_scoped_release no_gil;
    const auto role = is_default ? AcclBackend::Role::Default : AcclBackend::Role::Other;
    backend = c10::make_intrusive<AcclBackend>(&runtime, nullptr, role, std::move(store), rank, world,
                                               c10::make_intrusive<AcclOptions>(*options));
  }
  return reinterpret_cast<std::size_t>(py::cast(std::move(backend)).release().ptr());
  END_HANDLE_TH_ERRORS_RET(0)
}

// --- the store: an exception of c10d crosses the bridge as text and becomes a rendezvous error ---

static std::vector<std::uint8_t> bytes_of(bridge::Bytes value) { return {value.begin(), value.end()}; }

static rust::Vec<std::uint8_t> to_rust(const std::vector<std::uint8_t>& bytes) {
  rust::Vec<std::uint8_t> value;
  for (const std::uint8_t byte : bytes) value.push_back(byte);
  return value;
}

std::uint64_t bridge::store_identity(const StoreRef& store) noexcept { return reinterpret_cast<std::uintptr_t>(store.root()); }

void bridge::store_set(const StoreRef& store, rust::Str key, Bytes value) {
  store.store->set(std::string(key), bytes_of(value));
}

rust::Vec<std::uint8_t> bridge::store_get(const StoreRef& store, rust::Str key) {
  return to_rust(store.store->get(std::string(key)));
}

rust::Vec<std::uint8_t> bridge::store_compare_set(const StoreRef& store, rust::Str key, Bytes expected, Bytes desired) {
  return to_rust(store.store->compareSet(std::string(key), bytes_of(expected), bytes_of(desired)));
}

std::int64_t bridge::store_add(const StoreRef& store, rust::Str key, std::int64_t delta) {
  return store.store->add(std::string(key), delta);
}

bool bridge::store_check(const StoreRef& store, rust::Str key) { return store.store->check({std::string(key)}); }

bool bridge::store_delete(const StoreRef& store, rust::Str key) { return store.store->deleteKey(std::string(key)); }

}  // namespace accl
