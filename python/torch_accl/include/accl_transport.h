/*
 * A transport for torch-accl from another package: a table of C functions. The package registers it with torch_accl.register_transport()
 * before the first process group, and users choose it with ACCL_TRANSPORTS like any other transport.
 *
 * How a link is created. The two processes first connect over TCP (over a Unix socket with ACCL_TRANSPORT_ONE_HOST). The connecting
 * process calls open() without a peer, and sends the address that open() writes. The accepting process calls open() with that address,
 * and sends its own address back. The connecting process then calls connect() with the second address. The connection, called carrier,
 * stays open as long as the link. The engine detects the death of the peer by it.
 *
 * Rules.
 * - open(), and functions of different links, may be called at the same time. Functions of one link are called by one thread at a
 *   time, which may be any thread.
 * - No function is called in a forked child. The child inherits descriptors, and the transport must close those it opened.
 * - No function may block, call Python, or throw.
 * - Frames arrive whole, once and in order.
 * - No function is called for a link after destroy().
 * - The table, and the library that contains it, must stay loaded until the process ends.
 */
#ifndef ACCL_TRANSPORT_H
#define ACCL_TRANSPORT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ACCL_TRANSPORT_ABI 1
/* Bytes of a frame's header. */
#define ACCL_TRANSPORT_HEAD_BYTES 40
/* Maximum bytes of an address. */
#define ACCL_TRANSPORT_ADDRESS_BYTES 1024

/* Return values. */
#define ACCL_TRANSPORT_OK 0
/* Nothing has arrived, or there is no room, at the moment. */
#define ACCL_TRANSPORT_AGAIN 1
/* The peer has closed its side or has died, and everything that it sent was read. All later calls return this value again. */
#define ACCL_TRANSPORT_ENDED (-1)
/* The link is broken; error() returns the reason. All later calls return this value again. */
#define ACCL_TRANSPORT_FAILED (-2)

/* Flags. */
/* The transport connects only processes of the same host and user. */
#define ACCL_TRANSPORT_ONE_HOST 1u
/*
 * Frames are in memory that both processes share; requires ACCL_TRANSPORT_ONE_HOST. peek() needs no system call, commit() publishes a
 * frame by itself, and progress() returns OK. The engine polls such links often, plans calls with the costs of shared memory, and sends
 * compressed data without checksums.
 */
#define ACCL_TRANSPORT_IN_MEMORY 2u

/* Collectives. */
#define ACCL_BROADCAST 0u
#define ACCL_ALL_REDUCE 1u
#define ACCL_REDUCE 2u
#define ACCL_ALL_GATHER 3u
#define ACCL_GATHER 4u
#define ACCL_SCATTER 5u
#define ACCL_REDUCE_SCATTER 6u
#define ACCL_ALL_TO_ALL 7u
/* Element types. Collectives that only move data use ACCL_BYTES. */
#define ACCL_BYTES 0u
#define ACCL_INT8 1u
#define ACCL_UINT8 2u
#define ACCL_INT32 3u
#define ACCL_UINT32 4u
#define ACCL_INT64 5u
#define ACCL_UINT64 6u
#define ACCL_FLOAT 7u
#define ACCL_DOUBLE 8u
#define ACCL_FLOAT_COMPLEX 9u
#define ACCL_DOUBLE_COMPLEX 10u
/* Operators. Sum and product are requested for any type, all other operators only for integers. */
#define ACCL_SUM 0u
#define ACCL_PRODUCT 1u
#define ACCL_MIN 2u
#define ACCL_MAX 3u
#define ACCL_BAND 4u
#define ACCL_BOR 5u
#define ACCL_BXOR 6u

/* One rank's part of a collective of a group. */
typedef struct accl_collective_v1 {
  /* sizeof(accl_collective_v1). */
  uint32_t size;
  uint32_t collective;
  uint32_t element_type;
  /* Operator, for collectives that reduce. */
  uint32_t op;
  /* Rank of the root, for collectives that have one. */
  uint32_t root;
  /* Always 0. */
  uint32_t flags;
  /* Elements of one rank's block. An all_gather writes, and a reduce_scatter reads, count times the number of ranks. */
  uint64_t count;
  /*
   * Blocks in rank order, without gaps. input is NULL if this rank's contribution is already where its result will be. That is the whole
   * output of an all_reduce, of a broadcast or of a reduce's root, or this rank's block of an all_gather's output. A pointer is also NULL if
   * this rank has no such data.
   */
  const void *input;
  void *output;
} accl_collective_v1;

typedef struct accl_transport_v1 {
  /* ACCL_TRANSPORT_ABI. */
  uint32_t abi;
  /* sizeof(accl_transport_v1). */
  uint32_t size;
  /* Name in ACCL_TRANSPORTS: up to 31 lower-case letters, digits and '_'. */
  const char *name;
  /* Description in one sentence, for users. */
  const char *about;
  uint64_t flags;
  /* Maximum time in microseconds that a sleeping process may leave a link unpolled; 0 if its descriptors signal every event. */
  uint64_t poll_interval_us;
  /* Passed to open() and to functions of collectives. */
  void *context;

  /*
   * Creates one side of a link and writes its address. *address_bytes is the capacity on entry, and the length on return. Payloads will
   * have at most max_payload_bytes. peer is NULL on the connecting side, where connect() follows. If open() returns
   * ACCL_TRANSPORT_FAILED, the next transport is tried.
   */
  int (*open)(void *context, size_t max_payload_bytes, const void *peer, size_t peer_bytes, void **link, void *address,
              size_t *address_bytes);
  /* Gives a link its peer's address. Payloads will have at most max_payload_bytes, which may be less than open() was given. */
  int (*connect)(void *link, const void *peer, size_t peer_bytes, size_t max_payload_bytes);
  /*
   * Provides memory for one frame; the payload is aligned to 8 bytes. Returns OK, AGAIN if there is no room, ENDED or FAILED. The memory
   * is valid until commit(), or until the next reserve(), which discards it.
   */
  int (*reserve)(void *link, size_t payload_bytes, void **head, void **payload);
  /* Publishes the reserved frame. The transport may delay sending it until the next progress(). */
  void (*commit)(void *link);
  /*
   * Returns the next frame, and the same frame again until release(); the payload is aligned to 8 bytes. The result is OK, AGAIN, ENDED or
   * FAILED. The frame stays unchanged until release() or destroy(), even if the engine sends frames meanwhile.
   */
  int (*peek)(void *link, const void **head, const void **payload, size_t *payload_bytes);
  void (*release)(void *link);
  /*
   * Continues pending transfers. OK: the peer will get everything that was committed even if this process ends now. AGAIN: a transfer is in
   * flight.
   */
  int (*progress)(void *link);
  /*
   * Writes the descriptors to watch, edge-triggered, for data, room and hang-up. They are the same for the life of the link. Returns
   * their number, at most room. After peek(), reserve() or progress() has returned AGAIN, an edge must follow as soon as it would not.
   * Links may share descriptors. May be NULL.
   */
  size_t (*descriptors)(void *link, int *fds, size_t room);
  /* Returns the reason why the last function returned FAILED, or NULL. Valid until the next call. link is NULL after open(). May be NULL. */
  const char *(*error)(void *link);
  /* Announces that this side sends no more. The peer reads ENDED after all earlier frames. The peer's frames can still be read. */
  void (*close)(void *link);
  void (*destroy)(void *link);

  /* The members below may be missing: size is the number of bytes that the table has. */

  /*
   * Gives a link the carrier's socket before the first frame. The socket is connected and non-blocking. The transport may use its byte
   * streams, in both directions, as a doorbell. The socket stays open until destroy(), and the transport must not close it. Its edges end
   * a sleep like the edges of descriptors(). NULL if and only if arm is NULL.
   */
  void (*attach)(void *link, int carrier);
  /*
   * The engine stops polling the link until it calls one of its functions. Returns for how many microseconds it may stop. 0: an edge of the
   * carrier or of a descriptor will signal every event. The engine checks once more for room and frames after arm(). The value replaces
   * poll_interval_us. NULL if and only if attach is NULL.
   */
  uint64_t (*arm)(void *link);

  /*
   * Collectives that the transport's library runs as a whole: all seven functions, or none. Functions of one group are called by one thread
   * at a time, and must not block. Every rank of a group has issued the same call before any rank starts it. All ranks start the calls of
   * a group in the same order.
   */

  /*
   * Writes the data about this process that the other ranks of a new group need. *address_bytes is the capacity on entry, and the length on
   * return. ACCL_TRANSPORT_FAILED refuses.
   */
  int (*coll_address)(void *context, void *address, size_t *address_bytes);
  /*
   * Creates a group from the addresses of all ranks, in rank order. key is the same on all ranks, and usually differs from the keys of other
   * groups. ACCL_TRANSPORT_AGAIN: the library runs no collectives for such a group, and the engine runs them itself; all ranks must return
   * it. ACCL_TRANSPORT_FAILED refuses the group. coll_error() returns the reason in both cases.
   */
  int (*coll_open)(void *context, uint32_t rank, uint32_t world, const void *const *addresses, const size_t *address_bytes, uint64_t key,
                   void **group);
  /* Starts a collective. Its memory stays valid and unused by others until coll_test() returns ACCL_TRANSPORT_OK; otherwise for ever. */
  int (*coll_start)(void *group, const accl_collective_v1 *collective, void **call);
  /*
   * Continues a call. ACCL_TRANSPORT_OK: the call has completed, and its handle is no longer valid. ACCL_TRANSPORT_AGAIN: it is in flight.
   * ACCL_TRANSPORT_FAILED: it has failed; coll_abandon() follows, and no other call is started in its group.
   */
  int (*coll_test)(void *call);
  /* Gives up a call, which is not tested any more. No other call is started in its group. */
  void (*coll_abandon)(void *call);
  /* Returns why the last of these functions that this thread called returned FAILED, or NULL. Valid until the thread's next call. */
  const char *(*coll_error)(void);
  /*
   * Destroys a group. None of its calls is in flight, except abandoned ones. has_failed: other ranks may have abandoned calls that this rank
   * has not.
   */
  void (*coll_close)(void *group, int has_failed);
} accl_transport_v1;

#ifdef __cplusplus
}
#endif

#endif
