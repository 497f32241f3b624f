// Control of the stand-in driver, for tests.
//
// Owns the C interface by which a test steers the driver and lends it streams. What is not here is the vendors' interface.

#ifndef ACCL_GPU_STANDIN_H
#define ACCL_GPU_STANDIN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// ACCL_GPU_STANDIN_IPC in the environment lets a system share no memory: `none` lets exports fail with
// CUDA_ERROR_NOT_SUPPORTED (801), and `import` lets imports fail with CUDA_ERROR_PEER_ACCESS_UNSUPPORTED (217).

// Streams and device memory of another stand-in. Tests through torch lend the streams of their device type: tests/standin.
// The functions are called with the driver's lock. Tasks take no lock of the driver, so they may run under the lender's.
struct accl_standin_host {
  void *self;
  // Appends a task to a stream, given by its native handle. The stream calls work(data) once, in its order.
  void (*enqueue)(void *self, int device, void *stream, void (*work)(void *data), void *data);
  // Lets a stream do one step, as a query does.
  void (*advance)(void *self, int device, void *stream);
  // Gives access to a device's memory under the addresses that programs see, or ends it. Called at the beginning and the
  // end of a task.
  void (*access)(void *self, int device, int on);
  // Writes the first address of memory that kernels of a device may use, and the address behind it: device memory and pinned
  // memory. Returns 0 if `index` is not below the number of ranges.
  int (*memory)(void *self, int device, int index, uint64_t *begin, uint64_t *end);
};

// When streams do their tasks.
enum accl_standin_order {
  ACCL_STANDIN_EARLY,  // at once
  ACCL_STANDIN_LATE,   // when a result is required; each query does one task
  ACCL_STANDIN_RANDOM, // some at each call, by the seed
};

// Objects that are alive, and calls so far.
struct accl_standin_counts {
  int64_t contexts;  // retained and not released
  int64_t modules;   // loaded
  int64_t events;    // created
  int64_t programs;  // of the compiler
  int64_t tasks;     // in the library's own streams
  int64_t loads;     // of modules, so far
  int64_t compiles;  // of programs, so far
  int64_t calls;     // of functions of the vendors' interface, so far
  int64_t launches;  // of kernels, so far
  int64_t allocations;  // of device memory by the driver
  int64_t imports;      // of other processes' memory, not closed
  int64_t copies;       // from device memory to device memory, so far
};

// Lends streams and memory. Null: the library's own.
void accl_standin_lend(const struct accl_standin_host *host);
void accl_standin_order(int order, uint64_t seed);
// Lets one call of a function fail with a code: the call after `skipped` others from now. An empty name: no function.
void accl_standin_fail(const char *name, unsigned skipped, int code);
// Lets each call fail with a probability, drawn by a seed. A million: always. Zero: never.
void accl_standin_draw(uint64_t seed, unsigned per_million, int code);
// Name of the function that has failed last by the two functions above; empty for none since the last call of one of them.
const char *accl_standin_failed(void);
// Sets the version and the compute capability that the driver gives, such as 13020 and 9.0.
void accl_standin_version(int driver, int major, int minor);
// Sets whether devices reach pinned memory at the host's addresses.
void accl_standin_host_pointers(int has_them);
void accl_standin_count(struct accl_standin_counts *counts);
// Sets the most bytes that the driver's allocations may have together. Zero: no limit.
void accl_standin_memory_limit(size_t bytes);

// Streams and memory of the library's own. Device memory has no access rights outside of tasks.
void *accl_standin_stream(int device);
uint64_t accl_standin_allocate(int device, size_t bytes);
// Copies to and from device memory at once, out of the order of streams. The memory is the library's own, an allocation of
// the driver, or imported.
void accl_standin_poke(uint64_t address, const void *from, size_t bytes);
void accl_standin_peek(void *to, uint64_t address, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
