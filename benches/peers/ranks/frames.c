// Times frames of a transport's table of functions, and the MPI messages that carry them, between two ranks.
//
// `mpi_frames.py` loads this library in a process where both transport and MPI are initialised. Both ranks call each
// timing function at once; it returns microseconds.
#include <mpi.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "accl_transport.h"

// WINDOW: messages in flight, as many as a link has. MESSAGE and ANSWER: MPI tags.
enum { WINDOW = 64, MESSAGE = 7, ANSWER = 8 };

static double now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

// Opens one end of a link and writes its address; `peer` is the peer's address, if known. Returns 0, or an error code
// of the table.
int open_link(const accl_transport_v1 *table, const void *peer, size_t peer_bytes, size_t most_bytes, void **link, void *address,
              size_t *address_bytes) {
  return table->open(table->context, most_bytes, peer_bytes ? peer : NULL, peer_bytes, link, address, address_bytes);
}

int connect_link(const accl_transport_v1 *table, void *link, const void *peer, size_t peer_bytes, size_t most_bytes) {
  return table->connect(link, peer, peer_bytes, most_bytes);
}

void attach_link(const accl_transport_v1 *table, void *link, int bootstrap) { table->attach(link, bootstrap); }

// Sends a frame with this payload as soon as there is room. Returns 0, or an error code of the table.
static int send_frame(const accl_transport_v1 *table, void *link, const void *data, size_t bytes) {
  void *head, *payload;
  int found;
  while ((found = table->reserve(link, bytes, &head, &payload)) == ACCL_TRANSPORT_AGAIN) table->progress(link);
  if (found != ACCL_TRANSPORT_OK) return found;
  memset(head, 0, ACCL_TRANSPORT_HEAD_BYTES);
  memcpy(payload, data, bytes);
  table->commit(link);
  return 0;
}

static int receive_frame(const accl_transport_v1 *table, void *link, void *data) {
  const void *head, *payload;
  size_t bytes;
  int found;
  while ((found = table->peek(link, &head, &payload, &bytes)) == ACCL_TRANSPORT_AGAIN) {}
  if (found != ACCL_TRANSPORT_OK) return found;
  memcpy(data, payload, bytes);
  table->release(link);
  return 0;
}

// Returns the time of one round: `frames` frames there and an empty one back; negative if the link has failed.
double frames_us(const accl_transport_v1 *table, void *link, int rank, size_t bytes, int frames, int rounds) {
  char *data = calloc(1, bytes + 1);
  int wrong = 0;
  double begin = now_us();
  for (int round = 0; round < rounds && !wrong; ++round) {
    for (int i = 0; i < frames && !wrong; ++i)
      wrong = rank == 0 ? send_frame(table, link, data, bytes) : receive_frame(table, link, data);
    if (!wrong) wrong = rank == 0 ? receive_frame(table, link, data) : send_frame(table, link, data, 0);
  }
  double took = now_us() - begin;
  // Wait until the last frame has been sent.
  while (!wrong && table->progress(link) == ACCL_TRANSPORT_AGAIN) {}
  free(data);
  return wrong ? wrong : took / rounds;
}

// Returns the time of the same round with MPI messages between buffers of the caller, with as many in flight.
double messages_us(int rank, size_t bytes, int messages, int rounds) {
  char *data = calloc(WINDOW, bytes + 1), back[ACCL_TRANSPORT_HEAD_BYTES] = {0};
  MPI_Request under_way[WINDOW];
  MPI_Status ended[WINDOW];
  double begin = now_us();
  for (int round = 0; round < rounds; ++round) {
    for (int i = 0; i < messages; ++i) {
      MPI_Request *request = &under_way[i % WINDOW];
      char *place = data + (size_t)(i % WINDOW) * bytes;
      if (i >= WINDOW) MPI_Wait(request, MPI_STATUS_IGNORE);
      if (rank == 0)
        MPI_Isend(place, (int)bytes, MPI_BYTE, 1, MESSAGE, MPI_COMM_WORLD, request);
      else
        MPI_Irecv(place, (int)bytes, MPI_BYTE, 0, MESSAGE, MPI_COMM_WORLD, request);
    }
    MPI_Waitall(messages < WINDOW ? messages : WINDOW, under_way, ended);
    if (rank == 0)
      MPI_Recv(back, sizeof back, MPI_BYTE, 1, ANSWER, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    else
      MPI_Send(back, sizeof back, MPI_BYTE, 0, ANSWER, MPI_COMM_WORLD);
  }
  double took = now_us() - begin;
  free(data);
  return took / rounds;
}

// Returns the time of one float32 sum.
double all_reduce_us(float *data, size_t count, int rounds) {
  MPI_Barrier(MPI_COMM_WORLD);
  double begin = now_us();
  for (int round = 0; round < rounds; ++round)
    MPI_Allreduce(MPI_IN_PLACE, data, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  return (now_us() - begin) / rounds;
}

// Returns the time of one non-blocking float32 collective with its wait: a sum in place, a broadcast, or an all-gather
// of halves of `into`.
double nonblocking_us(int which, float *data, float *into, size_t count, int rounds) {
  MPI_Barrier(MPI_COMM_WORLD);
  double begin = now_us();
  for (int round = 0; round < rounds; ++round) {
    MPI_Request request;
    if (which == 0)
      MPI_Iallreduce(MPI_IN_PLACE, data, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request);
    else if (which == 1)
      MPI_Ibcast(data, (int)count, MPI_FLOAT, 0, MPI_COMM_WORLD, &request);
    else
      MPI_Iallgather(data, (int)count / 2, MPI_FLOAT, into, (int)count / 2, MPI_FLOAT, MPI_COMM_WORLD, &request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
  }
  return (now_us() - begin) / rounds;
}
