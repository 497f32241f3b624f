// A stand-in for an accelerator, on the processor: a device type of torch (PrivateUse1) with two devices.
//
// It makes forgotten waits visible. Memory of a device is mapped twice: addresses that torch sees have no access rights,
// so the host's first touch ends the process, and work of streams uses the other mapping. Streams do their work early,
// late (when a result is required) or in a random order. Each query of a stream or an event advances its stream by one
// step. Freed memory is filled with garbage in the order of its stream, and is never used again before the arena ends. Defects that
// real devices hide are counted: see `Faults`.
//
// Owns the device and its counters. It computes nothing itself: other operators copy to the host and use torch's own.
// Read `Stream_` first.

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/ScopeExit.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/distributed/c10d/cuda/StreamBlock.hpp>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/library.h>

#include "standin.h"

namespace {

constexpr int kDevices = 2;
constexpr size_t kArena = size_t{2} << 30;
constexpr size_t kAlign = 512;
constexpr int kPool = 8;  // streams of the pool, per device
constexpr int kBlocks = -1;  // no stream: blocks end when the host says so
constexpr uint8_t kGarbage = 0xdb;

// Errors of users that a real device does not report.
struct Faults {
  std::atomic<uint64_t> pageable{0};      // non-blocking copies from or to memory that is not pinned
  std::atomic<uint64_t> wrong_device{0};  // work enqueued while another device is current
  std::atomic<uint64_t> after_free{0};    // memory that is freed twice, or copied after its end
};
Faults faults;

// Things that must be gone at the end.
struct Alive {
  std::atomic<int64_t> events{0};
  std::atomic<int64_t> pinned_bytes{0};
  std::atomic<int64_t> device_bytes{0};
};
Alive alive;

enum class Order { kEarly, kLate, kRandom };
Order order = Order::kEarly;
std::mt19937_64 draws;
std::atomic<bool> broken{false};     // all work and queries fail, as after an illegal address
std::atomic<bool> frozen{false};     // streams work only when a result is required
std::atomic<bool> capturing{false};  // the current stream records a graph

// One lock for everything: a stand-in need not be fast.
std::recursive_mutex lock_;
using Lock = std::lock_guard<std::recursive_mutex>;

void refuse_if_broken() { TORCH_CHECK(!broken, "standin error: an illegal memory access was encountered"); }

// --- streams and events ---

struct Event_ {
  bool recorded = false;
  uint64_t version = 0;       // of the newest record
  uint64_t come = 0;          // newest version that its stream has come to
  int device = 0, stream = 0; // of the newest record
};

struct Task {
  std::function<void()> work;
  std::shared_ptr<Event_> awaited;  // the stream stops here until this event has come to `version`
  uint64_t version = 0;
};

// A stream: a queue of tasks.
struct Stream_ {
  std::deque<Task> tasks;
  // Ends of blocks of memory, before the next task that may use this memory.
  std::vector<Task> ends;
};
std::map<std::pair<int, int>, Stream_> streams;
std::atomic<uint64_t> steps{0};

void run_until(std::shared_ptr<Event_> event, uint64_t version);

// Does the next task of a stream. Returns false if there is none, or it waits for an event of another stream.
bool step(int device, int stream) {
  auto& tasks = streams[{device, stream}].tasks;
  if (tasks.empty()) return false;
  if (tasks.front().awaited && tasks.front().awaited->come < tasks.front().version) return false;
  ++steps;
  const Task task = std::move(tasks.front());
  tasks.pop_front();
  if (task.work) task.work();
  return true;
}

// Does all tasks of a stream, and tasks of other streams for which it waits.
void drain(int device, int stream) {
  auto& tasks = streams[{device, stream}].tasks;
  while (!tasks.empty()) {
    if (step(device, stream)) continue;
    run_until(tasks.front().awaited, tasks.front().version);
  }
}

void run_until(std::shared_ptr<Event_> event, uint64_t version) {
  while (event->come < version) {
    if (event->stream == kBlocks) {
      // Another thread ends the block, and needs the lock.
      lock_.unlock();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      lock_.lock();
      continue;
    }
    auto& tasks = streams[{event->device, event->stream}].tasks;
    TORCH_CHECK(!tasks.empty(), "standin: a stream waits for an event that never comes");
    if (!step(event->device, event->stream)) run_until(tasks.front().awaited, tasks.front().version);
  }
}

// Lets time pass: in the early order all streams finish, in the random order some of them move.
void pass_time() {
  if (order == Order::kLate || frozen) return;
  for (auto& [key, stream] : streams) {
    if (order == Order::kEarly) {
      while (step(key.first, key.second)) {
      }
    } else {
      for (auto n = draws() % 3; n > 0 && step(key.first, key.second); --n) {
      }
    }
  }
}

thread_local int current_device = 0;
thread_local int current_stream[kDevices] = {};

void enqueue(int device, int stream, Task task) {
  refuse_if_broken();
  if (current_device != device) ++faults.wrong_device;
  streams[{device, stream}].tasks.push_back(std::move(task));
  pass_time();
}

// Precedes an allocation, or a task that uses memory: torch may have given it blocks that were freed before. Until then, the stream
// may still wait for streams that use these blocks.
void reuse_memory(int device, int stream) {
  auto& [tasks, ends] = streams[{device, stream}];
  for (auto& end : ends) tasks.push_back(std::move(end));
  ends.clear();
}

c10::Stream stream_of(int device, int stream) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device)), stream);
}

// --- memory ---

struct Arena {
  char* seen = nullptr;  // addresses that torch sees, without access rights
  char* used = nullptr;  // the same memory for tasks
  size_t next = 0;
  struct Block {
    size_t bytes;
    int stream;  // current at the allocation
    std::set<int> streams;  // other streams that were recorded for it
  };
  std::map<char*, Block> blocks;
  std::map<const char*, size_t> dead;  // blocks whose end has come in the order of their stream
};

Arena& arena(int device) {
  static Arena arenas[kDevices];
  auto& arena = arenas[device];
  if (arena.seen == nullptr) {
    const int file = ::memfd_create("standin", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ::ftruncate(file, kArena) == 0, "standin: no memory");
    arena.seen = static_cast<char*>(::mmap(nullptr, kArena, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0));
    arena.used = static_cast<char*>(::mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0));
    ::close(file);
  }
  return arena;
}

int device_of(const void* seen) {
  for (int device = 0; device < kDevices; ++device) {
    const char* begin = arena(device).seen;
    if (seen >= begin && seen < begin + kArena) return device;
  }
  return -1;
}

// The address that tasks use.
char* used(const void* seen) {
  const int device = device_of(seen);
  TORCH_CHECK(device >= 0, "standin: not an address of a device");
  return arena(device).used + (static_cast<const char*>(seen) - arena(device).seen);
}

// Lets a stream wait for what another one has to do now.
void meet(int device, int stream, int waiting_device, int waiting_stream) {
  const auto event = std::make_shared<Event_>();
  event->device = device;
  event->stream = stream;
  event->version = 1;
  streams[{device, stream}].tasks.push_back({[event] { event->come = 1; }});
  streams[{waiting_device, waiting_stream}].tasks.push_back({nullptr, event, 1});
}

void free_block(void* seen) {
  const Lock lock(lock_);
  const int device = device_of(seen);
  auto& blocks = arena(device).blocks;
  const auto found = blocks.find(static_cast<char*>(seen));
  if (found == blocks.end()) {
    ++faults.after_free;
    return;
  }
  const auto [bytes, stream, others] = found->second;
  blocks.erase(found);
  alive.device_bytes -= static_cast<int64_t>(bytes);
  // In the order of the stream of its allocation, where the allocators of real devices use a block again.
  char* memory = used(seen);
  for (const int other : others) meet(device, other, device, stream);
  const auto fill = [memory, bytes = bytes, device] {
    std::memset(memory, kGarbage, bytes);
    arena(device).dead[memory] = bytes;
  };
  streams[{device, stream}].ends.push_back({fill});
  pass_time();
}

// Whether a task's address is in a block whose end has come.
bool is_dead(const void* memory) {
  for (int device = 0; device < kDevices; ++device) {
    const auto& dead = arena(device).dead;
    auto after = dead.upper_bound(static_cast<const char*>(memory));
    if (after != dead.begin() && static_cast<const char*>(memory) < (--after)->first + after->second) return true;
  }
  return false;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const Lock lock(lock_);
    auto& memory = arena(current_device);
    const c10::Device device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(current_device));
    if (bytes == 0) return {nullptr, device};
    const size_t rounded = (bytes + kAlign - 1) / kAlign * kAlign;
    if (memory.next + rounded > kArena) {
      TORCH_CHECK(memory.blocks.empty(), "standin: the arena is full");
      memory.next = 0;
      memory.dead.clear();
      // Blocks that have not ended in their streams would end other ones.
      for (auto& [key, stream] : streams) {
        if (key.first == current_device) stream.ends.clear();
      }
    }
    // Torch could give this block memory that was freed before.
    reuse_memory(current_device, current_stream[current_device]);
    char* seen = memory.seen + memory.next;
    memory.next += rounded;
    memory.blocks[seen] = {bytes, current_stream[current_device], {}};
    alive.device_bytes += static_cast<int64_t>(bytes);
    std::memset(used(seen), kGarbage, bytes);
    return {seen, seen, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(used(to), used(from), bytes); }
};
Allocator allocator;

struct Pinned {
  size_t bytes;
  int copies = 0;        // that a stream has yet to make
  bool is_freed = false; // by the program
};
std::map<const char*, Pinned> pinned;

void free_pinned(void* memory) {
  const Lock lock(lock_);
  const auto found = pinned.find(static_cast<char*>(memory));
  if (found == pinned.end()) return;
  found->second.is_freed = true;
  if (found->second.copies > 0) return;
  alive.pinned_bytes -= static_cast<int64_t>(found->second.bytes);
  pinned.erase(found);
  std::free(memory);
}

// Counts one more copy of a tensor in pinned memory, if the tensor owns that memory: until `end_copy` it is not freed, as
// with torch's allocators of pinned memory. Returns the block, or null.
char* begin_copy(const at::Tensor& host) {
  const auto found = pinned.find(static_cast<char*>(host.storage().data_ptr().get_context()));
  if (found == pinned.end()) return nullptr;
  ++found->second.copies;
  return const_cast<char*>(found->first);
}

void end_copy(char* block) {
  if (block == nullptr) return;
  auto& entry = pinned.at(block);
  if (--entry.copies == 0 && entry.is_freed) free_pinned(block);
}

bool is_pinned(const void* memory) {
  const Lock lock(lock_);
  auto after = pinned.upper_bound(static_cast<const char*>(memory));
  if (after == pinned.begin()) return false;
  --after;
  return static_cast<const char*>(memory) < after->first + after->second.bytes;
}

struct HostAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::kCPU};
    const Lock lock(lock_);
    auto* memory = static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
    TORCH_CHECK(memory != nullptr, "standin: no memory to pin");
    std::memset(memory, kGarbage, bytes);
    pinned[memory] = {bytes};
    alive.pinned_bytes += static_cast<int64_t>(bytes);
    return {memory, memory, &free_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
HostAllocator host_allocator;

// --- random numbers ---

// A generator of a device: the numbers of the CPU's generator with the same seed.
struct Generator_ final : c10::GeneratorImpl {
  explicit Generator_(c10::DeviceIndex device)
      : GeneratorImpl({c10::kPrivateUse1, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "standin: generators have no offset"); }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.unsafeGetGeneratorImpl()->seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  Generator_* clone_impl() const override {
    auto* copy = new Generator_(device_.index());
    copy->host = host.clone();
    return copy;
  }
  at::Generator host = at::detail::createCPUGenerator();
};

const at::Generator& default_generator(int device) {
  static const at::Generator all[kDevices] = {at::make_generator<Generator_>(c10::DeviceIndex{0}),
                                              at::make_generator<Generator_>(c10::DeviceIndex{1})};
  return all[device];
}

// --- torch's view of the device ---

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    // As with CUDA, the current device is not asked.
    if (device != before) setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(current_device));
  }
  void setDevice(c10::Device device) const override {
    refuse_if_broken();
    TORCH_CHECK(device.index() < kDevices, "standin: there are ", kDevices, " devices");
    if (device.has_index()) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index() && device.index() < kDevices) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    const int index = device.has_index() ? device.index() : current_device;
    return stream_of(index, current_stream[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(device.has_index() ? device.index() : current_device, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    static std::atomic<uint64_t> next{0};
    return stream_of(device.has_index() ? device.index() : current_device, 1 + static_cast<int>(next++ % kPool));
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStreamFromGlobalPool(device, false); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto& current = current_stream[stream.device_index()];
    const auto before = stream_of(stream.device_index(), current);
    current = static_cast<int>(stream.id());
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(static_cast<uintptr_t>(stream.id() + 1));
  }
  bool isStreamCapturing(const c10::Stream&) const override { return capturing; }

  static std::shared_ptr<Event_>& shared(void* event) { return *static_cast<std::shared_ptr<Event_>*>(event); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event == nullptr) return;
    const Lock lock(lock_);
    --alive.events;
    delete static_cast<std::shared_ptr<Event_>*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    const Lock lock(lock_);
    if (*event == nullptr) {
      *event = new std::shared_ptr<Event_>(std::make_shared<Event_>());
      ++alive.events;
    }
    const auto recorded = shared(*event);
    recorded->recorded = true;
    recorded->device = stream.device_index();
    recorded->stream = static_cast<int>(stream.id());
    const auto version = ++recorded->version;
    enqueue(recorded->device, recorded->stream, {[recorded, version] { recorded->come = version; }});
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const Lock lock(lock_);
    enqueue(stream.device_index(), static_cast<int>(stream.id()), {nullptr, shared(event), shared(event)->version});
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    const Lock lock(lock_);
    refuse_if_broken();
    const auto asked = shared(event);
    if (asked->come < asked->version) advance(asked->device, asked->stream);
    return asked->come >= asked->version;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const Lock lock(lock_);
    refuse_if_broken();
    run_until(shared(event), shared(event)->version);
  }
  bool queryStream(const c10::Stream& stream) const override {
    const Lock lock(lock_);
    refuse_if_broken();
    advance(stream.device_index(), static_cast<int>(stream.id()));
    return streams[{stream.device_index(), static_cast<int>(stream.id())}].tasks.empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    const Lock lock(lock_);
    refuse_if_broken();
    drain(stream.device_index(), static_cast<int>(stream.id()));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    const Lock lock(lock_);
    refuse_if_broken();
    for (int stream = 0; stream <= kPool; ++stream) drain(device, stream);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    const Lock lock(lock_);
    const int device = device_of(data.get());
    if (device < 0) return;
    auto& blocks = arena(device).blocks;
    const auto found = blocks.find(static_cast<char*>(data.get()));
    if (found != blocks.end()) found->second.streams.insert(static_cast<int>(stream.id()));
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  // One step of a stream, or of the stream for which it waits.
  static void advance(int device, int stream) {
    if (frozen || step(device, stream)) return;
    auto& tasks = streams[{device, stream}].tasks;
    if (tasks.empty() || tasks.front().awaited->stream == kBlocks) return;
    advance(tasks.front().awaited->device, tasks.front().awaited->stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({c10::kPrivateUse1, device}); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({c10::kPrivateUse1, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator_>(device < 0 ? getCurrentDevice() : device);
  }
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator; }
  at::Device getDeviceFromPtr(void* seen) const override {
    return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device_of(seen))};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const Lock lock(lock_);
    const c10::DeviceGuard guard(storage.device());
    auto data = allocator.allocate(bytes);
    const auto kept = std::min(bytes, storage.nbytes());
    if (kept > 0) {
      char *to = used(data.get()), *from = used(storage.data());
      reuse_memory(current_device, current_stream[current_device]);
      enqueue(current_device, current_stream[current_device], {[=] { std::memcpy(to, from, kept); }});
    }
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// --- for the stand-in driver of a GPU ---

// Lends streams and memory to the driver in this library: its kernels run in the order of the streams, on the memory of the
// device.
void lend_to(const std::string& path) {
  static accl_standin_host host;
  host.enqueue = [](void*, int device, void* handle, void (*work)(void*), void* data) {
    const Lock lock(lock_);
    const int stream = static_cast<int>(reinterpret_cast<uintptr_t>(handle)) - 1;
    reuse_memory(device, stream);
    streams[{device, stream}].tasks.push_back({[=] { work(data); }});
    pass_time();
  };
  host.advance = [](void*, int device, void* handle) {
    const Lock lock(lock_);
    Guard::advance(device, static_cast<int>(reinterpret_cast<uintptr_t>(handle)) - 1);
  };
  host.access = [](void*, int device, int on) {
    ::mprotect(arena(device).seen, kArena, on ? PROT_READ | PROT_WRITE : PROT_NONE);
  };
  host.memory = [](void*, int device, int index, uint64_t* begin, uint64_t* end) {
    const Lock lock(lock_);
    const auto set = [&](const char* first, size_t bytes) {
      *begin = reinterpret_cast<uintptr_t>(first);
      *end = *begin + bytes;
      return 1;
    };
    if (index == 0) return set(arena(device).seen, kArena);
    if (static_cast<size_t>(index) > pinned.size()) return 0;
    const auto& [memory, block] = *std::next(pinned.begin(), index - 1);
    return set(memory, block.bytes);
  };
  void* library = ::dlopen(path.c_str(), RTLD_NOW);
  TORCH_CHECK(library != nullptr, "standin: ", ::dlerror());
  using Lend = void (*)(const accl_standin_host*);
  reinterpret_cast<Lend>(::dlsym(library, "accl_standin_lend"))(&host);
}

// --- operators ---

at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                               std::optional<at::Device> device, std::optional<bool>,
                               std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(Guard().getDevice()));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(Guard().getDevice()));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

// A tensor of the host over the memory that tasks use.
at::Tensor host_view(const at::Tensor& tensor) {
  const auto options = tensor.options().device(c10::kCPU);
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), options);
  void* data = tensor.device().is_cpu() ? tensor.data_ptr() : used(tensor.const_data_ptr());
  auto view = at::from_blob(data, tensor.sizes(), tensor.strides(), options);
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  const auto& on = self.device().is_cpu() ? to : self;
  const auto& host = self.device().is_cpu() ? self : to;
  const bool crosses = self.device().is_cpu() || to.device().is_cpu();
  if (crosses && non_blocking && host.numel() > 0 && !is_pinned(host.const_data_ptr())) ++faults.pageable;
  {
    const Lock lock(lock_);
    const c10::DeviceGuard guard(on.device());
    const int device = on.device().index(), stream = current_stream[device];
    // The views are made now: a task must not depend on what the caller does to its tensors later.
    auto from_view = host_view(self), to_view = host_view(to);
    char* const block = crosses ? begin_copy(host) : nullptr;
    const auto copy = [from_view, to_view, block]() mutable {
      for (const auto* view : {&from_view, &to_view}) faults.after_free += is_dead(view->const_data_ptr());
      const at::AutoDispatchBelowADInplaceOrView below;
      to_view.copy_(from_view);
      end_copy(block);
    };
    const int other = to.device().index();
    if (crosses || other == device) {
      reuse_memory(device, stream);
      enqueue(device, stream, {copy});
    } else {
      // Between devices, the current streams of both wait for each other.
      meet(other, current_stream[other], device, stream);
      reuse_memory(device, stream);
      enqueue(device, stream, {copy});
      meet(device, stream, other, current_stream[other]);
    }
    if (crosses && !(non_blocking && is_pinned(host.const_data_ptr()))) drain(device, stream);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) { return at::_local_scalar_dense(self.cpu()); }

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  // A tensor of the same sizes stays as it is, whatever its strides.
  if (self.sym_sizes() == size) return self;
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  const auto bytes = static_cast<size_t>(self.storage_offset() + self.numel()) * self.itemsize();
  if (bytes > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  return self;
}

at::Tensor& set_source(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                       c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_source(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  const auto elements = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_source(self, std::move(storage), 0, {c10::SymInt(elements)}, {c10::SymInt(1)});
}

bool pinned_tensor(const at::Tensor& self, std::optional<at::Device>) {
  return self.device().is_cpu() && is_pinned(self.const_data_ptr());
}

at::Tensor pin(const at::Tensor& self, std::optional<at::Device>) {
  at::Tensor copy = at::detail::empty_strided_cpu(self.sizes(), self.strides(), self.scalar_type(), true);
  return copy.copy_(self);
}

void record_stream(at::Tensor& self, at::Stream stream) { Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream); }

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return at::native::cpu_fallback(op, stack);
  // The host computes, but draws are from the generator of the device.
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  int device = current_device;
  for (const auto& value : arguments) {
    if (value.isTensor() && value.toTensor().device().is_privateuseone()) {
      device = value.toTensor().device().index();
      break;
    }
  }
  const auto host_of = [](const at::Generator& generator) {
    TORCH_CHECK(generator.device().is_privateuseone(), "standin: the generator is on ", generator.device());
    return generator.get<Generator_>()->host;
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (op.schema().arguments()[i].name() != "generator") continue;
    auto& value = stack->at(stack->size() - arguments.size() + i);
    value = host_of(value.isNone() ? default_generator(device) : value.toGenerator());
    return at::native::cpu_fallback(op, stack);
  }
  // Some operators take no generator.
  at::Generator host = at::detail::getDefaultCPUGenerator(), own = host_of(default_generator(device));
  const auto before = host.get_state();
  host.set_state(own.get_state());
  const auto restored = c10::make_scope_exit([&] {
    own.set_state(host.get_state());
    host.set_state(before);
  });
  at::native::cpu_fallback(op, stack);
}

// Changes its running statistics, which its schema does not say.
void batch_norm(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size() + 3;
  std::vector<std::pair<at::Tensor, at::Tensor>> changed;
  for (const size_t i : {first, first + 1}) {
    if (!stack->at(i).isTensor()) continue;
    const at::Tensor there = stack->at(i).toTensor(), here = there.cpu();
    stack->at(i) = here;
    changed.emplace_back(there, here);
  }
  at::native::cpu_fallback(op, stack);
  for (const auto& [there, here] : changed) there.copy_(here);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("native_batch_norm", torch::CppFunction::makeFromBoxedFunction<&batch_norm>());
  m.impl("resize_", resize);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_source);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  // Views must not fall back to the host: these would be copies.
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("record_stream", record_stream);
}

// Copies see the bits of lazy views, like `copy_`.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, BackendSelect, m) {
  m.impl("is_pinned", pinned_tensor);
  m.impl("_pin_memory", pin);
}

// --- blocks ---

// Stops the current stream until `abort`.
struct Block final : c10d::cuda::StreamBlock {
  explicit Block(std::chrono::milliseconds) {
    const Lock lock(lock_);
    event->device = current_device;
    event->stream = kBlocks;
    event->version = 1;
    enqueue(current_device, current_stream[current_device], {nullptr, event, 1});
  }
  void abort() override {
    const Lock lock(lock_);
    event->come = 1;
    pass_time();
  }
  c10d::cuda::StreamBlockStatus status() override { return c10d::cuda::RUNNING; }
  std::shared_ptr<Event_> event = std::make_shared<Event_>();
};
std::unique_ptr<c10d::cuda::StreamBlock> block_stream(std::chrono::milliseconds timeout) {
  return std::make_unique<Block>(timeout);
}

}  // namespace

PYBIND11_MODULE(_standin, module) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(c10::kPrivateUse1, &allocator);
  at::setHostAllocator(c10::kPrivateUse1, &host_allocator);
  c10d::cuda::StreamBlockRegistry()->Register("STANDIN", block_stream);
  module.def("set_order", [](const std::string& name, uint64_t seed) {
    const Lock lock(lock_);
    TORCH_CHECK(name == "early" || name == "late" || name == "random", "no such order: ", name);
    order = name == "early" ? Order::kEarly : name == "late" ? Order::kLate : Order::kRandom;
    draws.seed(seed);
  });
  module.def("lend_to", &lend_to);
  // Enqueues work in the current stream that takes this many steps.
  module.def("compute", [](uint64_t count) {
    const Lock lock(lock_);
    for (; count > 0; --count) enqueue(current_device, current_stream[current_device], {[] {}});
  });
  module.def("freeze", [](bool now) { frozen = now; });
  module.def("break_context", [](bool now) { broken = now; });
  module.def("capture", [](bool now) { capturing = now; });
  module.def("exchange_device", [](int device) { return std::exchange(current_device, device); });
  module.def("default_generator", [](int device) {
    return pybind11::reinterpret_steal<pybind11::object>(THPGenerator_Wrap(default_generator(device)));
  });
  module.def("steps", [] { return steps.load(); });
  module.def("counts", [] {
    const Lock lock(lock_);
    size_t tasks = 0;
    for (const auto& [key, stream] : streams) tasks += stream.tasks.size();
    pybind11::dict all;
    all["pageable"] = faults.pageable.load();
    all["wrong_device"] = faults.wrong_device.load();
    all["after_free"] = faults.after_free.load();
    all["events"] = alive.events.load();
    all["pinned_bytes"] = alive.pinned_bytes.load();
    all["device_bytes"] = alive.device_bytes.load();
    all["tasks"] = tasks;
    return all;
  });
}
