//! Tests of the table with the vendors' headers. Tests that call the driver are in the crate's folder `tests`.

use super::functions::*;
use super::peer_functions::{
    self, HANDLE_BYTES, IpcHandle, LAZY_ACCESS, NO_MEMORY, NON_BLOCKING, OutAddress, OutIpcHandle, OutStream,
};
use crate::library::Vendor;
use crate::support::Prototypes;

/// Types of the table in C, by row, with their sizes in Rust.
const TYPES: &[(&str, &str, &str, usize)] = &[
    ("Code", "CUresult", "hipError_t", size_of::<Code>()),
    ("Int", "int", "int", size_of::<Int>()),
    ("Uint", "unsigned int", "unsigned int", size_of::<Uint>()),
    ("Size", "size_t", "size_t", size_of::<Size>()),
    ("Attribute", "CUdevice_attribute", "hipDeviceAttribute_t", size_of::<Attribute>()),
    ("FunctionAttribute", "CUfunction_attribute", "hipFunction_attribute", size_of::<FunctionAttribute>()),
    ("Device", "CUdevice", "hipDevice_t", size_of::<Device>()),
    ("Context", "CUcontext", "hipCtx_t", size_of::<Context>()),
    ("Module", "CUmodule", "hipModule_t", size_of::<Module>()),
    ("Kernel", "CUfunction", "hipFunction_t", size_of::<Kernel>()),
    ("Stream", "CUstream", "hipStream_t", size_of::<Stream>()),
    ("Event", "CUevent", "hipEvent_t", size_of::<Event>()),
    ("Address", "CUdeviceptr", "hipDeviceptr_t", size_of::<Address>()),
    ("Text", "const char *", "const char *", size_of::<Text>()),
    ("Bytes", "const void *", "const void *", size_of::<Bytes>()),
    ("OutBytes", "void *", "void *", size_of::<OutBytes>()),
    ("OutText", "char *", "char *", size_of::<OutText>()),
    ("OutInt", "int *", "int *", size_of::<OutInt>()),
    ("OutWords", "const char **", "const char **", size_of::<OutWords>()),
    ("OutDevice", "CUdevice *", "hipDevice_t *", size_of::<OutDevice>()),
    ("OutContext", "CUcontext *", "hipCtx_t *", size_of::<OutContext>()),
    ("OutModule", "CUmodule *", "hipModule_t *", size_of::<OutModule>()),
    ("OutKernel", "CUfunction *", "hipFunction_t *", size_of::<OutKernel>()),
    ("OutEvent", "CUevent *", "hipEvent_t *", size_of::<OutEvent>()),
    ("Pointers", "void **", "void **", size_of::<Pointers>()),
    ("OutAddress", "CUdeviceptr *", "hipDeviceptr_t *", size_of::<OutAddress>()),
    ("IpcHandle", "CUipcMemHandle", "hipIpcMemHandle_t", size_of::<IpcHandle>()),
    ("OutIpcHandle", "CUipcMemHandle *", "hipIpcMemHandle_t *", size_of::<OutIpcHandle>()),
    ("OutStream", "CUstream *", "hipStream_t *", size_of::<OutStream>()),
    ("OutProperties", "void *", "hipDeviceProp_t *", size_of::<OutProperties>()),
];

#[test]
fn prototypes_and_numbers_are_those_of_cudas_header() {
    let check = Prototypes { header: "cuda.h", vendor: Vendor::Cuda, types: TYPES, symbols: SYMBOLS };
    let numbers = format!(
        "static_assert(CUDA_ERROR_NOT_READY == {NOT_READY} && CU_EVENT_DISABLE_TIMING == {DISABLE_TIMING});\n\
         static_assert(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK == {MAX_THREADS});\n\
         static_assert(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR == {CUDA_MAJOR});\n\
         static_assert(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR == {CUDA_MINOR});\n\
         static_assert(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM == {CUDA_HOST_POINTERS});\n"
    );
    check.run("CUresult (*wrong)(CUmodule *) = cuModuleUnload;", &numbers);
    check.run("static_assert(std::string_view(TEXT(cuEventDestroy)) == \"cuEventDestroy\");", "");
}

#[test]
fn prototypes_and_numbers_are_those_of_hips_header() {
    let check = Prototypes { header: "hip/hip_runtime_api.h", vendor: Vendor::Hip, types: TYPES, symbols: SYMBOLS };
    let numbers = format!(
        "static_assert(hipErrorNotReady == {NOT_READY} && hipEventDisableTiming == {DISABLE_TIMING});\n\
         static_assert(HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK == {MAX_THREADS});\n\
         static_assert(hipDeviceAttributeCanUseHostPointerForRegisteredMem == {HIP_HOST_POINTERS});\n\
         static_assert(sizeof(hipDeviceProp_t) == {PROPERTIES_BYTES});\n\
         static_assert(offsetof(hipDeviceProp_t, gcnArchName) == {ARCHITECTURE_OFFSET});\n\
         static_assert(sizeof(hipDeviceProp_t::gcnArchName) == {ARCHITECTURE_BYTES});\n"
    );
    check.run("hipError_t (*wrong)(hipModule_t *) = hipModuleUnload;", &numbers);
}

#[test]
fn prototypes_for_shared_memory_are_those_of_cudas_header() {
    let symbols = peer_functions::SYMBOLS;
    let check = Prototypes { header: "cuda.h", vendor: Vendor::Cuda, types: TYPES, symbols };
    let numbers = format!(
        "static_assert(CUDA_ERROR_OUT_OF_MEMORY == {NO_MEMORY} && CU_IPC_HANDLE_SIZE == {HANDLE_BYTES});\n\
         static_assert(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS == {LAZY_ACCESS} && alignof(CUipcMemHandle) == 1);\n\
         static_assert(CU_STREAM_NON_BLOCKING == {NON_BLOCKING});\n"
    );
    check.run("CUresult (*wrong)(CUipcMemHandle *, CUdeviceptr *) = cuIpcGetMemHandle;", &numbers);
}

#[test]
fn prototypes_for_shared_memory_are_those_of_hips_header() {
    let symbols = peer_functions::SYMBOLS;
    let check = Prototypes { header: "hip/hip_runtime_api.h", vendor: Vendor::Hip, types: TYPES, symbols };
    let numbers = format!(
        "static_assert(hipErrorOutOfMemory == {NO_MEMORY} && HIP_IPC_HANDLE_SIZE == {HANDLE_BYTES});\n\
         static_assert(hipIpcMemLazyEnablePeerAccess == {LAZY_ACCESS} && alignof(hipIpcMemHandle_t) == 1);\n\
         static_assert(hipStreamNonBlocking == {NON_BLOCKING});\n"
    );
    check.run("hipError_t (*wrong)(hipIpcMemHandle_t *, void **) = hipIpcGetMemHandle;", &numbers);
}
