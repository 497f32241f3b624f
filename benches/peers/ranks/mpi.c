// Calls the MPI library that this file is compiled against.
#include <mpi.h>
#include <stdio.h>
#include <string.h>

#include "rank.h"

const char *peer_open(const struct spec *spec) {
  static char wrong[128];
  int rank, ranks;
  if (MPI_Init(NULL, NULL) != MPI_SUCCESS) return "MPI_Init failed";
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (rank == spec->rank && ranks == spec->ranks) return NULL;
  snprintf(wrong, sizeof wrong, "MPI reports rank %d of %d, but this process was started as rank %d of %d",
           rank, ranks, spec->rank, spec->ranks);
  return wrong;
}

static int call_mpi(const struct call *call) {
  int count = (int)call->count, block = (int)call->block;
  float *in = call->input, *out = call->output;
  switch (call->collective) {
    case ALL_REDUCE: return MPI_Allreduce(MPI_IN_PLACE, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    case REDUCE_SCATTER: return MPI_Reduce_scatter_block(in, out, block, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    case ALL_GATHER: return MPI_Allgather(in, block, MPI_FLOAT, out, block, MPI_FLOAT, MPI_COMM_WORLD);
    case BROADCAST: return MPI_Bcast(out, count, MPI_FLOAT, 0, MPI_COMM_WORLD);
    case ALL_TO_ALL: return MPI_Alltoall(in, block, MPI_FLOAT, out, block, MPI_FLOAT, MPI_COMM_WORLD);
    case BARRIER: return MPI_Barrier(MPI_COMM_WORLD);
    case COLLECTIVES: break;
  }
  return MPI_ERR_OP;
}

// By MPI's default, errors end the program with a message.
const char *peer_call(const struct call *call) { return call_mpi(call) == MPI_SUCCESS ? NULL : "the MPI call failed"; }

int peer_has(const struct call *call) { return call->collective < COLLECTIVES; }

const char *peer_version(void) {
  static char version[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(version, &length);
  // Keep the first line, which has the name. MPICH's has a tab, and Open MPI's continues after a comma.
  version[strcspn(version, "\n,")] = 0;
  for (char *at = version; *at; ++at)
    if (*at == '\t') *at = ' ';
  return version;
}

void peer_close(void) { MPI_Finalize(); }
