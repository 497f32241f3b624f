/*
 * A complete transport in one file: frames as datagrams between processes of one host. It is an example, and the tests
 * load it.
 *
 *   cc -shared -fPIC -O2 -I"$(python -c 'import torch_accl; print(torch_accl.get_include())')" datagrams.c -o datagrams.so
 *
 *   import ctypes, torch_accl
 *   library = ctypes.CDLL("./datagrams.so")
 *   library.datagrams_transport.restype = ctypes.c_void_p
 *   torch_accl.register_transport(library.datagrams_transport())
 *   # then ACCL_TRANSPORTS=datagrams,tcp
 *
 * A Unix socket delivers datagrams whole, in order and without loss; it refuses them while its peer's queue is full.
 */
#define _GNU_SOURCE
#include "accl_transport.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* A datagram of END_BYTES bytes, which is not a frame, announces that its sender sends no more. */
#define END_BYTES 1
#define HEAD_BYTES ACCL_TRANSPORT_HEAD_BYTES

typedef struct {
  int fd;
  size_t max_payload_bytes;
  /* The frame that is reserved or could not be sent yet: its bytes, and their number. */
  unsigned char *outbound;
  size_t outbound_bytes;
  int is_pending;
  /* The received frame, if there is one. */
  unsigned char *inbound;
  size_t inbound_bytes;
  int has_frame;
  int is_closed;
  int has_said_end;
  int is_ended;
  char why[128];
} datagrams_link;

/* The reason why a link could not be opened. */
static _Thread_local char why_not[128];

static int refuse(const char *what) {
  snprintf(why_not, sizeof why_not, "%s: %s", what, strerror(errno));
  return ACCL_TRANSPORT_FAILED;
}

static int fail(datagrams_link *link, const char *what) {
  snprintf(link->why, sizeof link->why, "%s: %s", what, strerror(errno));
  return ACCL_TRANSPORT_FAILED;
}

static void datagrams_destroy(void *of) {
  datagrams_link *link = of;
  if (link->fd >= 0) close(link->fd);
  free(link->outbound);
  free(link->inbound);
  free(link);
}

static int meet(datagrams_link *link, const void *peer, size_t peer_bytes) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  socklen_t length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + peer_bytes);
  if (peer_bytes > sizeof address.sun_path) {
    errno = EINVAL;
    return -1;
  }
  memcpy(address.sun_path, peer, peer_bytes);
  if (connect(link->fd, (struct sockaddr *)&address, length)) return -1;
  /* Until now any process on this host could send. The peer begins later, and from now on only the peer can send. */
  while (recv(link->fd, link->inbound, HEAD_BYTES, MSG_DONTWAIT) >= 0) {
  }
  return 0;
}

/* Checks that the socket's buffer can hold a frame: the system refuses a larger datagram. */
static int holds_frames(int fd, size_t frame_bytes) {
  int wanted = (int)(4 * frame_bytes), granted = 0;
  socklen_t length = sizeof granted;
  if (setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &wanted, sizeof wanted)) return 0;
  if (getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &granted, &length)) return 0;
  errno = EMSGSIZE;
  return granted > 0 && (size_t)granted >= 2 * frame_bytes;
}

static int datagrams_open(void *context, size_t max_payload_bytes, const void *peer, size_t peer_bytes, void **out,
                          void *address, size_t *address_bytes) {
  (void)context;
  datagrams_link *link = calloc(1, sizeof *link);
  if (!link) return refuse("out of memory");
  link->max_payload_bytes = max_payload_bytes;
  link->outbound = malloc(HEAD_BYTES + max_payload_bytes);
  link->inbound = malloc(HEAD_BYTES + max_payload_bytes);
  link->fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  /* Without a name, the system assigns a unique one. */
  struct sockaddr_un own = {.sun_family = AF_UNIX};
  socklen_t length = sizeof own.sun_family;
  int is_made = link->outbound && link->inbound && link->fd >= 0 && !bind(link->fd, (struct sockaddr *)&own, length) &&
                holds_frames(link->fd, HEAD_BYTES + max_payload_bytes);
  length = sizeof own;
  if (!is_made || getsockname(link->fd, (struct sockaddr *)&own, &length) || (peer && meet(link, peer, peer_bytes))) {
    int result = refuse("cannot create a datagram socket");
    datagrams_destroy(link);
    return result;
  }
  size_t bytes = length - offsetof(struct sockaddr_un, sun_path);
  memcpy(address, own.sun_path, bytes);
  *address_bytes = bytes;
  *out = link;
  return ACCL_TRANSPORT_OK;
}

static int datagrams_connect(void *of, const void *peer, size_t peer_bytes, size_t max_payload_bytes) {
  datagrams_link *link = of;
  link->max_payload_bytes = max_payload_bytes;
  return meet(link, peer, peer_bytes) ? fail(link, "cannot connect to the peer's socket") : ACCL_TRANSPORT_OK;
}

/* Sends the pending frame, and the end marker behind the last one. */
static int datagrams_progress(void *of) {
  datagrams_link *link = of;
  while (link->is_pending || (link->is_closed && !link->has_said_end)) {
    size_t bytes = link->is_pending ? link->outbound_bytes : END_BYTES;
    if (send(link->fd, link->outbound, bytes, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) {
      if (link->is_pending) link->is_pending = 0;
      else link->has_said_end = 1;
    } else if (errno == EAGAIN) {
      return ACCL_TRANSPORT_AGAIN;
    } else if (errno == ECONNREFUSED || errno == ECONNRESET || errno == ENOTCONN) {
      /* The peer has gone, so the frame is not needed. */
      link->is_pending = 0;
      link->has_said_end = 1;
    } else if (errno != EINTR) {
      return fail(link, "cannot send a datagram");
    }
  }
  return ACCL_TRANSPORT_OK;
}

static int datagrams_reserve(void *of, size_t payload_bytes, void **head, void **payload) {
  datagrams_link *link = of;
  int result = datagrams_progress(link);
  if (result != ACCL_TRANSPORT_OK) return result;
  link->outbound_bytes = HEAD_BYTES + payload_bytes;
  *head = link->outbound;
  *payload = link->outbound + HEAD_BYTES;
  return ACCL_TRANSPORT_OK;
}

static void datagrams_commit(void *of) {
  datagrams_link *link = of;
  link->is_pending = 1;
  datagrams_progress(link);
}

static int datagrams_peek(void *of, const void **head, const void **payload, size_t *payload_bytes) {
  datagrams_link *link = of;
  while (!link->has_frame) {
    if (link->is_ended) return ACCL_TRANSPORT_ENDED;
    ssize_t bytes = recv(link->fd, link->inbound, HEAD_BYTES + link->max_payload_bytes, MSG_DONTWAIT | MSG_TRUNC);
    if (bytes < 0 && errno == EAGAIN) return ACCL_TRANSPORT_AGAIN;
    if (bytes < 0 && errno == ECONNRESET) continue;
    if (bytes < 0 && errno != EINTR) return fail(link, "cannot receive a datagram");
    if (bytes == END_BYTES) link->is_ended = 1;
    if (bytes <= END_BYTES) continue;
    if ((size_t)bytes < HEAD_BYTES || (size_t)bytes > HEAD_BYTES + link->max_payload_bytes) {
      errno = EPROTO;
      return fail(link, "received a datagram that is not a frame");
    }
    link->inbound_bytes = (size_t)bytes;
    link->has_frame = 1;
  }
  *head = link->inbound;
  *payload = link->inbound + HEAD_BYTES;
  *payload_bytes = link->inbound_bytes - HEAD_BYTES;
  return ACCL_TRANSPORT_OK;
}

static void datagrams_release(void *of) { ((datagrams_link *)of)->has_frame = 0; }

static size_t datagrams_descriptors(void *of, int *fds, size_t room) {
  if (room > 0) fds[0] = ((datagrams_link *)of)->fd;
  return 1;
}

static const char *datagrams_error(void *of) { return of ? ((datagrams_link *)of)->why : why_not; }

static void datagrams_close(void *of) {
  ((datagrams_link *)of)->is_closed = 1;
  datagrams_progress(of);
}

const accl_transport_v1 *datagrams_transport(void) {
  static const accl_transport_v1 table = {
      .abi = ACCL_TRANSPORT_ABI,
      .size = sizeof(accl_transport_v1),
      .name = "datagrams",
      .about = "datagrams between processes of one host, an example of a transport from another package",
      .flags = ACCL_TRANSPORT_ONE_HOST,
      .open = datagrams_open,
      .connect = datagrams_connect,
      .reserve = datagrams_reserve,
      .commit = datagrams_commit,
      .peek = datagrams_peek,
      .release = datagrams_release,
      .progress = datagrams_progress,
      .descriptors = datagrams_descriptors,
      .error = datagrams_error,
      .close = datagrams_close,
      .destroy = datagrams_destroy,
  };
  return &table;
}
