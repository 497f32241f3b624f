// Names that mean the same for NVRTC, hiprtc and a C++ compiler for the host.
//
// Owns types, the execution model (threads, warps, barriers, atomics), arithmetic of which each operation is rounded,
// and access to memory. Does not know codecs.
//
// KERNEL begins a kernel whose registers the compiler limits so that many blocks run at the same time. LARGE_KERNEL
// begins one that would spill registers with that limit.
//
// With ACCL_HOST the includer defines the execution model: DEVICE, DEVICE_MEMBER, KERNEL, LARGE_KERNEL, SHARED, THREAD,
// BLOCK, and the functions of the section "Execution model" below. The other sections are plain C++.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;

// ---- Execution model --------------------------------------------------------------------------------------------

// Lanes that exchange values. A wavefront of 64 lanes is two warps: no kernel exchanges values over a greater distance.
constexpr u32 WARP = 32;

struct Args;

#if !defined(ACCL_HOST)

#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define SHARED __shared__
#define THREAD (threadIdx.x)
#define BLOCK (blockIdx.x)

#if defined(__HIPCC_RTC__) || defined(__HIP__)

#define KERNEL(name, threads) extern "C" __global__ void __launch_bounds__(threads) name(const Args args)
#define LARGE_KERNEL(name, threads) extern "C" __global__ void __launch_bounds__(threads, 1) name(const Args args)
DEVICE u32 lane_xor(u32 value, u32 mask) { return (u32)__shfl_xor((i32)value, (i32)mask, (i32)WARP); }
DEVICE u32 lane_from(u32 value, u32 lane) { return (u32)__shfl((i32)value, (i32)lane, (i32)WARP); }
DEVICE u32 warp_ballot(bool flag) { return (u32)(__ballot(flag) >> (__lane_id() & ~(WARP - 1))); }
DEVICE void warp_sync() { __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront"); __builtin_amdgcn_wave_barrier(); }

#else

#define KERNEL(name, threads) \
    extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ Args args)
#define LARGE_KERNEL(name, threads) \
    extern "C" __global__ void __launch_bounds__(threads, 1) name(const __grid_constant__ Args args)
DEVICE u32 lane_xor(u32 value, u32 mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DEVICE u32 lane_from(u32 value, u32 lane) { return __shfl_sync(0xffffffffu, value, lane); }
DEVICE u32 warp_ballot(bool flag) { return __ballot_sync(0xffffffffu, flag); }
DEVICE void warp_sync() { __syncwarp(); }

#endif

DEVICE void block_sync() { __syncthreads(); }
DEVICE bool block_any(bool flag) { return __syncthreads_or(flag) != 0; }
DEVICE void add_to(u64 *counter, u64 value) { atomicAdd(counter, value); }

template <class T> DEVICE T read_at(const void *at) { return *(const T *)at; }
template <class T> DEVICE void write_at(void *at, T value) { *(T *)at = value; }

#endif

DEVICE i32 greatest(i32 a, i32 b) { return a > b ? a : b; }
DEVICE i32 least(i32 a, i32 b) { return a < b ? a : b; }
DEVICE u32 greatest(u32 a, u32 b) { return a > b ? a : b; }
DEVICE u32 least(u32 a, u32 b) { return a < b ? a : b; }

// The greatest, the least and the sum among TEAM neighbouring lanes, a power of two up to a warp. All lanes of a warp
// take part.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
// These GPUs have instructions for a whole warp.
constexpr u32 SHUFFLED = WARP / 2;
DEVICE i32 warp_greatest(i32 value) { return __reduce_max_sync(0xffffffffu, value); }
DEVICE i32 warp_least(i32 value) { return __reduce_min_sync(0xffffffffu, value); }
DEVICE u32 warp_sum(u32 value) { return __reduce_add_sync(0xffffffffu, value); }
#else
constexpr u32 SHUFFLED = WARP;
DEVICE i32 warp_greatest(i32 value) { return value; }
DEVICE i32 warp_least(i32 value) { return value; }
DEVICE u32 warp_sum(u32 value) { return value; }
#endif

template <u32 TEAM> DEVICE i32 team_greatest(i32 value)
{
    if constexpr (TEAM > SHUFFLED) return warp_greatest(value);
    if constexpr (TEAM <= SHUFFLED)
#pragma unroll
        for (u32 mask = 1; mask < TEAM; mask *= 2) value = greatest(value, (i32)lane_xor((u32)value, mask));
    return value;
}

template <u32 TEAM> DEVICE i32 team_least(i32 value)
{
    if constexpr (TEAM > SHUFFLED) return warp_least(value);
    if constexpr (TEAM <= SHUFFLED)
#pragma unroll
        for (u32 mask = 1; mask < TEAM; mask *= 2) value = least(value, (i32)lane_xor((u32)value, mask));
    return value;
}

template <u32 TEAM> DEVICE u32 team_sum(u32 value)
{
    if constexpr (TEAM > SHUFFLED) return warp_sum(value);
    if constexpr (TEAM <= SHUFFLED)
#pragma unroll
        for (u32 mask = 1; mask < TEAM; mask *= 2) value += lane_xor(value, mask);
    return value;
}

// ---- Arithmetic, each operation rounded to nearest even ---------------------------------------------------------

#if defined(__CUDACC__) && !defined(__HIP__)

DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 bits_of(float value) { return __float_as_uint(value); }
DEVICE float plus(float a, float b) { return __fadd_rn(a, b); }
DEVICE float minus(float a, float b) { return __fsub_rn(a, b); }
DEVICE float times(float a, float b) { return __fmul_rn(a, b); }
DEVICE float over(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float inverse_of(float a) { return __frcp_rn(a); }
DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE double plus(double a, double b) { return __dadd_rn(a, b); }
DEVICE double minus(double a, double b) { return __dsub_rn(a, b); }
DEVICE double times(double a, double b) { return __dmul_rn(a, b); }
DEVICE double over(double a, double b) { return __ddiv_rn(a, b); }
DEVICE float narrowed(double a) { return __double2float_rn(a); }
DEVICE u64 bits_of(double value) { return (u64)__double_as_longlong(value); }
DEVICE double double_of(u64 bits) { return __longlong_as_double((long long)bits); }
// The lesser and the greater of two numbers; the number if the other is NaN.
DEVICE float lesser(float a, float b) { return fminf(a, b); }
DEVICE float greater(float a, float b) { return fmaxf(a, b); }

// The GPU's own conversions of numbers that are not NaN: exact, and rounded to nearest even.
#define ACCL_CONVERTS_F16 1
DEVICE float convert_from_f16(u32 bits)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)bits));
    return value;
}
DEVICE u32 convert_to_f16(float value)
{
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

#else

// The compiler must not contract a product and a sum, and must not reorder.
DEVICE float float_of(u32 bits) { float value; __builtin_memcpy(&value, &bits, 4); return value; }
DEVICE u32 bits_of(float value) { u32 bits; __builtin_memcpy(&bits, &value, 4); return bits; }
DEVICE float plus(float a, float b) { return a + b; }
DEVICE float minus(float a, float b) { return a - b; }
DEVICE float times(float a, float b) { return a * b; }
DEVICE float over(float a, float b) { return a / b; }
DEVICE float inverse_of(float a) { return 1.0f / a; }
DEVICE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE double plus(double a, double b) { return a + b; }
DEVICE double minus(double a, double b) { return a - b; }
DEVICE double times(double a, double b) { return a * b; }
DEVICE double over(double a, double b) { return a / b; }
DEVICE float narrowed(double a) { return (float)a; }
DEVICE u64 bits_of(double value) { u64 bits; __builtin_memcpy(&bits, &value, 8); return bits; }
DEVICE double double_of(u64 bits) { double value; __builtin_memcpy(&value, &bits, 8); return value; }
#define ACCL_CONVERTS_F16 0
DEVICE float lesser(float a, float b) { return b != b || a < b ? a : b; }
DEVICE float greater(float a, float b) { return b != b || a > b ? a : b; }

#endif

constexpr u32 NAN_BITS = 0x7fc00000;
constexpr u32 INFINITY_BITS = 0x7f800000;
constexpr u32 SIGN_BIT = 0x80000000;

DEVICE float magnitude(float value) { return float_of(bits_of(value) & ~SIGN_BIT); }
DEVICE bool is_finite(float value) { return (bits_of(value) & ~SIGN_BIT) < INFINITY_BITS; }
DEVICE bool is_nan(float value) { return value != value; }
// Every NaN becomes the canonical one, because processors return different ones.
DEVICE float canonical(float value) { return value != value ? float_of(NAN_BITS) : value; }
DEVICE float sum_of(float a, float b) { return canonical(plus(a, b)); }

// 2^23. The sum of 2^23 and a smaller number that is not negative has that number in its lowest bits, rounded to
// nearest even.
constexpr float ROUNDS = 8388608.0f;
constexpr u32 ROUNDS_BITS = 0x4b000000;
// Converts a number below 2^23 exactly, faster than a conversion.
DEVICE float small_number(u32 number) { return minus(float_of(ROUNDS_BITS | number), ROUNDS); }

DEVICE u32 ceil_div(u32 a, u32 b) { return (a + b - 1) / b; }
DEVICE u32 round_up(u32 a, u32 to) { return (a + to - 1) / to * to; }

// ---- Memory -----------------------------------------------------------------------------------------------------

DEVICE bool is_aligned(const void *at, u32 to) { return ((u64)at & (to - 1)) == 0; }

// Sixteen bytes that are moved together.
#if defined(__CUDACC__) && !defined(__HIP__)
typedef uint4 Quad;
#else
struct alignas(16) Quad { u32 x, y, z, w; };
#endif
