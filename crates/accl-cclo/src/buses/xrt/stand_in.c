/* Replacement for XRT's library in tests. It has one card, and logs each call to the file LOG. */
#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RUN_ARGUMENTS_OF_32_BITS 9
#define LAST_REGISTER 0x1FFC
/* A test sets the state of the run through this register. */
#define STATE_REGISTER 0x1FF8

static char device, engine, hostctrl, run;
static uint32_t registers[LAST_REGISTER / 4 + 1];
static struct buffer { uint64_t address; size_t size; char *bytes; } buffers[16];
static int count;

static void note(const char *format, ...) {
  FILE *file = fopen(LOG, "a");
  va_list arguments;
  va_start(arguments, format);
  vfprintf(file, format, arguments);
  va_end(arguments);
  fputc('\n', file);
  fclose(file);
}

static const char *named(void *handle) {
  return handle == &device ? "device" : handle == &engine ? "engine" : handle == &hostctrl ? "hostctrl" : handle == &run ? "run" : "?";
}

int xrtIniStringSet(const char *key, const char *value) {
  note("set %s to %s", key, value);
  return 0;
}

void *xrtDeviceOpen(unsigned int index) {
  note("open device %u", index);
  return index == 0 ? &device : NULL;
}

int xrtDeviceClose(void *handle) {
  note("close %s", named(handle));
  return 0;
}

int xrtDeviceLoadXclbinFile(void *handle, const char *path) {
  const char *name = strrchr(path, '/');
  note("load %s into %s", name ? name + 1 : path, named(handle));
  return strstr(path, "other-board") ? -EINVAL : strstr(path, "taken") ? -EBUSY : 0;
}

int xrtDeviceGetXclbinUUID(void *handle, unsigned char *out) {
  note("uuid of %s", named(handle));
  for (int i = 0; i < 16; ++i) out[i] = (unsigned char)i;
  return 0;
}

static void *opened(void *handle, const unsigned char *uuid, const char *name, const char *how) {
  note("open kernel %s of %s %02x..%02x %s", name, named(handle), uuid[0], uuid[15], how);
  if (!strcmp(name, "taken")) errno = EBUSY;
  if (!strcmp(name, "ccl_offload:{ccl_offload_0}")) return &engine;
  return strcmp(name, "hostctrl:{hostctrl_0_0}") ? NULL : &hostctrl;
}

void *xrtPLKernelOpen(void *handle, const unsigned char *uuid, const char *name) { return opened(handle, uuid, name, "shared"); }

void *xrtPLKernelOpenExclusive(void *handle, const unsigned char *uuid, const char *name) {
  return opened(handle, uuid, name, "exclusive");
}

int xrtKernelClose(void *handle) {
  note("close %s", named(handle));
  return 0;
}

int xrtKernelReadRegister(void *handle, uint32_t offset, uint32_t *value) {
  note("read %s %#x", named(handle), offset);
  *value = registers[offset / 4];
  return 0;
}

int xrtKernelWriteRegister(void *handle, uint32_t offset, uint32_t value) {
  note("write %s %#x = %#x", named(handle), offset, value);
  registers[offset / 4] = value;
  return value == 0xBAD ? -5 : 0;
}

void *xrtRunOpen(void *handle) {
  note("open run of %s", named(handle));
  return &run;
}

int xrtRunSetArg(void *handle, int index, ...) {
  va_list arguments;
  va_start(arguments, index);
  unsigned long long value = index < RUN_ARGUMENTS_OF_32_BITS ? va_arg(arguments, uint32_t) : va_arg(arguments, uint64_t);
  va_end(arguments);
  note("%s argument %d = %#llx", named(handle), index, value);
  return 0;
}

int xrtRunStart(void *handle) {
  note("start %s", named(handle));
  return 0;
}

unsigned int xrtRunState(void *handle) {
  note("state of %s", named(handle));
  return registers[STATE_REGISTER / 4];
}

int xrtRunClose(void *handle) {
  note("close %s", named(handle));
  return 0;
}

void *xrtBOAlloc(void *handle, size_t size, uint64_t flags, uint32_t bank) {
  note("buffer of %zu bytes, flags %#llx, bank %u of %s", size, (unsigned long long)flags, bank, named(handle));
  if (size > 1 << 20) return NULL;
  struct buffer *buffer = &buffers[count++];
  buffer->address = 0x100000000ull + 0x1000000ull * count;
  buffer->size = size;
  buffer->bytes = calloc(1, size);
  return buffer;
}

int xrtBOFree(void *handle) {
  note("free buffer %#llx", (unsigned long long)((struct buffer *)handle)->address);
  return 0;
}

uint64_t xrtBOAddress(void *handle) { return ((struct buffer *)handle)->address; }

int xrtBOWrite(void *handle, const void *from, size_t size, size_t seek) {
  struct buffer *buffer = handle;
  note("write %zu bytes of %#llx at %zu", size, (unsigned long long)buffer->address, seek);
  memcpy(buffer->bytes + seek, from, size);
  return 0;
}

int xrtBORead(void *handle, void *to, size_t size, size_t skip) {
  struct buffer *buffer = handle;
  note("read %zu bytes of %#llx at %zu", size, (unsigned long long)buffer->address, skip);
  memcpy(to, buffer->bytes + skip, size);
  return 0;
}

int xrtBOSync(void *handle, unsigned int way, size_t size, size_t offset) {
  note("sync %zu bytes of %#llx at %zu, way %u", size, (unsigned long long)((struct buffer *)handle)->address, offset, way);
  return 0;
}
