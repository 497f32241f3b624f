// The only place that knows differences between torch versions.
//
// The shim overrides c10d's old method names everywhere: newer versions forward their new names to them.
#pragma once

#include <torch/version.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

// Compared as a pair, so that 3.0 is newer than 2.9.
#define ACCL_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

#if !ACCL_TORCH_AT_LEAST(2, 13)
#error "torch_accl needs torch 2.13 or newer"
#endif

// What the headers say of the torch and the pybind11 that a module is compiled for, a line each.
#define ACCL_BUILT_WITH TORCH_VERSION "\n" PYBIND11_INTERNALS_ID

#if ACCL_TORCH_AT_LEAST(2, 14)
// `Backend::Options::clone`, `Work::getTimeout`, and `get_error` and timing bound on the base class.
#define ACCL_OVERRIDE_2_14 override
#define ACCL_BASE_BINDS_ERROR_AND_TIMING 1
// Scalar types that only newer versions have.
#define ACCL_CASES_OF_NEWER_SCALAR_TYPES \
  case at::ScalarType::BComplex32: return Dtype::BC32;
#else
#define ACCL_OVERRIDE_2_14
#define ACCL_BASE_BINDS_ERROR_AND_TIMING 0
#define ACCL_CASES_OF_NEWER_SCALAR_TYPES
#endif
