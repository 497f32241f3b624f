// C baseline, which shows what the machine can do: float32 sums in shared memory, and nothing else.
//
// There are no other types or operators, no error handling and no sleeping. Two ranks may have all sizes, more ranks
// only small ones.
//
// Small: each rank writes data and then a flag into its own slot, and adds the data of the others. It has two slots,
// used in turn. Large, two ranks: each rank owns a half and interleaves three streams over rings of slots. The first
// copies out this rank's data of the other half. The second adds the other's data of this half, straight from its slot,
// into the result and into a slot that goes back. The third copies in the finished other half.
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "board.h"
#include "rank.h"

enum {
  MOST_RANKS = 8,
  SMALL_BYTES = 16 << 10,
  TILE_BYTES = 64 << 10,
  SLOTS = 8,
  // Bytes of data in the flag's cache line.
  INLINE_BYTES = 32,
};

// A flag and the data that fits into its cache line; larger data is in `bulk`.
struct letter {
  _Alignas(LINE_BYTES) _Atomic uint64_t seq;
  float inline_data[INLINE_BYTES / sizeof(float)];
  _Alignas(LINE_BYTES) float bulk[SMALL_BYTES / sizeof(float)];
};

// From one rank to the other: the number of tiles written and taken since the start.
struct ring {
  struct line written, taken;
  _Alignas(4096) float slots[SLOTS][TILE_BYTES / sizeof(float)];
};

struct shared {
  struct letter letters[MOST_RANKS][2];
  struct ring parts[2], results[2];  // indexed by the rank that writes
};

static struct shared *shared;
static int rank, ranks;
static int crowded;  // more ranks than cores
static uint64_t seq;
static uint64_t parts_before[2], results_before[2];  // tiles of the calls so far, in each ring

const char *peer_open(const struct place *place) {
  static char wrong[128];
  rank = place->rank;
  ranks = place->ranks;
  if (ranks > MOST_RANKS) return "the C baseline supports at most 8 ranks";
  crowded = ranks > sysconf(_SC_NPROCESSORS_ONLN);
  char path[4096];
  snprintf(path, sizeof path, "%s/sketch", place->dir);
  int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, sizeof *shared) != 0) {
    snprintf(wrong, sizeof wrong, "the shared memory cannot be created: %s", strerror(errno));
    return wrong;
  }
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
  close(file);
  return shared == MAP_FAILED ? "the shared memory cannot be mapped" : NULL;
}

static inline uint64_t seen(struct line *line) { return atomic_load_explicit(&line->value, memory_order_acquire); }

static inline void publish(struct line *line, uint64_t value) {
  atomic_store_explicit(&line->value, value, memory_order_release);
}

static void wait_for(struct letter *letter) {
  if (crowded) {
    WAIT_UNTIL(atomic_load_explicit(&letter->seq, memory_order_acquire) == seq);
  } else {
    while (atomic_load_explicit(&letter->seq, memory_order_acquire) != seq) pause_core();
  }
}

static inline void add(float *restrict into, const float *restrict from, size_t count) {
  for (size_t i = 0; i < count; ++i) into[i] += from[i];
}

static inline void add_both(float *restrict into, float *restrict also, const float *restrict from, size_t count) {
  for (size_t i = 0; i < count; ++i) also[i] = into[i] = into[i] + from[i];
}

// A slot is free again after two calls. A rank ends a call when it has every other rank's letter of that call. The
// writer of such a letter had read all letters of the call before.
static void all_reduce_small(float *data, size_t count) {
  ++seq;
  size_t bytes = count * sizeof(float);
  int is_inline = bytes <= INLINE_BYTES;
  struct letter *mine = &shared->letters[rank][seq & 1];
  memcpy(is_inline ? mine->inline_data : mine->bulk, data, bytes);
  atomic_store_explicit(&mine->seq, seq, memory_order_release);
  for (int other = 0; other < ranks; ++other) {
    if (other == rank) continue;
    struct letter *letter = &shared->letters[other][seq & 1];
    wait_for(letter);
    add(data, is_inline ? letter->inline_data : letter->bulk, count);
  }
}

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

static void all_reduce_large(float *data, size_t count) {
  int other = 1 - rank;
  size_t first = (count / 2 + 15) / 16 * 16;
  size_t counts[2] = {first, count - first};
  float *halves[2] = {data, data + first};
  float *mine = halves[rank], *theirs = halves[other];
  // A short half is one tile: overlapping would not pay for more exchanges of flags.
  const size_t tile = TILE_BYTES / sizeof(float);
  size_t tiles[2] = {(counts[0] + tile - 1) / tile, (counts[1] + tile - 1) / tile};
  struct ring *send = &shared->parts[rank], *receive = &shared->parts[other];
  struct ring *back = &shared->results[rank], *done = &shared->results[other];
  uint64_t send_base = parts_before[rank], receive_base = parts_before[other];
  uint64_t back_base = results_before[rank], done_base = results_before[other];
  size_t sent = 0, added = 0, taken = 0;
#define TILE_OF(half, index) smaller(tile, counts[half] - (index) * tile)
  while (taken < tiles[other] || added < tiles[rank]) {
    if (sent < tiles[other] && send_base + sent < seen(&send->taken) + SLOTS) {
      memcpy(send->slots[(send_base + sent) % SLOTS], theirs + sent * tile, TILE_OF(other, sent) * sizeof(float));
      publish(&send->written, send_base + ++sent);
    }
    if (added < tiles[rank] && seen(&receive->written) > receive_base + added &&
        back_base + added < seen(&back->taken) + SLOTS) {
      add_both(mine + added * tile, back->slots[(back_base + added) % SLOTS],
               receive->slots[(receive_base + added) % SLOTS], TILE_OF(rank, added));
      ++added;
      publish(&back->written, back_base + added);
      publish(&receive->taken, receive_base + added);
    }
    if (taken < tiles[other] && seen(&done->written) > done_base + taken) {
      memcpy(theirs + taken * tile, done->slots[(done_base + taken) % SLOTS], TILE_OF(other, taken) * sizeof(float));
      publish(&done->taken, done_base + ++taken);
    }
  }
#undef TILE_OF
  for (int half = 0; half < 2; ++half) {
    parts_before[1 - half] += tiles[half];
    results_before[half] += tiles[half];
  }
}

static int is_small(const struct call *call) { return call->count * sizeof(float) <= SMALL_BYTES; }

const char *peer_call(const struct call *call) {
  if (is_small(call))
    all_reduce_small(call->output, call->count);
  else
    all_reduce_large(call->output, call->count);
  return NULL;
}

int peer_has(const struct call *call) { return call->collective == ALL_REDUCE && (ranks == 2 || is_small(call)); }

const char *peer_version(void) { return "in this repository"; }

void peer_close(void) {}
