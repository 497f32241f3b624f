// A driver of a GPU and its compiler, on the processor: the functions that accl-gpu calls, under the vendors' names.
//
// A forgotten order becomes visible. Streams do their work early, late (when a result is required) or in a random order.
// Device memory has no access rights outside of tasks, so the host's first touch ends the process. Calls that need a
// current context fail without one. Any call can be made to fail. The compiler is g++: the kernels' source becomes a shared
// object, which is the code that modules load.
//
// Owns contexts, modules, events, programs, allocations that processes share, and streams and memory unless another stand-in
// lends its own: see `standin.h`.
// A source follows the rules of accl-gpu's kernels: each is `KERNEL(name, threads)`, and has one parameter `Args`.
// Read `Streams` first, `Shared` for memory of several processes, and `CALL`, with which every function of the vendors' interface begins.

#include "standin.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#ifndef STANDIN_MODEL
#error "STANDIN_MODEL is the path of the execution model, a header"
#endif
#ifndef STANDIN_FOLDER
#error "STANDIN_FOLDER is a folder for compiled kernels"
#endif

// Further flags of the compiler of kernels.
#ifndef STANDIN_FLAGS
#define STANDIN_FLAGS ""
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kDevices = 2;
constexpr size_t kArena = size_t{64} << 20;
constexpr size_t kAlign = 512;
constexpr uint8_t kGarbage = 0xdb;
constexpr int kMostThreads = 1024;
constexpr size_t kMostArguments = 4096;

// Codes of the driver. HIP's are the same numbers.
enum Code {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNoBinary = 209,
  kNoPeerAccess = 217,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kLaunchFailed = 719,
  kNotSupported = 801,
};

struct Words {
  int code;
  const char *name, *text;
};
constexpr Words kWords[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};

// Codes of the compiler.
enum CompilerCode { kCompiled = 0, kNoMemory = 1, kNoProgram = 3, kNoSource = 2, kBadOption = 5, kRejected = 6, kNoName = 10 };
constexpr Words kCompilerWords[] = {
    {0, "NVRTC_SUCCESS", ""},
    {1, "NVRTC_ERROR_OUT_OF_MEMORY", ""},
    {2, "NVRTC_ERROR_PROGRAM_CREATION_FAILURE", ""},
    {3, "NVRTC_ERROR_INVALID_INPUT", ""},
    {5, "NVRTC_ERROR_INVALID_OPTION", ""},
    {6, "NVRTC_ERROR_COMPILATION", ""},
    {10, "NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID", ""},
};
constexpr int kTargets[] = {75, 80, 90, 100, 120};

// One lock for everything: a stand-in need not be fast. Tasks do not take it, because they may run under another's lock.
std::recursive_mutex lock_;
using Lock = std::lock_guard<std::recursive_mutex>;

// --- failures that tests ask for ---

struct Failures {
  std::string name;  // of the function to fail; empty for none
  unsigned skipped = 0;
  unsigned per_million = 0;
  int code = 0;
  std::mt19937_64 draws;
  std::string last;
};
Failures failures;
std::atomic<int64_t> calls{0}, launches{0}, copies{0};

// Returns the code with which a call fails; 0 for none.
int drawn(const char *name) {
  ++calls;
  bool fails = false;
  if (failures.name == name) {
    fails = failures.skipped == 0;
    if (fails) failures.name.clear();
    else --failures.skipped;
  }
  fails = fails || (failures.per_million > 0 && failures.draws() % 1000000 < failures.per_million);
  if (fails) failures.last = name;
  return fails ? failures.code : 0;
}

// Begins a function: takes the lock, and fails if a test asks for that.
#define CALL(name)             \
  const Lock lock(lock_);      \
  const int fails = drawn(name)
#define CALL_OR_FAIL(name) \
  CALL(name);              \
  if (fails != 0) return fails

// --- memory that processes share ---

struct Range {
  unsigned long long begin, end;
  unsigned is_writable, reserved;
};

// Allocations of the driver and imported ones. Each is a file in memory, mapped without access rights outside of tasks. Tasks
// of several threads may run at the same time, so a lock of its own guards the access; no other lock is taken with it.
class Shared {
 public:
  struct Mapping {
    int device = 0, file = -1;
    size_t bytes = 0;
    uint64_t id = 0;     // of the file
    int64_t opened = 0;  // imports of it; 0 for an allocation
  };

  // Maps a file, which the mapping then owns. Returns 0 if the system refuses.
  uint64_t map(const Mapping &mapping) {
    const std::lock_guard<std::mutex> lock(lock_);
    const int rights = users_ > 0 ? PROT_READ | PROT_WRITE : PROT_NONE;
    void *address = ::mmap(nullptr, mapping.bytes, rights, MAP_SHARED | MAP_NORESERVE, mapping.file, 0);
    if (address == MAP_FAILED) return 0;
    const auto begin = reinterpret_cast<uint64_t>(address);
    mappings_[begin] = mapping;
    return begin;
  }

  // Ends the mapping that begins at an address. The address is never used again, so that late accesses end the process.
  void unmap(uint64_t begin) {
    const std::lock_guard<std::mutex> lock(lock_);
    const auto found = mappings_.find(begin);
    const auto flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    ::mmap(reinterpret_cast<void *>(begin), found->second.bytes, PROT_NONE, flags, -1, 0);
    ::close(found->second.file);
    mappings_.erase(found);
  }

  // Changes the number of imports of a mapping that has become one. Returns the new number.
  int64_t open(uint64_t begin, int change) {
    const std::lock_guard<std::mutex> lock(lock_);
    return mappings_.at(begin).opened += change;
  }

  // Finds the mapping that contains an address, and copies it. Returns its first address; 0 if there is none.
  uint64_t find(uint64_t address, Mapping &mapping) {
    const std::lock_guard<std::mutex> lock(lock_);
    auto after = mappings_.upper_bound(address);
    if (after == mappings_.begin()) return 0;
    mapping = (--after)->second;
    return address - after->first < mapping.bytes ? after->first : 0;
  }

  // Finds the import of a file on a device. Returns 0 if there is none.
  uint64_t find_import(int device, uint64_t id) {
    const std::lock_guard<std::mutex> lock(lock_);
    for (const auto &[begin, mapping] : mappings_)
      if (mapping.opened > 0 && mapping.device == device && mapping.id == id) return begin;
    return 0;
  }

  // Begins a task, or ends it: memory has access rights while there is a task.
  void access(bool on) {
    const std::lock_guard<std::mutex> lock(lock_);
    users_ += on ? 1 : -1;
    if (users_ != (on ? 1 : 0)) return;
    for (const auto &[begin, mapping] : mappings_)
      ::mprotect(reinterpret_cast<void *>(begin), mapping.bytes, on ? PROT_READ | PROT_WRITE : PROT_NONE);
  }

  // Appends the memory that kernels of a device may use.
  void append_to(std::vector<Range> &ranges, int device) {
    const std::lock_guard<std::mutex> lock(lock_);
    for (const auto &[begin, mapping] : mappings_)
      if (mapping.device == device) ranges.push_back({begin, begin + mapping.bytes, 1, 0});
  }

  // Counts the allocations, their bytes and the imports.
  void count(int64_t &allocations, size_t &bytes, int64_t &imports) {
    const std::lock_guard<std::mutex> lock(lock_);
    allocations = imports = 0, bytes = 0;
    for (const auto &[begin, mapping] : mappings_) {
      imports += mapping.opened;
      allocations += mapping.opened == 0;
      bytes += mapping.opened == 0 ? mapping.bytes : 0;
    }
  }

 private:
  std::mutex lock_;
  int users_ = 0;
  std::map<uint64_t, Mapping> mappings_;
};
Shared shared;
size_t memory_limit = 0;

// A handle of an allocation, which other processes open by the number of its file in this process.
struct Handle {
  char magic[8];
  int32_t process, file;
  uint64_t bytes, id;
  char reserved[32];
};
static_assert(sizeof(Handle) == 64, "a handle has the vendors' size");
constexpr char kHandleMagic[8] = {'s', 't', 'a', 'n', 'd', 'i', 'p', 'c'};

// Whether ACCL_GPU_STANDIN_IPC has a value: see `standin.h`.
bool ipc_is(const char *value) {
  const char *found = std::getenv("ACCL_GPU_STANDIN_IPC");
  return found != nullptr && std::strcmp(found, value) == 0;
}

// --- streams and memory ---

struct Arena {
  char *seen = nullptr;  // addresses that programs see, without access rights
  char *used = nullptr;  // the same memory, for `poke` and `peek`
  size_t next = 0;
};
Arena arenas[kDevices];

Arena &arena(int device) {
  auto &arena = arenas[device];
  if (arena.seen == nullptr) {
    const int file = ::memfd_create("accl-gpu-standin", MFD_CLOEXEC);
    if (file < 0 || ::ftruncate(file, kArena) != 0) std::abort();
    arena.seen = static_cast<char *>(::mmap(nullptr, kArena, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0));
    arena.used = static_cast<char *>(::mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0));
    ::close(file);
  }
  return arena;
}

// The library's own streams: queues of tasks.
struct Streams {
  struct Task {
    void (*work)(void *);
    void *data;
  };
  int order = ACCL_STANDIN_EARLY;
  std::mt19937_64 draws;
  std::map<std::pair<int, void *>, std::deque<Task>> queues;

  bool step(std::deque<Task> &queue) {
    if (queue.empty()) return false;
    const Task task = queue.front();
    queue.pop_front();
    task.work(task.data);
    return true;
  }

  // Lets time pass: in the early order all streams finish, in the random order some of them move.
  void pass_time() {
    if (order == ACCL_STANDIN_LATE) return;
    for (auto &[key, queue] : queues) {
      auto steps = order == ACCL_STANDIN_EARLY ? queue.size() : draws() % 3;
      while (steps-- > 0 && step(queue)) {
      }
    }
  }
};
Streams streams;

void own_enqueue(void *, int device, void *stream, void (*work)(void *), void *data) {
  streams.queues[{device, stream}].push_back({work, data});
  streams.pass_time();
}
void own_advance(void *, int device, void *stream) { streams.step(streams.queues[{device, stream}]); }
void own_access(void *, int device, int on) {
  ::mprotect(arena(device).seen, kArena, on ? PROT_READ | PROT_WRITE : PROT_NONE);
}
int own_memory(void *, int device, int index, uint64_t *begin, uint64_t *end) {
  *begin = reinterpret_cast<uint64_t>(arena(device).seen);
  *end = *begin + kArena;
  return index == 0;
}
constexpr accl_standin_host kOwn{nullptr, own_enqueue, own_advance, own_access, own_memory};
accl_standin_host host = kOwn;

// Code with which the device has failed; no call on it works any more.
std::atomic<int> broken{0};

// Enqueues work that may access the device's memory.
void enqueue(int device, void *stream, std::function<void()> work) {
  struct Task {
    int device;
    std::function<void()> work;
  };
  const auto run = [](void *data) {
    const std::unique_ptr<Task> task(static_cast<Task *>(data));
    host.access(host.self, task->device, 1);
    shared.access(true);
    task->work();
    shared.access(false);
    host.access(host.self, task->device, 0);
  };
  host.enqueue(host.self, device, stream, run, new Task{device, std::move(work)});
}

// --- devices and contexts ---

struct Context_ {
  int device;
  int64_t retained = 0;
};
Context_ contexts[kDevices] = {{0}, {1}};
thread_local Context_ *current = nullptr;
bool is_initialised = false;
int driver_version = 13020, capability_major = 9, capability_minor = 0, has_host_pointers = 1;

// Returns the code with which a call on the current context fails; 0 for none.
int without_context() {
  if (current == nullptr || current->retained == 0) return kInvalidContext;
  return broken;
}

// --- modules ---

// Head of a code object, before the shared object's bytes.
struct Head {
  char magic[8];
  int32_t target;
  uint64_t bytes;
};
constexpr char kMagic[8] = {'s', 't', 'a', 'n', 'd', 'i', 'n', 0};

using Launch = const char *(*)(void (*)(const void *), const void *, unsigned, unsigned, unsigned, const Range *, unsigned);

struct Module_ {
  int device;
  void *library;
  Launch launch;
  size_t argument_bytes;
  // Launches see when the module is unloaded before they are done.
  std::shared_ptr<std::atomic<bool>> is_loaded = std::make_shared<std::atomic<bool>>(true);
};
struct Kernel_ {
  Module_ *module;
  void (*kernel)(const void *);
};
std::set<Module_ *> modules;
std::map<Module_ *, std::vector<std::unique_ptr<Kernel_>>> kernels;
int64_t loads = 0;

struct Event_ {
  int device;
  void *stream = nullptr;
  std::atomic<uint64_t> recorded{0}, come{0};
};
std::map<void *, std::shared_ptr<Event_>> events;

// --- programs ---

struct Program_ {
  std::string source, log, code;
  std::vector<std::string> names;
  bool is_compiled = false;
};
std::set<Program_ *> programs;
int64_t compiles = 0;

std::string contents(const std::filesystem::path &path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// Compiles a source with g++, unless that was done before. Returns the shared object's bytes; empty with a log otherwise.
std::string compiled(const Program_ &program, const std::vector<std::string> &defines, std::string &log) {
  std::string text = "#include \"" STANDIN_MODEL "\"\n#line 1 \"torch-accl.cu\"\n" + program.source;
  text += "\n#line 1 \"names\"\nextern \"C\" const unsigned long accl_standin_argument_bytes = sizeof(Args);\n";
  text += "extern \"C\" void (*const accl_standin_names[])(const Args &) = {";
  for (const auto &name : program.names) text += "&" + name + ", ";
  text += "};\n";
  // Results must not depend on what a compiler may assume, or on checks that forbid a change of stacks.
  std::string command = "g++ -std=c++17 -O1 -ffp-contract=off -fno-strict-aliasing -U_FORTIFY_SOURCE -fno-gnu-unique -fPIC -shared -w " STANDIN_FLAGS;
  for (const auto &define : defines) command += " '" + define + "'";
  const std::string key = command + "\n" + contents(STANDIN_MODEL) + text;
  const std::filesystem::path folder(STANDIN_FOLDER);
  std::filesystem::create_directories(folder);
  char name[32];
  std::snprintf(name, sizeof name, "%016zx", std::hash<std::string>()(key));
  const auto object = folder / (std::string(name) + ".so"), known = folder / (std::string(name) + ".key");
  if (std::filesystem::exists(object) && contents(known) == key) return contents(object);
  char own[] = "/tmp/accl-gpu-standin-XXXXXX";
  if (::mkdtemp(own) == nullptr) return "";
  const std::filesystem::path work(own);
  std::ofstream(work / "kernels.cpp") << text;
  command += " '" + (work / "kernels.cpp").string() + "' -o '" + (work / "kernels.so").string() + "' 2> '" +
             (work / "log").string() + "'";
  const int status = std::system(command.c_str());
  log = contents(work / "log");
  std::string bytes = status == 0 ? contents(work / "kernels.so") : "";
  if (!bytes.empty()) {
    // Another process may write the same files: each renames its own.
    const auto mine = folder / (std::string(name) + "." + std::to_string(::getpid()) + "." + std::string(own + 22));
    std::ofstream(mine, std::ios::binary) << bytes;
    std::filesystem::rename(mine, object);
    std::ofstream(mine, std::ios::binary) << key;
    std::filesystem::rename(mine, known);
  }
  std::filesystem::remove_all(work);
  return bytes;
}

}  // namespace

// --- control ---

EXPORT void accl_standin_lend(const accl_standin_host *lent) {
  const Lock lock(lock_);
  host = lent == nullptr ? kOwn : *lent;
}

EXPORT void accl_standin_order(int order, uint64_t seed) {
  const Lock lock(lock_);
  streams.order = order;
  streams.draws.seed(seed);
  streams.pass_time();
}

EXPORT void accl_standin_fail(const char *name, unsigned skipped, int code) {
  const Lock lock(lock_);
  failures.name = name;
  failures.skipped = skipped;
  failures.per_million = 0;
  failures.code = code;
  failures.last.clear();
}

EXPORT void accl_standin_draw(uint64_t seed, unsigned per_million, int code) {
  const Lock lock(lock_);
  failures.name.clear();
  failures.per_million = per_million;
  failures.code = code;
  failures.draws.seed(seed);
  failures.last.clear();
}

EXPORT const char *accl_standin_failed() {
  thread_local std::string last;
  const Lock lock(lock_);
  last = failures.last;
  return last.c_str();
}

EXPORT void accl_standin_version(int driver, int major, int minor) {
  const Lock lock(lock_);
  driver_version = driver;
  capability_major = major;
  capability_minor = minor;
}

EXPORT void accl_standin_host_pointers(int has_them) {
  const Lock lock(lock_);
  has_host_pointers = has_them;
}

EXPORT void accl_standin_count(accl_standin_counts *counts) {
  const Lock lock(lock_);
  *counts = {};
  for (const auto &context : contexts) counts->contexts += context.retained;
  counts->modules = static_cast<int64_t>(modules.size());
  counts->events = static_cast<int64_t>(events.size());
  counts->programs = static_cast<int64_t>(programs.size());
  for (const auto &[key, queue] : streams.queues) counts->tasks += static_cast<int64_t>(queue.size());
  counts->loads = loads;
  counts->compiles = compiles;
  counts->calls = calls;
  counts->launches = launches;
  size_t bytes = 0;
  shared.count(counts->allocations, bytes, counts->imports);
  counts->copies = copies;
}

EXPORT void accl_standin_memory_limit(size_t bytes) {
  const Lock lock(lock_);
  memory_limit = bytes;
}

EXPORT void *accl_standin_stream(int device) {
  const Lock lock(lock_);
  static uintptr_t next = 16;
  void *stream = reinterpret_cast<void *>(next++);
  streams.queues[{device, stream}];
  return stream;
}

EXPORT uint64_t accl_standin_allocate(int device, size_t bytes) {
  const Lock lock(lock_);
  auto &memory = arena(device);
  const size_t rounded = (bytes + kAlign - 1) / kAlign * kAlign;
  if (memory.next + rounded > kArena) return 0;
  std::memset(memory.used + memory.next, kGarbage, rounded);
  memory.next += rounded;
  return reinterpret_cast<uint64_t>(memory.seen + memory.next - rounded);
}

// Copies to or from memory of `shared`. Returns false if the address is elsewhere.
static bool copy_shared(uint64_t address, void *to, const void *from, size_t bytes) {
  Shared::Mapping mapping;
  const uint64_t begin = shared.find(address, mapping);
  if (begin == 0) return false;
  if (bytes > begin + mapping.bytes - address) std::abort();
  const auto offset = static_cast<off_t>(address - begin);
  const auto done = to != nullptr ? ::pread(mapping.file, to, bytes, offset) : ::pwrite(mapping.file, from, bytes, offset);
  if (done != static_cast<ssize_t>(bytes)) std::abort();
  return true;
}

static char *used(uint64_t address) {
  for (auto &arena : arenas) {
    const auto begin = reinterpret_cast<uint64_t>(arena.seen);
    if (arena.seen != nullptr && begin <= address && address < begin + kArena) return arena.used + (address - begin);
  }
  std::abort();
}
EXPORT void accl_standin_poke(uint64_t address, const void *from, size_t bytes) {
  const Lock lock(lock_);
  if (!copy_shared(address, nullptr, from, bytes)) std::memcpy(used(address), from, bytes);
}
EXPORT void accl_standin_peek(void *to, uint64_t address, size_t bytes) {
  const Lock lock(lock_);
  if (!copy_shared(address, to, nullptr, bytes)) std::memcpy(to, used(address), bytes);
}

// --- the driver ---

// A function under NVIDIA's name, and under AMD's if it is given.
#define BOTH(cuda, hip, parameters)                                             \
  EXPORT int cuda parameters;                                                   \
  EXPORT int hip parameters __attribute__((alias(#cuda)));                      \
  EXPORT int cuda parameters

BOTH(cuInit, hipInit, (unsigned)) {
  CALL_OR_FAIL("cuInit");
  is_initialised = true;
  return kSuccess;
}

BOTH(cuDriverGetVersion, hipDriverGetVersion, (int *version)) {
  CALL_OR_FAIL("cuDriverGetVersion");
  *version = driver_version;
  return kSuccess;
}

BOTH(cuGetErrorName, hipDrvGetErrorName, (int code, const char **name)) {
  CALL_OR_FAIL("cuGetErrorName");
  for (const auto &words : kWords)
    if (words.code == code) return *name = words.name, kSuccess;
  return *name = nullptr, kInvalidValue;
}

BOTH(cuGetErrorString, hipDrvGetErrorString, (int code, const char **text)) {
  CALL_OR_FAIL("cuGetErrorString");
  for (const auto &words : kWords)
    if (words.code == code) return *text = words.text, kSuccess;
  return *text = nullptr, kInvalidValue;
}

BOTH(cuDeviceGet, hipDeviceGet, (int *device, int ordinal)) {
  CALL_OR_FAIL("cuDeviceGet");
  if (!is_initialised) return 3;
  if (ordinal < 0 || ordinal >= kDevices) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

BOTH(cuDeviceGetName, hipDeviceGetName, (char *name, int bytes, int)) {
  CALL_OR_FAIL("cuDeviceGetName");
  std::snprintf(name, static_cast<size_t>(bytes), "Stand-in");
  return kSuccess;
}

static int attribute_of(int attribute, int *value) {
  switch (attribute) {
    case 91:
    case 4:
      return *value = has_host_pointers, kSuccess;
    case 75:
      return *value = capability_major, kSuccess;
    case 76:
      return *value = capability_minor, kSuccess;
    default:
      return kInvalidValue;
  }
}
BOTH(cuDeviceGetAttribute, hipDeviceGetAttribute, (int *value, int attribute, int)) {
  CALL_OR_FAIL("cuDeviceGetAttribute");
  return attribute_of(attribute, value);
}

EXPORT int hipGetDevicePropertiesR0600(void *properties, int) {
  CALL_OR_FAIL("hipGetDevicePropertiesR0600");
  std::memset(properties, 0, 1472);
  std::snprintf(static_cast<char *>(properties) + 1160, 256, "sm_%d%d", capability_major, capability_minor);
  return kSuccess;
}

BOTH(cuDevicePrimaryCtxRetain, hipDevicePrimaryCtxRetain, (void **context, int device)) {
  CALL_OR_FAIL("cuDevicePrimaryCtxRetain");
  ++contexts[device].retained;
  *context = &contexts[device];
  return kSuccess;
}

// Functions that release something report an earlier failure, and release all the same, as in real drivers.
BOTH(cuDevicePrimaryCtxRelease_v2, hipDevicePrimaryCtxRelease, (int device)) {
  CALL("cuDevicePrimaryCtxRelease_v2");
  if (contexts[device].retained == 0) return kInvalidContext;
  --contexts[device].retained;
  return fails;
}

BOTH(cuCtxGetCurrent, hipCtxGetCurrent, (void **context)) {
  CALL_OR_FAIL("cuCtxGetCurrent");
  *context = current;
  return kSuccess;
}

BOTH(cuCtxSetCurrent, hipCtxSetCurrent, (void *context)) {
  CALL_OR_FAIL("cuCtxSetCurrent");
  current = static_cast<Context_ *>(context);
  return kSuccess;
}

BOTH(cuModuleLoadData, hipModuleLoadData, (void **loaded, const void *code)) {
  CALL_OR_FAIL("cuModuleLoadData");
  if (const int code = without_context()) return code;
  Head head;
  std::memcpy(&head, code, sizeof head);
  if (std::memcmp(head.magic, kMagic, sizeof kMagic) != 0) return kInvalidImage;
  if (head.target / 10 != capability_major || head.target % 10 > capability_minor) return kNoBinary;
  // The dynamic linker returns an open library for its name, so each has a name of its own.
  char name[] = "/tmp/accl-gpu-standin-XXXXXX";
  const int file = ::mkstemp(name);
  const auto *bytes = static_cast<const char *>(code) + sizeof head;
  const bool is_written = file >= 0 && ::write(file, bytes, head.bytes) == static_cast<ssize_t>(head.bytes);
  void *library = is_written ? ::dlopen(name, RTLD_NOW | RTLD_LOCAL) : nullptr;
  ::close(file);
  ::unlink(name);
  if (library == nullptr) {
    std::fprintf(stderr, "accl-gpu-standin: %s\n", ::dlerror());
    return kInvalidImage;
  }
  const auto *argument_bytes = static_cast<const unsigned long *>(::dlsym(library, "accl_standin_argument_bytes"));
  auto *module = new Module_{current->device, library, reinterpret_cast<Launch>(::dlsym(library, "accl_model_launch")),
                             *argument_bytes};
  modules.insert(module);
  ++loads;
  *loaded = module;
  return kSuccess;
}

BOTH(cuModuleUnload, hipModuleUnload, (void *loaded)) {
  CALL("cuModuleUnload");
  if (const int code = without_context()) return code;
  auto *module = static_cast<Module_ *>(loaded);
  if (modules.erase(module) == 0) return kInvalidHandle;
  kernels.erase(module);
  // The code stays in the process: launches that come too late are reported, and do not crash.
  *module->is_loaded = false;
  delete module;
  return fails;
}

BOTH(cuModuleGetFunction, hipModuleGetFunction, (void **function, void *loaded, const char *name)) {
  CALL_OR_FAIL("cuModuleGetFunction");
  if (const int code = without_context()) return code;
  auto *module = static_cast<Module_ *>(loaded);
  if (modules.count(module) == 0) return kInvalidHandle;
  auto *kernel = reinterpret_cast<void (*)(const void *)>(::dlsym(module->library, name));
  if (kernel == nullptr) return kNotFound;
  kernels[module].push_back(std::make_unique<Kernel_>(Kernel_{module, kernel}));
  *function = kernels[module].back().get();
  return kSuccess;
}

BOTH(cuFuncGetAttribute, hipFuncGetAttribute, (int *value, int attribute, void *)) {
  CALL_OR_FAIL("cuFuncGetAttribute");
  if (attribute != 0) return kInvalidValue;
  *value = kMostThreads;
  return kSuccess;
}

BOTH(cuLaunchKernel, hipModuleLaunchKernel,
     (void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned,
      void *stream, void **arguments, void **extra)) {
  CALL_OR_FAIL("cuLaunchKernel");
  if (const int code = without_context()) return code;
  const auto *kernel = static_cast<Kernel_ *>(function);
  if (kernel->module->device != current->device) return kInvalidHandle;
  const bool is_line = gy == 1 && gz == 1 && by == 1 && bz == 1;
  if (gx == 0 || bx == 0 || bx > kMostThreads || !is_line || extra != nullptr) return kInvalidValue;
  ++launches;
  const size_t bytes = kernel->module->argument_bytes;
  if (bytes > kMostArguments) return kInvalidValue;
  // Aligned like every structure.
  std::vector<std::max_align_t> copy(bytes / sizeof(std::max_align_t) + 1);
  std::memcpy(copy.data(), arguments[0], bytes);
  std::vector<Range> ranges;
  uint64_t begin = 0, end = 0;
  while (host.memory(host.self, current->device, static_cast<int>(ranges.size()), &begin, &end)) {
    ranges.push_back({begin, end, 1, 0});
  }
  const unsigned is_reversed = streams.draws() % 2;
  const auto launch = kernel->module->launch;
  const auto is_loaded = kernel->module->is_loaded;
  const int device = current->device;
  enqueue(device, stream, [=, run = kernel->kernel, copy = std::move(copy)]() mutable {
    if (broken != 0) return;
    shared.append_to(ranges, device);
    const char *failure = "a module was unloaded before its launch was done";
    if (*is_loaded) {
      failure = launch(run, copy.data(), gx, bx, is_reversed, ranges.data(), static_cast<unsigned>(ranges.size()));
    }
    if (failure == nullptr) return;
    std::fprintf(stderr, "accl-gpu-standin: %s\n", failure);
    broken = kLaunchFailed;
  });
  return kSuccess;
}

BOTH(cuMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync, (uint64_t to, const void *from, size_t bytes, void *stream)) {
  CALL_OR_FAIL("cuMemcpyHtoDAsync_v2");
  if (const int code = without_context()) return code;
  enqueue(current->device, stream, [=] { std::memcpy(reinterpret_cast<void *>(to), from, bytes); });
  return kSuccess;
}

BOTH(cuMemcpyDtoHAsync_v2, hipMemcpyDtoHAsync, (void *to, uint64_t from, size_t bytes, void *stream)) {
  CALL_OR_FAIL("cuMemcpyDtoHAsync_v2");
  if (const int code = without_context()) return code;
  enqueue(current->device, stream, [=] { std::memcpy(to, reinterpret_cast<const void *>(from), bytes); });
  return kSuccess;
}

BOTH(cuMemcpyDtoDAsync_v2, hipMemcpyDtoDAsync, (uint64_t to, uint64_t from, size_t bytes, void *stream)) {
  CALL_OR_FAIL("cuMemcpyDtoDAsync_v2");
  if (const int code = without_context()) return code;
  ++copies;
  enqueue(current->device, stream,
          [=] { std::memcpy(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), bytes); });
  return kSuccess;
}

BOTH(cuStreamCreate, hipStreamCreateWithFlags, (void **stream, unsigned flags)) {
  CALL_OR_FAIL("cuStreamCreate");
  if (const int code = without_context()) return code;
  if (flags != 1) return kInvalidValue;
  // A lender has streams by small numbers, and none of these.
  static uintptr_t next = 1 << 20;
  *stream = reinterpret_cast<void *>(next++);
  return kSuccess;
}

BOTH(cuMemAlloc_v2, hipMalloc, (uint64_t *address, size_t bytes)) {
  CALL_OR_FAIL("cuMemAlloc_v2");
  if (const int code = without_context()) return code;
  if (bytes == 0) return kInvalidValue;
  int64_t allocations = 0, imports = 0;
  size_t used_bytes = 0;
  shared.count(allocations, used_bytes, imports);
  if (memory_limit != 0 && (bytes > memory_limit || used_bytes > memory_limit - bytes)) return kOutOfMemory;
  const int file = ::memfd_create("accl-gpu-standin-allocation", MFD_CLOEXEC);
  struct stat facts;
  if (file < 0) return kOutOfMemory;
  const bool is_sized = bytes <= SIZE_MAX / 2 && ::ftruncate(file, static_cast<off_t>(bytes)) == 0;
  const uint64_t begin = is_sized && ::fstat(file, &facts) == 0
                             ? shared.map({current->device, file, bytes, static_cast<uint64_t>(facts.st_ino), 0})
                             : 0;
  if (begin == 0) return ::close(file), kOutOfMemory;
  const std::vector<uint8_t> garbage(std::min(bytes, size_t{1} << 20), kGarbage);
  for (size_t at = 0; at < bytes; at += garbage.size())
    copy_shared(begin + at, nullptr, garbage.data(), std::min(garbage.size(), bytes - at));
  *address = begin;
  return kSuccess;
}

// The memory stays where other processes have it mapped.
BOTH(cuMemFree_v2, hipFree, (uint64_t address)) {
  CALL("cuMemFree_v2");
  if (const int code = without_context()) return code;
  Shared::Mapping mapping;
  if (shared.find(address, mapping) != address || mapping.opened != 0) return kInvalidValue;
  shared.unmap(address);
  return fails;
}

BOTH(cuIpcGetMemHandle, hipIpcGetMemHandle, (Handle *handle, uint64_t address)) {
  CALL_OR_FAIL("cuIpcGetMemHandle");
  if (const int code = without_context()) return code;
  if (ipc_is("none")) return kNotSupported;
  Shared::Mapping mapping;
  if (shared.find(address, mapping) == 0 || mapping.opened != 0) return kInvalidValue;
  *handle = {{}, static_cast<int32_t>(::getpid()), mapping.file, mapping.bytes, mapping.id, {}};
  std::memcpy(handle->magic, kHandleMagic, sizeof kHandleMagic);
  return kSuccess;
}

// A handle that is open on the device already is counted, and has its address, as in CUDA.
BOTH(cuIpcOpenMemHandle_v2, hipIpcOpenMemHandle, (uint64_t *address, Handle handle, unsigned flags)) {
  CALL_OR_FAIL("cuIpcOpenMemHandle_v2");
  if (const int code = without_context()) return code;
  if (ipc_is("import")) return kNoPeerAccess;
  if (flags != 1 || std::memcmp(handle.magic, kHandleMagic, sizeof kHandleMagic) != 0) return kInvalidValue;
  // CUDA does not open memory of the same process.
  if (handle.process == ::getpid()) return kInvalidContext;
  if (const uint64_t known = shared.find_import(current->device, handle.id)) {
    shared.open(known, 1);
    return *address = known, kSuccess;
  }
  const std::string path = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.file);
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return kInvalidValue;
  // The process may have freed the memory, and opened another file since.
  struct stat facts;
  const bool is_same = ::fstat(file, &facts) == 0 && static_cast<uint64_t>(facts.st_ino) == handle.id &&
                       static_cast<uint64_t>(facts.st_size) == handle.bytes;
  const uint64_t begin = is_same ? shared.map({current->device, file, handle.bytes, handle.id, 1}) : 0;
  if (begin == 0) return ::close(file), kInvalidValue;
  return *address = begin, kSuccess;
}

BOTH(cuIpcCloseMemHandle, hipIpcCloseMemHandle, (uint64_t address)) {
  CALL("cuIpcCloseMemHandle");
  if (const int code = without_context()) return code;
  Shared::Mapping mapping;
  if (shared.find(address, mapping) != address || mapping.opened == 0) return kInvalidValue;
  if (shared.open(address, -1) == 0) shared.unmap(address);
  return fails;
}

BOTH(cuEventCreate, hipEventCreateWithFlags, (void **event, unsigned)) {
  CALL_OR_FAIL("cuEventCreate");
  if (const int code = without_context()) return code;
  auto created = std::make_shared<Event_>();
  created->device = current->device;
  *event = created.get();
  events[*event] = std::move(created);
  return kSuccess;
}

BOTH(cuEventRecord, hipEventRecord, (void *event, void *stream)) {
  CALL_OR_FAIL("cuEventRecord");
  if (const int code = without_context()) return code;
  const auto found = events.find(event);
  if (found == events.end() || found->second->device != current->device) return kInvalidHandle;
  const auto recorded = found->second;
  recorded->stream = stream;
  const uint64_t version = ++recorded->recorded;
  enqueue(current->device, stream, [recorded, version] { recorded->come = version; });
  return kSuccess;
}

BOTH(cuEventQuery, hipEventQuery, (void *event)) {
  CALL_OR_FAIL("cuEventQuery");
  if (const int code = without_context()) return code;
  const auto found = events.find(event);
  if (found == events.end()) return kInvalidHandle;
  const auto asked = found->second;
  if (asked->come < asked->recorded) host.advance(host.self, asked->device, asked->stream);
  if (broken != 0) return broken;
  return asked->come < asked->recorded ? kNotReady : kSuccess;
}

BOTH(cuEventDestroy_v2, hipEventDestroy, (void *event)) {
  CALL("cuEventDestroy_v2");
  if (const int code = without_context()) return code;
  if (events.erase(event) == 0) return kInvalidHandle;
  return fails;
}

// --- the compiler ---

BOTH(nvrtcVersion, hiprtcVersion, (int *major, int *minor)) {
  CALL_OR_FAIL("nvrtcVersion");
  *major = 13;
  *minor = 2;
  return kCompiled;
}

EXPORT const char *nvrtcGetErrorString(int code) {
  CALL("nvrtcGetErrorString");
  if (fails != 0) return nullptr;
  for (const auto &words : kCompilerWords)
    if (words.code == code) return words.name;
  return "NVRTC_ERROR unknown";
}
EXPORT const char *hiprtcGetErrorString(int) __attribute__((alias("nvrtcGetErrorString")));

EXPORT int nvrtcGetNumSupportedArchs(int *count) {
  CALL_OR_FAIL("nvrtcGetNumSupportedArchs");
  *count = static_cast<int>(std::size(kTargets));
  return kCompiled;
}

EXPORT int nvrtcGetSupportedArchs(int *targets) {
  CALL_OR_FAIL("nvrtcGetSupportedArchs");
  std::copy(std::begin(kTargets), std::end(kTargets), targets);
  return kCompiled;
}

BOTH(nvrtcCreateProgram, hiprtcCreateProgram,
     (void **program, const char *source, const char *, int, const char *const *, const char *const *)) {
  CALL_OR_FAIL("nvrtcCreateProgram");
  auto *created = new Program_;
  created->source = source;
  programs.insert(created);
  *program = created;
  return kCompiled;
}

BOTH(nvrtcAddNameExpression, hiprtcAddNameExpression, (void *program, const char *name)) {
  CALL_OR_FAIL("nvrtcAddNameExpression");
  if (programs.count(static_cast<Program_ *>(program)) == 0) return kNoProgram;
  static_cast<Program_ *>(program)->names.push_back(name);
  return kCompiled;
}

BOTH(nvrtcCompileProgram, hiprtcCompileProgram, (void *handle, int count, const char *const *options)) {
  CALL_OR_FAIL("nvrtcCompileProgram");
  auto *program = static_cast<Program_ *>(handle);
  if (programs.count(program) == 0) return kNoProgram;
  ++compiles;
  int target = 0;
  std::vector<std::string> defines;
  for (int i = 0; i < count; ++i) {
    const std::string option = options[i];
    if (option.rfind("-D", 0) == 0) defines.push_back(option);
    std::sscanf(option.c_str(), "--gpu-architecture=sm_%d", &target);
  }
  if (std::find(std::begin(kTargets), std::end(kTargets), target) == std::end(kTargets)) {
    program->log = "the target is unknown";
    return kBadOption;
  }
  const std::string object = compiled(*program, defines, program->log);
  if (object.empty()) return kRejected;
  Head head{{}, target, object.size()};
  std::memcpy(head.magic, kMagic, sizeof kMagic);
  program->code = std::string(reinterpret_cast<const char *>(&head), sizeof head) + object;
  program->is_compiled = true;
  return kCompiled;
}

BOTH(nvrtcGetProgramLogSize, hiprtcGetProgramLogSize, (void *program, size_t *bytes)) {
  CALL_OR_FAIL("nvrtcGetProgramLogSize");
  *bytes = static_cast<Program_ *>(program)->log.size() + 1;
  return kCompiled;
}

BOTH(nvrtcGetProgramLog, hiprtcGetProgramLog, (void *program, char *log)) {
  CALL_OR_FAIL("nvrtcGetProgramLog");
  std::strcpy(log, static_cast<Program_ *>(program)->log.c_str());
  return kCompiled;
}

BOTH(nvrtcGetLoweredName, hiprtcGetLoweredName, (void *handle, const char *name, const char **lowered)) {
  CALL_OR_FAIL("nvrtcGetLoweredName");
  const auto &names = static_cast<Program_ *>(handle)->names;
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) return kNoName;
  *lowered = found->c_str();
  return kCompiled;
}

BOTH(nvrtcGetCUBINSize, hiprtcGetCodeSize, (void *program, size_t *bytes)) {
  CALL_OR_FAIL("nvrtcGetCUBINSize");
  *bytes = static_cast<Program_ *>(program)->code.size();
  return kCompiled;
}

BOTH(nvrtcGetCUBIN, hiprtcGetCode, (void *program, char *code)) {
  CALL_OR_FAIL("nvrtcGetCUBIN");
  const auto &bytes = static_cast<Program_ *>(program)->code;
  std::memcpy(code, bytes.data(), bytes.size());
  return kCompiled;
}

BOTH(nvrtcDestroyProgram, hiprtcDestroyProgram, (void **program)) {
  CALL("nvrtcDestroyProgram");
  if (programs.erase(static_cast<Program_ *>(*program)) == 0) return kNoProgram;
  delete static_cast<Program_ *>(*program);
  *program = nullptr;
  return fails;
}
