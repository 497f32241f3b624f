// Float32 sums of unencoded elements: read, add, finish and write, as accl-kernels' `Floats` does them.
//
// Owns the kernels of a module of sums. A span's tiles have no meaning here. `values` are elements of ACCL_TENSOR,
// `sums` are float32.

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
