// Float32 sums of unencoded elements: read, add, finish and write, as accl-kernels' `Floats` does them.
//
// Owns the kernels of a module of sums. A span's tiles have a meaning for squares alone. `values` are elements of
// ACCL_TENSOR, `sums` are float32.

constexpr u32 TENSOR = ACCL_TENSOR;
constexpr u32 THREADS = ACCL_THREADS;
// Elements that a block handles.
constexpr u32 PART = ACCL_PART;

// Calls `each` with the index of every group of eight elements of this block, and the number of its elements.
template <class Each> DEVICE void each_eight(const Args &args, Each each)
{
    const Span span = span_of_block(args);
    const u64 begin = (u64)(BLOCK - span.first_block) * PART;
#pragma unroll
    for (u32 row = 0; row < PART / (THREADS * EIGHT); row++) {
        const u64 at = begin + (row * THREADS + THREAD) * EIGHT;
        if (at < span.elements) each(span, at, span.elements - at < EIGHT ? (u32)(span.elements - at) : EIGHT);
    }
}

// Sets the sums to the elements.
#if ACCL_KERNELS & ACCL_READ
KERNEL(accl_read, THREADS)
{
    each_eight(args, [](const Span &span, u64 at, u32 count) {
        float x[EIGHT];
        read_eight<TENSOR>(x, span.values + at * bytes_of(TENSOR), count);
        write_eight<F32, TO_INFINITY>(span.sums + at * 4, x, count);
    });
}
#endif

// Adds the elements to the sums.
#if ACCL_KERNELS & ACCL_ADD
KERNEL(accl_add, THREADS)
{
    each_eight(args, [](const Span &span, u64 at, u32 count) {
        float x[EIGHT], sums[EIGHT];
        read_eight<TENSOR>(x, span.values + at * bytes_of(TENSOR), count);
        read_eight<F32>(sums, span.sums + at * 4, count);
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) sums[i] = sum_of(sums[i], x[i]);
        write_eight<F32, TO_INFINITY>(span.sums + at * 4, sums, count);
    });
}
#endif

// Divides the sums, if there is a divisor. Sums that the tensor's type cannot hold become infinite.
#if ACCL_KERNELS & ACCL_FINISH
KERNEL(accl_finish, THREADS)
{
    const bool divides = args.flags & FLAG_DIVIDES;
    const float divisor = args.divisor;
    each_eight(args, [=](const Span &span, u64 at, u32 count) {
        float sums[EIGHT];
        read_eight<F32>(sums, span.sums + at * 4, count);
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) sums[i] = finished<TENSOR>(sums[i], divides, divisor);
        write_eight<F32, TO_INFINITY>(span.sums + at * 4, sums, count);
    });
}
#endif

// Writes the sums as elements, rounded to nearest even; beyond the range of a 16-bit type they become infinite.
#if ACCL_KERNELS & ACCL_WRITE
KERNEL(accl_write, THREADS)
{
    each_eight(args, [](const Span &span, u64 at, u32 count) {
        float sums[EIGHT];
        read_eight<F32>(sums, span.sums + at * 4, count);
        write_eight<TENSOR, TO_INFINITY>(span.values + at * bytes_of(TENSOR), sums, count);
    });
}
#endif

#if ACCL_KERNELS & ACCL_COPY
// Copies elements to the address in `sums`. Both may be the same memory.
KERNEL(accl_copy, THREADS)
{
    each_eight(args, [](const Span &span, u64 at, u32 count) {
        u32 bits[EIGHT];
        read_bits_of_eight<TENSOR>(bits, span.values + at * bytes_of(TENSOR), count);
        write_bits_of_eight<TENSOR>(span.sums + at * bytes_of(TENSOR), bits, count);
    });
}
#endif

#if ACCL_KERNELS & (ACCL_SQUARES | ACCL_SQUARES_OF_SUMS)
// Partial sums that the CPU has for the squares of a tile.
constexpr u32 LANES = WARP / 2;

// Adds the squares of each tile up in float64, in the CPU's order, and writes two numbers to `code`: the sum for `values`,
// elements of TYPE, and the sum for `sums`. One half of a warp adds the values up, and the other half the sums.
template <u32 TYPE> DEVICE void add_squares(const Args &args)
{
    const Work work = work_of_block<WHOLE_TILE>(args);
    const u32 lane = THREAD % LANES, first = THREAD - lane, whole = work.elements / LANES * LANES;
    const bool has_values = THREAD < LANES;
    const u8 *values = work.span.values + work.start * bytes_of(TYPE), *sums = work.span.sums + work.start * 4;
    const auto square = [=](u32 at) {
        const double x = has_values ? read_number<TYPE>(values + at * bytes_of(TYPE)) : read_number<F32>(sums + at * 4);
        return times(x, x);
    };
    double of_lane = 0.0, total = 0.0, rest = 0.0;
#pragma unroll 8
    for (u32 at = lane; at < whole; at += LANES) of_lane = plus(of_lane, square(at));
    const u64 bits = bits_of(of_lane);
    for (u32 from = first; from < first + LANES; from++) {
        total = plus(total, double_of((u64)lane_from((u32)(bits >> 32), from) << 32 | lane_from((u32)bits, from)));
    }
    for (u32 at = whole; at < work.elements; at++) rest = plus(rest, square(at));
    if (lane == 0) write_at<u64>(work.code + (has_values ? 0 : 8), bits_of(plus(total, rest)));
}
#endif

#if ACCL_KERNELS & ACCL_SQUARES
KERNEL(accl_squares, WARP) { add_squares<TENSOR>(args); }
#endif

#if ACCL_KERNELS & ACCL_SQUARES_OF_SUMS
KERNEL(accl_squares_of_sums, WARP) { add_squares<F32>(args); }
#endif
