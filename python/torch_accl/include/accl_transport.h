/*
 * A transport for torch-accl from another package: a table of C functions, handed in with torch_accl.register_transport() before
 * the first process group, and chosen with ACCL_TRANSPORTS like any other.
 *
 * How a link is made. The two processes meet over a TCP connection (over a Unix socket with ACCL_TRANSPORT_ONE_HOST). Who connects
 * calls open() without a peer and sends the address that it gets. Who accepts calls open() with that address and sends its own back.
 * Then who connected calls connect() with it. The connection stays open besides the link and tells of the peer's death.
 *
 * Rules. open(), and the functions of different links, may be called at the same time. Those of one link are called by one thread at a time, by any thread, and never in a forked child: descriptors that one
 * inherits are the transport's to close there. None may block, call Python, or throw. Frames arrive whole, once and in order. Nothing is called for a link after destroy(). The table, and the library
 * that it is in, stay until the process ends.
 */
#ifndef ACCL_TRANSPORT_H
#define ACCL_TRANSPORT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ACCL_TRANSPORT_ABI 1
/* Bytes of a frame's head. */
#define ACCL_TRANSPORT_HEAD_BYTES 40
/* Most bytes of an address. */
#define ACCL_TRANSPORT_ADDRESS_BYTES 1024

/* What functions return. */
#define ACCL_TRANSPORT_OK 0
/* There is nothing, or no room, now. */
#define ACCL_TRANSPORT_AGAIN 1
/* The peer has closed its side, or is gone, and everything that it sent was read. It is returned again from then on. */
#define ACCL_TRANSPORT_ENDED (-1)
/* The link is broken; error() says why. It is returned again from then on. */
#define ACCL_TRANSPORT_FAILED (-2)

/* Flags. */
/* Only between processes of one host and user. */
#define ACCL_TRANSPORT_ONE_HOST 1u
/*
 * Frames lie in memory that both processes share, so ACCL_TRANSPORT_ONE_HOST goes with it. Looking for one takes no system call, commit()
 * publishes by itself, and progress() returns OK. Calls look at such links often, are planned with the costs of shared memory, and send
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
/* Element types. Collectives that only move data have ACCL_BYTES. */
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
/* Operators. Minimum and maximum are asked for of integers alone, sum and product of any type, the others of integers. */
#define ACCL_SUM 0u
#define ACCL_PRODUCT 1u
#define ACCL_MIN 2u
#define ACCL_MAX 3u
#define ACCL_BAND 4u
#define ACCL_BOR 5u
#define ACCL_BXOR 6u

/* A collective of a group, as one rank makes it. */
typedef struct accl_collective_v1 {
  /* sizeof(accl_collective_v1). */
  uint32_t size;
  uint32_t collective;
  uint32_t element_type;
  /* Of those that reduce. */
  uint32_t op;
  /* Of those that have one. */
  uint32_t root;
  /* 0. */
  uint32_t flags;
  /* Elements of one rank's block: an all_gather writes, and a reduce_scatter reads, as many times so many as there are ranks. */
  uint64_t count;
  /*
   * Blocks in rank order, one behind the other. input is NULL where this rank's contribution lies where its result will: the whole output of an
   * all_reduce, of a broadcast or of a reduce's root, this rank's block of that of an all_gather. Both are NULL where this rank has none.
   */
  const void *input;
  void *output;
} accl_collective_v1;

typedef struct accl_transport_v1 {
  /* ACCL_TRANSPORT_ABI. */
  uint32_t abi;
  /* sizeof(accl_transport_v1). */
  uint32_t size;
  /* Its name in ACCL_TRANSPORTS: up to 31 small letters, digits and '_'. */
  const char *name;
  /* One sentence for people. */
  const char *about;
  uint64_t flags;
  /* How long a sleeping process may leave a link alone, in microseconds; 0 when its descriptors tell of everything. */
  uint64_t poll_interval_us;
  /* For open(). */
  void *context;

  /*
   * Makes one side of a link, and writes its address: *address_bytes is the room at first, and the length then. Payloads will have at
   * most max_payload_bytes. peer is NULL on the side that connects, where connect() follows. ACCL_TRANSPORT_FAILED refuses: the next
   * transport is tried.
   */
  int (*open)(void *context, size_t max_payload_bytes, const void *peer, size_t peer_bytes, void **link, void *address,
              size_t *address_bytes);
  /* Gives a link its peer. Payloads will have at most max_payload_bytes, which may be less than before. */
  int (*connect)(void *link, const void *peer, size_t peer_bytes, size_t max_payload_bytes);
  /*
   * A place for one frame, the payload aligned to 8 bytes: OK, AGAIN without room, ENDED or FAILED. It stays until commit() or the next
   * reserve(), which gives it up.
   */
  int (*reserve)(void *link, size_t payload_bytes, void **head, void **payload);
  /* Publishes the frame. It may leave the process with the next progress() only. */
  void (*commit)(void *link);
  /*
   * The next frame, the payload aligned to 8 bytes, the same one until release(): OK, AGAIN, ENDED or FAILED. It stays unchanged until
   * release() or destroy(), whatever is sent meanwhile.
   */
  int (*peek)(void *link, const void **head, const void **payload, size_t *payload_bytes);
  void (*release)(void *link);
  /*
   * Moves things on. OK: the peer will get everything that was committed even if this process ends now. AGAIN: something is under way.
   */
  int (*progress)(void *link);
  /*
   * Descriptors to watch, edge-triggered, for bytes, room and hang-up; the same for the life of the link. Returns how many, at most room.
   * When peek(), reserve() or progress() has returned AGAIN, an edge follows as soon as it would not. Links may have descriptors in
   * common. May be NULL.
   */
  size_t (*descriptors)(void *link, int *fds, size_t room);
  /* Why the last function returned FAILED, or NULL; stays until the next call. link is NULL after open(). May be NULL. */
  const char *(*error)(void *link);
  /* Nothing more will be sent: the peer reads ENDED behind what was. What the peer sends can still be read. */
  void (*close)(void *link);
  void (*destroy)(void *link);

  /* What stands below may be missing: size says how much of the table there is. */

  /*
   * Gives a link the carrier's socket before its first frame: connected, non-blocking, a stream of bytes in both directions that are the
   * transport's own from now on, for a doorbell. It stays open until destroy(), and is not the transport's to close. Its edges end a sleep
   * like those of descriptors(). May be NULL, where arm is.
   */
  void (*attach)(void *link, int carrier);
  /*
   * Nobody looks at the link from now on, until a function of it is called. Returns how long it may be left alone, in microseconds; 0: an
   * edge of the carrier or of a descriptor will tell of whatever comes. One more look for room and frames follows. It replaces
   * poll_interval_us. May be NULL, where attach is.
   */
  uint64_t (*arm)(void *link);

  /*
   * Collectives that the transport's library does as a whole; all seven, or none of them. Only one thread at a time calls those of a group, and
   * none may block. Every rank of a group has made the same call before any of them starts it, and they start the calls of a group in one order.
   */

  /*
   * Writes what the other ranks of a group that is about to be made need to know of this process: *address_bytes is the room at first, and the
   * length then. ACCL_TRANSPORT_FAILED refuses.
   */
  int (*coll_address)(void *context, void *address, size_t *address_bytes);
  /*
   * Makes a group out of the addresses of all ranks, in rank order. key is the same on all ranks, and mostly another one than those of other
   * groups. ACCL_TRANSPORT_AGAIN: the library does no collectives of such a group, on all ranks alike, and they are done without it.
   * ACCL_TRANSPORT_FAILED refuses the group. coll_error() says why, of both.
   */
  int (*coll_open)(void *context, uint32_t rank, uint32_t world, const void *const *addresses, const size_t *address_bytes, uint64_t key,
                   void **group);
  /* Starts a collective. Its memory stays, and is left alone, until coll_test() returns ACCL_TRANSPORT_OK, or for ever. */
  int (*coll_start)(void *group, const accl_collective_v1 *collective, void **call);
  /*
   * Moves it on. ACCL_TRANSPORT_OK: it is done, and the call is no more. ACCL_TRANSPORT_AGAIN: it is under way. ACCL_TRANSPORT_FAILED: it has
   * failed, coll_abandon() follows, and nothing more is started in its group.
   */
  int (*coll_test)(void *call);
  /* It is not tested any more. Nothing more is started in its group. */
  void (*coll_abandon)(void *call);
  /* Why the last of these functions that this thread has called returned FAILED, or NULL; stays until the thread's next call. */
  const char *(*coll_error)(void);
  /*
   * The group is no more. None of its calls is under way but those that were abandoned. has_failed: other ranks may have abandoned calls that
   * this one has not.
   */
  void (*coll_close)(void *group, int has_failed);
} accl_transport_v1;

#ifdef __cplusplus
}
#endif

#endif
