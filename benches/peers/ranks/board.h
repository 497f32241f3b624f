// The board: memory that the ranks of one library share with the driver. Ranks start together by it, and the driver
// reads from it when each batch began and ended. All are on one host and use one clock.
//
// Owns the layout, which `board.py` and `src/board.rs` repeat: a cache line for each rank's arrivals, a line for each rank's
// mark, then a row of (begin, end) for each rank. It does not decide what is timed.
#pragma once
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum {
  BOARD_RANKS = 64,
  BOARD_BATCHES = 4096,
  LINE_BYTES = 64,
  SPINS_BEFORE_YIELD = 20,
};

struct line {
  _Atomic uint64_t value;
  char rest[LINE_BYTES - sizeof(uint64_t)];
};

struct span {
  uint64_t begin_ns, end_ns;
};

struct board {
  struct line arrivals[BOARD_RANKS];
  struct line marks[BOARD_RANKS];
  struct span spans[BOARD_RANKS][BOARD_BATCHES];
};

static inline uint64_t now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static inline void pause_core(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Polls `condition` until it holds, and yields the core after a few polls: another rank may need it.
#define WAIT_UNTIL(condition)                       \
  for (unsigned looks = 0; !(condition); ++looks) { \
    if (looks < SPINS_BEFORE_YIELD)                 \
      pause_core();                                 \
    else                                            \
      sched_yield();                                \
  }

// Maps the board's file, which the driver has created. Returns NULL if it cannot be mapped.
static inline struct board *board_open(const char *path) {
  int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return NULL;
  void *memory = mmap(NULL, sizeof(struct board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return memory == MAP_FAILED ? NULL : memory;
}

// Returns when all ranks have called it as often as this one.
static inline void board_meet(struct board *board, int rank, int ranks) {
  uint64_t mine = atomic_load_explicit(&board->arrivals[rank].value, memory_order_relaxed) + 1;
  atomic_store_explicit(&board->arrivals[rank].value, mine, memory_order_release);
  for (int other = 0; other < ranks; ++other)
    WAIT_UNTIL(atomic_load_explicit(&board->arrivals[other].value, memory_order_acquire) >= mine);
}
