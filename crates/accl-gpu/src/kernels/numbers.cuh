// Elements of tensors and metadata: float32, float16 and bfloat16, to float32 and back.
//
// Owns the conversions, which equal the conversions of accl-kernels' `reduce/float16.rs`, and the access to groups of eight
// elements. Does not know tiles.

// Types by their numbers in ACCL_TENSOR and ACCL_META.
constexpr u32 F32 = 0;
constexpr u32 F16 = 1;
constexpr u32 BF16 = 2;

DEVICE constexpr u32 bytes_of(u32 type) { return type == F32 ? 4 : 2; }

// Elements that one thread handles together. Their codes fill whole bytes, and they share their bucket.
constexpr u32 EIGHT = 8;

constexpr u32 F16_NAN = 0x7e00;
constexpr u32 F16_INFINITY = 0x7c00;
constexpr u32 BF16_NAN = 0x7fc0;
constexpr float F16_MOST = 65504.0f;
constexpr u32 BF16_MOST_BITS = 0x7f7f0000;

DEVICE float widen_f16(u32 bits)
{
    const u32 size = bits & 0x7fff;
    // Read as float32, the shifted bits are the value times 2^-112, denormals included: the product is exact.
    const u32 finite = bits_of(times(float_of(size << 13), float_of((112 + 127) << 23)));
    return float_of(finite | (size >= F16_INFINITY ? INFINITY_BITS : 0) | (bits & 0x8000) << 16);
}

// The same, but any NaN for a NaN.
DEVICE float widen_f16_to_any_nan(u32 bits)
{
#if ACCL_CONVERTS_F16
    return convert_from_f16(bits);
#else
    return widen_f16(bits);
#endif
}

DEVICE u32 narrow_f16(float value)
{
#if ACCL_CONVERTS_F16
    return is_nan(value) ? F16_NAN : convert_to_f16(value);
#else
    const u32 bits = bits_of(value), size = bits & ~SIGN_BIT;
    // The denormals of float16 have the unit in the last place of 0.5, so the addition rounds as needed.
    const u32 denormal = bits_of(plus(float_of(size), 0.5f)) - 0x3f000000;
    const u32 normal = (size - (112 << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    u32 result = size < (127 - 14) << 23 ? denormal : normal;
    result = size >= 0x477ff000 ? F16_INFINITY : result;
    result |= bits >> 16 & 0x8000;
    return size > INFINITY_BITS ? F16_NAN : result;
#endif
}

DEVICE float widen_bf16(u32 bits) { return float_of(bits << 16); }

DEVICE u32 narrow_bf16(float value)
{
    const u32 bits = bits_of(value);
    // Adds half of the lowest kept bit, less one unless that bit is odd: ties go to even.
    const u32 rounded = bits + (0x7fff + (bits >> 16 & 1));
    return is_nan(value) ? BF16_NAN : rounded >> 16;
}

// The bits of a number of the type, and the reverse.
template <u32 TYPE> DEVICE float widen(u32 bits)
{
    if (TYPE == F16) return widen_f16(bits);
    if (TYPE == BF16) return widen_bf16(bits);
    return float_of(bits);
}

template <u32 TYPE> DEVICE u32 narrow(float value)
{
    if (TYPE == F16) return narrow_f16(value);
    if (TYPE == BF16) return narrow_bf16(value);
    return bits_of(value);
}

// The result for a finite value beyond the range of a 16-bit type.
constexpr bool TO_LARGEST = true;
constexpr bool TO_INFINITY = false;

template <u32 TYPE, bool LARGEST> DEVICE u32 narrow_to(float value)
{
    if (TYPE != F32 && LARGEST) {
        const float most = TYPE == F16 ? F16_MOST : float_of(BF16_MOST_BITS);
        value = value > most ? most : value;
        value = value < -most ? -most : value;
    }
    return narrow<TYPE>(value);
}

// One element at an address that has the type's alignment.
template <u32 TYPE> DEVICE float read_number(const u8 *at)
{
    return TYPE == F32 ? float_of(read_at<u32>(at)) : widen<TYPE>(read_at<u16>(at));
}

template <u32 TYPE> DEVICE void write_bits(u8 *at, u32 bits)
{
    if (TYPE == F32) write_at<u32>(at, bits);
    else write_at<u16>(at, (u16)bits);
}

// The bits of an element whose address is even: elements that are sent unencoded follow codes of any length.
template <u32 TYPE> DEVICE u32 read_loose(const u8 *at)
{
    const u32 low = read_at<u16>(at);
    return TYPE == F32 ? low | (u32)read_at<u16>(at + 2) << 16 : low;
}

template <u32 TYPE> DEVICE void write_loose(u8 *at, u32 bits)
{
    write_at<u16>(at, (u16)bits);
    if (TYPE == F32) write_at<u16>(at + 2, (u16)(bits >> 16));
}

template <u32 TYPE> DEVICE void write_number(u8 *at, float value) { write_bits<TYPE>(at, narrow<TYPE>(value)); }

// How often a group of eight elements is read: rarely read ones are read one by one, which takes less code.
constexpr bool OFTEN = false;
constexpr bool RARELY = true;

// Reads the bits of the first `count` of eight elements; the others become the first one, which changes no range.
// `count` is not 0. `at` has the alignment of an element.
template <u32 TYPE, bool IS_RARE = OFTEN> DEVICE void read_bits_of_eight(u32 (&bits)[EIGHT], const u8 *at, u32 count)
{
    constexpr u32 WORDS = EIGHT * bytes_of(TYPE) / 4;
    if (!IS_RARE && count == EIGHT && is_aligned(at, 8)) {
        u32 words[WORDS];
        if (is_aligned(at, 16)) {
#pragma unroll
            for (u32 i = 0; i < WORDS; i += 4) {
                const Quad quad = read_at<Quad>(at + 4 * i);
                words[i] = quad.x, words[i + 1] = quad.y, words[i + 2] = quad.z, words[i + 3] = quad.w;
            }
        } else {
#pragma unroll
            for (u32 i = 0; i < WORDS; i += 2) {
                const u64 pair = read_at<u64>(at + 4 * i);
                words[i] = (u32)pair, words[i + 1] = (u32)(pair >> 32);
            }
        }
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) bits[i] = TYPE == F32 ? words[i % WORDS] : words[i / 2] >> 16 * (i % 2) & 0xffff;
    } else {
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) {
            const u8 *from = at + i * bytes_of(TYPE);
            bits[i] = i >= count ? bits[0] : TYPE == F32 ? read_at<u32>(from) : read_at<u16>(from);
        }
    }
}

// Writes the first `count` of eight elements.
template <u32 TYPE> DEVICE void write_bits_of_eight(u8 *at, const u32 (&bits)[EIGHT], u32 count)
{
    constexpr u32 WORDS = EIGHT * bytes_of(TYPE) / 4;
    if (count == EIGHT && is_aligned(at, 8)) {
        u32 words[WORDS];
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) words[i] = TYPE == F32 ? bits[i] : bits[2 * i % EIGHT] | bits[2 * i % EIGHT + 1] << 16;
        if (is_aligned(at, 16)) {
#pragma unroll
            for (u32 i = 0; i < WORDS; i += 4)
                write_at<Quad>(at + 4 * i, Quad{words[i], words[i + 1], words[i + 2], words[i + 3]});
        } else {
#pragma unroll
            for (u32 i = 0; i < WORDS; i += 2) write_at<u64>(at + 4 * i, words[i] | (u64)words[i + 1] << 32);
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++)
            if (i < count) write_bits<TYPE>(at + i * bytes_of(TYPE), bits[i]);
    }
}

// Reads the first `count` of eight elements; the others become the first one. A NaN becomes any NaN.
template <u32 TYPE, bool IS_RARE = OFTEN> DEVICE void read_eight_to_any_nan(float (&x)[EIGHT], const u8 *at, u32 count)
{
    u32 bits[EIGHT];
    read_bits_of_eight<TYPE, IS_RARE>(bits, at, count);
#pragma unroll
    for (u32 i = 0; i < EIGHT; i++) x[i] = TYPE == F16 ? widen_f16_to_any_nan(bits[i]) : widen<TYPE>(bits[i]);
}

// The same, but a NaN keeps its payload.
template <u32 TYPE, bool IS_RARE = OFTEN> DEVICE void read_eight(float (&x)[EIGHT], const u8 *at, u32 count)
{
    u32 bits[EIGHT];
    read_bits_of_eight<TYPE, IS_RARE>(bits, at, count);
#pragma unroll
    for (u32 i = 0; i < EIGHT; i++) x[i] = widen<TYPE>(bits[i]);
}

// Writes the first `count` of eight elements.
template <u32 TYPE, bool LARGEST> DEVICE void write_eight(u8 *at, const float (&x)[EIGHT], u32 count)
{
    u32 bits[EIGHT];
#pragma unroll
    for (u32 i = 0; i < EIGHT; i++) bits[i] = narrow_to<TYPE, LARGEST>(x[i]);
    write_bits_of_eight<TYPE>(at, bits, count);
}

// A finished sum of elements of the type: divided, if there is a divisor. A sum that the type cannot hold becomes
// infinite.
template <u32 TYPE> DEVICE float finished(float sum, bool divides, float divisor)
{
    // The least numbers that round to an infinity.
    const float overflows = TYPE == F16 ? 65520.0f : float_of(0x7f7f8000);
    if (divides) sum = canonical(over(sum, divisor));
    return TYPE != F32 && magnitude(sum) >= overflows ? float_of((bits_of(sum) & SIGN_BIT) | INFINITY_BITS) : sum;
}

// Returns a number of the type that is not above, or not below, the given one, which is not NaN.
template <u32 TYPE> DEVICE float toward_down(float value)
{
    if (TYPE == F32) return value;
    const u32 nearest = narrow<TYPE>(value), size = nearest & 0x7fff;
    if (!(widen<TYPE>(nearest) > value)) return widen<TYPE>(nearest);
    return widen<TYPE>(size == 0 ? 0x8001 : nearest & 0x8000 ? nearest + 1 : nearest - 1);
}

template <u32 TYPE> DEVICE float toward_up(float value)
{
    if (TYPE == F32) return value;
    const u32 nearest = narrow<TYPE>(value), size = nearest & 0x7fff;
    if (!(widen<TYPE>(nearest) < value)) return widen<TYPE>(nearest);
    return widen<TYPE>(size == 0 ? 1 : nearest & 0x8000 ? nearest - 1 : nearest + 1);
}

// The smallest normal number. bfloat16 has the exponents of float32.
template <u32 TYPE> DEVICE float smallest_normal() { return float_of(TYPE == F16 ? (127 - 14) << 23 : 1 << 23); }
