// One rank of a library: started as `PROGRAM DIR RANK RANKS CORE`, it follows orders from the socket DIR/socket.
//
// Orders from the driver: `check COLLECTIVE DTYPE BYTES`, `run COLLECTIVE DTYPE BYTES BATCHES CALLS MEET`, `quit`.
// Answers are `ok`, `none` (the library does not have the call) or `wrong SENTENCE`. Times go to the board, see
// `board.h`.
#define _GNU_SOURCE
#include "rank.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "board.h"

static const char *const NAMES[COLLECTIVES] = {"all_reduce", "reduce_scatter", "all_gather",
                                               "broadcast",  "all_to_all",     "barrier"};

static struct place place;
static struct board *board;
static FILE *driver;
static float *buffers[2];
static size_t room_bytes;

static void fail(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "rank %d: ", place.rank);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
  exit(1);
}

static void answer(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vfprintf(driver, format, arguments);
  va_end(arguments);
  fputc('\n', driver);
  fflush(driver);
}

static void connect_to_driver(void) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  if (snprintf(address.sun_path, sizeof address.sun_path, "%s/socket", place.dir) >= (int)sizeof address.sun_path)
    fail("the path of %s/socket is too long", place.dir);
  int stream = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (stream < 0 || connect(stream, (struct sockaddr *)&address, sizeof address) != 0)
    fail("%s: %s", address.sun_path, strerror(errno));
  driver = fdopen(stream, "r+");
  if (!driver) fail("the socket cannot be used: %s", strerror(errno));
  // Line buffering, so that reads and writes alternate without a seek between them.
  setvbuf(driver, NULL, _IOLBF, 0);
}

static void stay_on(int core) {
  if (core < 0) return;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  if (sched_setaffinity(0, sizeof one, &one) != 0) fail("core %d: %s", core, strerror(errno));
}

static struct call prepare(enum collective collective, size_t bytes) {
  if (bytes > room_bytes) {
    for (int which = 0; which < 2; ++which) {
      free(buffers[which]);
      if (posix_memalign((void **)&buffers[which], 4096, bytes) != 0) fail("no memory for %zu bytes", bytes);
    }
    room_bytes = bytes;
  }
  // Touches all pages. Zeros, so that repeated sums in place do not change.
  for (int which = 0; which < 2; ++which) memset(buffers[which], 0, bytes);
  size_t count = bytes / sizeof(float);
  return (struct call){collective, count, count / (size_t)place.ranks, buffers[0], buffers[1]};
}

static float pattern(int rank, size_t element) { return (float)(rank + 1) + (float)(element % 7); }

// Returns the result that `check` expects for an element of this rank's output.
static float expected(const struct call *call, size_t element) {
  int ranks = place.ranks;
  float sum = (float)(ranks * (ranks + 1) / 2);
  size_t own = (size_t)place.rank * call->block;
  switch (call->collective) {
    case ALL_REDUCE: return sum + (float)ranks * (float)(element % 7);
    case REDUCE_SCATTER: return sum + (float)ranks * (float)((own + element) % 7);
    case ALL_GATHER: return pattern((int)(element / call->block), element % call->block);
    case BROADCAST: return pattern(0, element);
    case ALL_TO_ALL: return pattern((int)(element / call->block), own + element % call->block);
    case BARRIER:
    case COLLECTIVES: break;
  }
  return 0;
}

static void check(const struct call *call) {
  for (size_t element = 0; element < call->count; ++element)
    call->input[element] = call->output[element] = pattern(place.rank, element);
  uint64_t mark = atomic_load(&board->marks[place.rank].value) + 1;
  board_meet(board, place.rank, place.ranks);
  atomic_store(&board->marks[place.rank].value, mark);
  const char *wrong = peer_call(call);
  if (wrong) return answer("wrong %s", wrong);
  if (call->collective == BARRIER) {
    for (int other = 0; other < place.ranks; ++other)
      if (atomic_load(&board->marks[other].value) < mark)
        return answer("wrong barrier completed before rank %d arrived", other);
    return answer("ok");
  }
  size_t count = call->collective == REDUCE_SCATTER ? call->block : call->count;
  for (size_t element = 0; element < count; ++element)
    if (call->output[element] != expected(call, element))
      return answer("wrong %s: element %zu is %g, expected %g", NAMES[call->collective], element,
                    (double)call->output[element], (double)expected(call, element));
  answer("ok");
}

static void run(const struct call *call, long batches, long calls, int meet) {
  long warm = batches * calls / 10 + 1;
  struct span *spans = board->spans[place.rank];
  board_meet(board, place.rank, place.ranks);
  for (long done = 0; done < warm; ++done) {
    const char *wrong = peer_call(call);
    if (wrong) return answer("wrong %s", wrong);
  }
  for (long batch = 0; batch < batches; ++batch) {
    if (meet || batch == 0) board_meet(board, place.rank, place.ranks);
    spans[batch].begin_ns = now_ns();
    for (long done = 0; done < calls; ++done) {
      const char *wrong = peer_call(call);
      if (wrong) return answer("wrong %s", wrong);
    }
    spans[batch].end_ns = now_ns();
  }
  answer("ok");
}

static void obey(char *line) {
  char verb[16] = "", name[32] = "", dtype[16] = "";
  size_t bytes = 0;
  long batches = 0, calls = 0;
  int meet = 0;
  int words = sscanf(line, "%15s %31s %15s %zu %ld %ld %d", verb, name, dtype, &bytes, &batches, &calls, &meet);
  int runs = strcmp(verb, "run") == 0;
  if (words < 4 || (runs && (words != 7 || batches > BOARD_BATCHES))) fail("cannot read the order `%s`", line);
  enum collective collective = ALL_REDUCE;
  while (collective < COLLECTIVES && strcmp(name, NAMES[collective]) != 0) ++collective;
  if (collective == COLLECTIVES || strcmp(dtype, "float32") != 0) return answer("none");
  struct call call = prepare(collective, bytes);
  if (!peer_has(&call)) return answer("none");
  if (runs)
    run(&call, batches, calls, meet);
  else
    check(&call);
}

int main(int count, char **arguments) {
  if (count != 5) fail("usage: %s DIR RANK RANKS CORE", arguments[0]);
  place = (struct place){atoi(arguments[2]), atoi(arguments[3]), arguments[1]};
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  stay_on(atoi(arguments[4]));
  connect_to_driver();
  char path[4096];
  snprintf(path, sizeof path, "%s/board", place.dir);
  board = board_open(path);
  if (!board) fail("%s: %s", path, strerror(errno));
  // Sent before the ranks connect, so that the driver can end them if they never do.
  answer("pid %d %d", place.rank, (int)getpid());
  const char *wrong = peer_open(&place);
  if (wrong) {
    answer("wrong %s", wrong);
    return 1;
  }
  answer("ready %s", peer_version());
  char line[256];
  while (fgets(line, sizeof line, driver) && strncmp(line, "quit", 4) != 0) obey(line);
  peer_close();
  return 0;
}
