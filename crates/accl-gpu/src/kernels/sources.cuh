// Sources of the values that are encoded, and what happens to the values that they decode to.
//
// Owns elements without and with the residual of error feedback; `combine.cuh` has a third source. Does not know codecs.

// Elements of a tensor or float32 sums of it.
template <u32 TYPE> struct Values {
    static constexpr bool WANTS_DECODED = false;
    const u8 *values;

    DEVICE_MEMBER explicit Values(const Work &work) : values(work.span.values + work.start * bytes_of(TYPE)) {}

    // Reads the elements from `at` on, `count` of eight; the others become the first one. A NaN becomes any NaN.
    template <bool IS_RARE = OFTEN> DEVICE_MEMBER void read(float (&x)[EIGHT], u32 at, u32 count) const
    {
        read_eight_to_any_nan<TYPE, IS_RARE>(x, values + (u64)at * bytes_of(TYPE), count);
    }

    DEVICE_MEMBER float read_one(u32 at) const { return read_number<TYPE>(values + (u64)at * bytes_of(TYPE)); }

    // Returns the bits of an element that is sent as WIRE: unchanged, or rounded to nearest even.
    template <u32 WIRE> DEVICE_MEMBER u32 unencoded(u32 at) const
    {
        const u8 *from = values + (u64)at * bytes_of(TYPE);
        if (TYPE == WIRE) return TYPE == F32 ? read_at<u32>(from) : read_at<u16>(from);
        return narrow<WIRE>(read_number<TYPE>(from));
    }

    // The same for `count` of eight elements from `at` on.
    template <u32 WIRE> DEVICE_MEMBER void unencoded_eight(u32 (&bits)[EIGHT], u32 at, u32 count) const
    {
        read_bits_of_eight<TYPE>(bits, values + (u64)at * bytes_of(TYPE), count);
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) bits[i] = TYPE == WIRE ? bits[i] : narrow<WIRE>(widen<TYPE>(bits[i]));
    }

    template <bool LARGEST> DEVICE_MEMBER void take(u32, const float (&)[EIGHT], u32) const {}
    DEVICE_MEMBER void take(u32, const float (&)[EIGHT], const float (&)[EIGHT], u32) const {}
    template <bool LARGEST> DEVICE_MEMBER void take_one(u32, float) const {}
};

// The same with a residual in float32, which is added, and which becomes what the encoding loses.
template <u32 TYPE> struct WithResidual {
    static constexpr bool WANTS_DECODED = true;
    Values<TYPE> base;
    u8 *residual;
    // Whether the residual is left alone: all values of the tile are zeros, or a flag says so.
    bool is_kept;

    DEVICE_MEMBER WithResidual(const Work &work, bool is_kept)
        : base(work), residual(work.span.sums + work.start * 4), is_kept(is_kept) {}

    template <bool IS_RARE = OFTEN> DEVICE_MEMBER void read(float (&x)[EIGHT], u32 at, u32 count) const
    {
        base.template read<IS_RARE>(x, at, count);
        if (is_kept) return;
        float more[EIGHT];
        read_eight<F32, IS_RARE>(more, residual + (u64)at * 4, count);
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) x[i] = sum_of(x[i], more[i]);
    }

    DEVICE_MEMBER float read_one(u32 at) const
    {
        const float x = base.read_one(at);
        return is_kept ? x : sum_of(x, read_number<F32>(residual + (u64)at * 4));
    }

    template <u32 WIRE> DEVICE_MEMBER u32 unencoded(u32 at) const { return narrow<WIRE>(read_one(at)); }

    template <u32 WIRE> DEVICE_MEMBER void unencoded_eight(u32 (&bits)[EIGHT], u32 at, u32 count) const
    {
        float x[EIGHT];
        read(x, at, count);
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) bits[i] = narrow<WIRE>(x[i]);
    }

    // Stores the loss of `count` elements from `at` on, given what they decode to. LARGEST means nothing here.
    template <bool LARGEST> DEVICE_MEMBER void take(u32 at, const float (&decoded)[EIGHT], u32 count) const
    {
        float x[EIGHT];
        read(x, at, count);
        take(at, x, decoded, count);
    }

    // The same, given their values, too.
    DEVICE_MEMBER void take(u32 at, const float (&x)[EIGHT], const float (&decoded)[EIGHT], u32 count) const
    {
        if (is_kept) return;
        float lost[EIGHT];
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) {
            const float loss = minus(x[i], decoded[i]);
            lost[i] = is_finite(loss) ? loss : 0.0f;
        }
        write_eight<F32, TO_INFINITY>(residual + (u64)at * 4, lost, count);
    }

    template <bool LARGEST> DEVICE_MEMBER void take_one(u32 at, float decoded) const
    {
        if (is_kept) return;
        const float loss = minus(read_one(at), decoded);
        write_number<F32>(residual + (u64)at * 4, is_finite(loss) ? loss : 0.0f);
    }
};

// Whether all elements of the tile are zeros. All threads of a block take part.
template <u32 TYPE, u32 THREADS> DEVICE bool has_only_zeros(const Work &work)
{
    const Values<TYPE> values(work);
    // Blocks begin at different elements, and most blocks find a number at once.
    const u32 row = THREADS * EIGHT, rows = ceil_div(work.elements, row);
    for (u32 index = 0; index < rows; index++) {
        const u32 at = ((index + work.part) % rows * THREADS + THREAD) * EIGHT;
        float x[EIGHT];
        bool found = false;
        if (at < work.elements) {
            values.read(x, at, least(work.elements - at, EIGHT));
#pragma unroll
            for (u32 i = 0; i < EIGHT; i++) found |= x[i] != 0.0f;
        }
        if (block_any(found)) return false;
    }
    return true;
}
