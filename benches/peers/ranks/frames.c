// Frames of a transport's table of functions, and the messages of MPI that they are made of, between two ranks: a library that
// `mpi_frames.py` calls in a process where both are up. Each function is called by both ranks at once, and returns microseconds.
#include <mpi.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "accl_transport.h"

// As many as a link has under way.
enum { WINDOW = 64, MESSAGE = 7, ANSWER = 8 };

static double now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

// One end of a link, whose address is written; with the peer's where that is known. 0, or what went wrong.
int open_link(const accl_transport_v1 *table, const void *peer, size_t peer_bytes, size_t most_bytes, void **link, void *address,
              size_t *address_bytes) {
  return table->open(table->context, most_bytes, peer_bytes ? peer : NULL, peer_bytes, link, address, address_bytes);
}

int connect_link(const accl_transport_v1 *table, void *link, const void *peer, size_t peer_bytes, size_t most_bytes) {
  return table->connect(link, peer, peer_bytes, most_bytes);
}

void attach_link(const accl_transport_v1 *table, void *link, int carrier) { table->attach(link, carrier); }

// A frame with this payload leaves as soon as there is room; 0, or what went wrong.
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

// Of one frame there and an empty one back; below zero where the link has failed.
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
  // What was sent last has to leave.
  while (!wrong && table->progress(link) == ACCL_TRANSPORT_AGAIN) {}
  free(data);
  return wrong ? wrong : took / rounds;
}

// The same with messages that begin and end in buffers of the caller, as many under way.
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

// Of one sum of float32.
double all_reduce_us(float *data, size_t count, int rounds) {
  MPI_Barrier(MPI_COMM_WORLD);
  double begin = now_us();
  for (int round = 0; round < rounds; ++round)
    MPI_Allreduce(MPI_IN_PLACE, data, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  return (now_us() - begin) / rounds;
}

// Of one non-blocking collective of float32 and the wait for it: a sum in place, a broadcast, or a gathering of halves of `into`.
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
