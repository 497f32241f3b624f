// Casts: elements unchanged, or as float16 or bfloat16; accl-kernels' `codec/cast.rs` has the format.
//
// Owns all kernels of these codecs, but the choice of a source. Bits that are not converted keep the payload of a NaN.

constexpr u32 TENSOR = ACCL_TENSOR;
constexpr u32 THREADS = ACCL_THREADS;
constexpr u32 PART = ACCL_PART;
// The type of encoded elements: the tensor's, or another one.
constexpr u32 UNCHANGED = 3;
constexpr u32 WIRE = ACCL_WIRE == UNCHANGED ? TENSOR : ACCL_WIRE;

// Shared memory is not needed.
struct Room {};

// Calls `each` with the index in the tile of every group of eight elements of this block, and the number of its
// elements.
template <class Each> DEVICE void each_eight(const Work &work, Each each)
{
#pragma unroll
    for (u32 row = 0; row < PART / (THREADS * EIGHT); row++) {
        const u32 at = work.part * PART + (row * THREADS + THREAD) * EIGHT;
        if (at < work.elements) each(at, least(work.elements - at, EIGHT));
    }
}

template <class Source> DEVICE void encode(const Args &, Room &, const Work &work, const Source &source)
{
    each_eight(work, [&](u32 at, u32 count) {
        u32 bits[EIGHT];
        source.template unencoded_eight<WIRE>(bits, at, count);
        write_bits_of_eight<WIRE>(work.code + at * bytes_of(WIRE), bits, count);
        float decoded[EIGHT];
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) decoded[i] = widen<WIRE>(bits[i]);
        source.template take<TO_INFINITY>(at, decoded, count);
    });
    const u32 end = work.elements * bytes_of(WIRE);
    if (work.is_last && THREAD < round_up(end, 8) - end) write_at<u8>(work.code + end + THREAD, 0);
}

struct Reader {
    const u8 *code;

    DEVICE_MEMBER Reader(const u8 *code, u32) : code(code) {}

    DEVICE_MEMBER void read(float (&values)[EIGHT], u32 at, u32 count) const
    {
        read_eight<WIRE>(values, code + at * bytes_of(WIRE), count);
    }

    DEVICE_MEMBER float read_one(u32 at) const { return read_number<WIRE>(code + at * bytes_of(WIRE)); }
};

template <u32 TO> DEVICE void decode_to(const Args &args)
{
    const Work work = work_of_block<PART>(args);
    each_eight(work, [&](u32 at, u32 count) {
        u32 bits[EIGHT];
        read_bits_of_eight<WIRE>(bits, work.code + at * bytes_of(WIRE), count);
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) bits[i] = TO == WIRE ? bits[i] : narrow<TO>(widen<WIRE>(bits[i]));
        write_bits_of_eight<TO>(work.span.values + (work.start + at) * bytes_of(TO), bits, count);
    });
}

#if ACCL_KERNELS & ACCL_DECODE
KERNEL(accl_decode, THREADS) { decode_to<TENSOR>(args); }
#endif

#if ACCL_KERNELS & ACCL_DECODE_SUMS
KERNEL(accl_decode_sums, THREADS) { decode_to<F32>(args); }
#endif

#if ACCL_KERNELS & ACCL_DECODE_ADD
KERNEL(accl_decode_add, THREADS)
{
    const Work work = work_of_block<PART>(args);
    each_eight(work, [&](u32 at, u32 count) {
        float values[EIGHT], sums[EIGHT];
        read_eight<WIRE>(values, work.code + at * bytes_of(WIRE), count);
        u8 *to = work.span.sums + (work.start + at) * 4;
        read_eight<F32>(sums, to, count);
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) sums[i] = sum_of(sums[i], values[i]);
        write_eight<F32, TO_INFINITY>(to, sums, count);
    });
}
#endif
