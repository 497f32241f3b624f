// The execution model of the kernels on a host: every thread of a block is a fiber. Barriers and exchanges switch
// fibers. Blocks run one after the other.
//
// Owns threads, barriers, exchanges and checks of memory. It precedes `prelude.cuh`. Every access of a kernel to memory
// outside of its block must be aligned and lie in a range that the launch names. Shared memory is filled with a
// pattern before each block. Threads that wait at different places, or for ever, are an error.

#define ACCL_HOST 1

#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>

extern "C" char __start_accl_shared[] __attribute__((weak));
extern "C" char __stop_accl_shared[] __attribute__((weak));

// Functions are static, not inline: libraries of several kernels share the variables of inline functions.
namespace model {

constexpr unsigned MOST_THREADS = 1024;
constexpr unsigned LANES = 32;
constexpr size_t STACK_BYTES = 64 << 10;
constexpr unsigned PATTERN = 0xa5;

// Memory that a kernel may access.
struct Range {
    unsigned long long begin, end;
    unsigned is_writable, reserved;
};

// Threads that wait for each other: a block, or a warp.
struct Group {
    unsigned size, arrived, any, kind;
    unsigned long generation;
    unsigned slots[2][LANES];
};

struct Fiber {
    ucontext_t start;
    jmp_buf at;
    bool has_begun, is_done;
    Group *group;
    unsigned long generation;
};

static Fiber fibers[MOST_THREADS];
static char *stacks;
static Group block_group, warps[MOST_THREADS / LANES];
static jmp_buf scheduler;
static unsigned thread, block, threads;
static char message[256];
static const Range *ranges;
static unsigned range_count;
static void (*kernel)(const void *);
static const void *arguments;

[[noreturn]] static void fail(const char *what, unsigned long long number)
{
    snprintf(message, sizeof message, "%s (%#llx) in block %u, thread %u", what, number, block, thread);
    _longjmp(scheduler, 2);
}

static void check(const void *at, size_t bytes, bool writes)
{
    static const Range *last;
    const unsigned long long address = (unsigned long long)at;
    if (address % bytes != 0) fail("an access is not aligned", address);
    auto holds = [&](const Range &range) {
        return range.begin <= address && address + bytes <= range.end && (range.is_writable || !writes);
    };
    if (last >= ranges && last < ranges + range_count && holds(*last)) return;
    for (unsigned i = 0; i < range_count; i++)
        if (holds(ranges[i])) {
            last = &ranges[i];
            return;
        }
    fail(writes ? "a write is outside of the memory" : "a read is outside of the memory", address);
}

// Returns to the scheduler until the group has moved on.
static void wait(Group &group)
{
    Fiber &fiber = fibers[thread];
    fiber.group = &group;
    fiber.generation = group.generation;
    if (_setjmp(fiber.at) == 0) _longjmp(scheduler, 1);
}

static void arrive(Group &group, unsigned kind)
{
    if (group.arrived == 0) group.kind = kind;
    if (group.kind != kind) fail("threads wait at different places", kind);
    if (++group.arrived < group.size) return wait(group);
    group.arrived = 0;
    group.generation++;
}

enum Kind { SYNC_BLOCK, ANY_BLOCK, SYNC_WARP, EXCHANGE };

static Group &warp() { return warps[thread / LANES]; }

// Returns what `lane` of this warp gives.
static unsigned exchange(unsigned value, unsigned lane)
{
    Group &group = warp();
    unsigned *slots = group.slots[group.generation % 2];
    slots[thread % LANES] = value;
    arrive(group, EXCHANGE);
    return slots[lane % LANES];
}

static unsigned ballot(bool flag)
{
    Group &group = warp();
    unsigned *slots = group.slots[group.generation % 2];
    slots[thread % LANES] = flag;
    arrive(group, EXCHANGE);
    unsigned bits = 0;
    for (unsigned lane = 0; lane < LANES; lane++) bits |= slots[lane] << lane;
    return bits;
}

static bool any(bool flag)
{
    static unsigned found[2];
    unsigned &mine = found[block_group.generation % 2];
    if (block_group.arrived == 0) mine = 0;
    mine |= flag;
    arrive(block_group, ANY_BLOCK);
    return mine;
}

static void begin()
{
    kernel(arguments);
    fibers[thread].is_done = true;
    _longjmp(scheduler, 1);
}

static bool can_run(const Fiber &fiber)
{
    return !fiber.is_done && (fiber.group == nullptr || fiber.group->generation != fiber.generation);
}

// Runs all threads of a block. Returns false after an error.
static bool run_block(bool is_reversed)
{
    // Without shared memory both addresses are null.
    memset(__start_accl_shared, PATTERN, (size_t)(__stop_accl_shared - __start_accl_shared));
    block_group = Group{threads, 0, 0, 0, 0, {}};
    for (unsigned i = 0; i < threads / LANES; i++) warps[i] = Group{LANES, 0, 0, 0, 0, {}};
    for (unsigned i = 0; i < threads; i++) fibers[i].has_begun = fibers[i].is_done = false, fibers[i].group = nullptr;
    static unsigned next, done;
    static bool has_moved;
    done = 0;
    while (done < threads) {
        has_moved = false;
        for (next = 0; next < threads; next++) {
            thread = is_reversed ? threads - 1 - next : next;
            Fiber &fiber = fibers[thread];
            if (!can_run(fiber)) continue;
            has_moved = true;
            const int why = _setjmp(scheduler);
            if (why == 2) return false;
            if (why == 0) {
                if (fiber.has_begun) _longjmp(fiber.at, 1);
                fiber.has_begun = true;
                getcontext(&fiber.start);
                fiber.start.uc_stack.ss_sp = stacks + thread * STACK_BYTES;
                fiber.start.uc_stack.ss_size = STACK_BYTES;
                fiber.start.uc_link = nullptr;
                makecontext(&fiber.start, begin, 0);
                setcontext(&fiber.start);
            }
            done += fibers[thread].is_done;
        }
        if (!has_moved && done < threads) {
            snprintf(message, sizeof message, "block %u: threads wait for ever", block);
            return false;
        }
    }
    return true;
}

} // namespace model

// Runs a kernel. Returns null, or a description of an error.
extern "C" const char *accl_model_launch(void (*kernel)(const void *), const void *arguments, unsigned blocks,
                                         unsigned threads, unsigned is_reversed, const model::Range *ranges,
                                         unsigned range_count)
{
    if (threads % model::LANES != 0 || threads > model::MOST_THREADS) return "a block has whole warps";
    if (model::stacks == nullptr) model::stacks = (char *)malloc(model::MOST_THREADS * model::STACK_BYTES);
    model::kernel = kernel;
    model::arguments = arguments;
    model::threads = threads;
    model::ranges = ranges;
    model::range_count = range_count;
    for (unsigned i = 0; i < blocks; i++) {
        model::block = is_reversed ? blocks - 1 - i : i;
        if (!model::run_block(is_reversed != 0)) return model::message;
    }
    return nullptr;
}

#define DEVICE static inline
#define DEVICE_MEMBER inline
#define SHARED static __attribute__((section("accl_shared")))
#define THREAD (model::thread)
#define BLOCK (model::block)
#define KERNEL(name, threads) extern "C" void name(const Args &args)
#define LARGE_KERNEL(name, threads) KERNEL(name, threads)

static inline unsigned lane_xor(unsigned value, unsigned mask) { return model::exchange(value, model::thread ^ mask); }
static inline unsigned lane_from(unsigned value, unsigned lane) { return model::exchange(value, lane); }
static inline unsigned warp_ballot(bool flag) { return model::ballot(flag); }
static inline void warp_sync() { model::arrive(model::warp(), model::SYNC_WARP); }
static inline void block_sync() { model::arrive(model::block_group, model::SYNC_BLOCK); }
static inline bool block_any(bool flag) { return model::any(flag); }

static inline void add_to(unsigned long long *counter, unsigned long long value)
{
    model::check(counter, sizeof *counter, true);
    *counter += value;
}

template <class T> static inline T read_at(const void *at)
{
    model::check(at, sizeof(T), false);
    T value;
    memcpy(&value, at, sizeof value);
    return value;
}

template <class T> static inline void write_at(void *at, T value)
{
    model::check(at, sizeof(T), true);
    memcpy(at, &value, sizeof value);
}
