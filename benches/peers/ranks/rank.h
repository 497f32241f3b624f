// The functions that a library in C or C++ provides: connecting the ranks, one call of a collective, and the end.
// `rank.c` does the rest: it talks to the driver, owns the buffers, times batches and checks results.
#pragma once
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

enum collective { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL, BARRIER, COLLECTIVES };

// A call on float32 elements; reductions are sums. `count` is the number of elements in the largest buffer, `block` in
// each rank's part of it.
struct call {
  enum collective collective;
  size_t count, block;
  float *input;   // read by reduce_scatter, all_gather and all_to_all
  float *output;  // written; all_reduce and broadcast are in place
};

struct place {
  int rank, ranks;
  const char *dir;  // folder for files by which the ranks of this library connect
};

// Each returns NULL, or one sentence that describes the error. `peer_has` returns whether the call exists. Broadcast is
// from rank 0.
const char *peer_open(const struct place *place);
const char *peer_call(const struct call *call);
int peer_has(const struct call *call);
// Returns the library's name and version.
const char *peer_version(void);
void peer_close(void);

#ifdef __cplusplus
}
#endif
