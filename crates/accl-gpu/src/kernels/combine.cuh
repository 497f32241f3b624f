// Kernels that add encoded elements to unencoded ones and encode the sums. A family defines `Room`, `Reader` and
// `encode`.
//
// Owns the source of sums, and the values that they decode to. Does not know codes.

// Elements of a tensor or float32 sums of it, plus the decoded elements of another code; the sums are finished. The
// values that they decode to are written as elements of the tensor, unless the results are null.
template <u32 TYPE> struct WithCode {
    static constexpr bool WANTS_DECODED = true;
    Values<TYPE> base;
    Reader reader;
    u8 *results;
    bool divides;
    float divisor;

    DEVICE_MEMBER WithCode(const Args &args, const Work &work)
        : base(work), reader(work.span.other + (work.code - work.span.code), work.elements),
          results(work.span.sums ? work.span.sums + work.start * bytes_of(TENSOR) : nullptr),
          divides(args.flags & FLAG_DIVIDES), divisor(args.divisor)
    {
    }

    template <bool IS_RARE = OFTEN> DEVICE_MEMBER void read(float (&x)[EIGHT], u32 at, u32 count) const
    {
        float more[EIGHT];
        base.template read<IS_RARE>(x, at, count);
        reader.read(more, at, count);
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) x[i] = finished<TENSOR>(sum_of(x[i], more[i]), divides, divisor);
        // The other code may not have zeros in place of missing elements.
        if (count < EIGHT) {
#pragma unroll
            for (u32 i = 1; i < EIGHT; i++) x[i] = i < count ? x[i] : x[0];
        }
    }

    DEVICE_MEMBER float read_one(u32 at) const
    {
        return finished<TENSOR>(sum_of(base.read_one(at), reader.read_one(at)), divides, divisor);
    }

    template <u32 WIRE> DEVICE_MEMBER u32 unencoded(u32 at) const { return narrow<WIRE>(read_one(at)); }

    template <u32 WIRE> DEVICE_MEMBER void unencoded_eight(u32 (&bits)[EIGHT], u32 at, u32 count) const
    {
        float x[EIGHT];
        read(x, at, count);
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) bits[i] = narrow<WIRE>(x[i]);
    }

    // Writes the results of `count` elements from `at` on.
    template <bool LARGEST> DEVICE_MEMBER void take(u32 at, const float (&decoded)[EIGHT], u32 count) const
    {
        if (results) write_eight<TENSOR, LARGEST>(results + (u64)at * bytes_of(TENSOR), decoded, count);
    }

    DEVICE_MEMBER void take(u32 at, const float (&)[EIGHT], const float (&decoded)[EIGHT], u32 count) const
    {
        take<TO_LARGEST>(at, decoded, count);
    }

    template <bool LARGEST> DEVICE_MEMBER void take_one(u32 at, float decoded) const
    {
        if (results) write_bits<TENSOR>(results + (u64)at * bytes_of(TENSOR), narrow_to<TENSOR, LARGEST>(decoded));
    }
};

template <u32 TYPE> DEVICE void combine(const Args &args, Room &room)
{
    const Work work = work_of_block<PART>(args);
    encode(args, room, work, WithCode<TYPE>(args, work));
}

// Adds encoded elements to elements of the tensor's type.
#if ACCL_KERNELS & ACCL_COMBINE
LARGE_KERNEL(accl_combine, THREADS)
{
    SHARED Room room;
    combine<TENSOR>(args, room);
}
#endif

// Adds encoded elements to float32 sums.
#if ACCL_KERNELS & ACCL_COMBINE_SUMS
LARGE_KERNEL(accl_combine_sums, THREADS)
{
    SHARED Room room;
    combine<F32>(args, room);
}
#endif
