// What a contender in C or C++ has to give: how ranks meet, one call of a collective, and the end. `rank.c` does the
// rest: it talks to the driver, owns the buffers, times batches and checks results.
#pragma once
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

enum collective { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL, BARRIER, COLLECTIVES };

// Elements are float32; sums. `count` is that of the largest buffer, `block` that of each rank's part of it.
struct call {
  enum collective collective;
  size_t count, block;
  float *input;   // what reduce_scatter, all_gather and all_to_all read
  float *output;  // what is written; all_reduce and broadcast are in place
};

struct place {
  int rank, ranks;
  const char *dir;  // where the ranks of this contender meet
};

// Each returns null, or one sentence that says what is wrong. Broadcast is from rank 0.
const char *peer_open(const struct place *place);
const char *peer_call(const struct call *call);
int peer_has(const struct call *call);
// Name and version of what is measured.
const char *peer_version(void);
void peer_close(void);

#ifdef __cplusplus
}
#endif
