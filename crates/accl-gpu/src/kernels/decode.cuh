// Kernels that decode groups of eight elements independently of each other. A family defines `Reader`.
//
// Owns the way of decoded values to memory. Does not know codes.

// Elements that a block decodes.
constexpr u32 DECODE_PART = ACCL_DECODE_PART;
constexpr u32 DECODE_THREADS = ACCL_DECODE_THREADS;

// Calls `each` with decoded values, the index of the first of them in the span, and their number. `unencoded` gets the
// index of an element that was sent unencoded, and its address.
template <class Each, class Unencoded> DEVICE void decode_part(const Args &args, Each each, Unencoded unencoded)
{
    const Work work = work_of_block<DECODE_PART>(args);
    const Reader reader(work);
#pragma unroll
    for (u32 row = 0; row < DECODE_PART / (DECODE_THREADS * EIGHT); row++) {
        const u32 at = work.part * DECODE_PART + (row * DECODE_THREADS + THREAD) * EIGHT;
        if (at >= reader.coded()) break;
        const u32 count = least(reader.coded() - at, EIGHT);
        float values[EIGHT];
        reader.read(values, at, count);
        each(work.span, values, work.start + at, count);
    }
    if (!work.is_last) return;
#pragma unroll 1
    for (u32 at = reader.coded() + THREAD; at < work.elements; at += DECODE_THREADS)
        unencoded(work.span, work.start + at, reader.tail() + (at - reader.coded()) * bytes_of(TENSOR));
}

// Decodes into elements of the tensor's type, or into float32.
template <u32 TO> DEVICE void decode_to(const Args &args)
{
    decode_part(
        args,
        [](const Span &span, const float (&values)[EIGHT], u64 at, u32 count) {
            write_eight<TO, TO_LARGEST>(span.values + at * bytes_of(TO), values, count);
        },
        [](const Span &span, u64 at, const u8 *from) {
            const u32 bits = read_loose<TENSOR>(from);
            write_bits<TO>(span.values + at * bytes_of(TO), TO == TENSOR ? bits : bits_of(widen<TENSOR>(bits)));
        });
}

#if ACCL_KERNELS & ACCL_DECODE
LARGE_KERNEL(accl_decode, DECODE_THREADS) { decode_to<TENSOR>(args); }
#endif

#if ACCL_KERNELS & ACCL_DECODE_SUMS
LARGE_KERNEL(accl_decode_sums, DECODE_THREADS) { decode_to<F32>(args); }
#endif

// Adds the decoded elements to float32 sums.
#if ACCL_KERNELS & ACCL_DECODE_ADD
LARGE_KERNEL(accl_decode_add, DECODE_THREADS)
{
    decode_part(
        args,
        [](const Span &span, const float (&values)[EIGHT], u64 at, u32 count) {
            float sums[EIGHT];
            read_eight<F32>(sums, span.sums + at * 4, count);
#pragma unroll
            for (u32 i = 0; i < EIGHT; i++) sums[i] = sum_of(sums[i], values[i]);
            write_eight<F32, TO_INFINITY>(span.sums + at * 4, sums, count);
        },
        [](const Span &span, u64 at, const u8 *from) {
            u8 *sum = span.sums + at * 4;
            write_number<F32>(sum, sum_of(read_number<F32>(sum), widen<TENSOR>(read_loose<TENSOR>(from))));
        });
}
#endif
