// Small floating-point numbers in blocks that share a scale: fp8, mx and nvfp4; accl-kernels' `codec/scaled.rs` and
// `codec/small_float.rs` have the format.
//
// Owns numbers of 8 and 4 bits, and the scales of all formats. A block of elements belongs to a team of lanes, one group
// of eight elements each. With group scales, all blocks of a group are in one block of threads.

constexpr u32 TENSOR = ACCL_TENSOR;
constexpr u32 THREADS = ACCL_THREADS;
constexpr u32 PART = ACCL_PART;
// Kinds of scales: a float32, a power of two in a byte, or an e4m3 and a float32 for each group.
constexpr u32 BY_FLOAT = 0;
constexpr u32 BY_POWER = 1;
constexpr u32 BY_GROUP = 2;
constexpr u32 SCALES = ACCL_SCALES;

constexpr u32 BLOCK_ELEMENTS = SCALES == BY_FLOAT ? 256 : SCALES == BY_POWER ? 32 : 16;
constexpr u32 SCALE_BYTES = SCALES == BY_FLOAT ? 4 : 1;
constexpr u32 GROUP = 2048;
constexpr u32 GROUP_BYTES = SCALES == BY_GROUP ? 4 : 0;
constexpr u32 TEAM = BLOCK_ELEMENTS / EIGHT;
constexpr u32 WARPS = THREADS / WARP;

static_assert(PART == THREADS * EIGHT && PART == GROUP, "a block of threads has one group");

// A format with its bits of exponent and mantissa, and the code of its largest number.
template <u32 EXPONENT, u32 MANTISSA, u32 LARGEST_CODE> struct Format {
    static constexpr u32 SIGN_AT = EXPONENT + MANTISSA;
    static constexpr u32 BITS = SIGN_AT + 1;
    static constexpr u32 BIAS = (1 << (EXPONENT - 1)) - 1;
    // The exponent of the smallest normal number, as float32 stores it.
    static constexpr u32 LEAST_EXPONENT = 128 - BIAS;

    // The code of a value. The sum has in its lowest bits the magnitude in steps of the format, rounded to nearest even.
    static DEVICE_MEMBER u32 code(float value)
    {
        const u32 bits = bits_of(value), size = bits & ~SIGN_BIT;
        const u32 exponent = greatest(size >> 23, LEAST_EXPONENT);
        const u32 rounds = (exponent + 23 - MANTISSA) << 23;
        const u32 steps = bits_of(plus(float_of(size), float_of(rounds))) - rounds;
        const u32 code = ((exponent - LEAST_EXPONENT) << MANTISSA) + steps;
        return least(code, LARGEST_CODE) | bits >> 31 << SIGN_AT;
    }

    static DEVICE_MEMBER float value(u32 code)
    {
        const u32 size = code & ((1 << SIGN_AT) - 1);
        const u32 normal = (size << (23 - MANTISSA)) + ((127 - BIAS) << 23);
        const float step = float_of((LEAST_EXPONENT - MANTISSA) << 23);
        const u32 bits = size < 1 << MANTISSA ? bits_of(times(small_number(size), step)) : normal;
        return float_of(size > LARGEST_CODE ? NAN_BITS : bits | code >> SIGN_AT << 31);
    }
};

typedef Format<4, 3, 0x7e> E4m3;
typedef Format<5, 2, 0x7b> E5m2;
typedef Format<2, 1, 7> E2m1;

template <u32 KIND> struct FormatOf { typedef E4m3 Type; };
template <> struct FormatOf<1> { typedef E5m2 Type; };
template <> struct FormatOf<2> { typedef E2m1 Type; };
typedef FormatOf<ACCL_FORMAT>::Type Number;

constexpr u32 BITS = Number::BITS;
constexpr float LARGEST = ACCL_FORMAT == 0 ? 448.0f : ACCL_FORMAT == 1 ? 57344.0f : 6.0f;
// The exponent of the largest number.
constexpr u32 LARGEST_EXPONENT = ACCL_FORMAT == 0 ? 8 : ACCL_FORMAT == 1 ? 15 : 2;

struct Layout {
    u32 scales_at, codes_at, codes_end, end;

    DEVICE_MEMBER explicit Layout(u32 elements)
    {
        scales_at = GROUP_BYTES * ceil_div(elements, GROUP);
        codes_at = scales_at + SCALE_BYTES * ceil_div(elements, BLOCK_ELEMENTS);
        codes_end = codes_at + code_bytes<BITS>(elements);
        end = round_up(codes_end, 8);
    }
};

struct Room {
    Staging<THREADS> staging;
    u32 greatest[WARPS];
};

// The number by which values are multiplied, and the scale of decoded values.
struct Factors {
    float factor, scale;
};

// Finds the scale of a block from the bits of its greatest magnitude, and writes it if `to` is not null. `most` is the
// same of all finite blocks of the group, whose scale is written if `group_to` is not null.
DEVICE Factors place(u32 greatest_bits, u32 most, u8 *to, u8 *group_to)
{
    const bool finite = greatest_bits < INFINITY_BITS;
    if (SCALES == BY_FLOAT) {
        const u32 quotient = bits_of(over(float_of(greatest_bits), LARGEST)) & ~0xfu;
        const float scale = finite ? greater(float_of(quotient), float_of(1 << 23)) : float_of(NAN_BITS);
        if (to) write_at<u32>(to, bits_of(scale));
        return {inverse_of(scale), scale};
    }
    if (SCALES == BY_POWER) {
        const u32 exponent = greatest_bits >> 23;
        const u32 byte = exponent > LARGEST_EXPONENT ? exponent - LARGEST_EXPONENT : 0;
        if (to) write_at<u8>(to, (u8)(finite ? byte : 0xff));
        const float scale = float_of(byte == 0 ? 1 << 22 : byte << 23);
        return {float_of((254 - byte) << 23), finite ? scale : float_of(NAN_BITS)};
    }
    const u32 quotient = bits_of(over(float_of(most), times(LARGEST, 448.0f))) & ~0x3fu;
    const float group = greater(float_of(quotient), float_of((127 - 117) << 23));
    if (group_to) write_at<u32>(group_to, bits_of(group));
    const float inverse = inverse_of(times(LARGEST, group));
    const u32 code = greatest(E4m3::code(times(finite ? float_of(greatest_bits) : 0.0f, inverse)), 1u);
    if (to) write_at<u8>(to, (u8)(finite ? code : 0x7f));
    const float scale = times(E4m3::value(code), group);
    return {inverse_of(scale), finite ? scale : float_of(NAN_BITS)};
}

// The greatest of all threads of a block.
DEVICE u32 greatest_of_block(Room &room, u32 value)
{
    value = (u32)team_greatest<WARP>((i32)value);
    room.greatest[THREAD / WARP] = value;
    block_sync();
#pragma unroll
    for (u32 warp = 0; warp < WARPS; warp++) value = greatest(value, room.greatest[warp]);
    return value;
}

DEVICE void values_of(float (&values)[EIGHT], const Codes<BITS> &codes, float scale)
{
#pragma unroll
    for (u32 i = 0; i < EIGHT; i++) values[i] = canonical(times(Number::value(codes.get(i)), scale));
}

template <class Source> DEVICE void encode(const Args &args, Room &room, const Work &work, const Source &source)
{
    const Layout layout(work.elements);
    const u32 begin = work.part * PART, at = begin + THREAD * EIGHT;
    const u32 count = at < work.elements ? least(work.elements - at, EIGHT) : 0;
    float x[EIGHT] = {};
    if (count > 0) source.read(x, at, count);
    u32 found = 0;
#pragma unroll
    for (u32 i = 0; i < EIGHT; i++) found = greatest(found, bits_of(x[i]) & ~SIGN_BIT);
    // The bits of magnitudes are not negative.
    found = (u32)team_greatest<TEAM>((i32)found);
    u32 most = 0;
    if (SCALES == BY_GROUP) most = greatest_of_block(room, found < INFINITY_BITS ? found : 0);

    const bool writes = count > 0 && THREAD % TEAM == 0;
    u8 *to = writes ? work.code + layout.scales_at + at / BLOCK_ELEMENTS * SCALE_BYTES : nullptr;
    const Factors factors = place(found, most, to, THREAD == 0 ? work.code + work.part * GROUP_BYTES : nullptr);
    const bool is_finite_block = found < INFINITY_BITS;
    if (writes && !is_finite_block) count_not_finite(args);

    Codes<BITS> codes = {0, 0};
    if (count > 0 && is_finite_block) {
        u32 numbers[EIGHT];
#pragma unroll
        for (u32 i = 0; i < EIGHT; i++) numbers[i] = Number::code(times(x[i], factors.factor));
        codes.template set<0>(numbers);
        if (count < EIGHT) codes.keep(count);
    }
    const u32 warp_at = begin + THREAD / WARP * WARP * EIGHT, lane = THREAD % WARP;
    const u32 total = warp_at < work.elements ? code_bytes<BITS>(least(work.elements - warp_at, WARP * EIGHT)) : 0;
    u8 *codes_to = work.code + layout.codes_at + at / EIGHT * BITS;
    write_codes<BITS>(room.staging, codes_to, codes.word(), code_bytes<BITS>(count), lane * BITS, total);
    if (Source::WANTS_DECODED && count > 0) {
        float decoded[EIGHT];
        values_of(decoded, codes, factors.scale);
        source.take(at, x, decoded, count);
    }
    if (work.is_last && THREAD < layout.end - layout.codes_end) write_at<u8>(work.code + layout.codes_end + THREAD, 0);
}

struct Reader {
    const u8 *code;
    u32 elements;
    Layout layout;

    DEVICE_MEMBER Reader(const u8 *code, u32 elements) : code(code), elements(elements), layout(elements) {}
    DEVICE_MEMBER explicit Reader(const Work &work) : Reader(work.code, work.elements) {}

    DEVICE_MEMBER u32 coded() const { return elements; }
    // No element is sent unencoded.
    DEVICE_MEMBER const u8 *tail() const { return code; }
    DEVICE_MEMBER float read_one(u32) const { return 0.0f; }

    DEVICE_MEMBER void read(float (&values)[EIGHT], u32 at, u32 count) const
    {
        const u8 *from = code + layout.scales_at + at / BLOCK_ELEMENTS * SCALE_BYTES;
        float scale;
        if (SCALES == BY_FLOAT) {
            scale = float_of(read_at<u32>(from));
        } else if (SCALES == BY_POWER) {
            const u32 byte = read_at<u8>(from);
            scale = float_of(byte == 0 ? 1 << 22 : byte == 0xff ? NAN_BITS : byte << 23);
        } else {
            scale = times(E4m3::value(read_at<u8>(from)), float_of(read_at<u32>(code + at / GROUP * GROUP_BYTES)));
        }
        Codes<BITS> codes;
        codes.set_word(read_codes<BITS>(code + layout.codes_at + at / EIGHT * BITS, code_bytes<BITS>(count)));
        values_of(values, codes, scale);
    }
};
